"""Laws of the token store: it changes only where tokens come from; no entry is shared, torn or trusted blindly."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
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
from stillroom.core.errors import DataError
from stillroom.core.files import sum_of_file
from stillroom.core.types import Detail
from stillroom.data import Corpus, Loader, Rows, open_data
from stillroom.data import store as store_module
from stillroom.data.store import MANIFEST, DataFile, TokenStore, tokenizer_digest

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
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "BATCH_RECORDS", 17)


def entry_files(cache: Path, pattern: str) -> list[Path]:
    return sorted(cache.glob(f"*/*/{pattern}"))


@given(
    counts=st.lists(st.integers(5, 60), min_size=1, max_size=3),
    packing=st.sampled_from(["auto", "blocks", "rows", "packed"]),
    train_share=st.sampled_from([1.0, 0.5]),
    per_batch=st.sampled_from([1, 7, 50_000]),
)
@settings(deadline=None, max_examples=25)
def test_stored_tokens_are_those_of_memory(
    tmp_path_factory: Any, counts: list[int], packing: Any, train_share: float, per_batch: int
) -> None:
    folder = tmp_path_factory.mktemp("data")
    for number, count in enumerate(counts):
        write_records(folder / f"{number}.jsonl", count, number, bad=2 if number else 0)
    spec = str(folder / "*.jsonl")
    over: dict[str, Any] = {"packing": packing, "train_share": train_share, "max_length": 24, "max_bad_share": 0.9}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "BATCH_RECORDS", per_batch)
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
    monkeypatch.setattr(TokenStore, "_tokenized", lambda *_: pytest.fail("it tokenizes"))
    again = open_data(config, tiny.tokenizer())
    assert same_corpus(first, again)
    details = [{note for note in corpus.notes if isinstance(note, Detail)} for corpus in (first, again)]
    assert details[1] and {note for note in details[0] - details[1] if not note.startswith("tokenized")} == set()


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
def test_a_flipped_byte_is_found_named_and_mended(tmp_path: Path, small_batches: None, data: st.DataObject) -> None:
    path = tmp_path / "d.jsonl"
    if not path.exists():
        write_records(path, 40)
    config = DataConfig(train=str(path), cache=str(tmp_path / "cache"))
    whole = open_data(config.model_copy(update={"cache": "off"}), tiny.tokenizer())
    open_data(config, tiny.tokenizer())
    files = [*entry_files(tmp_path / "cache", "*.bin"), *entry_files(tmp_path / "cache", MANIFEST)]
    victim = data.draw(st.sampled_from(files))
    contents = bytearray(victim.read_bytes())
    place = data.draw(st.integers(0, len(contents) - 1))
    contents[place] ^= data.draw(st.integers(1, 255))
    victim.write_bytes(contents)
    told: list[str] = []
    mended = open_data(config, tiny.tokenizer(), tell=told.append)
    assert str(victim) in told[0]
    assert same_corpus(whole, mended)


def test_an_array_that_is_missing_or_cut_off_is_made_again(tmp_path: Path, small_batches: None) -> None:
    write_records(tmp_path / "d.jsonl", 60)
    config = DataConfig(train=str(tmp_path / "d.jsonl"), cache=str(tmp_path / "cache"))
    whole = open_data(config.model_copy(update={"cache": "off"}), tiny.tokenizer())
    open_data(config, tiny.tokenizer())
    for harm in (lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:50])):
        for name in ("ids.bin", MANIFEST):
            (victim,) = entry_files(tmp_path / "cache", name)
            harm(victim)
            told: list[str] = []
            assert same_corpus(whole, open_data(config, tiny.tokenizer(), tell=told.append))
            assert told and entry_files(tmp_path / "cache", MANIFEST)


def in_background(script: str) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})


def test_a_killed_build_leaves_nothing_that_is_believed(tmp_path: Path, small_batches: None) -> None:
    """Another process waits for a build; when that is killed, the entry is built anew and its remains are removed."""
    write_records(tmp_path / "d.jsonl", 400)
    cache = tmp_path / "cache"
    process = in_background(f"""
        import time, tiny
        from stillroom.config.schema import DataConfig
        from stillroom.data import open_data, store
        store.BATCH_RECORDS = 17
        tokenized = store.TokenStore._tokenized
        def slowly(self, items, tally):
            time.sleep(0.5)
            return tokenized(self, items, tally)
        store.TokenStore._tokenized = slowly
        open_data(DataConfig(train={str(tmp_path / "d.jsonl")!r}, cache={str(cache)!r}), tiny.tokenizer())
    """)
    while not any(path.stat().st_size for path in cache.glob("*/.tmp-*/ids.bin")) and process.poll() is None:
        time.sleep(0.01)
    assert process.poll() is None and not entry_files(cache, MANIFEST)
    killing = threading.Timer(1.0, lambda: process.send_signal(signal.SIGKILL))
    killing.start()
    config = DataConfig(train=str(tmp_path / "d.jsonl"), cache=str(cache))
    stored = open_data(config, tiny.tokenizer())
    assert process.wait() == -signal.SIGKILL, "the build was not waited for"
    assert same_corpus(stored, open_data(config.model_copy(update={"cache": "off"}), tiny.tokenizer()))
    assert not [*cache.glob("*/.tmp-*")] and len(entry_files(cache, MANIFEST)) == 1


def test_two_processes_at_once_build_one_entry(tmp_path: Path) -> None:
    write_records(tmp_path / "d.jsonl", 100)
    cache, config = tmp_path / "cache", {"train": str(tmp_path / "d.jsonl"), "cache": str(tmp_path / "cache")}
    process = in_background(f"""
        import tiny
        from stillroom.config.schema import DataConfig
        from stillroom.data import open_data
        open_data(DataConfig(**{config!r}), tiny.tokenizer())
    """)
    stored = open_data(DataConfig(**config), tiny.tokenizer())  # type: ignore[arg-type]
    assert process.wait() == 0 and len(entry_files(cache, MANIFEST)) == 1
    assert same_corpus(stored, open_data(DataConfig(train=config["train"], cache="off"), tiny.tokenizer()))


def test_a_finished_entry_is_read_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_records(tmp_path / "d.jsonl", 30)
    config = DataConfig(train=str(tmp_path / "d.jsonl"), cache=str(tmp_path / "cache"))
    first = open_data(config, tiny.tokenizer())

    def read_only(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EROFS, "Read-only file system")

    for name in ("hold", "replaced_folder"):
        monkeypatch.setattr(store_module, name, read_only)
    assert same_corpus(first, open_data(config, tiny.tokenizer()))
    entry_files(tmp_path / "cache", "ids.bin")[0].unlink()
    with pytest.raises(DataError) as caught:
        open_data(config, tiny.tokenizer())
    assert caught.value.exit_code == 2 and caught.value.where == "data.cache"


def test_a_full_disk_is_an_error_of_the_setting_and_leaves_no_entry(
    tmp_path: Path, small_batches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_records(tmp_path / "d.jsonl", 60)
    config = DataConfig(train=str(tmp_path / "d.jsonl"), cache=str(tmp_path / "cache"))
    put, written = store_module._Column._put, list[int]()

    def full(column: Any, values: Any) -> None:
        written.append(len(values))
        if len(written) > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        put(column, values)

    with monkeypatch.context() as patch:
        patch.setattr(store_module._Column, "_put", full)
        with pytest.raises(DataError) as caught:
            open_data(config, tiny.tokenizer())
    assert caught.value.exit_code == 2 and caught.value.where == "data.cache"
    assert not [*(tmp_path / "cache").glob("*/*/*")]
    assert len(open_data(config, tiny.tokenizer()).train)


def test_memory_is_bounded_by_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of a file is held as objects than a batch, in records and in characters."""
    write_records(tmp_path / "d.jsonl", 200)
    tokenized, sizes = TokenStore._tokenized, list[int]()

    def counted(store: TokenStore, items: Any, tally: Any) -> Any:
        sizes.append(len(items))
        return tokenized(store, items, tally)

    monkeypatch.setattr(TokenStore, "_tokenized", counted)
    monkeypatch.setattr(store_module, "BATCH_RECORDS", 17)
    open_data(DataConfig(train=str(tmp_path / "d.jsonl"), cache=str(tmp_path / "one")), tiny.tokenizer())
    assert sum(sizes) == 200 and max(sizes) == 17
    monkeypatch.setattr(store_module, "BATCH_CHARACTERS", 1)
    sizes.clear()
    open_data(DataConfig(train=str(tmp_path / "d.jsonl"), cache=str(tmp_path / "two")), tiny.tokenizer())
    assert sum(sizes) == 200 and max(sizes) == 1


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
    with pytest.raises(DataError) as caught:
        open_data(DataConfig(train=str(tmp_path / "d.jsonl"), cache=str(tmp_path / "file")), tiny.tokenizer())
    assert caught.value.exit_code == 2 and caught.value.where == "data.cache" and caught.value.advice


