"""The head's kernels in Triton: values in the interpreter, what ptxas builds, and a T4's PTX executed on a CPU.

No GPU is used here, and nothing says how long anything takes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "gpu"))
import ptx
from ptx_cases import MANY, T4, RowCase
from ptx_launch import build, resources
from ptx_table import DENSE, SPARSE

from stillroom.core.errors import BrokenAtStart
from stillroom.losses import divergences
from stillroom.losses.head import kernel
from stillroom.losses.head.kernel_triton import TritonKernel, member_of
from stillroom.losses.head.rows import Logits, PlainKernel, RowPlan, RowRecord

SUPPORT = Path(__file__).parents[2] / "support"
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels that Triton compiles are kept for the module only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


# -- values: Triton's interpreter --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    paths = [*sys.path, str(SUPPORT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}
    script = SUPPORT / "triton_interpreted.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_every_divergence_and_form_is_float64_to_rounding(interpreted: dict[str, Any]) -> None:
    found = interpreted["against_float64"]
    assert len(found) == 5 * (len(DENSE) + 2) + 7
    for name, errors in found.items():
        assert errors["kd"] < 5e-6, name
        assert errors["ce"] < 2e-6, name
        assert errors["gradient"] < 1e-6, name


def test_a_half_gradient_keeps_the_sums_of_its_rows(interpreted: dict[str, Any]) -> None:
    for name, errors in interpreted["half_rows"].items():
        assert errors["row_sum"] < 1e-6, name
        assert errors["gradient"] < (6e-4 if name.startswith("float16") else 8e-3), name


@pytest.mark.parametrize("form", ["passes", "at once"])
def test_bad_rows_are_those_of_the_plain_kernel(form: str, interpreted: dict[str, Any]) -> None:
    ours, plain = interpreted["odd_rows"][form]
    assert ours["is_bad"] == plain["is_bad"] == [False, True, True, True, False, False, False]
    for key in ("kd", "ce", "gradient"):
        torch.testing.assert_close(
            torch.tensor(ours[key]), torch.tensor(plain[key]), rtol=1e-5, atol=1e-6, equal_nan=True
        )
    assert not any(map(any, ours["spoiled"]))


def test_the_head_multiplies_the_half_gradient_back(interpreted: dict[str, Any]) -> None:
    """Through the kernel and the products, one power for all rows and one for each, in chunks."""
    for name, errors in interpreted["whole_head"].items():
        assert errors["hidden"] < 4e-4, name
        assert errors["weight"] < 4e-4, name


# -- built: registers and spills ---------------------------------------------------------------------------


def builds() -> Iterator[Any]:
    for architecture in (70, 75, 80, 89):
        for name in DENSE if architecture == T4 else ("forward_kl", "jsd"):
            for num_blocks in (0, MANY):
                given = {"divergence": name, "temperature": 2.0, "num_blocks": num_blocks}
                yield pytest.param(architecture, given, id=f"sm_{architecture} {name} {num_blocks}")
        for kind in SPARSE:
            for num_blocks in (0, MANY):
                given = {"kind": kind, "num_blocks": num_blocks}
                yield pytest.param(architecture, given, id=f"sm_{architecture} {kind} {num_blocks}")
    yield pytest.param(60, {}, id="sm_60")


@pytest.mark.parametrize(("architecture", "options"), list(builds()))
def test_ptxas_builds_the_kernel_without_spills(architecture: int, options: dict[str, Any], tmp_path: Path) -> None:
    held = resources(build(RowCase(num_tokens=49_152, **options).launch, architecture), tmp_path)
    assert held["spilled_bytes"] == 0
    assert 0 < held["registers"] <= 224


# -- executed as PTX ---------------------------------------------------------------------------------------


def executed(case: RowCase, **options: Any) -> ptx.Run:
    """All blocks of a row at once, in a random order."""
    slots = int(case.launch.arguments.get("num_parts", 1))
    return case.executed(**{"slots": slots, "schedule": "random", **options})


def cases(vocabularies: tuple[int, ...]) -> Iterator[Any]:
    for vocabulary in vocabularies:
        for name, settings in DENSE.items():
            for num_blocks in (0, MANY):
                given = {"divergence": name, "settings": settings, "num_blocks": num_blocks}
                yield pytest.param(vocabulary, given, id=f"{name} {num_blocks} {vocabulary}")
        for kind in SPARSE:
            for num_blocks in (0, MANY):
                given = {"kind": kind, "num_blocks": num_blocks}
                yield pytest.param(vocabulary, given, id=f"{kind} {num_blocks} {vocabulary}")


def check(vocabulary: int, options: dict[str, Any]) -> None:
    """No race; the gradient before rounding within 1e-4 of float64 (it is nearer), and rounded once to FP16."""
    whole = RowCase(num_tokens=vocabulary, half=None, **options)
    executed(whole, checks=False)
    errors = whole.errors()
    assert errors.gradient < 2e-6
    assert errors.kd < 1e-5
    assert errors.ce < 5e-6
    case = RowCase(num_tokens=vocabulary, **options)
    run = executed(case)
    assert not run.races
    assert case.errors().halves < 1.01
    assert case.errors().row_sum < 3e-6  # 1e-4 without what rounding took


@pytest.mark.parametrize(("vocabulary", "options"), list(cases((9_003,))))
def test_the_ptx_of_a_t4_computes_float64_and_has_no_race(vocabulary: int, options: dict[str, Any]) -> None:
    check(vocabulary, options)


@pytest.mark.slow
@pytest.mark.parametrize(("vocabulary", "options"), list(cases((49_152, 50_257, 151_936))))
def test_the_ptx_of_a_t4_computes_float64_at_real_vocabularies(vocabulary: int, options: dict[str, Any]) -> None:
    check(vocabulary, options)


@pytest.mark.parametrize(
    ("options", "read"),
    [({}, 16.0), ({"num_blocks": MANY}, 8.0), ({"divergence": "jsd"}, 24.0),
     ({"divergence": "jsd", "num_blocks": MANY}, 8.0), ({"kind": "top-k"}, 8.0),
     ({"kind": "top-k", "num_blocks": MANY}, 4.0), ({"kind": "sampled", "num_blocks": MANY}, 4.0)],
)  # fmt: skip
@pytest.mark.parametrize("vocabulary", [49_152, 50_257])
def test_a_row_is_read_as_often_as_the_cost_model_says(vocabulary: int, options: dict[str, Any], read: float) -> None:
    """Ragged rows too: a mask at an odd length would cost four times the sectors."""
    case = RowCase(num_tokens=vocabulary, **options)
    counted = case.bytes_per_element(executed(case, checks=False))
    # Each kept logit is a sector: read by two groups of warps, and written twice.
    kept = 2 * 32 * 64 / vocabulary if options.get("kind") else 0.0
    assert counted["read"] == pytest.approx(read + kept, rel=0.02)
    assert counted["written"] == pytest.approx(2.0 + kept, rel=0.02)


@pytest.mark.parametrize("schedule", ["first", "last", "random"])
@pytest.mark.parametrize("options", [{}, {"divergence": "jsd"}, {"kind": "top-k"}, {"kind": "sampled"}], ids=str)
def test_blocks_of_a_row_may_come_in_any_order(schedule: str, options: dict[str, Any]) -> None:
    for seed in range(3 if schedule == "random" else 1):
        case = RowCase(num_tokens=9_003, num_blocks=MANY, num_rows=2, **options)
        run = case.executed(slots=4, schedule=schedule, seed=seed)
        assert not run.races
        assert case.errors().halves < 1.01


def test_with_fewer_slots_than_parts_a_row_would_wait_long() -> None:
    case = RowCase(num_tokens=9_003, num_blocks=MANY)
    with pytest.raises(ptx.Deadlock):
        case.executed(slots=2)


@pytest.mark.parametrize("schedule", ["first", "last", "random"])
@pytest.mark.parametrize("options", [{}, {"divergence": "jsd"}, {"kind": "top-k"}], ids=str)
def test_blocks_that_never_meet_give_up_and_leave_nothing_that_looks_right(
    schedule: str, options: dict[str, Any]
) -> None:
    """Two of the three blocks of a row fit on the device. The second row is not waited for at all."""
    case = planted(RowCase(num_tokens=9_003, num_blocks=MANY, num_rows=2, **options), patience=5)
    run = case.executed(slots=2, schedule=schedule, checks=False)
    gradient, _sums = case.gradient()
    assert torch.isnan(case.rows.ce).all() and torch.isnan(case.rows.kd).all() and torch.isnan(gradient).any(-1).all()
    assert not case.rows.is_bad.any()
    looks = run.instructions["ld.global.gpu.acquire.b32"] / 8  # of a block of eight warps
    assert looks < 60


def test_blocks_that_meet_late_but_in_time_are_right() -> None:
    case = planted(RowCase(num_tokens=9_003, num_blocks=MANY, num_rows=2), patience=100)
    assert not case.executed(slots=3, schedule="last").races
    assert case.errors().halves < 1.01


def test_a_row_is_cut_in_no_more_parts_than_the_device_runs_at_once() -> None:
    assert RowCase(num_tokens=9_003, num_blocks=2).launch.grid == 1
    assert RowCase(num_tokens=9_003, num_blocks=3).launch.grid == 3


# -- planted faults are seen -------------------------------------------------------------------------------


def test_a_barrier_removed_is_a_race() -> None:
    case = RowCase(num_tokens=9_003)
    built = build(case.launch, T4)
    head, store, tail = built.ptx.rpartition("st.global.v2.b32")
    assert store
    before, barrier, after = head.rpartition("bar.sync")
    run = case.executed(built, ptx=before + "// " + barrier + after + store + tail)
    assert sum(run.races.values()) > 1000


@pytest.mark.parametrize("kind", ["dense", "top-k"])
def test_a_release_weakened_is_a_race(kind: str) -> None:
    case = RowCase(num_tokens=9_003, num_blocks=MANY, kind=kind)
    built = build(case.launch, T4)
    assert "atom.global.gpu.acq_rel" in built.ptx
    run = case.executed(built, ptx=built.ptx.replace("atom.global.gpu.acq_rel", "atom.global.gpu.relaxed"), slots=3)
    assert run.races


def test_a_barrier_removed_between_kept_logits_and_the_rest_is_a_race() -> None:
    """The second of those before the blocks meet: a warp would read kept logits that another is to take out."""
    case = RowCase(num_tokens=9_003, num_blocks=MANY, kind="top-k")
    built = build(case.launch, T4)
    head, meeting, tail = built.ptx.partition("atom.global.gpu.acq_rel")
    marks = [one.start() for one in re.finditer("st.global.b32", head)]
    place = head.index("bar.sync", marks[1])
    run = case.executed(built, ptx=head[:place] + "// " + head[place:] + meeting + tail, slots=3)
    assert run.races


def planted(case: RowCase, **arguments: Any) -> RowCase:
    case.launch = dataclasses.replace(case.launch, arguments={**case.launch.arguments, **arguments})
    return case


def test_a_mask_one_off_is_seen() -> None:
    """One column too many is padding that nobody wrote; past the padded length it is nobody's memory."""
    case = planted(RowCase(num_tokens=9_003), num_tokens=9_004)
    case.executed()
    assert not case.errors().halves < 1.01
    with pytest.raises(IndexError):
        planted(RowCase(num_tokens=9_003), padded=9_088).executed()


