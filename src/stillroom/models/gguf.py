"""Load a model from one GGUF file, as llama.cpp and its relatives use them: configuration, tokenizer and weights.

The loader of transformers reads what it knows and ignores the rest. So the header is read here first: a file that was
cut short, that is a part of several, or whose rotary frequencies are scaled would load as something else. By hand and
not by `gguf.GGUFReader`, which takes seconds for the lists of a large vocabulary, and does not end where the length of
an array goes beyond the file.

Quantised weights are turned into numbers of the requested dtype when they are loaded. What is loaded is then an
ordinary model: it can be trained, cut, saved and quantised again.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    modeling_gguf_pytorch_utils,
)

from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.core.files import reason_of
from stillroom.models.coded import BlockLinear
from stillroom.precision.blocks import FORMATS, RECIPES, block_types, decode, encode, row_bytes

# -- empty -----------------------------------------------------------------------------------------
# A network of a configuration with real buffers and no weights, to be given weights from somewhere else.


def empty_network(config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    """Its parameters are on the meta device. Buffers that no file holds, such as rotary tables, are computed."""
    with _parameters_on_meta(), torch.random.fork_rng(devices=[]):
        network = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    return network.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter goes to the meta device when a module takes it, before it is initialised."""
    kind: Any = nn.Module
    register = kind.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.data.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    kind.register_parameter = register_on_meta
    try:
        yield
    finally:
        kind.register_parameter = register


def tables_of(network: Any) -> frozenset[str]:
    """The names of the embeddings' and the head's weights: of tied ones the name that is listed."""
    parts = (network.get_input_embeddings(), network.get_output_embeddings())
    weights = {id(part.weight) for part in parts if part is not None}
    return frozenset(name for name, weight in network.named_parameters() if id(weight) in weights)


# model_type of transformers: architecture of llama.cpp. What is written and read back here.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",  # with experts
    "olmoe": "olmoe",
}
_CODES = "gguf.codes"  # in a student's folder: a safetensors file that does not look like weights to be loaded
_ROUTERS = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")  # small, and llama.cpp keeps them in FP32


def keep_codes(folder: Path, codes: Mapping[str, Tensor]) -> None:
    """Write the codes that a student was trained with next to its weights."""
    if codes:
        save_file(dict(codes), folder / _CODES)


def kept_codes(folder: Path, notes: list[str]) -> dict[str, Tensor]:
    """The codes that a student was trained with, by parameter; empty where its folder has none."""
    path = folder / _CODES
    try:
        return load_file(path) if path.is_file() else {}
    except (OSError, SafetensorError) as error:
        notes.append(f"{_CODES} cannot be read, so the weights are rounded again: {reason_of(error)}")
        return {}


def codes_of(weight: Tensor, kind: str, kept: Tensor | None = None) -> Tensor:
    """The codes of a weight: those that are kept if they stand for its very numbers, else by rounding."""
    shape = (*weight.shape[:-1], row_bytes(weight.shape[-1], kind))
    fits = kept is not None and kept.dtype == torch.uint8 and kept.shape == shape
    if kept is not None and fits and torch.equal(decode(kept, kind), weight.detach()):
        return kept
    return encode(weight, kind)


def types_of(network: Any, form: str, layers: Mapping[str, str] | None = None, *, where: str) -> dict[str, str]:
    """How each parameter is stored in a GGUF file of this form: norms, biases and routers always in FP32."""
    kind = network.config.model_type
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"a {kind} is not written as GGUF", where=where, advice=[f"families that are: {', '.join(ARCHITECTURES)}"]
        )
    shapes = {name: tuple(weight.shape) for name, weight in network.named_parameters()}
    wide = frozenset(name for name in shapes if name.endswith(_ROUTERS))
    if form not in RECIPES:
        return {name: "float32" if len(shape) < 2 or name in wide else form for name, shape in shapes.items()}
    num_layers = int(network.config.num_hidden_layers)
    return block_types(
        shapes, form, tables=tables_of(network), wide=wide, num_layers=num_layers, layers=layers, where=where
    )


ENDING = ".gguf"
MAGIC = b"GGUF"
_AGAIN = "get the file again"
_FOLDER = "use the model's own folder, with config.json and safetensors"