def test_small_files_leave_no_store_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_records(tmp_path / "d.jsonl", 30)
    open_data(DataConfig(train=str(tmp_path / "d.jsonl")), tiny.tokenizer())
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr("stillroom.data.store.WORTH_STORING", 100)
    open_data(DataConfig(train=str(tmp_path / "d.jsonl")), tiny.tokenizer())
    assert entry_files(tmp_path / "cache" / "stillroom" / "tokens", "manifest.json")


def test_an_id_or_size_beyond_the_small_dtype_is_kept(tmp_path: Path) -> None:
    """Also one that comes after others were written in the small dtype."""
    column = store_module._Column(tmp_path / "ids.bin", "<u2")
    expected = [*range(3000), 70_000, 7]
    with column:
        for values in (expected[:3000], expected[3000:]):
            column.append(np.array(values, np.int32))
    written = column.to_dict()
    assert store_module._mapped(tmp_path / "ids.bin", written["dtype"]).tolist() == expected
    assert written["sha256"] == sum_of_file(tmp_path / "ids.bin").sha256
    assert [path.name for path in tmp_path.iterdir()] == ["ids.bin"]


def test_a_file_without_records_has_an_entry_with_what_was_counted(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("{broken\n")
    told: list[str] = []
    digest = tokenizer_digest(tiny.tokenizer())
    assert digest is not None
    store = TokenStore(tmp_path / "cache", DataConfig(), tiny.tokenizer(), digest, told.append)

    def items(tally: Any) -> Any:
        tally.refuse("d.jsonl:1", "broken")
        yield from ()

    for _ in range(2):
        stored = store.open(DataFile(tmp_path / "d.jsonl", "d.jsonl", items))
        assert len(stored) == 0 and stored.tally.counters == {"bad_records": 1} and len(told) == 1