def test_a_wrong_stride_is_seen() -> None:
    given = RowCase(num_tokens=9_003, num_rows=2).launch.arguments["t_stride"]
    case = planted(RowCase(num_tokens=9_003, num_rows=2), t_stride=given - 64)
    case.executed()
    assert not case.errors().halves < 1.01
    with pytest.raises(IndexError):
        planted(RowCase(num_tokens=9_003, num_rows=2), t_stride=given + 64).executed()


def test_an_instruction_that_the_emulator_does_not_know_is_an_error() -> None:
    case = RowCase(num_tokens=1_000)
    built = build(case.launch, T4)
    with pytest.raises((NotImplementedError, KeyError)):
        case.executed(built, ptx=re.sub(r"ex2\.approx\.f32", "tanh.approx.f32", built.ptx))


# -- which kernel a device gets ----------------------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts of a T4. The kernels themselves are those of the test."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    properties = type("Properties", (), {"multi_processor_count": 40})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(TritonKernel, "run", lambda self, *given: PlainKernel().run(*given))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("fastest", ["triton", "triton-passes"])
def test_the_fastest_of_the_right_forms_is_chosen(fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_milliseconds", lambda one, device: 1.0 if one.name == fastest else 2.0)
    assert kernel.try_triton(CPU).name == fastest


def test_a_trial_that_does_not_end_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, turns: int) -> None:
            self.turns = turns

        def query(self) -> bool:
            self.turns -= 1
            return self.turns < 0

    kernel._wait(Event(3), "triton")  # type: ignore[arg-type]
    monkeypatch.setattr(kernel, "_TRIAL_SECONDS", 0.0)
    with pytest.raises(BrokenAtStart) as refusal:
        kernel._wait(Event(10**6), "triton")  # type: ignore[arg-type]
    assert "STILLROOM_KERNEL=plain" in " ".join(refusal.value.advice)


