"""Laws of the Python interface: objects do what names do, stay as they were, and leave a run that stands alone."""

from __future__ import annotations

import errno
import importlib
import inspect
import io
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from given_objects import are_equal, given, load, quick, texts, weights
from process_jobs import environment, group
from refusals import refused
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import stillroom
import stillroom.report
from stillroom.core.errors import (
    BrokenAtStart,
    CannotSave,
    ConfigError,
    DataError,
    Interrupted,
    NoBetterStudent,
    StillroomError,
)
from stillroom.models.objects import GivenModel
from stillroom.telemetry import read_events
from stillroom.training.run_folder import FOLDER


def losses(folder: Path) -> list[float]:
    return [event["train_loss"] for event in read_events(folder / "events.jsonl") if event["event"] == "step"]


def state_of(model: Any) -> tuple[Any, ...]:
    """Whatever a user could find changed in a model."""
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        [(id(weight), weight.requires_grad, weight.grad is None) for weight in model.parameters()],
        [module.training for module in model.modules()],
        model.device,
        model.dtype,
        dict(model.config.__dict__),
        model.config._attn_implementation,
    )


def same_state(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return are_equal(one[0], other[0]) and one[1:] == other[1:]


# -- objects ---------------------------------------------------------------------------------------------


def test_objects_train_what_names_train_and_stay_as_they_were(world: Path, tmp_path: Path) -> None:
    objects = given(world)
    teacher, student = objects["teacher"][0], objects["student"][0]
    teacher.train()
    teacher.model.embed_tokens.weight.requires_grad_(False)
    before, random = (state_of(teacher), state_of(student)), torch.random.get_rng_state()
    config = stillroom.load_config(overrides=tiny.settings(world))
    by_name = stillroom.distill(config, tmp_path / "names", device="cpu")
    by_object = stillroom.distill(**objects, out=tmp_path / "objects", settings=quick(world), device="cpu")
    assert same_state(before[0], state_of(teacher)) and same_state(before[1], state_of(student))
    assert torch.equal(random, torch.random.get_rng_state()), "the caller's random numbers are not those of the run"
    assert losses(by_name.folder) == losses(by_object.folder)
    assert are_equal(weights(by_name.folder), weights(by_object.folder))
    trained, tokenizer = by_object.load_student()
    assert are_equal(dict(trained.state_dict()), {**trained.state_dict(), **weights(by_object.folder)})
    assert not trained.training and all(weight.requires_grad for weight in trained.parameters())
    assert len(tokenizer) == len(objects["teacher"][1])
    assert by_object.report_path.is_file() and by_object.student_path.is_dir()


def test_a_run_begun_from_objects_is_resumed_from_its_folder_alone(world: Path, tmp_path: Path) -> None:
    whole = stillroom.distill(**given(world), out=tmp_path / "whole", settings=quick(world), device="cpu")
    with pytest.raises(Interrupted):
        stillroom.distill(
            **given(world), out=tmp_path / "cut", settings=quick(world, train__max_minutes=1e-9), device="cpu"
        )
    shutil.move(tmp_path / "cut", tmp_path / "moved")
    resumed = stillroom.resume(tmp_path / "moved", device="cpu", max_minutes=0)
    assert are_equal(weights(whole.folder), weights(resumed.folder))
    assert resumed.report_path.is_file()
    # The same call goes on as well, and a finished run is returned as it is.
    again = stillroom.distill(**given(world), out=tmp_path / "moved", settings=quick(world), device="cpu")
    assert again.summary == resumed.summary


@pytest.mark.parametrize("changed", ["teacher", "student", "tokenizer", "data"])
def test_a_folder_is_not_continued_with_other_objects(world: Path, tmp_path: Path, changed: str) -> None:
    settings = quick(world, train__max_steps=1, eval__samples=0)
    first = stillroom.distill(**given(world), out=tmp_path / "run", settings=settings, device="cpu")
    other = given(world)
    if changed == "data":
        other["data"] = iter(other["data"][:-1])
    elif changed == "tokenizer":
        other["student"][1].chat_template = "{{ messages }}"
    else:
        with torch.no_grad():
            other[changed][0].lm_head.weight[0, 0] += 1e-3
    role = "" if changed == "tokenizer" else changed  # both models are given with one tokenizer
    with refused(ConfigError, role):
        stillroom.distill(**other, out=tmp_path / "run", settings=settings, device="cpu")
    assert stillroom.resume(tmp_path / "run").summary == first.summary
    assert not list((tmp_path / "run").glob(".tmp-*"))


def test_what_is_not_as_the_objects_suggest_is_said(world: Path, tmp_path: Path) -> None:
    objects = given(world)
    objects["teacher"] = objects["teacher"][0]
    objects["teacher"].lm_head.register_forward_hook(lambda *_parts: None)
    objects["student"][0].requires_grad_(False)
    settings = quick(world, train__max_steps=1, eval__samples=0)
    result = stillroom.distill(**objects, out=tmp_path / "run", settings=settings, device="cpu")
    notes = [event["text"] for event in read_events(result.folder / "events.jsonl") if event["event"] == "note"]
    assert any("it takes the student's" in text for text in notes)
    assert any("hooks on 1 of its modules" in text for text in notes)
    assert any("all its weights are frozen" in text for text in notes)
    assert any("given as objects: kept in inputs/" in text for text in notes)
    objects["student"] = objects["student"][0]
    with refused(ConfigError, "teacher"):
        stillroom.distill(**objects, out=tmp_path / "none", settings=settings, device="cpu")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_written_model_is_the_given_one(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """Tied heads, buffers and renamed experts included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.config(family, width=16, num_layers=1)).to(dtype)
    found = GivenModel.of((model, tiny.tokenizer()), "teacher")
    assert found is not None
    before, mark = state_of(model), found.fingerprint()
    found.save(tmp_path / "model")
    assert same_state(before, state_of(model)) and found.fingerprint() == mark
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
    assert are_equal(dict(model.state_dict()), dict(again.state_dict()))
    assert GivenModel("teacher", again, AutoTokenizer.from_pretrained(tmp_path / "model")).fingerprint() == mark


def test_a_run_that_cannot_begin_leaves_nothing_of_its_inputs(world: Path, tmp_path: Path) -> None:
    objects = given(world)
    with torch.no_grad():
        objects["teacher"][0].lm_head.weight.fill_(float("nan"))
    with pytest.raises(BrokenAtStart):
        stillroom.distill(**objects, out=tmp_path / "run", settings=quick(world), device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_kill_before_the_run_began_does_not_block_its_folder(world: Path, tmp_path: Path, is_whole: bool) -> None:
    out = tmp_path / "run"

    def killed() -> None:
        from stillroom.training import distill as engine
        from stillroom.training.run_folder import Inputs

        where, name = (engine, "load_models") if is_whole else (Inputs, "_write")
        setattr(where, name, lambda *_args, **_options: os.kill(os.getpid(), signal.SIGKILL))
        stillroom.distill(**given(world), out=out, settings=quick(world), device="cpu")

    assert tiny.in_child(killed) == -9
    assert (out / FOLDER).exists() == is_whole and not (out / "config.json").exists()
    settings = quick(world, train__max_steps=1, eval__samples=0)
    assert stillroom.distill(**given(world), out=out, settings=settings, device="cpu").summary["steps"] == 1
    assert not list(out.glob(".tmp-*"))


@pytest.mark.parametrize(
    ("fault", "told"), [(ConnectionError("reset by peer"), DataError), (KeyError("row"), KeyError)]
)
def test_records_that_break_off_are_no_full_disk(
    world: Path, tmp_path: Path, fault: Exception, told: type[Exception]
) -> None:
    """A stream of a network ends as unreadable data, a fault of the generator's own as itself; no folder is left."""

    def records() -> Iterator[str]:
        yield "one text"
        raise fault

    with pytest.raises(told) as found:
        stillroom.distill(
            **{**given(world), "data": records()}, out=tmp_path / "run", settings=quick(world), device="cpu"
        )
    if isinstance(found.value, DataError):
        assert found.value.where == "record 2" and "reset by peer" in found.value.what
    assert not (tmp_path / "run").exists()


def test_a_disk_that_is_full_of_inputs_ends_with_24(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("stillroom.training.run_folder.write_records", full)
    with refused(CannotSave, "inputs") as found:
        stillroom.distill(**given(world), out=tmp_path / "run", settings=quick(world), device="cpu")
    assert found.value.exit_code == 24 and not (tmp_path / "run").exists()


def test_a_folder_called_inputs_that_is_not_ours_is_left_alone(world: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / FOLDER).mkdir(parents=True)
    (tmp_path / "run" / FOLDER / "mine.txt").write_text("mine")
    with refused(ConfigError, "--out"):
        stillroom.distill(**given(world), out=tmp_path / "run", settings=quick(world), device="cpu")
    assert (tmp_path / "run" / FOLDER / "mine.txt").read_text() == "mine"


# -- several processes -----------------------------------------------------------------------------------


def distilled_by_several(world: Path, folder: Path) -> None:
    """What each of several processes does: distil, noting who writes what; then leave out the folder."""
    from stillroom.training import run_folder

    def noted(what: str, wrapped: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            with (folder / f"{what}-{os.environ['RANK']}").open("a") as file:
                file.write("once ")
            return wrapped(*args, **options)

        return call

    stillroom.report.write_report = noted("report", stillroom.report.write_report)  # type: ignore[assignment]
    run_folder.Inputs.keep = noted("inputs", run_folder.Inputs.keep)  # type: ignore[method-assign]
    settings = quick(world, train__max_steps=2, eval__samples=0)
    result = stillroom.distill(**given(world), out=folder / "run", device="cpu", progress=True, settings=settings)
    assert result.summary["status"] == "done"
    with pytest.raises(ConfigError):
        stillroom.distill(**given(world), device="cpu")


def test_of_several_processes_the_first_alone_writes(world: Path, tmp_path: Path) -> None:
    first, second = group(2, lambda: distilled_by_several(world, tmp_path))
    assert sorted(path.name for path in tmp_path.glob("*-?")) == ["inputs-0", "report-0"]
    assert (tmp_path / "report-0").read_text() == "once "
    assert first.out and not second.out


# -- evaluation and generation ---------------------------------------------------------------------------


def test_objects_score_what_names_score_and_stay_as_they_were(world: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world / "teacher")
    model, teacher = load(world / "student"), load(world / "teacher").train()
    before = state_of(model), state_of(teacher)
    options: dict[str, Any] = {"max_length": 32, "max_batches": 4, "device": torch.device("cpu")}
    names = stillroom.evaluate(world / "student", world / "train.jsonl", teacher=str(world / "teacher"), **options)
    objects = stillroom.evaluate((model, tokenizer), iter(texts(world)), teacher=teacher, **options)
    assert same_state(before[0], state_of(model)) and same_state(before[1], state_of(teacher))
    assert isinstance(objects, stillroom.Assessment) and isinstance(objects.student, stillroom.Scores)
    assert (objects.perplexity, objects.student.kl) == (names.perplexity, names.student.kl)
    assert objects.retention == names.retention and objects.student.intervals == names.student.intervals
    alone = stillroom.evaluate((model, tokenizer), texts(world), **options)
    assert alone.teacher is None and alone.student.kl is None and alone.perplexity == names.perplexity
    with refused(ConfigError, "model"):
        stillroom.evaluate(model, texts(world), **options)


def test_a_pair_writes_what_its_folder_writes(world: Path) -> None:
    pair = load(world / "teacher"), AutoTokenizer.from_pretrained(world / "teacher")
    before = state_of(pair[0])
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        by_name = stillroom.generate(world / "teacher", "the still", max_new_tokens=8, device="cpu", **options)
        assert stillroom.generate(pair, "the still", max_new_tokens=8, **options) == by_name != ""
    assert same_state(before, state_of(pair[0]))
    with refused(ConfigError, "device"):
        stillroom.generate(pair, "the still", device="cpu")


# -- arguments -------------------------------------------------------------------------------------------


class Wrapped(torch.nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module


class Louder(LlamaForCausalLM):
    """A user's own class: saved and loaded, its copy would be a plain Llama."""

    def forward(self, *args: Any, **options: Any) -> Any:
        found = super().forward(*args, **options)
        found.logits = found.logits * 2
        return found


def wrong_models(world: Path) -> Iterator[tuple[Any, str]]:
    model = load(world / "student")
    yield 42, "int"
    yield None.__class__, "type"
    yield type(model), "class"
    yield model.state_dict(), "student"
    yield Wrapped(model), ".module"
    yield (model,), "1"
    yield (model, "tokenizer"), "str"
    yield (tiny.tokenizer(), model), "student"
    yield model.model, "head"
    yield Louder(model.config), "Louder"
    patched = load(world / "student")
    patched.model.layers[0].forward = lambda hidden, **_options: hidden
    yield patched, "model.layers.0"
    frozen = load(world / "student")
    frozen.lm_head.requires_grad_(False)
    yield frozen, "lm_head.weight"
    with torch.device("meta"):
        yield AutoModelForCausalLM.from_config(model.config), "meta"


def test_what_is_no_model_is_refused_by_name(world: Path, tmp_path: Path) -> None:
    for value, told in wrong_models(world):
        with refused(ConfigError, "student", told) as found:
            stillroom.distill(
                teacher=str(world / "teacher"), student=value, data="builtin:stdlib", out=tmp_path / "run"
            )
        assert found.value.advice
    assert not (tmp_path / "run").exists()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"config": "run.toml"}, "load_config"),
    ({"config": {"train": {}}}, "config"),
    ({"settings": [("train.max_steps", 1)]}, "settings"),
    ({"settings": {1: 2}}, "settings"),
    ({"settings": {"train.max_step": 1}}, "train.max_steps"),
    ({"settings": {"train.max_steps": "many"}}, "train.max_steps"),
    ({"settings": {"teacher.model": "x"}}, "teacher.model"),
    ({"settings": {"student.init": "shrink", "student.shrink.layers": 1}}, "student"),
    ({"preset": "no such"}, "no such"),
    ({"preset": 3}, "preset"),
    ({"out": 3}, "out"),
    ({"out": ""}, "out"),
    ({"device": 0}, "device"),
    ({"on_event": "print"}, "on_event"),
    ({"on_event": [print]}, "on_event"),
    ({"progress": "yes"}, "progress"),
    ({"inject": None}, "inject"),
    ({"teacher": None}, "teacher"),
    ({"teacher": None, "student": None, "data": None}, "data"),
]


@pytest.mark.parametrize(("over", "told"), WRONG, ids=[told for _, told in WRONG])
def test_a_wrong_argument_is_refused_by_name(
    over: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call = {"teacher": "builtin:teacher", "student": "builtin:student", "data": "builtin:stdlib", **over}
    with refused(StillroomError, "", told):
        stillroom.distill(**call)
    assert list(tmp_path.iterdir()) == []


def test_the_other_functions_check_their_arguments_too(world: Path) -> None:
    folder = str(world / "teacher")
    for call, told in (
        (lambda: stillroom.resume(3), "folder"),  # type: ignore[arg-type]
        (lambda: stillroom.resume("x", max_minutes=-1), "max_minutes"),
        (lambda: stillroom.resume("nowhere"), "nowhere"),
        (lambda: stillroom.evaluate(folder, "builtin:stdlib", max_length=4), "max_length"),
        (lambda: stillroom.evaluate(folder, "builtin:stdlib", batch_size=True), "batch_size"),
        (lambda: stillroom.evaluate(folder, "builtin:stdlib", bos="yes"), "bos"),  # type: ignore[arg-type]
        (lambda: stillroom.evaluate(3, "builtin:stdlib"), "model"),  # type: ignore[arg-type]
        (lambda: stillroom.evaluate(folder, 3), "data"),  # type: ignore[arg-type]
        (lambda: stillroom.generate(folder, ["x"]), "prompt"),  # type: ignore[arg-type]
        (lambda: stillroom.generate(folder, "x", max_new_tokens=0), "max_new_tokens"),
        (lambda: stillroom.generate(folder, "x", temperature=float("nan")), "temperature"),
        (lambda: stillroom.generate(folder, "x", raw=None), "raw"),  # type: ignore[arg-type]
        (lambda: stillroom.plan("run.toml"), "config"),  # type: ignore[arg-type]
        (lambda: stillroom.examine(None), "config"),  # type: ignore[arg-type]
        (lambda: stillroom.preview(stillroom.load_config(), rows=-1), "rows"),
        (lambda: stillroom.write_cache(stillroom.load_config(), ""), "out"),
        (lambda: stillroom.export_student("", "x"), "run"),
        (lambda: stillroom.resume("x", max_steps=0), "max_steps"),
    ):
        with refused(StillroomError, "", told):
            call()


def test_two_runs_of_one_second_have_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stillroom.api import new_folder

    monkeypatch.chdir(tmp_path)
    found = []
    for _ in range(3):
        found.append(new_folder(None))
        found[-1].mkdir(parents=True)
    assert len(set(found)) == 3


# -- the result ------------------------------------------------------------------------------------------


def test_a_result_tells_what_it_is_and_escapes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path('javascript:<img src=x onerror="alert(1)">')
    folder.mkdir()
    (folder / "report.html").touch()
    row = {"perplexity": 57.12, "bits_per_byte": 1.62, "parameters": 401220}
    hostile = {"status": "<script>", "steps": 8, "student": row, "student_before": row, "teacher": {}}
    shown = stillroom.Result(folder, hostile)._repr_html_()
    assert "<script" not in shown and "<img" not in shown and 'href="javascript:' not in shown
    assert '/report.html"' in shown and "57.1" in shown and "student before" in shown
    told = repr(stillroom.Result(Path("runs/a"), {"status": "done", "steps": 8, "student": row, "teacher": row}))
    assert told == f"Result(folder={'runs/a'!r}, status='done', steps=8, perplexity=57.1 (teacher 57.1))"
    assert repr(stillroom.Result(Path("a"))) == "Result(folder='a', status=None)"
    assert "unknown" in stillroom.Result(Path("a"))._repr_html_()
    with pytest.raises(BrokenAtStart):
        stillroom.Result(tmp_path / "nowhere").load_student()


def test_a_run_without_a_better_student_raises_with_its_report_written(world: Path, tmp_path: Path) -> None:
    weights = {"objectives__kd__weight": 0.95, "objectives__ce__weight": 0.05}  # labels, which it then fails by
    settings = quick(world, train__learning_rate=1e-3, train__max_steps=12, train__eval_steps=6, **weights)
    spoiled = {**given(world), "student": given(world)["teacher"], "teacher": given(world)["student"]}
    with pytest.raises(NoBetterStudent) as told:
        stillroom.distill(**spoiled, out=tmp_path / "run", settings=settings, device="cpu")
    assert told.value.folder == tmp_path / "run" and (tmp_path / "run" / "report.html").is_file()


# -- the package -----------------------------------------------------------------------------------------


def test_the_names_of_the_package_are_listed_before_torch_is_loaded() -> None:
    code = """
import sys, stillroom
assert set(stillroom.__all__) <= set(dir(stillroom))
assert stillroom.distill.__doc__
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())


def test_every_name_is_itself_after_everything_was_imported() -> None:
    """A module of the same name would take the place of a function as soon as someone imports it."""
    for module in pkgutil.iter_modules(stillroom.__path__):
        if module.name != "__main__":
            importlib.import_module(f"stillroom.{module.name}")
    for name in stillroom.__all__:
        assert callable(getattr(stillroom, name)), name
    assert {"jsd", "taid"} <= set(stillroom.divergence_names())
    with pytest.raises(AttributeError, match="nothing"):
        _ = stillroom.nothing


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(stillroom.__file__).parent / "py.typed").is_file()
    functions = [value for name in stillroom.__all__ if inspect.isfunction(value := getattr(stillroom, name))]
    assert len(functions) >= 10
    for function in functions:
        signature = inspect.signature(function)
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
        assert signature.return_annotation is not inspect.Parameter.empty
        assert all(parameter.annotation is not parameter.empty for parameter in signature.parameters.values())


# -- progress --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("progress", "is_told"), [(None, False), (False, False), (True, True)])
def test_a_script_is_quiet_unless_asked(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], progress: bool | None, is_told: bool
) -> None:
    config = stillroom.load_config(overrides=tiny.settings(world, train__max_steps=1, eval__samples=0))
    heard: list[str] = []
    stillroom.distill(config, tmp_path / "run", progress=progress, on_event=lambda event: heard.append(event["event"]))
    assert ("checks passed" in capsys.readouterr().out) == is_told
    assert {"run_start", "step", "eval", "run_end"} <= set(heard)


def test_a_notebook_s_kernel_gets_one_table_that_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython and ipykernel are no dependency: these stand for them, as a kernel has them."""
    from stillroom.telemetry import console

    shown: list[str] = []
    pages: list[str] = []

    def display(picture: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw and display_id
        shown.append(picture["text/plain"])
        return SimpleNamespace(update=update)

    def update(picture: dict[str, str], *, raw: bool) -> None:
        shown.append("= " + picture["text/plain"])
        pages.append(picture["text/html"])

    ipython, screen = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    screen.display = display  # type: ignore[attr-defined]
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", screen)
    assert not console.is_notebook(), "a terminal's IPython has no kernel"
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    assert console.is_notebook()
    with console.ConsoleView() as view:
        view.handle({"event": "run_start", "schedule": {"optimizer_steps": 5000}, "config": {}})
        terms = {"kd": {"raw": 1.0, "weight": 1.0, "scaled": 1.0, "share": 1.0}}
        for step in range(1, 5001):
            view.handle({"event": "step", "step": step, "train_loss": 1.0, "terms": terms})
        view.handle({"event": "eval", "step": 5000, "perplexity": 57.12, "bits_per_byte": "<b>", "best": True})
        view.handle({"event": "stage", "name": "<i>saving</i>", "state": "begin"})
        view.handle({"event": "step", "step": 5000, "train_loss": 1.0, "terms": terms})
    told = stream.getvalue()
    assert "\x1b" not in told and "\r" not in told and told.count("step ") <= 1
    assert shown[0].startswith("step 1/5,000") and all(text.startswith("= ") for text in shown[1:])
    assert shown[-1].startswith("= step 5,000/5,000") and "57.1" in shown[-1]
    assert "<td>57.1</td>" in pages[-1] and "<b>" not in pages[-1] and "<i>" not in "".join(pages)