# -- the header ---------------------------------------------------------------------------------------

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_DIMS = 8
_MOST_NESTED = 8  # arrays in arrays
_LONG = 64  # an array of more entries is passed over: tokens and merges


@dataclass(frozen=True)
class Omitted:
    """A long array, of which only the length is kept."""

    count: int


@dataclass(frozen=True)
class GgufTensor:
    num_elements: int
    kind: int  # as ggml numbers its types
    offset: int  # from the beginning of the file


@dataclass(frozen=True)
class GgufHeader:
    """The fields of a file, without its long arrays, and where its tensors lie."""

    path: Path
    num_bytes: int
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture", ""))

    @property
    def num_tokens(self) -> int:
        """The tokens that it lists; 0 where it has no tokenizer."""
        tokens = self.fields.get("tokenizer.ggml.tokens", [])
        return tokens.count if isinstance(tokens, Omitted) else len(tokens)

    def own(self, key: str) -> Any:
        """A field of the architecture, such as `rope.scaling.type`."""
        return self.fields.get(f"{self.architecture}.{key}")


def read_header(path: Path) -> GgufHeader:
    """Raise if the file is not a GGUF file, or ends in the middle of its header."""
    try:
        stamp = path.stat()
        return _read(path, stamp.st_size, stamp.st_mtime_ns)
    except OSError as error:
        raise BrokenAtStart(f"{path} cannot be read: {error.strerror}", advice=["check its permissions"]) from error