@pytest.mark.usefixtures("on_gpu")
def test_every_form_is_tried_under_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, str]] = []
    agree = kernel._agree
    monkeypatch.setattr(
        kernel, "_agree", lambda one, *rest: (tried.append((type(one).__name__, one.name)), agree(one, *rest))[1]
    )
    monkeypatch.setattr(kernel, "_milliseconds", lambda one, device: 1.0)
    kernel.try_triton(CPU)
    assert set(tried) == {("_OnTrial", "triton"), ("_OnTrial", "triton-passes")}


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", ["triton", "triton-passes"])
def test_a_form_whose_numbers_differ_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: TritonKernel, student: Logits, teacher: Any, rows: RowRecord, plan: RowPlan) -> None:
        PlainKernel().run(student, teacher, rows, plan)
        student.raw.mul_(1.01 if self.name == name else 1.0)

    monkeypatch.setattr(TritonKernel, "run", wrong)
    choice = kernel.try_triton(CPU)
    assert {choice.name, name} == {"triton", "triton-passes"}
    assert f"{name}: " in choice.reason


@pytest.mark.usefixtures("on_gpu")
def test_a_kernel_that_cannot_be_built_leaves_the_others_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: TritonKernel, *given: Any) -> None:
        raise RuntimeError("ptxas is missing\nand more")

    monkeypatch.setattr(TritonKernel, "run", fail)
    choice = kernel.try_triton(CPU)
    assert choice.name == "plain"
    assert "ptxas is missing" in choice.reason


