"""GGUF's block formats: round weights exactly as a file rounds them, and keep them as codes.

A row of a matrix is cut into blocks of 32 or 256 neighbours that share a scale. The simple formats (q4_0 to q8_0) are
rounded here in torch, bit for bit as the `gguf` package and llama.cpp's reference do. The scales of the K formats are
found by a search inside llama.cpp, whose library is called for it; their codes are read here.

# B blocks, R rows of a matrix, C columns, W bytes of a row of codes
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from stillroom.core.errors import ConfigError


@dataclass(frozen=True)
class BlockFormat:
    """A way to store a block of neighbouring weights."""

    number: int  # of ggml's type
    size: int  # weights that share a scale
    num_bytes: int  # of a block
    levels: int = 0  # of a code; 0: the K formats
    has_offset: bool = False  # code * scale + offset, else codes around zero

    @property
    def bits(self) -> float:
        return 8.0 * self.num_bytes / self.size


FORMATS: Mapping[str, BlockFormat] = {
    "q4_0": BlockFormat(2, 32, 18, levels=16),
    "q4_1": BlockFormat(3, 32, 20, levels=16, has_offset=True),
    "q5_0": BlockFormat(6, 32, 22, levels=32),
    "q5_1": BlockFormat(7, 32, 24, levels=32, has_offset=True),
    "q8_0": BlockFormat(8, 32, 34, levels=256),
    "q4_k": BlockFormat(12, 256, 144),
    "q5_k": BlockFormat(13, 256, 176),
    "q6_k": BlockFormat(14, 256, 210),
}
# What a user asks for: the format of most matrices, and of embeddings and head, which suffer most and are read as a
# table. llama.cpp gives the head six bits in every four-bit file; the simple formats have eight as their next.
RECIPES: Mapping[str, tuple[str, str]] = {
    "q4_0": ("q4_0", "q8_0"),
    "q4_1": ("q4_1", "q8_0"),
    "q5_0": ("q5_0", "q8_0"),
    "q5_1": ("q5_1", "q8_0"),
    "q8_0": ("q8_0", "q8_0"),
    "q4_k_m": ("q4_k", "q6_k"),
    "q5_k_m": ("q5_k", "q6_k"),
    "q6_k": ("q6_k", "q6_k"),
}
PLAIN = ("float32", "float16")
# Rows that are not whole blocks of 256: what llama.cpp takes instead.
_NARROWER = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
# Of these layers the K recipes store some in q6_k, as llama.cpp does: they cost most where they are rounded.
_SENSITIVE = ("v_proj", "down_proj")


# -- which tensor is stored how ------------------------------------------------------------------------------


def block_types(
    shapes: Mapping[str, tuple[int, ...]],
    recipe: str,
    *,
    tables: frozenset[str],
    wide: frozenset[str] = frozenset(),
    num_layers: int = 0,
    layers: Mapping[str, str] | None = None,
    where: str = "student.quantise",
) -> dict[str, str]:
    """The format of every parameter by name: a block format, or float32 for vectors and what is in `wide`.

    `tables` are the embeddings and the head; `layers` are exceptions, a format for each pattern of names. Raise for
    an exception that matches nothing, and for a matrix whose rows are not whole blocks.
    """
    if recipe not in RECIPES:
        raise ConfigError(f"unknown format {recipe!r}", where=where, advice=[f"formats: {', '.join(RECIPES)}"])
    usual, of_tables = RECIPES[recipe]
    exceptions = _exceptions(layers or {}, shapes, where)
    found = {}
    for name, shape in shapes.items():
        if name in exceptions:
            kind = exceptions[name]
        elif len(shape) < 2 or name in wide:
            kind = "float32"
        else:
            kind = of_tables if name in tables else usual
            if recipe in ("q4_k_m", "q5_k_m") and _has_more_bits(name, num_layers):
                kind = "q6_k"
        if kind in _NARROWER and shape[-1] % FORMATS[kind].size:
            kind = _NARROWER[kind]
        if kind in FORMATS and (len(shape) < 2 or shape[-1] % FORMATS[kind].size):
            raise ConfigError(
                f"{name} {list(shape)} cannot be stored as {kind}: its rows are not whole blocks of "
                f"{FORMATS[kind].size}",
                where=where,
                advice=[f"store it wider: {_store_wider(name)}"],
            )
        found[name] = kind
    return found


def _store_wider(name: str) -> str:
    """The exception, as --layers and student.quantise_layers take it, for all layers of this kind at once."""
    kind = name.removesuffix(".weight").rpartition(".")[2]
    return f"--layers {kind}=float16 with export, --set 'student.quantise_layers={{{kind}=\"float16\"}}' in a run"


def _exceptions(layers: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], where: str) -> dict[str, str]:
    found = {}
    for pattern, kind in layers.items():
        if kind not in FORMATS and kind not in PLAIN:
            known = ", ".join((*FORMATS, *PLAIN))
            raise ConfigError(f"unknown format {kind!r} for {pattern}", where=where, advice=[f"formats: {known}"])
        names = [name for name in shapes if fnmatchcase(name, pattern) or fnmatchcase(name, f"*{pattern}.weight")]
        if not names:
            raise ConfigError(
                f"no parameter is called {pattern}",
                where=where,
                advice=[
                    f"names are those of the network, for example {next(iter(shapes))}",
                    "a head that is tied to the embeddings is stored with them, under their name",
                ],
            )
        found.update(dict.fromkeys(names, kind))
    return found


def _has_more_bits(name: str, num_layers: int) -> bool:
    """llama.cpp's rule: values and down projections of the first and last eighth, and of every third layer between."""
    parts = name.split(".")
    if not any(part in _SENSITIVE for part in parts):
        return False
    layer = next((int(part) for part in parts if part.isdigit()), None)
    if layer is None or not num_layers:
        return False
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


