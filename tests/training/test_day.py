"""The day that a chat template prints belongs to the run: rows of a resumed run and of its cache have it."""

from __future__ import annotations

import json
import shutil
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
import tiny

from stillroom.config import load_config
from stillroom.core.errors import DataError, Interrupted
from stillroom.data import chat
from stillroom.training.distill import distill, resume
from stillroom.training.loop import Stop
from stillroom.training.run_folder import read_config
from stillroom.training.write_cache import make_cache

TEMPLATE = (
    "{{ strftime_now('%d %b %Y %H:%M') }}\n{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def dated_world(world: Path, tmp_path: Path) -> Path:
    """Models whose template prints the time, and chats."""
    home = Path(shutil.copytree(world, tmp_path / "world"))
    words = tiny.tokenizer()
    words.chat_template = TEMPLATE
    for name in ("teacher", "student"):
        words.save_pretrained(home / name)
    lines = tiny.sentences(80, 0)
    chats = [[{"role": "user", "content": line[:9]}, {"role": "assistant", "content": line}] for line in lines]
    (home / "train.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
    return home


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """From the call on it is this day."""

    def be(day: str) -> None:
        class Day(date):
            @classmethod
            def today(cls) -> Day:
                return cls.fromisoformat(day)

        for module in ("stillroom.data.chat", "stillroom.training.distill"):
            monkeypatch.setattr(f"{module}.date", Day)

    return be


def config(home: Path, **over: Any) -> Any:
    return load_config(
        overrides=tiny.settings(home, eval__samples=0, **{"train__max_steps": 4, "data__max_length": 96, **over})
    )


def stopped(chosen: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        wanted = iter([False, True])
        patch.setattr(Stop, "is_wanted", lambda _self: next(wanted, False))
        with pytest.raises(Interrupted):
            distill(chosen, folder, device="cpu")


@pytest.mark.parametrize("over", [{}, {"teacher__cache": "auto"}], ids=["live", "cached"])
def test_a_run_goes_on_with_its_own_day(
    dated_world: Path, tmp_path: Path, on: Any, monkeypatch: pytest.MonkeyPatch, over: dict[str, Any]
) -> None:
    chosen = config(dated_world, **over)
    on("2026-03-01")
    stopped(chosen, tmp_path / "run", monkeypatch)
    assert read_config(tmp_path / "run").data.day == "2026-03-01"
    on("2026-03-02")
    stopped(chosen, tmp_path / "run", monkeypatch)  # the same command
    assert resume(tmp_path / "run", device="cpu").summary["status"] == "done"
    assert len(list(tmp_path.glob("teacher-cache-*"))) == len(over)


def test_a_run_whose_template_prints_no_day_keeps_none(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(config(world), tmp_path / "run", monkeypatch)
    assert read_config(tmp_path / "run").data.day == ""


def test_a_run_that_kept_no_day_has_that_of_its_log(
    dated_world: Path, tmp_path: Path, on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As versions before wrote them: the hash of the data would tell another day."""
    stopped(config(dated_world), tmp_path / "run", monkeypatch)
    path = tmp_path / "run" / "config.json"
    description = json.loads(path.read_text())
    assert description["config"]["data"].pop("day") == datetime.now().date().isoformat()
    path.write_text(json.dumps(description))
    on("2026-03-01")
    assert resume(tmp_path / "run", device="cpu").summary["status"] == "done"


def test_a_cache_of_another_day_is_refused_by_name_and_can_be_asked_for(
    dated_world: Path, tmp_path: Path, on: Any
) -> None:
    chosen, cache = config(dated_world), tmp_path / "cache"
    on("2026-03-01")
    rows = make_cache(chosen, cache, device="cpu")["rows"]
    on("2026-03-02")
    with pytest.raises(DataError) as refused:
        distill(config(dated_world, teacher__cache=str(cache)), tmp_path / "run", device="cpu")
    assert "2026-03-01" in refused.value.what and "data.day=2026-03-01" in refused.value.advice[0]
    assert make_cache(chosen, cache, device="cpu")["rows"] == rows, "a cache that is continued keeps its day"
    of_that_day = config(dated_world, teacher__cache=str(cache), data__day="2026-03-01", train__max_steps=2)
    assert distill(of_that_day, tmp_path / "run", device="cpu").summary["status"] == "done"


def test_the_token_store_keeps_days_apart(dated_world: Path, tmp_path: Path) -> None:
    from stillroom.data import open_data

    words = tiny.tokenizer()
    words.chat_template = TEMPLATE

    def digest(day: str, cache: str) -> str:
        data = config(dated_world, data__cache=cache, data__day=day).data
        return open_data(data, words).train.digest()

    store = str(tmp_path / "store")
    first, second = (digest(day, store) for day in ("2026-03-01", "2026-03-02"))
    assert first != second
    assert digest("2026-03-01", store) == first == digest("2026-03-01", "off")


def test_a_day_is_printed_alike_at_every_hour(dated_world: Path) -> None:
    words = tiny.tokenizer()
    words.chat_template = TEMPLATE
    said = chat.Chat((chat.Turn("user", "a"), chat.Turn("assistant", "b")))
    printed = chat.TemplateChat(words, chat.Tally(), "2026-03-01")(said)
    assert "".join(text for text, _ in printed[0]).startswith("01 Mar 2026 00:00\n")
