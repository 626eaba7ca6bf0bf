"""Laws of GGUF's block formats: rounded as the reference rounds, exact as codes, the same when rounded twice."""

from __future__ import annotations

import importlib.util
import re

import gguf
import pytest
import torch
from refusals import refused

from stillroom.config import parse_assignments
from stillroom.core.errors import ConfigError
from stillroom.precision import AdamW, ParameterGroup
from stillroom.precision.blocks import FORMATS, block_types, decode, encode, llama_cpp, rounded
from stillroom.precision.storage import Rounded

SIMPLE = [name for name, form in FORMATS.items() if form.levels]
HAS_LLAMA = importlib.util.find_spec("xllamacpp") is not None


def weights(scale: float = 0.02, columns: int = 1024) -> torch.Tensor:
    """A matrix with a block of zeros, a block of equal numbers and a tie for the largest."""
    values = torch.randn(24, columns, generator=torch.Generator().manual_seed(3)) * scale
    values[0, :32] = 0.0
    values[1, :32] = 0.5 * scale
    values[2, 5], values[2, 9] = 7 * scale, -7 * scale
    return values


@pytest.mark.parametrize("scale", [1e-6, 0.02, 30.0])
@pytest.mark.parametrize("kind", SIMPLE)
def test_codes_are_those_of_the_gguf_package_to_the_last_bit(kind: str, scale: float) -> None:
    values = weights(scale)
    theirs = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType(FORMATS[kind].number))
    assert torch.equal(encode(values, kind), torch.from_numpy(theirs))


@pytest.mark.parametrize("kind", list(FORMATS))
def test_any_codes_are_read_as_the_gguf_package_reads_them(kind: str) -> None:
    """Codes drawn at random, with finite scales: every bit of a block has a meaning that must be the same."""
    form = FORMATS[kind]
    codes = torch.randint(0, 256, (50, form.num_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    scales = [208] if kind == "q6_k" else [0, 2] if form.has_offset or not form.levels else [0]
    for begin in scales:
        codes[:, begin : begin + 2] = torch.rand(50, 1).half().view(torch.uint8)
    theirs = gguf.quants.dequantize(codes.numpy(), gguf.GGMLQuantizationType(form.number))
    assert torch.equal(decode(codes, kind), torch.from_numpy(theirs))


@pytest.mark.parametrize("kind", SIMPLE)
def test_rounding_is_idempotent_and_equals_the_file(kind: str) -> None:
    values = weights()
    once = rounded(values, kind)
    assert torch.equal(once, decode(encode(values, kind), kind))
    assert torch.equal(rounded(once, kind), once)
    assert 0 < float((once - values).abs().max()) < 0.02


@pytest.mark.skipif(not HAS_LLAMA, reason="xllamacpp is not installed")
@pytest.mark.parametrize("kind", ["q4_k", "q5_k", "q6_k"])
def test_threads_find_the_codes_of_one_search(kind: str) -> None:
    values, threads = weights()[:7], torch.get_num_threads()
    once = encode(values, kind)
    try:
        torch.set_num_threads(3)
        assert torch.equal(encode(values, kind), once)
    finally:
        torch.set_num_threads(threads)


def test_without_llama_cpp_its_formats_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    llama_cpp.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with refused(ConfigError, "student.quantise", "stillroom[llamacpp]"):
        rounded(weights(), "q4_k")


def test_a_weight_that_is_not_finite_stays_so_for_the_guard_to_see() -> None:
    values = weights()
    values[3, 40] = float("nan")
    for kind in FORMATS if HAS_LLAMA else SIMPLE:
        assert not torch.isfinite(rounded(values, kind)[3, 32:64]).all()


def test_the_straight_through_gradient_is_that_of_the_rounded_weights() -> None:
    values, inputs = weights(columns=64), torch.randn(5, 64)
    parameter = torch.nn.Parameter(values.clone())
    storage = Rounded(parameter, "q4_0")
    assert torch.equal(storage.master, values) and torch.equal(parameter.data, rounded(values, "q4_0"))
    (inputs @ parameter.T).square().sum().backward()
    plain = rounded(values, "q4_0").requires_grad_()
    (inputs @ plain.T).square().sum().backward()
    assert parameter.grad is not None and plain.grad is not None and torch.equal(parameter.grad, plain.grad)


def test_updates_too_small_for_a_code_add_up_in_the_master() -> None:
    values = weights(columns=64)
    parameter = torch.nn.Parameter(values.clone())
    groups = [ParameterGroup("student", 1e-6, (("w", parameter),))]
    optimizer = AdamW(groups, store=lambda _name, one: Rounded(one, "q4_0"), weight_decay=0.0)
    before = parameter.data.clone()
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step(1.0, {"student": 1.0})
    master = optimizer.tensors()["w.master"]
    assert torch.allclose(values - master, torch.full_like(values, 3e-6), atol=2e-7)
    assert torch.equal(parameter.data, rounded(master, "q4_0"))
    assert float((parameter.data == before).float().mean()) > 0.5


SHAPES = {
    "model.embed_tokens.weight": (320, 64),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.mlp.down_proj.weight": (64, 256),
    "model.norm.weight": (64,),
}
TABLES = frozenset({"model.embed_tokens.weight"})


def test_embeddings_stay_wider_vectors_stay_whole_and_exceptions_win() -> None:
    found = block_types(SHAPES, "q4_0", tables=TABLES, layers={"down_proj": "q8_0"})
    assert list(found.values()) == ["q8_0", "q4_0", "q8_0", "float32"]


def test_rows_too_short_for_a_k_format_take_what_llama_cpp_takes() -> None:
    found = block_types(SHAPES, "q4_k_m", tables=TABLES, num_layers=1)
    assert list(found.values()) == ["q8_0", "q5_0", "q6_k", "float32"]


@pytest.mark.parametrize(
    ("recipe", "layers", "shape"),
    [
        ("q3_9", {}, (64, 64)),
        ("q4_0", {"lm_head": "q8_0"}, (64, 64)),  # tied: it is stored with the embeddings
        ("q4_0", {"q_proj": "int4"}, (64, 64)),
        ("q4_0", {}, (64, 72)),
    ],
)
def test_what_cannot_be_stored_is_refused(recipe: str, layers: dict[str, str], shape: tuple[int, int]) -> None:
    shapes = {**SHAPES, "model.layers.0.self_attn.q_proj.weight": shape}
    with refused(ConfigError, "student.quantise"):
        block_types(shapes, recipe, tables=TABLES, layers=layers)


def test_the_exception_that_a_refusal_offers_serves_all_layers_at_once() -> None:
    shapes = {f"model.layers.{layer}.mlp.down_proj.weight": (64, 172) for layer in range(3)}
    with pytest.raises(ConfigError) as caught:
        block_types(shapes, "q4_0", tables=TABLES)
    option = re.search(r"--layers (\S+)=(\S+)", caught.value.advice[0])
    setting = re.search(r"--set '(.+?)'", caught.value.advice[0])
    assert option is not None and setting is not None
    layers = {option[1]: option[2]}
    assert parse_assignments([setting[1]])["student.quantise_layers"] == layers
    assert set(block_types(shapes, "q4_0", tables=TABLES, layers=layers).values()) == {"float16"}