def test_what_the_kernel_does_not_serve_goes_to_the_other_one() -> None:
    class Other:
        name = "other"
        calls = 0

        def run(self, *given: Any) -> None:
            self.calls += 1

    other = Other()
    ours = TritonKernel(other)
    rows = RowCase().rows
    bare = Logits(torch.zeros(2, 8))
    plan = RowPlan(divergences.make("forward_kl"), True, True, True, False)
    for student, changed in (
        (dataclasses.replace(bare, bias=torch.zeros(8)), plan),
        (dataclasses.replace(bare, clamp=3.0), plan),
        (dataclasses.replace(bare, raw=bare.raw.double()), plan),
        (bare, dataclasses.replace(plan, wants_teacher=True)),
        (bare, dataclasses.replace(plan, label_margin=0.1)),
        (bare, dataclasses.replace(plan, divergence=divergences.make("akl"))),
    ):
        ours.run(student, bare, rows, changed)
    assert other.calls == 6
    assert member_of(divergences.make("skew_reverse_kl", {"alpha": 0.95})) is None


# -- other versions ----------------------------------------------------------------------------------------

_BUILD = """
import json, sys, tempfile
from pathlib import Path
from ptx_cases import MANY, AdamCase, RowCase
from ptx_launch import build, resources
import triton
launches = [RowCase(num_tokens=49_152).launch, RowCase(num_tokens=49_152, num_blocks=MANY).launch,
            RowCase("jsd", 49_152).launch, RowCase("jsd", 49_152, num_blocks=MANY).launch,
            *(RowCase(num_tokens=49_152, kind=kind, num_blocks=many).launch
              for kind in ("top-k", "sampled") for many in (0, MANY)),
            AdamCase(is_half=True).launch]
with tempfile.TemporaryDirectory() as folder:
    found = [resources(build(one, a), Path(folder)) for a in (70, 75, 80, 89) for one in launches]
print(json.dumps([triton.__version__, found]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.2.0", "3.3.1", "3.4.0", "3.5.1", "3.6.0"])
def test_the_triton_of_each_supported_torch_builds_the_kernels_without_spills(version: str, tmp_path: Path) -> None:
    """torch 2.6 to 2.11 pin these; each is downloaded."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "site")]
    if subprocess.run([*pip, f"triton=={version}"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"triton {version} cannot be downloaded")
    paths = [str(tmp_path / "site"), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", _BUILD], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found, held = json.loads(done.stdout.splitlines()[-1])
    assert found == version
    assert [one["spilled_bytes"] for one in held] == [0] * 36
