"""Training for a quantised file: the weights in use are the file's, and everything else is an ordinary run."""

from __future__ import annotations

import filecmp
import json
import sys
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from commands import output, run
from process_jobs import Ended, commands, losses, wait_for
from refusals import refused
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stillroom.config import load_config
from stillroom.core.errors import BrokenAtStart, ConfigError, Interrupted
from stillroom.export.folder import export
from stillroom.models.coded import BlockLinear
from stillroom.models.gguf import packed_network
from stillroom.precision.blocks import rounded
from stillroom.training import loop
from stillroom.training.distill import distill, resume
from stillroom.training.loop import Stop


def trained(world: Path, out: Path, **over: Any) -> Any:
    settings = tiny.settings(world, **{"student__quantise": "q4_0", **over})
    return distill(load_config(overrides=settings), out, device="cpu")


@pytest.fixture(scope="module")
def finished(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(world, tmp_path_factory.mktemp("quantised") / "run")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "student" / "model.safetensors")


def test_the_student_that_is_kept_is_what_the_file_holds(finished: Any) -> None:
    found = weights_of(finished.folder)
    matrices = [name for name, weight in found.items() if weight.ndim == 2 and "layers" in name]
    assert matrices and all(torch.equal(found[name], rounded(found[name], "q4_0")) for name in matrices)
    tables = [name for name, weight in found.items() if weight.ndim == 2 and "layers" not in name]
    assert tables and all(torch.equal(found[name], rounded(found[name], "q8_0")) for name in tables)


def test_the_exported_file_answers_as_the_student_was_trained(finished: Any, tmp_path: Path) -> None:
    done = export(str(finished.folder), tmp_path / "out", format="gguf", form="q4_0")
    assert done.rounded_largest == 0.0 and done.rounded_kl == 0.0  # nothing was left to round
    assert done.quality is not None and done.quality.perplexity == done.quality.full_perplexity


def test_a_killed_run_resumes_bit_for_bit(
    world: Path, tmp_path: Path, finished: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = iter([False, False, False, True])
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "is_wanted", lambda _self: next(wanted, False))
        with pytest.raises(Interrupted):
            trained(world, tmp_path / "parts")
    parts = resume(tmp_path / "parts", device="cpu")
    one, other = weights_of(finished.folder), weights_of(parts.folder)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("best", [4, 0])
