"""Laws of the token store: it changes only where tokens come from; no entry is shared, torn or trusted blindly."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from stillroom.config.schema import DataConfig
from stillroom.data import Corpus, Loader, Rows, open_data
from stillroom.data.records import Tally
from stillroom.data.store import store as store_module
from stillroom.data.store.keys import tokenizer_digest
from stillroom.data.store.making import Here, Job, Workers
from stillroom.errors import ConfigError, DataError

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"


def write_records(path: Path, count: int, seed: int = 0, *, bad: int = 0) -> None:
    rng = random.Random(seed)
    lines = []
    for number, text in enumerate(tiny.sentences(count, seed)):
        value = {"text": text} if rng.random() < 0.5 else {"prompt": text[:20], "completion": f" {text} {number}"}
        lines.append(json.dumps(value))
    lines += ['{"text": 3}', "{broken"][:bad]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def same_rows(left: Rows, right: Rows) -> bool:
    if len(left) != len(right) or left.groups != right.groups:
        return False
    return all(
        left.sample_id(row) == right.sample_id(row)
        and (left.row(row) == right.row(row)).all()
        and left.question(row) == right.question(row)
        for row in range(len(left))
    )


def same_corpus(left: Corpus, right: Corpus) -> bool:
    is_same = left.counters == right.counters
    return is_same and same_rows(left.train, right.train) and same_rows(left.evaluation, right.evaluation)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PART_RECORDS", 17)


def entry_files(cache: Path, pattern: str) -> list[Path]:
    return sorted(cache.glob(f"*/*/{pattern}"))


@given(
    counts=st.lists(st.integers(5, 60), min_size=1, max_size=3),
    packing=st.sampled_from(["auto", "blocks", "rows", "packed"]),
    train_share=st.sampled_from([1.0, 0.5]),
    per_part=st.sampled_from([1, 7, 50_000]),
)
@settings(deadline=None, max_examples=25)
def test_stored_tokens_are_those_of_memory(
    tmp_path_factory: Any, counts: list[int], packing: Any, train_share: float, per_part: int
) -> None:
    folder = tmp_path_factory.mktemp("data")
    for number, count in enumerate(counts):
        write_records(folder / f"{number}.jsonl", count, number, bad=2 if number else 0)
    spec = str(folder / "*.jsonl")
    over: dict[str, Any] = {"packing": packing, "train_share": train_share, "max_length": 24, "max_bad_share": 0.9}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "PART_RECORDS", per_part)
        in_memory = open_data(DataConfig(train=spec, cache="off", **over), tiny.tokenizer())
        for _ in range(2):  # made, then found
            stored = open_data(DataConfig(train=spec, cache=str(folder / "cache"), **over), tiny.tokenizer())
            assert same_corpus(in_memory, stored)
    named = [note for note in in_memory.notes if "cannot be used" not in note]  # names bad records in another order
    assert {*named} <= {*stored.notes} and len(stored.notes) >= len(in_memory.notes)


@given(
    batch_size=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    num_ranks=st.integers(1, 3),
    resume=st.integers(0, 4),
    groups=st.booleans(),
    packing=st.sampled_from(["blocks", "rows", "packed"]),
)
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_batch_size_resume_point_and_process_count_give_each_row_once(
    tmp_path: Path, batch_size: int, accumulation: int, num_ranks: int, resume: int, groups: bool, packing: Any
) -> None:
    path = tmp_path / "d.jsonl"
    if not path.exists():
        write_records(path, 80)
    config = DataConfig(train=str(path), cache=str(tmp_path / "cache"), packing=packing, max_length=32)
    rows = open_data(config, tiny.tokenizer()).train

    def loader(rank: int) -> Loader:
        return Loader(
            rows,
            batch_size=batch_size,
            accumulation=accumulation,
            seed=3,
            rank=rank,
            num_ranks=num_ranks,
            groups_lengths=groups,
        )

    loaders = [loader(rank) for rank in range(num_ranks)]
    seen: list[str] = []
    for window in range(loaders[0].num_windows):
        if window == resume:
            loaders = [loader(rank) for rank in range(num_ranks)]  # as after a kill: only the index is known
        for one in loaders:
            for batch in one.window(window):
                seen += batch.sample_ids if batch.num_scored else []
    assert sorted(seen) == sorted(rows.sample_id(row) for row in range(len(rows)))


def test_a_second_start_tokenizes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_records(tmp_path / "d.jsonl", 60)
    config = DataConfig(train=str(tmp_path / "d.jsonl"), cache=str(tmp_path / "cache"))
    first = open_data(config, tiny.tokenizer())
    monkeypatch.setattr(store_module.Here, "make", lambda *_: pytest.fail("it tokenizes"))
    assert same_corpus(first, open_data(config, tiny.tokenizer()))


def test_a_changed_file_alone_is_tokenized_again(tmp_path: Path) -> None:
    for name in "abc":
        write_records(tmp_path / f"{name}.jsonl", 30, ord(name))
    config = DataConfig(train=str(tmp_path / "*.jsonl"), cache=str(tmp_path / "cache"))
    told: list[str] = []
    open_data(config, tiny.tokenizer(), tell=told.append)
    assert [line.split(":")[0] for line in told] == ["tokenized a.jsonl", "tokenized b.jsonl", "tokenized c.jsonl"]
    write_records(tmp_path / "b.jsonl", 31, 7)
    told.clear()
    open_data(config, tiny.tokenizer(), tell=told.append)
    assert [line.split(":")[0] for line in told] == ["tokenized b.jsonl"] and "tokens/s" in told[0]


def other_tokenizers() -> dict[str, Any]:
    with_template = tiny.tokenizer()
    with_template.chat_template = CHAT
    other_template = tiny.tokenizer()
    other_template.chat_template = CHAT + " "
    added = tiny.tokenizer()
    added.add_tokens(["still room"])
    return {
        "smaller": tiny.tokenizer(300),
        "with a template": with_template,
        "with another template": other_template,
        "with a token more": added,
        "the same": tiny.tokenizer(),
    }


def test_a_tokenizer_is_the_same_wherever_it_was_read_from(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.save_pretrained(tmp_path / "saved")
    read = AutoTokenizer.from_pretrained(tmp_path / "saved", local_files_only=True)
    assert tokenizer_digest(read) == tokenizer_digest(tokenizer)


def test_two_tokenizers_templates_or_settings_never_share_an_entry(tmp_path: Path) -> None:
    write_records(tmp_path / "d.jsonl", 30)
    config = DataConfig(train=str(tmp_path / "d.jsonl"), cache=str(tmp_path / "cache"))
    keys: dict[str, set[str]] = {}
    before: set[str] = set()
    for name, tokenizer in other_tokenizers().items():
        open_data(config, tokenizer)
        keys[name] = {path.parent.name for path in entry_files(tmp_path / "cache", "manifest.json")} - before
        before |= keys[name]
    open_data(config.model_copy(update={"train_on_prompt": True}), tiny.tokenizer())
    open_data(config.model_copy(update={"bos": False}), tiny.tokenizer())
    assert [len(found) for found in keys.values()] == [1, 1, 1, 1, 1]
    assert len(entry_files(tmp_path / "cache", "manifest.json")) == 7
    open_data(config.model_copy(update={"max_length": 99, "packing": "rows"}), tiny.tokenizer())
    assert len(entry_files(tmp_path / "cache", "manifest.json")) == 7, "what acts after tokenizing needs no new entry"


@given(data=st.data())
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_byte_is_found_named_and_mended(tmp_path: Path, small_parts: None, data: st.DataObject) -> None:
    path = tmp_path / "d.jsonl"
    if not path.exists():
        write_records(path, 40)
    config = DataConfig(train=str(path), cache=str(tmp_path / "cache"))
    whole = open_data(config.model_copy(update={"cache": "off"}), tiny.tokenizer())
    open_data(config, tiny.tokenizer())
    victim = data.draw(
        st.sampled_from(entry_files(tmp_path / "cache", "part-*") + entry_files(tmp_path / "cache", "m*"))
    )
    contents = bytearray(victim.read_bytes())
    place = data.draw(st.integers(0, len(contents) - 1))
    contents[place] ^= data.draw(st.integers(1, 255))
    victim.write_bytes(contents)
    told: list[str] = []
    mended = open_data(config, tiny.tokenizer(), tell=told.append)
    assert str(victim) in told[0] and "damaged" in told[0]
    assert same_corpus(whole, mended)


def test_a_part_that_is_missing_or_cut_off_is_made_again(tmp_path: Path, small_parts: None) -> None:
    write_records(tmp_path / "d.jsonl", 60)
    config = DataConfig(train=str(tmp_path / "d.jsonl"), cache=str(tmp_path / "cache"))
    whole = open_data(config.model_copy(update={"cache": "off"}), tiny.tokenizer())
    open_data(config, tiny.tokenizer())
    first, second, *_ = entry_files(tmp_path / "cache", "part-*")
    first.unlink()
    second.write_bytes(second.read_bytes()[:50])
    told: list[str] = []
    assert same_corpus(whole, open_data(config, tiny.tokenizer(), tell=told.append))
    assert "it is missing" in told[0] and str(second) in told[1]


def test_a_build_that_was_killed_goes_on_with_what_is_there(tmp_path: Path, small_parts: None) -> None:
    write_records(tmp_path / "d.jsonl", 400)
    cache = tmp_path / "cache"
    script = textwrap.dedent(f"""
        import sys, time, tiny
        from stillroom.config.schema import DataConfig
        from stillroom.data import open_data
        from stillroom.data.store import store, part
        store.PART_RECORDS = 17
        write = store.Here.make
        def slowly(self, job):
            time.sleep(0.05)
            return write(self, job)
        store.Here.make = slowly
        print("begun", flush=True)
        open_data(DataConfig(train={str(tmp_path / "d.jsonl")!r}, cache={str(cache)!r}), tiny.tokenizer())
    """)
    paths = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths})
    while len(entry_files(cache, "part-*")) < 4 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    num_there = len(entry_files(cache, "part-*"))
    assert not entry_files(cache, "manifest.json") and 4 <= num_there < 24
    entry_files(cache, "part-*")[0].parent.joinpath(".tmp-part-000020.tok-1").write_bytes(b"half")
    told: list[str] = []
    config = DataConfig(train=str(tmp_path / "d.jsonl"), cache=str(cache))
    stored = open_data(config, tiny.tokenizer(), tell=told.append)
    assert f"{num_there} parts were there from an earlier start" in told[-1]
    assert same_corpus(stored, open_data(config.model_copy(update={"cache": "off"}), tiny.tokenizer()))
    assert not entry_files(cache, ".tmp-*")


def test_several_processes_give_the_same_parts(
    tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_records(tmp_path / "d.jsonl", 100)
    config = DataConfig(train=str(tmp_path / "d.jsonl"), cache=str(tmp_path / "one"))
    alone = open_data(config, tiny.tokenizer())
    monkeypatch.setattr(store_module, "WORTH_PROCESSES", 0)
    monkeypatch.setattr("stillroom.data.store.opening.num_usable_cores", lambda: 2)
    told: list[str] = []
    shared = open_data(config.model_copy(update={"cache": str(tmp_path / "two")}), tiny.tokenizer(), tell=told.append)
    assert "with 2 processes" in told[-1] and same_corpus(alone, shared)
    parts = [[path.read_bytes() for path in entry_files(tmp_path / name, "part-*")] for name in ("one", "two")]
    assert parts[0] == parts[1]


def test_a_tokenizer_that_is_another_one_elsewhere_is_used_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_records(tmp_path / "d.jsonl", 30)
    here = Here(DataConfig(), tiny.tokenizer())
    with pytest.raises(DataError, match="is another one after it was saved"):
        Workers(here, "another digest", 1)
    monkeypatch.setattr(store_module, "WORTH_PROCESSES", 0)
    monkeypatch.setattr("stillroom.data.store.opening.num_usable_cores", lambda: 2)

    def refused(*_: Any) -> None:
        raise DataError("the tokenizer does not travel")

    monkeypatch.setattr(store_module, "Workers", refused)
    told: list[str] = []
    open_data(
        DataConfig(train=str(tmp_path / "d.jsonl"), cache=str(tmp_path / "cache")), tiny.tokenizer(), tell=told.append
    )
    assert "does not travel: one process tokenizes" in told[0] and "with one process" in told[1]


def test_an_error_in_another_process_arrives_whole(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    digest = tokenizer_digest(tokenizer)
    assert digest is not None
    workers = Workers(Here(DataConfig(bos=True), tokenizer), digest, 1)
    job = Job(tmp_path / "part", [("d:1", {"text": "the still room"})], Tally())
    try:
        with pytest.raises(ConfigError, match="has no begin-of-text token") as caught:
            workers.make(job)
        with pytest.raises(ConfigError):
            workers.make(job)  # the process goes on
    finally:
        workers.close()
    assert caught.value.where == "data.bos" and caught.value.advice


def test_a_lone_text_is_cut_up_the_same_way(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(tiny.sentences(200, 1)), encoding="utf-8")
    in_memory = open_data(DataConfig(train=str(path), cache="off"), tiny.tokenizer())
    stored = open_data(DataConfig(train=str(path), cache=str(tmp_path / "cache")), tiny.tokenizer())
    assert same_corpus(in_memory, stored) and len(in_memory.evaluation)
    assert any("is cut between paragraphs" in note for note in stored.notes)


def test_a_folder_that_cannot_be_written_is_named_with_advice(tmp_path: Path) -> None:
    write_records(tmp_path / "d.jsonl", 30)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DataError, match=r"token store in .* cannot be used") as caught:
        open_data(DataConfig(train=str(tmp_path / "d.jsonl"), cache=str(tmp_path / "file")), tiny.tokenizer())
    assert caught.value.exit_code == 2 and "data.cache=off" in str(caught.value)


def test_small_files_leave_no_store_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_records(tmp_path / "d.jsonl", 30)
    open_data(DataConfig(train=str(tmp_path / "d.jsonl")), tiny.tokenizer())
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr("stillroom.data.store.opening.WORTH_STORING", 100)
    open_data(DataConfig(train=str(tmp_path / "d.jsonl")), tiny.tokenizer())
    assert entry_files(tmp_path / "cache" / "stillroom" / "tokens", "manifest.json")


def test_an_id_or_size_beyond_the_small_dtype_is_kept(tmp_path: Path) -> None:
    from stillroom.data.encode import TokenizedRecord
    from stillroom.data.records import Record, Tally
    from stillroom.data.store.part import Part, check_part, open_part, write_part

    ids, sizes = np.array([1, 70_000], np.int32), np.array([3, 300], np.int32)
    record = Record("d:1", (("x", True),), "key")
    written = Part.of([TokenizedRecord(record, ids, sizes, np.array([False, True]))], Tally())
    write_part(tmp_path / "p", written)
    check_part(tmp_path / "p")
    read = open_part(tmp_path / "p")
    assert read.ids.tolist() == [1, 70_000] and read.num_bytes.tolist() == [3, 300] and read.names[0] == "d:1"
