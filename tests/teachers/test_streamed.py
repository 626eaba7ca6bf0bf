"""Laws of a streamed teacher: the same answers to the last bit, and two layers on the device at most."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from refusals import refused
from transformers import AutoModelForCausalLM

from stillroom.config.schema import TeacherConfig
from stillroom.core.errors import BrokenAtStart
from stillroom.core.types import IGNORED, Batch, Needs
from stillroom.models import open_teacher
from stillroom.teachers.live import LiveTeacher, open_live
from stillroom.teachers.placement import FileShelf, MemoryShelf, StreamedModel, open_streamed

CPU = torch.device("cpu")
LAYERS = 5


def section(folder: Path) -> TeacherConfig:
    return TeacherConfig(model=str(folder), placement="stream")


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> StreamedModel:
    found = open_live(section(folder), dtype)
    assert isinstance(found, StreamedModel)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("deep") / "model", "llama", num_layers=LAYERS)


@torch.no_grad()
def logits(network: Any, seed: int = 3) -> torch.Tensor:
    ids = torch.randint(2, tiny.VOCAB, (2, 20), generator=torch.Generator().manual_seed(seed))
    return network(input_ids=ids, use_cache=False).logits


def a_batch() -> Batch:
    ids = torch.randint(2, tiny.VOCAB, (3, 12), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, dims=1).clone()
    targets[:, -1] = IGNORED
    return Batch(ids, torch.ones_like(ids), targets, torch.ones_like(ids), ("a", "b", "c"))


# Tied and untied heads, biases, other prefixes, masks by layer, mixtures whose files are converted, recurrences.
FAMILIES = ["llama", "gpt2", "qwen3", "gemma3_text", "opt", "gpt_neox", "mixtral", "deepseek_v3", "mamba", "bloom"]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_ordinary_placement_to_the_last_bit(family: str, tmp_path: Path) -> None:
    families.build(family).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    whole = open_teacher(TeacherConfig(model=str(tmp_path / "model")), torch.float32)
    ours = opened(tmp_path / "model")
    for seed in (3, 4):
        assert torch.equal(logits(ours.network, seed), logits(whole.network, seed))
    assert ours.anatomy == whole.anatomy and ours.is_described == whole.is_described
    assert ours.stream is not None and ours.stream.peak_layers <= 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights_are_cast_as_the_ordinary_loader_casts_them(folder: Path, dtype: torch.dtype) -> None:
    whole, ours = open_teacher(TeacherConfig(model=str(folder)), dtype), opened(folder, dtype)
    assert logits(ours.network).dtype == dtype
    assert torch.equal(logits(ours.network), logits(whole.network))


def test_two_layers_at_most_are_on_the_device_and_none_between_batches(folder: Path) -> None:
    found = opened(folder)
    stream = found.stream
    assert stream is not None
    layer = open_teacher(TeacherConfig(model=str(folder)), torch.float32).network.model.layers[0]
    layer_bytes = sum(4 * weight.numel() for weight in layer.parameters())
    inside: list[int] = []
    for block in found.network.model.layers:
        block.mlp.register_forward_hook(lambda *_: inside.append(num_here(found.network)))
    logits(found.network)
    assert inside == [1] * LAYERS, "one layer has its weights, and another is on its way"
    assert stream.peak_layers == 2 and stream.peak_bytes == 2 * layer_bytes
    assert stream.num_reads == LAYERS, "each layer is read once a batch"
    assert num_here(found.network) == 0 and not stream._bytes and stream._ahead is None
    stays = {name for name, weight in found.network.named_parameters() if not weight.is_meta}
    assert stays == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


def num_here(network: Any) -> int:
    return sum(not any(weight.is_meta for weight in block.parameters()) for block in network.model.layers)


def test_the_next_layer_is_read_by_another_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = opened(folder)
    names: list[tuple[str, bool]] = []
    read = FileShelf.read

    def watched(shelf: FileShelf, name: str, *args: Any, **options: Any) -> torch.Tensor:
        names.append((name.split(".")[2], threading.current_thread() is threading.main_thread()))
        return read(shelf, name, *args, **options)

    monkeypatch.setattr(FileShelf, "read", watched)
    logits(found.network)
    assert {number for number, is_main in names if is_main} == {"0"}
    assert {number for number, is_main in names if not is_main} == {str(number) for number in range(1, LAYERS)}


def test_weights_are_let_go_of_when_a_forward_fails(folder: Path) -> None:
    found = opened(folder)
    expected = logits(found.network)
    block = found.network.model.layers[2].mlp

    def fail(*_: Any) -> None:
        raise KeyError("test")

    handle = block.register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        logits(found.network)
    handle.remove()
    assert num_here(found.network) == 0
    assert torch.equal(logits(found.network), expected), "what was read ahead is dropped"
    assert found.stream is not None and found.stream.peak_layers == 2


def test_a_file_that_went_away_is_an_error_and_not_another_answer(folder: Path, tmp_path: Path) -> None:
    copy = tiny.save_model(tmp_path / "copy", "llama", num_layers=2)
    found = opened(copy)
    (copy / "model.safetensors").unlink()
    with refused(BrokenAtStart, "model.safetensors", "layers.0.") as caught:
        logits(found.network)
    assert caught.value.exit_code == 20 and "model.safetensors" in caught.value.where


def test_shards_are_read_where_they_lie(folder: Path, tmp_path: Path) -> None:
    whole = open_teacher(TeacherConfig(model=str(folder)), torch.float32)
    whole.network.save_pretrained(tmp_path / "cut", max_shard_size="40KB")
    whole.tokenizer.save_pretrained(tmp_path / "cut")
    assert len(list((tmp_path / "cut").glob("model-*-of-*.safetensors"))) > 2
    assert torch.equal(logits(opened(tmp_path / "cut").network), logits(whole.network))


def test_a_weight_that_layers_share_stays(tmp_path: Path) -> None:
    """Zamba2 has one block that several layers call."""
    families.build("zamba2").save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    whole, ours = open_teacher(TeacherConfig(model=str(tmp_path / "model")), torch.float32), opened(tmp_path / "model")
    assert torch.equal(logits(ours.network), logits(whole.network))


def test_files_that_must_be_converted_are_kept_in_main_memory_and_said_so(tmp_path: Path) -> None:
    families.build("mixtral").save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    found = opened(tmp_path / "model")
    assert found.stream is not None and isinstance(found.stream._shelf, MemoryShelf)
    assert any("not streamed from its files: its files name or cut" in note for note in found.notes)
    plain = opened(tiny.save_model(tmp_path / "plain", "llama", num_layers=2))
    assert plain.stream is not None and isinstance(plain.stream._shelf, FileShelf)
    assert any("2 layers" in note and "stay in its files" in note for note in plain.notes)


def test_a_streamed_teacher_answers_with_taps_and_without(folder: Path) -> None:
    whole = open_teacher(TeacherConfig(model=str(folder)), torch.float32)
    found = opened(folder)
    plain = LiveTeacher(whole.network, vocab_size=tiny.VOCAB, device=CPU, offload=False, is_described=True)
    ours = LiveTeacher(
        found.network, vocab_size=tiny.VOCAB, device=CPU, offload=False, is_described=True, placement=found.stream
    )
    for needs in (Needs(), Needs(hidden_layers=(1, 3))):
        mine, theirs = ours.observe(a_batch(), needs), plain.observe(a_batch(), needs)
        assert torch.equal(mine.hidden, theirs.hidden) and torch.equal(mine.head.weight, theirs.head.weight)
    assert not ours.writes_text and "no samples" in ours.notes[0] and plain.writes_text
    assert ours.summary()["teacher_streaming"]["peak_layers"] == 2


def test_a_model_that_is_no_list_of_layers_is_refused_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillroom.teachers.placement.layers_if_any", lambda _network: [])
    with refused(BrokenAtStart, "teacher.placement", "LlamaForCausalLM") as caught:
        open_streamed(section(folder), torch.float32)
    assert caught.value.exit_code == 20 and "teacher.placement=device" in caught.value.advice[0]


def test_a_model_that_uses_layers_past_their_forward_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaModel

    forward = LlamaModel.forward

    def peeking(self: Any, *args: Any, **options: Any) -> Any:
        float(self.layers[1].mlp.up_proj.weight.sum())
        return forward(self, *args, **options)

    monkeypatch.setattr(LlamaModel, "forward", peeking)
    with refused(BrokenAtStart, "teacher.placement", "LlamaForCausalLM"):
        open_streamed(section(folder), torch.float32)


def test_quantised_files_are_refused(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "coded")
    tiny.tokenizer().save_pretrained(tmp_path / "coded")
    text = (tmp_path / "coded" / "config.json").read_text()
    (tmp_path / "coded" / "config.json").write_text(
        text.replace("{", '{"quantization_config": {"quant_method": "awq", "bits": 4},', 1)
    )
    with refused(BrokenAtStart, "teacher.placement") as caught:
        open_streamed(section(tmp_path / "coded"), torch.float32)
    assert caught.value.exit_code == 20