@lru_cache(maxsize=8)
def _read(path: Path, num_bytes: int, _stamp: int) -> GgufHeader:
    with path.open("rb") as opened:
        begin = opened.read(len(MAGIC))
        if begin != MAGIC:
            raise BrokenAtStart(
                f"{path} is not a GGUF file: it begins with {begin!r}, not with {MAGIC!r}", advice=[_AGAIN]
            )
        reader = _Reader(opened, path, num_bytes)
        version = reader.number("I")
        if version not in _VERSIONS:
            raise BrokenAtStart(
                f"{path} is GGUF of version {version} or of another byte order: versions 2 and 3, little-endian, "
                "are read",
                advice=["convert it again with a present llama.cpp"],
            )
        num_tensors, num_fields = reader.number("Q"), reader.number("Q")
        fields = dict(reader.field() for _ in range(reader.plausible(num_fields)))
        found = dict(reader.tensor() for _ in range(reader.plausible(num_tensors)))
        alignment = int(fields.get("general.alignment", 32)) or 1
        data = -(-opened.tell() // alignment) * alignment
    tensors = {name: GgufTensor(count, kind, data + offset) for name, (count, kind, offset) in found.items()}
    return GgufHeader(path, num_bytes, fields, tensors)


class _Reader:
    """Reads values one after another. A length beyond the end of the file is an error before anything is read."""

    def __init__(self, opened: BinaryIO, path: Path, num_bytes: int) -> None:
        self._opened, self._path, self._num_bytes = opened, path, num_bytes

    def number(self, code: str) -> Any:
        size = struct.calcsize(code)
        return struct.unpack(f"<{code}", self._bytes(size))[0]

    def plausible(self, count: int) -> int:
        """A count of things that take at least a byte each."""
        if count > self._num_bytes:
            raise self._cut_short()
        return count

    def text(self) -> str:
        return self._bytes(self.number("Q")).decode("utf-8", "replace")

    def field(self) -> tuple[str, Any]:
        name = self.text()
        return name, self._value(self.number("I"))

    def tensor(self) -> tuple[str, tuple[int, int, int]]:
        name, num_dims, count = self.text(), self.number("I"), 1
        if num_dims > _MOST_DIMS:
            raise self._damaged(f"{name!r} has {num_dims:,} dimensions")
        for _ in range(num_dims):
            count *= self.number("Q")
        return name, (count, self.number("I"), self.number("Q"))

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(depth)
        if kind not in _NUMBERS:
            raise self._damaged(f"a field of type {kind}")
        return self.number(_NUMBERS[kind])

    def _array(self, depth: int) -> list[Any] | Omitted:
        if depth >= _MOST_NESTED:
            raise self._damaged(f"arrays in arrays, {depth} deep")
        kind, count = self.number("I"), self.plausible(self.number("Q"))
        if kind in _NUMBERS and count > _LONG:
            self._bytes(count * struct.calcsize(_NUMBERS[kind]))
            return Omitted(count)
        values = [self._value(kind, depth + 1) for _ in range(count)]
        return values if count <= _LONG else Omitted(count)

    def _bytes(self, count: int) -> bytes:
        if count > self._num_bytes - self._opened.tell():
            raise self._cut_short()
        return self._opened.read(count)

    def _cut_short(self) -> BrokenAtStart:
        return BrokenAtStart(
            f"{self._path} was cut short or is damaged: its header goes beyond its end at {self._num_bytes:,} bytes",
            advice=[_AGAIN],
        )

    def _damaged(self, what: str) -> BrokenAtStart:
        return BrokenAtStart(f"{self._path} is damaged: its header has {what}", advice=[_AGAIN])


# -- scaled rotary frequencies ------------------------------------------------------------------------

# Transformers leaves the scaling out without a message: the model would answer otherwise than it should. The two kinds
# that a configuration can express are read, and any other is refused.
_FREQUENCIES = "rope_freqs.weight"  # what each frequency is divided by
_READ_BY_TRANSFORMERS = ("gpt-oss", "gpt_oss")
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192  # of every Llama 3 that scales


def scaled_rotation(header: GgufHeader) -> dict[str, Any]:
    """The `rope_parameters` that the file asks for besides its base; empty where nothing is scaled."""
    if header.architecture in _READ_BY_TRANSFORMERS:
        return {}
    kind, factor = header.own("rope.scaling.type"), header.own("rope.scaling.factor")
    divisors = _divisors(header)
    if divisors is not None:
        return _like_llama3(header, divisors)
    if kind in (None, "none") or factor in (None, 1.0):
        return {}
    if kind == "linear" and header.architecture == "llama":
        return {"rope_type": "linear", "factor": float(factor)}
    raise _refused(header, f"rope.scaling.type = {kind!r} with factor {factor:g}")


def _divisors(header: GgufHeader) -> npt.NDArray[np.float64] | None:
    tensor = header.tensors.get(_FREQUENCIES)
    if tensor is None:
        return None
    values = np.fromfile(header.path, dtype="<f4", count=tensor.num_elements, offset=tensor.offset).astype(np.float64)
    return None if (values == 1.0).all() else values


def _like_llama3(header: GgufHeader, divisors: npt.NDArray[np.float64]) -> dict[str, Any]:
    """The settings that give these very divisors, as llama.cpp computes them from a Llama 3's configuration."""
    base, factor = float(header.own("rope.freq_base") or 10_000.0), float(divisors.max())
    wavelengths = 2.0 * math.pi * base ** (np.arange(len(divisors)) / len(divisors))
    smooth = (_ORIGINAL / wavelengths - _LOW) / (_HIGH - _LOW)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    expected = np.where(wavelengths < _ORIGINAL / _HIGH, 1.0, expected)
    expected = np.where(wavelengths > _ORIGINAL / _LOW, factor, expected)
    if header.architecture != "llama" or not np.allclose(divisors, expected, rtol=1e-4, atol=0.0):
        raise _refused(header, _FREQUENCIES)
    scales = {"factor": factor, "low_freq_factor": _LOW, "high_freq_factor": _HIGH}
    return {"rope_type": "llama3", **scales, "original_max_position_embeddings": _ORIGINAL}


def _refused(header: GgufHeader, told: str) -> BrokenAtStart:
    return BrokenAtStart(
        f"{header.path} scales its rotary frequencies in a way that is not read from GGUF ({told}): it would answer "
        "otherwise than the model does",
        advice=[_FOLDER],
    )


# -- loading ------------------------------------------------------------------------------------------


def gguf_config(path: Path) -> Any:
    """The configuration that the file describes. Read once: the lists of tokens take seconds."""
    _check(path)
    stamp = path.stat()
    return copy.deepcopy(_config(path, stamp.st_size, stamp.st_mtime_ns))


@lru_cache(maxsize=4)
def _config(path: Path, _size: int, _stamp: int) -> Any:
    try:
        with _loader() as folder:
            config = AutoConfig.from_pretrained(folder, gguf_file=str(path.absolute()))
    except (ValueError, KeyError) as error:
        if "not supported yet" not in str(error):
            raise
        kind = read_header(path).architecture
        raise BrokenAtStart(
            f"{path} is a {kind!r}, which transformers {transformers.__version__} does not read from GGUF",
            advice=[_FOLDER],
        ) from error
    scaling = scaled_rotation(read_header(path))
    if scaling:
        config.rope_parameters = {**config.rope_parameters, **scaling}
    return config


def gguf_tokenizer(path: Path) -> Any:
    _check(path)
    num_tokens = read_header(path).num_tokens
    if not num_tokens:
        raise BrokenAtStart(f"{path} holds no tokenizer", advice=["get a file that was converted with its tokenizer"])
    with _loader() as folder:
        return _without_foreign(AutoTokenizer.from_pretrained(folder, gguf_file=str(path.absolute())), num_tokens)


def _without_foreign(tokenizer: Any, num_tokens: int) -> Any:
    """Without the special tokens that transformers adds for its own families: the model has no embeddings for them."""
    if max(tokenizer.get_vocab().values()) < num_tokens:
        return tokenizer
    table = json.loads(tokenizer.backend_tokenizer.to_str())
    table["added_tokens"] = [token for token in table["added_tokens"] if token["id"] < num_tokens]
    known = {token["content"] for token in table["added_tokens"]} | set(table["model"]["vocab"])
    special = {role: token for role, token in tokenizer.special_tokens_map.items() if token in known}
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(table)), **special)
    plain.chat_template = tokenizer.chat_template
    return plain