# -- rounding ------------------------------------------------------------------------------------------------


def rounded(weight: Tensor, kind: str) -> Tensor:
    """The FP32 values that a file gives back for a weight [..., C]. What is not finite stays not finite."""
    if kind in PLAIN:
        return weight.to(getattr(torch, kind)).float()
    form = FORMATS[kind]
    if not form.levels:  # the search takes NaN for a number
        return decode(encode(weight, kind), kind).masked_fill_(~torch.isfinite(weight.detach()), torch.nan)
    codes, scale, offset = _codes(weight, form)
    values = codes.mul_(scale) if offset is None else codes.mul_(scale).add_(offset)
    return values.view(weight.shape)


def _codes(weight: Tensor, form: BlockFormat) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes, scales, offsets) of each block, as FP32: value = code * scale + offset. [B, size], [B, 1], [B, 1]

    Every operation is one of the reference's, in its order: rounding differs otherwise.
    """
    blocks = weight.detach().float().reshape(-1, form.size)
    if form.has_offset:
        low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
        scale = (high - low) / (form.levels - 1)
        codes = (blocks - low).mul_(_inverse(scale)).add_(0.5).trunc_().clamp_(0, form.levels - 1)
        return codes, scale.half().float(), low.half().float()
    if form.levels == 256:
        scale = blocks.abs().amax(1, keepdim=True) / 127
        codes = blocks * _inverse(scale)
        size = codes.abs()
        whole = size.floor()
        codes = codes.sign_().mul_(whole.add_(size.sub_(whole).mul_(2).floor_()))  # halves away from zero
        return codes, scale.half().float(), None
    half = form.levels // 2
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))  # with its sign: it gets the lowest code
    scale = largest / -half
    codes = (blocks * _inverse(scale)).add_(half + 0.5).trunc_().clamp_(0, form.levels - 1).sub_(half)
    return codes, scale.half().float(), None


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.zeros_like(scale), 1.0 / scale)


# -- codes ---------------------------------------------------------------------------------------------------


def is_searched(kind: str) -> bool:
    """Whether codes are found by a search, which may find others for weights that are rounded already."""
    return kind in FORMATS and not FORMATS[kind].levels


def row_bytes(columns: int, kind: str) -> int:
    """Bytes of a row of codes."""
    form = FORMATS[kind]
    return columns // form.size * form.num_bytes


def encode(weight: Tensor, kind: str) -> Tensor:
    """The codes of a weight as a file holds them. [..., C] -> uint8 [..., W]"""
    form = FORMATS[kind]
    shape = (*weight.shape[:-1], row_bytes(weight.shape[-1], kind))
    if not form.levels:
        return _by_llama_cpp(weight, form).view(shape)
    codes, scale, offset = _codes(weight, form)
    halves = [scale.half().view(torch.uint8)] + ([offset.half().view(torch.uint8)] if offset is not None else [])
    if form.levels == 256:
        packed = [codes.to(torch.int8).view(torch.uint8)]
    else:
        whole = (codes if offset is not None else codes.add_(form.levels // 2)).to(torch.uint8)
        low, high = (whole & 15).view(-1, 2, 16).unbind(1)
        packed = [low | (high << 4)]
        if form.levels == 32:
            packed.insert(0, _packed_bits(whole >> 4))
    return torch.cat([*halves, *packed], 1).view(shape)


def _packed_bits(bits: Tensor) -> Tensor:
    """Eight flags a byte, the first lowest. [B, 32] -> [B, 4]"""
    weights = 2 ** torch.arange(8, device=bits.device, dtype=torch.int32)
    return (bits.view(-1, 4, 8).int() * weights).sum(-1).to(torch.uint8)


def decode(codes: Tensor, kind: str) -> Tensor:
    """The FP32 values of codes. uint8 [..., W] -> [..., C]"""
    form = FORMATS[kind]
    blocks = codes.reshape(-1, form.num_bytes)
    values = _DECODERS[kind](blocks) if not form.levels else _decode_simple(blocks, form)
    return values.reshape(*codes.shape[:-1], codes.shape[-1] // form.num_bytes * form.size)


def _halves(blocks: Tensor, begin: int) -> Tensor:
    """The FP16 number at a place of each block, in FP32. [B, 1]"""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """The low halves of the bytes, then the high ones. [..., N] -> [..., 2, N]"""
    return torch.stack([packed & 15, packed >> 4], -2)


def _decode_simple(blocks: Tensor, form: BlockFormat) -> Tensor:
    scale, begin = _halves(blocks, 0), 4 if form.has_offset else 2
    if form.levels == 256:
        return blocks[:, 2:].contiguous().view(torch.int8).float() * scale
    codes = _nibbles(blocks[:, -16:]).view(-1, 32)
    if form.levels == 32:
        shifts = torch.arange(8, device=blocks.device, dtype=torch.uint8)
        high = (blocks[:, begin : begin + 4, None] >> shifts) & 1
        codes = codes | (high.view(-1, 32) << 4)
    if form.has_offset:
        return codes.float() * scale + _halves(blocks, 2)
    return (codes.float() - form.levels // 2) * scale


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of q4_k and q5_k: the scale and what is subtracted, of eight parts of 32. [B, 8, 1] both"""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], 1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], 1)
    return (
        (_halves(blocks, 0) * scales.float()).unsqueeze(2),
        (_halves(blocks, 2) * minima.float()).unsqueeze(2),
    )