def test_a_file_of_searched_codes_is_what_was_trained_and_resumed(
    best: int, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search does not give weights that are rounded already their codes back: the best student's are kept."""
    pytest.importorskip("xllamacpp")
    if best == 0:
        monkeypatch.setattr(loop, "is_better", lambda _result, state: state.best_step < 0)
    wide = families.build("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1, vocab_size=tiny.VOCAB)
    wide.save_pretrained(tmp_path / "wide")
    tiny.tokenizer().save_pretrained(tmp_path / "wide")
    over = {"student__model": str(tmp_path / "wide"), "student__quantise": "q5_k_m", "train__max_steps": 4}
    whole = trained(world, tmp_path / "whole", **over)
    assert whole.summary["best_step"] == best
    done = export(str(whole.folder), tmp_path / "out", format="gguf", form="q5_k_m")
    assert done.rounded_largest == 0.0 and set(done.weights) >= {"q5_k", "q6_k"}
    same = (whole.summary[name]["perplexity"] for name in ("student", "student_before"))
    assert (best == 0) == (next(same) == next(same))
    wanted = iter([False, False, True])
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "is_wanted", lambda _self: next(wanted, False))
        with pytest.raises(Interrupted):
            trained(world, tmp_path / "parts", **over)
    parts = resume(tmp_path / "parts", device="cpu")
    names = [path.name for path in (whole.folder / "student").iterdir()]
    same = filecmp.cmpfiles(whole.folder / "student", parts.folder / "student", names, shallow=False)
    assert sorted(same[0]) == sorted(names)
    (parts.folder / "student" / "gguf.codes").write_bytes(b"damaged")
    again = export(str(parts.folder), tmp_path / "again", format="gguf", form="q5_k_m")
    assert any("gguf.codes" in note for note in again.notes)


def test_exceptions_are_kept_wider(world: Path, tmp_path: Path) -> None:
    kept = {"*.down_proj.weight": "float32"}
    result = trained(world, tmp_path / "run", student__quantise_layers=kept, train__max_steps=2)
    found = weights_of(result.folder)
    down = [weight for name, weight in found.items() if "down_proj" in name]
    assert down and not any(torch.equal(weight, rounded(weight, "q4_0")) for weight in down)
    done = export(str(result.folder), tmp_path / "out", format="gguf", form="q4_0")
    assert done.rounded_largest == 0.0 and done.weights["float32"] >= sum(weight.numel() for weight in down)


def test_eight_bits_train_as_well_as_full_weights(world: Path, tmp_path: Path) -> None:
    plain = trained(world, tmp_path / "plain", student__quantise="").summary["student"]["perplexity"]
    eight = trained(world, tmp_path / "eight", student__quantise="q8_0").summary["student"]["perplexity"]
    assert eight == pytest.approx(plain, rel=0.01)


def test_without_a_teacher_the_unquantised_student_teaches(world: Path) -> None:
    settings = tiny.settings(world, student__quantise="q4_0")
    del settings["teacher.model"]
    assert load_config(overrides=settings).teacher.model == settings["student.model"]


@pytest.mark.parametrize(
    "over",
    [
        {"precision__mode": "fp16-master"},
        {"student__quantise": "q3_k"},
        {"student__quantise": "", "student__quantise_layers": {"q_proj": "q8_0"}},
        {"student__adapter": {"rank": 2}},
        {"student__quantise_layers": {"nothing": "q8_0"}},
    ],
)
def test_what_cannot_be_combined_is_refused(world: Path, tmp_path: Path, over: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        trained(world, tmp_path / "run", **over)


def test_the_command_compares_original_rounded_and_trained(world: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["--data", str(world / "train.jsonl"), "--out", str(tmp_path / "q"), "--steps", "4", "--device", "cpu"]
    sizes = ["--set", "data.max_length=32", "--set", "train.batch_size=4", "--set", "eval.max_batches=2"]
    said = json.loads(
        output(capsys, "quantise", str(world / "student"), *words, *sizes, "--set", "eval.samples=0", "--json")
    )
    assert said["original"]["kl"] == 0.0 < said["rounded"]["kl"] and Path(said["file"]).is_file()
    code, _out, _err = run(capsys, "quantise", str(world / "student"), *words, "--to", "q3_k")
    assert code == 2


def test_two_processes_train_the_rounded_student_of_one_and_shards_are_refused(world: Path, tmp_path: Path) -> None:
    def both(out: Path, **over: Any) -> list[Ended]:
        given = tiny.settings(world, student__quantise="q4_0", train__max_steps=3, eval__samples=0, **over)
        words = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
        asked = ["distill", "--out", str(out), "--device", "cpu", "--no-progress", *words]
        return wait_for(commands([asked, asked]))

    ends = both(tmp_path / "two", train__strategy="ddp")
    assert [ended.code for ended in ends] == [0, 0], ends
    one = trained(world, tmp_path / "one", train__max_steps=3, train__gradient_accumulation_steps=2)
    assert losses(tmp_path / "two", "train_loss") == pytest.approx(losses(one.folder, "train_loss"), rel=1e-4)
    found = weights_of(tmp_path / "two")
    assert all(torch.equal(one, rounded(one, "q4_0")) for name, one in found.items() if name.endswith("proj.weight"))
    ends = both(tmp_path / "shards", train__strategy="fsdp")
    assert [ended.code for ended in ends] == [2, 2] and "student.quantise" in ends[0].err, ends


# -- frozen layers as codes ------------------------------------------------------------------------------------


def test_a_teacher_of_a_files_codes_answers_as_the_unpacked_one(world: Path, tmp_path: Path) -> None:
    export(str(world / "student"), tmp_path / "out", format="gguf", form="q4_1")
    path = tmp_path / "out" / "model-q4_1.gguf"
    packed, _report, _notes = packed_network(path, torch.float32)
    assert any(isinstance(part, BlockLinear) for part in packed.modules())
    plain = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ids = torch.arange(3, 35).view(2, 16)
    with torch.no_grad():
        assert torch.equal(packed(ids).logits, plain(ids).logits)


def test_a_run_learns_from_a_files_codes_and_from_rounded_layers(world: Path, tmp_path: Path) -> None:
    export(str(world / "student"), tmp_path / "out", format="gguf", form="q8_0")
    path = str(tmp_path / "out" / "model-q8_0.gguf")
    over = {"student__quantise": "", "teacher__model": path, "train__max_steps": 2}
    kl = [
        trained(world, tmp_path / kind, teacher__quantisation=kind, **over).summary["student"]["kl"]
        for kind in ("none", "file", "q8_0")
    ]
    assert kl[0] == kl[1] == kl[2]  # the same numbers, and rounding them again changes nothing
    with refused(BrokenAtStart, "teacher.quantisation"):
        trained(world, tmp_path / "no", student__quantise="", teacher__quantisation="file")


def test_nf4_without_its_library_names_it(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with refused(BrokenAtStart, "student.adapter.base_dtype", "stillroom[bitsandbytes]"):
        trained(world, tmp_path / "run", student__quantise="", student__adapter={"base_dtype": "nf4"})


@pytest.mark.parametrize("kind", ["q4_0", "nf4"])
def test_an_adapter_is_trained_next_to_a_four_bit_base(
    kind: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    adapter = {"rank": 4, "base_dtype": kind}
    over = {"student__quantise": "", "student__adapter": adapter, "train__max_steps": 4}
    result = trained(world, tmp_path / "run", **over)
    assert result.summary["student"]["perplexity"] < result.summary["student_before"]["perplexity"]
    wanted = iter([False, False, True])
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "is_wanted", lambda _self: next(wanted, False))
        with pytest.raises(Interrupted):
            trained(world, tmp_path / "parts", **over)
    one, other = weights_of(result.folder), weights_of(resume(tmp_path / "parts", device="cpu").folder)
    assert all(torch.equal(one[name], other[name]) for name in one)
