"""Laws of publishing: what is sent is listed first, one commit holds it, its figures are the Hub's own metadata."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import output
from commands import run as command
from hub_server import TOKEN, Hub, hub_server
from huggingface_hub import ModelCardData

import stillroom
from stillroom.core import remote

TO = ("--to", "org/name")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(remote, "_PAUSE", 0.0)
    with hub_server(monkeypatch) as server:
        yield server


def head(hub: Hub) -> dict[str, bytes]:
    return hub.repos["org/name"].head()


@pytest.fixture
def model(sound_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound_model, tmp_path / "model"))


def test_a_run_is_published_with_its_figures_in_one_commit(
    hub: Hub, shared_run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shared_run()
    gguf = tmp_path / "small-q8_0.gguf"
    gguf.write_bytes(b"GGUF" + b"\0" * 60)
    listed = output(capsys, "push", str(run.folder), *TO, "--private", "--gguf", str(gguf), "--dry-run")
    assert not hub.repos and "model.safetensors" in listed and "private" in listed
    out = output(capsys, "push", str(run.folder), *TO, "--private", "--gguf", str(gguf))
    assert out.splitlines()[:-1] == listed.splitlines()[:-1], "what is said before is what is sent"
    assert out.splitlines()[-1].endswith(f"{hub.url}/org/name")
    repo = hub.repos["org/name"]
    assert repo.titles == ["initial commit", "Stillroom: model"] and repo.private
    sent = {name: held for name, held in head(hub).items() if not name.startswith(".")}
    student = {path.name: path.read_bytes() for path in (run.folder / "student").iterdir()}
    assert sent.pop("README.md") and sent == {**student, gguf.name: gguf.read_bytes()}
    card = head(hub)["README.md"].decode()
    results = ModelCardData(**yaml.safe_load(card.split("---")[1])).eval_results or []
    figures = {one.metric_type: one.metric_value for one in results}
    assert figures["perplexity"] == run.summary["student"]["perplexity"] and "agreement" in figures
    assert f"llama-cli -m {gguf.name}" in card and "float32" in card and str(run.folder) not in card
    assert TOKEN not in out + card


def test_the_same_again_is_no_commit_and_an_earlier_model_s_weights_are_removed(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = stillroom.push(model, "org/name")
    repo = hub.repos["org/name"]
    assert first == f"{hub.url}/org/name" and len(repo.titles) == 2 and not repo.private
    stillroom.push(model, "org/name")
    assert len(repo.titles) == 2
    stale = {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"{}", "LICENSE": b"mine"}
    repo.commit("main", {**repo.head(), **stale, "onnx/model.safetensors": b"other"}, "another model")
    found = json.loads(output(capsys, "push", str(model), *TO, "--json"))
    assert sorted(found["removes"]) == ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    assert found["commit"] == repo.branches["main"] and not {*found["removes"]} & {*head(hub)}
    assert {"LICENSE", "onnx/model.safetensors"} <= {*head(hub)}


def test_a_card_that_is_there_is_sent_as_it_is(hub: Hub, model: Path) -> None:
    (model / "README.md").write_text("---\nlicense: mit\n---\nmine\n")
    (model / ".env").write_text(TOKEN)
    stillroom.push(model, "org/name")
    assert head(hub)["README.md"].startswith(b"---\nlicense: mit") and ".env" not in head(hub)


def _outside(model: Path) -> None:
    (model.parent / "secret.txt").write_text("secret")
    (model / "notes.txt").symlink_to(model.parent / "secret.txt")


def _no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def _damaged(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"not safetensors")


def _begun(model: Path) -> None:
    """The folder of a run that has no student yet."""
    for path in model.iterdir():
        path.unlink()
    (model / "events.jsonl").write_text("")


def _unfinished(model: Path) -> None:
    shutil.copytree(model, model / "student")
    (model / "model.safetensors").unlink()
    (model / "config.json").write_text('{"config": {"teacher": {"model": "org/big"}}}')
    (model / "events.jsonl").write_text("")


@pytest.mark.parametrize(
    ("change", "words", "code"),
    [
        (_outside, (), 2),
        (_no_weights, (), 20),
        (_damaged, (), 20),
        (_begun, (), 20),
        (_unfinished, (), 2),
        (None, ("--gguf", "missing.gguf"), 2),
        (None, ("--gguf", __file__), 2),
        (None, ("--to", "name"), 2),
    ],
)
def test_what_must_not_go_is_refused_before_the_hub_is_asked(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str], change: Any, words: tuple[str, ...], code: int
) -> None:
    if change is not None:
        change(model)
    ended, _out, err = command(capsys, "push", str(model), *TO, *words)
    assert ended == code and err and not hub.requests
    assert command(capsys, "push", str(model / "typo"), *TO)[0] == 2


def test_anyway_sends_the_student_of_an_unfinished_run(hub: Hub, model: Path) -> None:
    _unfinished(model)
    stillroom.push(model, "org/name", anyway=True)
    assert "model.safetensors" in head(hub) and "not finished" in head(hub)["README.md"].decode()


def test_private_is_not_promised_of_a_repository_that_is_public(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stillroom.push(model, "org/name")
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    before = hub.repos["org/name"].titles[:]
    assert command(capsys, "push", str(model), *TO, "--private")[0] == 2
    assert hub.repos["org/name"].titles == before


@pytest.mark.parametrize(
    ("part", "fault", "code"),
    [
        ("whoami", (401, f"bad token {TOKEN}"), 2),
        ("/repos/create", (403, f"not yours {TOKEN}"), 24),
        ("/commit/", (403, f"read only {TOKEN}"), 24),
        ("/commit/", (409, "conflict"), 24),
        ("/large/", "drop", 24),
        ("/validate-yaml", (400, f"bad {TOKEN}"), 24),
    ],
)
def test_a_refusal_ends_with_its_code_and_never_shows_the_token(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str], part: str, fault: Any, code: int
) -> None:
    hub.fault = lambda _method, path: fault if part in path else None
    ended, out, err = command(capsys, "push", str(model), *TO, "--json")
    assert ended == code and TOKEN not in out + err
    assert json.loads(out)["exit_code"] == code
    hub.fault = lambda _method, _path: None
    stillroom.push(model, "org/name")
    assert "model.safetensors" in head(hub), "the same command again sends it"