def gguf_network(path: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any], list[str]]:
    """The network, the loader's report of weights that are missing or left over, and notes.

    The loader marks its model as quantised and refuses to save it, though its weights are plain numbers. So move them
    into a model of the same configuration that was never marked.
    """
    config = gguf_config(path)
    with _loader() as folder:
        marked, report = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=str(path.absolute()), dtype=dtype, output_loading_info=True
        )
    _reader.cache_clear()
    network = empty_network(config, dtype)
    network.load_state_dict(marked.state_dict(), assign=True)
    network.tie_weights()
    pre = read_header(path).fields.get("tokenizer.ggml.pre", "not named")
    notes = [
        f"{path} was read as {config.model_type} in {str(dtype).removeprefix('torch.')}",
        f"its tokenizer was made from the lists in the file: how text is split before that is called {pre!r} there, "
        "and is what transformers makes of it",
    ]
    return network, report, notes


def in_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of queries or keys, from neighbouring pairs to two halves of a head. [H D, W]"""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return torch.cat([pairs[:, :, 0], pairs[:, :, 1]], 1).reshape(weight.shape)


_PACKED = ("llama", "mistral", "qwen2", "qwen3")  # families whose layers are taken from a file as codes


def packed_network(path: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any], list[str]]:
    """The network of a GGUF file with its linear layers as the file's codes; everything else in `dtype`.

    The numbers are those of `gguf_network`, which unpacks them. Rows of queries and keys are moved whole: a block
    never spans two rows.
    """
    import gguf

    config = gguf_config(path)
    kind = config.model_type
    if kind not in _PACKED:
        raise BrokenAtStart(
            f"the layers of a {kind} are not taken from a GGUF file as codes",
            where="teacher.quantisation",
            advice=[f"families that are: {', '.join(_PACKED)}", "--set teacher.quantisation=none"],
        )
    network = empty_network(config, dtype)
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[ARCHITECTURES[kind]], config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(str(path)).tensors}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    formats = {form.number: name for name, form in FORMATS.items()}
    tables, values = tables_of(network), {}
    for own, parameter in list(network.named_parameters()):
        stem, _dot, suffix = own.rpartition(".")
        tensor = tensors.get(f"{names.get_name(stem)}.{suffix}")
        if tensor is None:
            continue
        halve = heads.get(stem.rpartition(".")[2]) if ARCHITECTURES[kind] == "llama" else None
        form = formats.get(int(tensor.tensor_type))
        layer = network.get_submodule(stem)
        if type(layer) is nn.Linear and own not in tables and suffix == "weight" and form is not None:
            shape = (layer.out_features, row_bytes(layer.in_features, form))
            codes = torch.from_numpy(np.array(tensor.data, copy=True)).view(torch.uint8).reshape(shape)
            codes = in_halves(codes, halve) if halve else codes
            sizes = (layer.in_features, layer.out_features)
            network.set_submodule(stem, BlockLinear(codes, form, sizes, layer.bias))
            continue
        numbers = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), copy=True))
        numbers = numbers.reshape(parameter.shape)
        values[own] = (in_halves(numbers, halve) if halve and numbers.ndim == 2 else numbers).to(dtype)
    network.load_state_dict(values, strict=False, assign=True)
    network.tie_weights()
    missing = [name for name, weight in network.named_parameters() if weight.is_meta]
    note = f"{path} was read as {kind}: its linear layers stay the file's codes, everything else is {dtype}"
    report = {"missing_keys": missing, "unexpected_keys": [], "mismatched_keys": []}
    return network, report, [note.replace("torch.", "")]


@contextmanager
def _loader() -> Iterator[str]:
    """An empty folder: a loader would also read what lies next to the file, which may be of another model.

    Inside, transformers parses a file once and not for each of configuration, tokenizer and weights, makes the table of
    names once and not for each module, and draws no bar, which its settings do not reach.
    """
    import gguf

    library: Any = gguf
    utils: Any = modeling_gguf_pytorch_utils
    own = library.GGUFReader, library.get_tensor_name_map, utils.tqdm
    library.GGUFReader, library.get_tensor_name_map = _reader_of, lru_cache(library.get_tensor_name_map)
    utils.tqdm = lambda tensors, **_options: tensors
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield folder
    finally:
        library.GGUFReader, library.get_tensor_name_map, utils.tqdm = own


def _reader_of(path: str) -> Any:
    stamp = Path(path).stat()
    return _reader(path, stamp.st_size, stamp.st_mtime_ns)


@lru_cache(maxsize=1)
def _reader(path: str, _size: int, _stamp: int) -> Any:
    """Kept until the weights are loaded: its lists of tokens take seconds to make, and hundreds of bytes each."""
    from gguf.gguf_reader import GGUFReader

    return GGUFReader(path)


def _check(path: Path) -> None:
    """Refuse a file that is damaged, partial, or would be loaded as something else than it is."""
    header = read_header(path)
    if not header.architecture:
        raise BrokenAtStart(f"{path} does not say which architecture it is", advice=[_AGAIN])
    parts = int(header.fields.get("split.count") or 1)
    if parts > 1:
        raise BrokenAtStart(
            f"{path} is one of {parts} parts of a model",
            advice=["put them together with llama.cpp: llama-gguf-split --merge FIRST OUT", _FOLDER],
        )
    try:
        library: Any = importlib.import_module("gguf")
        importlib.import_module("accelerate")  # asked for by the loader of transformers
    except ImportError as error:
        raise BrokenAtStart(
            f"{path} is a GGUF file and needs {error.name}", advice=["pip install 'stillroom[gguf]'"]
        ) from error
    _check_whole(header, library)
    scaled_rotation(header)


def _check_whole(header: GgufHeader, library: Any) -> None:
    end, sizes = 0, {int(kind): size for kind, size in library.GGML_QUANT_SIZES.items()}
    for name, tensor in header.tensors.items():
        if tensor.kind not in sizes:
            raise BrokenAtStart(
                f"{header.path} stores {name} in type {tensor.kind}, which this gguf does not know",
                advice=["pip install -U gguf", _FOLDER],
            )
        block, num_bytes = sizes[tensor.kind]
        end = max(end, tensor.offset + tensor.num_elements // block * num_bytes)
    if not header.tensors or end > header.num_bytes:
        raise BrokenAtStart(
            f"{header.path} was cut short: it has {header.num_bytes:,} bytes, and its {len(header.tensors):,} tensors "
            f"end at {end:,}",
            advice=[_AGAIN],
        )
