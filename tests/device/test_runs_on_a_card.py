"""Whole runs on a graphics card made of main memory, several in a process: what a CPU alone does not show.

Of every step that is kept: the host reads once, nothing is copied but what is planned, and generators are on the card.
Of every snapshot: it is in main memory. `card.py` says what such a card can and cannot show.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import card_cuda
import card_private
import card_runs
import pytest
import tiny
import torch
from process_jobs import alone, environment
from transformers import AutoModelForCausalLM

TURING, AMPERE = (7, 5), (8, 0)
Answers = dict[str, dict[str, Any]]
Ask = Callable[..., Answers]


@pytest.fixture(scope="session")
def worlds(world: Path, moe_world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The shared worlds, and one whose student has two query heads for each key head."""
    grouped = tmp_path_factory.mktemp("grouped")
    shutil.copytree(world / "teacher", grouped / "teacher")
    shutil.copytree(world / "student", grouped / "student")
    shutil.copy(world / "train.jsonl", grouped)
    config = tiny.config("llama", width=32, num_layers=1)
    config.num_key_value_heads = 1
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(config).save_pretrained(grouped / "student")
    return {"dense": str(world), "moe": str(moe_world), "grouped": str(grouped)}


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if card_cuda.COMPILER is None:
        pytest.skip("no C++ compiler: the card is not tried as a CUDA device here")
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    card_cuda.build_guard(library)
    return library


def written(job: dict[str, Any], folder: Path) -> Path:
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


def answers_of(job: Path) -> Answers:
    answers: Answers = json.loads(job.with_suffix(".answer").read_text())
    return answers


@pytest.fixture(scope="session")
def card_process(guard: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], None]]:
    """A process that loaded the guard before torch, as it must be, and forks for each job."""
    words = [sys.executable, str(Path(__file__).with_name("card_runs.py")), str(guard)]
    errors = tmp_path_factory.mktemp("card") / "stderr"
    with errors.open("w") as stream:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, text=True, env=environment()
        )
    assert process.stdin is not None and process.stdout is not None
    asked, answered = process.stdin, process.stdout

    def carry_out(job: Path) -> None:
        print(job, file=asked, flush=True)
        assert answered.readline().strip() == "0", errors.read_text()[-3000:]

    with process:
        yield carry_out
        asked.close()


@pytest.fixture
def on_cuda(card_process: Callable[[Path], None], worlds: dict[str, str], tmp_path: Path) -> Ask:
    def asked(runs: Sequence[str], capability: tuple[int, int] = TURING) -> Answers:
        job = written({"card": "cuda", "capability": capability, "worlds": worlds, "runs": list(runs)}, tmp_path)
        card_process(job)
        return answers_of(job)

    return asked


@pytest.fixture
def on_private(worlds: dict[str, str], tmp_path: Path) -> Ask:
    if missing := card_private.missing():
        pytest.skip(f"the card is not tried as a device of its own here: {missing}")

    def asked(runs: Sequence[str]) -> Answers:
        job = written({"card": "private", "worlds": worlds, "runs": list(runs)}, tmp_path)
        alone(lambda: card_runs.carry_out(job))
        return answers_of(job)

    return asked


def check(answers: Answers) -> None:
    """No run failed, and none broke a law."""
    wrong = {name: found.get("error") or found["broken"] for name, found in answers.items()}
    assert not {name: why for name, why in wrong.items() if why}, wrong


def last_loss(found: dict[str, Any]) -> float:
    return float(found["steps"][-1]["loss"])


def test_every_precision_trains_with_one_read_a_step(on_cuda: Ask) -> None:
    modes = ["fp32", "fp16-mixed", "fp16-master", "fp16-split", "fp16-sr"]
    answers = on_cuda(["auto", *modes, "bf16 moments", "accumulation", "accumulation mixed"])
    check(answers)
    assert answers["auto"]["precision"] == "fp16-master"
    for mode in modes:
        assert answers[mode]["precision"] == mode
        assert last_loss(answers[mode]) == pytest.approx(last_loss(answers["fp32"]), rel=1e-3)
        scaled = 65536.0 if mode.startswith("fp16") else 1.0
        assert set(answers[mode]["loss_scale"]) == {scaled}, "as on a CPU: nothing overflows"
        assert mode == "fp32" or set(answers[mode]["steps"][-1]["products"]) == {"float16"}, "those of the heads too"
    assert set(answers["fp16-mixed"]["steps"][-1]["attention"]) == {"float16 gqa=False"}
    first = answers["auto"]
    assert first["gpu_memory"][1] == pytest.approx(first["steps"][1]["peak"] / 1e9), "the peak of the step is shown"
    assert first["steps"][1]["peak"] > 1.2 * first["steps"][1]["live"]