def _decode_q4_k(blocks: Tensor) -> Tensor:
    scale, lowest = _scales_and_minima(blocks)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return scale * codes.float() - lowest


def _decode_q5_k(blocks: Tensor) -> Tensor:
    scale, lowest = _scales_and_minima(blocks)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    shifts = torch.arange(8, device=blocks.device, dtype=torch.uint8)[:, None]
    high = (blocks[:, 16:48].unsqueeze(1) >> shifts) & 1
    return scale * (low | (high << 4)).float() - lowest


def _decode_q6_k(blocks: Tensor) -> Tensor:
    scale = blocks[:, 192:208].contiguous().view(torch.int8).float() * _halves(blocks, 208)
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], device=blocks.device, dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    codes = (low | (high << 4)).float() - 32
    return scale.unsqueeze(2) * codes.reshape(-1, 16, 16)


_DECODERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "q4_k": _decode_q4_k,
    "q5_k": _decode_q5_k,
    "q6_k": _decode_q6_k,
}


# -- llama.cpp -----------------------------------------------------------------------------------------------


def _by_llama_cpp(weight: Tensor, form: BlockFormat) -> Tensor:
    """Codes of a K format by llama.cpp's own search, on the CPU."""
    values = weight.detach().float().cpu().contiguous()
    rows, columns = values.numel() // values.shape[-1], values.shape[-1]
    codes = torch.empty(rows * (columns // form.size) * form.num_bytes, dtype=torch.uint8)
    search, into = llama_cpp().ggml_quantize_chunk, (values.data_ptr(), codes.data_ptr())
    step = -(-rows // torch.get_num_threads())

    def part(first: int) -> int:
        return int(search(form.number, *into, first * columns, min(step, rows - first), columns, None))

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # it leaves Python's lock alone while it searches
        written = sum(threads.map(part, range(0, rows, step)))
    if written != codes.numel():
        raise ConfigError(f"llama.cpp wrote {written:,} bytes of codes where {codes.numel():,} were expected")
    return codes.to(weight.device)


@lru_cache(maxsize=1)
def llama_cpp() -> ctypes.CDLL:
    """llama.cpp's library as the wheel xllamacpp brings it. Only functions that take plain numbers are called."""
    package = importlib.util.find_spec("xllamacpp")
    places = package.submodule_search_locations or () if package else ()
    found = [file for place in places for file in Path(place).glob("*.so")]
    try:
        library = ctypes.CDLL(str(found[0]))
        quantise = library.ggml_quantize_chunk
    except (IndexError, OSError, AttributeError) as error:
        raise ConfigError(
            "the formats q4_k_m, q5_k_m and q6_k are rounded by llama.cpp's library, which is not installed",
            where="--quantise, student.quantise",
            advice=["pip install 'stillroom[llamacpp]'", "q4_0, q4_1, q5_0, q5_1 and q8_0 need nothing more"],
        ) from error
    quantise.restype = ctypes.c_size_t
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    quantise.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    return library