def test_every_objective_and_placement_keeps_to_the_plan(on_cuda: Ask) -> None:
    runs = ["auto", "inner", "top-k", "labels alone", "jsd", "recomputed", "fp32 teacher", "shared heads", "shrink"]
    answers = on_cuda([*runs, "offload", "offload fp32", "stream", "int8"])
    check(answers)
    assert set(answers["shared heads"]["steps"][-1]["attention"]) == {"float16 gqa=False"}, "below sm_80"
    near, far = answers["auto"]["steps"][-1], answers["offload"]["steps"][-1]
    assert last_loss(answers["offload"]) == last_loss(answers["auto"]), "the same teacher"
    assert far["pinned_in"] == near["live"] - far["live"] > 0, "each step brings what is not kept, from pinned memory"
    twice = answers["offload fp32"]["steps"][-1]
    assert twice["pinned_in"] == 2 * far["pinned_in"], "once for each micro-batch"
    streamed = answers["stream"]["steps"][-1]
    assert last_loss(answers["stream"]) == last_loss(answers["auto"]), "the same teacher"
    assert 0 < streamed["pinned_in"] == near["live"] - streamed["live"] < far["pinned_in"], "its layers alone"
    assert last_loss(answers["int8"]) == pytest.approx(last_loss(answers["auto"]), rel=0.02)


def test_an_adapter_keeps_to_the_plan_and_is_merged_off_the_card(on_cuda: Ask) -> None:
    answers = on_cuda(["adapter", "adapter in halves", "adapter in fp32", "fp16-mixed"])
    check(answers)
    for name, told in answers.items():
        is_merged = any("logits differ by" in note for note in told["notes"])
        assert told["status"] == "done" and is_merged is name.startswith("adapter"), name
    assert answers["adapter"]["precision"] == "fp16-mixed"
    held, whole = answers["adapter"]["steps"][-1]["live"], answers["fp16-mixed"]["steps"][-1]["live"]
    assert held < 0.75 * whole, "the base has neither gradients nor moments, and its matrices are FP16"


@pytest.mark.slow
def test_every_router_mode_keeps_to_the_plan(on_cuda: Ask) -> None:
    modes = ["truth", "sar", "sar-joint", "sar-meta", "sar-transient", "all-experts", "augmentation"]
    answers = on_cuda([*(f"router {mode}" for mode in modes), "router sar offload"])
    check(answers)
    assert last_loss(answers["router sar offload"]) == pytest.approx(last_loss(answers["router sar"]), rel=1e-5)


def test_faults_are_recovered_from_on_a_card(on_cuda: Ask) -> None:
    answers = on_cuda(["nan_weight", "nan_moment", "inf_grad", "inf_logit", "teacher_nan", "huge_weight", "replay"])
    check(answers)
    for name in ("nan_weight", "nan_moment", "huge_weight"):
        # Where the loss scale may fall, the first sign of trouble is taken for an overflow.
        assert [action for action in answers[name]["actions"] if action != "retry"] == ["rollback"], name
    assert math.isfinite(answers["replay"]["loss"])


@pytest.mark.slow
def test_a_run_goes_on_on_another_device_in_the_mode_it_began_in(on_cuda: Ask) -> None:
    answers = on_cuda(
        ["from the CPU", "from the CPU fp16", "to the CPU", "cut and resumed", "evaluate", "generate", "as on the CPU"]
    )  # fmt: skip
    check(answers)
    losses = [step["loss"] for step in answers["as on the CPU"]["steps"]]
    assert losses[:4] == pytest.approx(losses[4:], rel=1e-5), "the card's numbers are the CPU's"
    for name, mode in (("from the CPU", "fp32"), ("from the CPU fp16", "fp16-split"), ("to the CPU", "fp16-master")):
        assert answers[name]["precision"] == mode and len(answers[name]["steps"]) == 5
        assert any("the run continues on" in note for note in answers[name]["notes"])
    assert answers["cut and resumed"]["is_same"], "bit for bit"
    for pair in (answers["evaluate"]["perplexity"], answers["evaluate"]["kl"]):
        assert pair[0] == pytest.approx(pair[1], rel=1e-6)
    assert answers["generate"]["texts"][0] == answers["generate"]["texts"][1]


def test_a_card_with_bf16_is_used_so(on_cuda: Ask) -> None:
    answers = on_cuda(["auto", "bf16-mixed", "shared heads", "offload"], AMPERE)
    check(answers)
    assert answers["auto"]["precision"] == "bf16-mixed"
    assert set(answers["auto"]["steps"][-1]["attention"]) == {"bfloat16 gqa=False"}, "teacher and student"
    assert "float16" not in answers["auto"]["steps"][-1]["products"]
    assert "bfloat16 gqa=True" in answers["shared heads"]["steps"][-1]["attention"], "the flash kernel takes it"


def test_partial_products_are_never_added_in_half(on_cuda: Ask) -> None:
    answers = on_cuda(["fp16-mixed", "fp16-master"])
    check(answers)
    for name, told in answers.items():
        assert not any(step["adds_in_half"] for step in told["steps"]), name
        assert told["adds_in_half_after"] is True, "the setting of the process is restored"


def test_torch_without_wide_results_multiplies_in_fp32_and_says_so(on_cuda: Ask) -> None:
    """torch 2.6 and 2.7 have no `out_dtype`."""
    answers = {**on_cuda(["old torch"]), **on_cuda(["auto"])}  # in two processes: what torch has is asked once in each
    check(answers)
    assert last_loss(answers["old torch"]) == pytest.approx(last_loss(answers["auto"]), rel=1e-3)
    assert "float32" in answers["old torch"]["steps"][-1]["products"]
    said = {name: [note for note in told["notes"] if "2.8" in note] for name, told in answers.items()}
    assert len(said["old torch"]) == 1 and not said["auto"]


def test_a_full_gpu_as_cublas_reports_it_makes_micro_batches_smaller(on_cuda: Ask) -> None:
    told = on_cuda(["full cublas"])["full cublas"]
    assert told.get("status") == "done", told
    assert any("micro-batches of 1 rows instead of 2" in note for note in told["notes"])


def test_memory_that_is_not_pinned_costs_a_note_and_no_micro_batch(on_cuda: Ask) -> None:
    names = ["offload", "offload without pinning", "stream", "stream without pinning"]
    answers = on_cuda(names)
    check(answers)
    for pinned, pageable in (names[:2], names[2:]):
        assert last_loss(answers[pinned]) == last_loss(answers[pageable])
        assert answers[pinned]["steps"][-1]["pinned_in"] > 0 == answers[pageable]["steps"][-1]["pinned_in"]
        notes = answers[pageable]["notes"]
        assert sum("pageable" in note for note in notes) == 1 and not any("memory ran out" in note for note in notes)
        assert not any("pageable" in note for note in answers[pinned]["notes"])


def test_the_first_loss_scale_looks_at_every_device(on_cuda: Ask) -> None:
    assert on_cuda(["peaks"])["peaks"]["peaks"] == ["5.0", "7.0", "nan"]


def test_a_gpu_that_behaves_as_modelled_gets_a_verdict_of_one(on_cuda: Ask) -> None:
    found = on_cuda(["bench"])["bench"]
    assert "error" not in found, found
    for said in ("peak", "sustained"):
        times = {one["name"]: one for one in found[said]["judged"] if not one["name"].startswith("memory/")}
        assert {"head/forward_kl/triton", "head/jsd/triton"} <= set(times)
        for phase in ("teacher", "student forward", "head", "student backward", "optimizer"):
            assert f"step/triton rows, eager bodies/{phase}" in times
        for one in times.values():
            assert one["at_measured"] == pytest.approx(1.0, rel=5e-3) and one["is_inside"], one
        ratios = [one["at_published"] for one in times.values()]
        assert ratios == pytest.approx([1.0] * len(ratios)) if said == "peak" else min(ratios) > 1.2


def test_packed_rows_have_one_mask_for_all_heads_that_starts_at_whole_rows(on_cuda: Ask) -> None:
    """Below sm_80 the memory-efficient kernel serves: it takes a mask, whose rows it wants aligned, and no groups."""
    answers = on_cuda(["packed", "packed shared heads"])
    check(answers)
    for name, told in answers.items():
        step = told["steps"][-1]
        assert set(step["attention"]) == {"float16 gqa=False"}, name
        shapes = {tuple(json.loads("[" + words.partition("[")[2].partition("]")[0] + "]")) for words in step["masks"]}
        assert step["masks"] and all(words.startswith("bool") for words in step["masks"])
        assert {shape[1] for shape in shapes} == {1}, "one for all heads, broadcast"
        assert all(shape[2] == shape[3] for shape in shapes)


MUTANTS = {
    "mutant item": "read 2 times",
    "mutant copy": "copied to the card",
    "mutant wrong device": "same device",
    "mutant ring": "a snapshot is on the card",
    "mutant generator": "generator",
    "mutant copied out": "copied to main memory",
}


def caught(found: dict[str, Any]) -> str:
    return str(found.get("error") or " ".join(found["broken"]))


def test_planted_mistakes_are_caught(on_cuda: Ask) -> None:
    answers = on_cuda(list(MUTANTS))
    for name, words in MUTANTS.items():
        assert words in caught(answers[name]), f"{name}: {caught(answers[name])}"


@pytest.mark.slow
def test_a_device_of_its_own_shows_the_same(on_private: Ask) -> None:
    """Without a compiler: what does not depend on the name of the device."""
    modes = ["fp32", "fp16-master", "fp16-split", "fp16-sr"]
    runs = [*modes, "accumulation", "inner", "top-k", "offload", "inf_grad", "from the CPU", "to the CPU", "evaluate"]
    mutants = ["mutant item", "mutant copy", "mutant wrong device", "mutant ring", "mutant generator"]
    answers = on_private([*runs, *mutants])
    check({name: answers[name] for name in runs})
    for mode in modes:
        assert last_loss(answers[mode]) == pytest.approx(last_loss(answers["fp32"]), rel=1e-3)
    for name in mutants:
        assert MUTANTS[name] in caught(answers[name]), f"{name}: {caught(answers[name])}"
