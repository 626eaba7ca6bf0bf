"""Laws of what comes from others: names stay in their folder, addresses and code need the user's word."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cache_cases as cases
import pytest
import tiny
from faulty_store import FaultyStore, faulty_store
from refusals import refused

import stillroom
from stillroom.cli.exit import fault_of
from stillroom.config import load_config
from stillroom.config.schema import OBJECTIVES, StudentConfig, TeacherConfig
from stillroom.core import remote
from stillroom.core.errors import BrokenAtStart, ConfigError, DataError, OutsideName
from stillroom.core.files import inside, is_hidden, replaced_folder
from stillroom.core.remote import Commit, RemoteFile, Store, here, read_commit
from stillroom.models import files as sources
from stillroom.models.files import Source, fetch_base, runs_code
from stillroom.models.load import load_tokenizer
from stillroom.teachers.cache.in_store import Origin, folder_of
from stillroom.teachers.cache.reader import Cache
from stillroom.teachers.cache.writer import open_store, write_missing
from stillroom.training.distill import distill, resume
from stillroom.training.run_folder import Trust, opened, read_config

SOURCE = Path(stillroom.__file__).parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"
UP = ("../evil", "a/../../evil", "..", ".", "a/./b", "/etc/evil", "a//b", "", "C:/evil", "c:evil", "a\\..\\evil",
      "evil\0", ".hidden", "a/.hidden/b", "evil\n")  # fmt: skip
SETTINGS = {"train__max_steps": 2, "train__eval_steps": 2, "train__save_steps": 1, "eval__samples": 0}


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PAUSE", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def faulty() -> Iterator[type[FaultyStore]]:
    with faulty_store() as store:
        yield store


# -- names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UP)
def test_a_name_that_leads_out_of_its_folder_or_is_hidden_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutsideName):
        inside(tmp_path, name)


@pytest.mark.parametrize("name", ["a", "a/b.c", "a..b", "name with spaces", "xy:z/a", "checkpoints/step-000001/a.json"])
def test_a_plain_name_is_joined(tmp_path: Path, name: str) -> None:
    assert inside(tmp_path, name) == tmp_path / name


def test_a_listing_leaves_hidden_names_out_and_refuses_names_that_lead_up() -> None:
    assert is_hidden(".git/config") and is_hidden("a/.b") and is_hidden("..b")
    assert not is_hidden("a/../b") and not is_hidden("a/./b") and not is_hidden("a.b")


# Modules that read names from manifests, indexes, stores and listings. In them a path is joined with a constant, with
# a name of ours that is listed here, or by `inside`.
OUTSIDE = {
    "training/checkpoint.py": {"f'{TEMPORARY}step-{step:06d}-{owner}'"},  # a number and a word of ours
    "parallel/shards.py": set(),
    # A word of ours (the kind of copies), numbers, and names that were listed in the run's own folder.
    "core/remote.py": {"key_of(url)", "name", "path.relative_to(self.folder)"},
    # A checkpoint's folder by its number, constants, and a path of the run's own record that is normalised first.
    "training/run_folder.py": {"key_of(url)", "place", "name", "_PLACES[role][1]", "str(forms['relative'])"},
    "teachers/cache/in_store.py": {"path.name", "name", "key_of(url)"},  # notes of a joined path; constants
    "teachers/cache/manifest.py": {"file"},  # shards that `_check_index` passed
    "teachers/cache/reader.py": {"positions"},  # a number
    # Shards that `_check_index` passed, names that callers write out, a folder that was listed (for an advice).
    "models/files.py": {"file", "name", "near"},
    "teachers/placement.py": {"file", "tensor.file"},  # the same shards
}


def _joined(path: Path) -> set[str]:
    """What a module joins to paths, as source; constants left out."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and not _is_number(node):
            found.add(node.right)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "joinpath":
            found.update(node.args)
    return {ast.unparse(one) for one in found if not _is_constant(one)}


def _is_number(node: ast.BinOp) -> bool:
    return any(isinstance(one, ast.Constant) and isinstance(one.value, int | float) for one in (node.left, node.right))


def _is_constant(node: ast.expr) -> bool:
    """Text, a name in capitals, or text built of numbers and such."""
    if isinstance(node, ast.JoinedStr):
        return all(isinstance(one, ast.Constant) or _is_number_text(one) for one in node.values)
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id.strip("_").isupper())


def _is_number_text(value: ast.expr) -> bool:
    return isinstance(value, ast.FormattedValue) and (
        value.format_spec is not None or (isinstance(value.value, ast.Name) and value.value.id == "group")
    )


@pytest.mark.parametrize("module", OUTSIDE)
def test_names_from_outside_are_joined_to_paths_in_one_place(module: str) -> None:
    left = _joined(SOURCE / module) - OUTSIDE[module]
    assert not left, f"use files.inside: {left}"


@pytest.mark.parametrize(
    "module",
    ["training/checkpoint.py", "core/files.py", "core/remote.py", "training/run_folder.py",
     "teachers/cache/in_store.py", "models/files.py"],
)  # fmt: skip
def test_every_reader_of_outside_names_uses_the_one_join(module: str) -> None:
    tree = ast.parse((SOURCE / module).read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "inside"]
    assert calls


# -- stores ----------------------------------------------------------------------------------------------


def config(world: Path, **over: Any) -> Any:
    return load_config(overrides=tiny.settings(world, **{**SETTINGS, **over}))


@pytest.fixture(scope="module")
def stored(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run as a store holds it."""
    place = tmp_path_factory.mktemp("stored")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "home"))
        distill(config(world), f"file://{place}/store/run", device="cpu")
    return place / "store" / "run"


@pytest.fixture
def store(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "store" / "run"))


def _everything(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


@pytest.mark.parametrize("name", ["../planted", "student/../../planted", ".planted", "/planted"])
def test_a_store_s_commit_that_names_files_outside_writes_nothing(store: Path, tmp_path: Path, name: str) -> None:
    (store.parent / "planted").write_text("evil")
    (store / ".planted").write_text("evil")
    commit = store / remote.COMMIT
    table = json.loads(commit.read_text())
    table["files"][name] = {"bytes": 4, "sha256": "0"}
    commit.write_text(json.dumps(table))
    with pytest.raises(DataError):
        resume(f"file://{store}", device="cpu")
    if name.startswith("student/"):  # a reader takes what is listed, and compares the student with the commit
        with pytest.raises(OutsideName):
            here(f"file://{store}")
    assert not [path for path in _everything(tmp_path / "home") if path.endswith("planted")]


def _listing(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let a store list names that only an object store can have."""
    listed = Store.entries

    def entries(self: Store, under: str = "") -> dict[str, RemoteFile]:
        added = {name: RemoteFile(name, name, 4, "mark") for name in names if name.startswith(under)}
        return {**listed(self, under), **added}

    monkeypatch.setattr(Store, "entries", entries)
    monkeypatch.setattr(Store, "get", lambda _self, _name, into: into.write_text("evil"))
    monkeypatch.setattr(Store, "begin", lambda _self, _name, _num_bytes: b"evil")


def test_a_run_in_a_store_whose_keys_lead_up_is_refused(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _listing(monkeypatch, "../../../evil.txt")
    with pytest.raises(OutsideName):
        resume(f"file://{store}", device="cpu")
    assert not list(tmp_path.rglob("evil.txt"))


@pytest.mark.parametrize("key", ["shards/../../../evil.shard", "shards/../.lock/evil.shard", "shards//evil.shard"])
def test_a_cache_in_a_store_whose_keys_lead_up_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    cases.write(tmp_path / "store" / "cache", cases.rows_of([5, 6, 7]))
    _listing(monkeypatch, key)
    with pytest.raises(OutsideName):
        folder_of(f"file://{tmp_path}/store/cache")
    assert not list(tmp_path.rglob("evil*"))


def test_a_listing_of_data_whose_keys_lead_up_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text("{}\n")
    monkeypatch.setattr(Store, "listed", lambda _self: [RemoteFile("x", "../../evil.jsonl", 3, "mark")])
    monkeypatch.setattr(Store, "copy", lambda _self, _file, into: into.write_text("evil"))
    with pytest.raises(OutsideName):
        remote.local_copy(f"file://{tmp_path}/data")
    assert not list(tmp_path.rglob("evil*"))


def test_a_folder_does_not_say_where_its_shards_come_from(tmp_path: Path) -> None:
    """A hidden file of a given cache folder named an address, and every shard was sent there."""
    folder = tmp_path / "cache"
    rows = cases.rows_of([5, 6, 7])
    cases.write(folder, cases.rows_of([4]))
    (folder / ".origin").write_text(f"file://{tmp_path}/stranger")
    assert Origin.of(folder) is None and Cache(folder)._origin is None
    open_store(folder, cases.manifest())
    assert write_missing(folder, cases.needed(rows), cases.Matrices(batch_tokens=16))
    assert not (tmp_path / "stranger").exists()


# -- commits of a store ----------------------------------------------------------------------------------


def test_a_commit_on_a_disk_is_the_old_one_or_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in the middle of the write leaves the commit before it."""
    place = Store(f"file://{tmp_path}/store")
    place.write(remote.COMMIT, Commit(id="one", files={}).to_bytes())

    def killed(*_arguments: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        place.write(remote.COMMIT, Commit(id="two", files={}).to_bytes())
    monkeypatch.undo()
    found = read_commit(place)
    assert found is not None and found.id == "one"


@pytest.mark.parametrize(
    "left", [b"", b'{"files": {"ru', b"[]", b"{}", b'{"files": {"a": {"sha256": 3}}}', b"[" * 99_999]
)
def test_a_commit_that_is_damaged_is_an_error(tmp_path: Path, left: bytes) -> None:
    place = Store(f"file://{tmp_path}/store")
    place.write(remote.COMMIT, left)
    with pytest.raises(DataError):
        read_commit(place)


def test_a_run_on_a_disk_by_address_survives_a_kill_in_its_commit(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/store/run"

    def killed() -> None:
        from stillroom.core import files

        written = files.write_durably

        def write(path: Path, contents: bytes) -> Any:
            if "commit.json" in path.name and (tmp_path / "store" / "run" / remote.COMMIT).exists():
                path.write_bytes(contents[: len(contents) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return written(path, contents)

        files.write_durably = write  # type: ignore[assignment]
        with opened(url):
            distill(config(world, checkpoint__background="off"), url, device="cpu")

    assert tiny.in_child(killed) == -9
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert resume(url, device="cpu").summary["status"] == "done"


# -- trust -----------------------------------------------------------------------------------------------


def _edit(run: Path, **changes: Any) -> None:
    table = json.loads((run / "config.json").read_text())
    for key, value in changes.items():
        section, name = key.split("__")
        table["config"][section][name] = value
        table["paths"].pop(f"{section}.{name}", None)
    (run / "config.json").write_text(json.dumps(table))


def test_what_the_user_allows_is_allowed_and_nothing_else(store: Path) -> None:
    _edit(store, teacher__trust_remote_code=True, teacher__revision=COMMIT, teacher__model="org/name")
    _edit(store, data__eval="s3://mine/text.jsonl", teacher__cache="s3://mine/cache")
    for trust in (Trust(), Trust(code=True), Trust(addresses=("s3://mine",)), Trust(True, ("s3://mine/cache",))):
        with pytest.raises(ConfigError):
            read_config(store, trust=trust)
    assert read_config(store, trust=Trust(True, ("s3://mine",))).teacher.trust_remote_code


def test_the_error_names_the_options_that_allow_it(store: Path) -> None:
    _edit(store, teacher__trust_remote_code=True, teacher__revision=COMMIT, data__eval="s3://mine/text.jsonl")
    with pytest.raises(ConfigError) as caught:
        stillroom.resume(store)
    assert "--trust-remote-code --allow-address s3://mine/text.jsonl" in str(caught.value)


def test_a_plug_in_named_by_a_run_s_folder_is_not_imported(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Any:
        raise AssertionError("it was imported")

    entry = SimpleNamespace(load=load, dist=None, value="stranger:RECIPE", name="stranger")
    monkeypatch.setattr(OBJECTIVES, "_entries_by_name", {"stranger": [entry]})
    _edit(store, objectives__stranger={"weight": 1.0})
    with refused(ConfigError, "config.json", "stranger"):
        read_config(store)


def test_a_run_that_was_begun_with_an_address_goes_on_by_the_same_command(world: Path, tmp_path: Path) -> None:
    """The configuration is then the user's own; `resume` needs the word again."""
    data = f"file://{world}/train.jsonl"
    folder = tmp_path / "run"
    distill(config(world, data__train=data, train__max_steps=1), folder, device="cpu")
    (folder / "summary.json").unlink()
    with pytest.raises(ConfigError):
        resume(folder, device="cpu")
    allowed = resume(folder, device="cpu", trust=Trust(addresses=(f"file://{world}",)))
    assert allowed.summary["steps"] == 1
    assert distill(config(world, data__train=data, train__max_steps=1), folder, device="cpu").summary["steps"] == 1


def _hub(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    api = SimpleNamespace(model_info=lambda _name, **_options: SimpleNamespace(sha=COMMIT))
    monkeypatch.setattr(sources, "snapshot_download", lambda _name, **_options: str(folder))
    monkeypatch.setattr(sources, "HfApi", lambda: api)
    sources._ask_hub.cache_clear()


TRUSTED = TeacherConfig(model="org/name", trust_remote_code=True, revision=COMMIT)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_another_repository_is_not_pinned_and_not_run(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    table = json.loads((model_folder / file).read_text())
    table["auto_map"] = {"AutoModelForCausalLM": "other/name--code.M", "AutoTokenizer": [None, "other/name--code.T"]}
    (model_folder / file).write_text(json.dumps(table))
    _hub(monkeypatch, model_folder)
    with refused(BrokenAtStart, "trust_remote_code", "other/name--code.M"):
        load_tokenizer(TRUSTED, "org/name")
    sources._ask_hub.cache_clear()


def test_code_is_run_from_a_commit_of_the_hub_alone(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = json.loads((model_folder / "config.json").read_text())
    table["auto_map"] = {"AutoModelForCausalLM": "code.M"}
    (model_folder / "config.json").write_text(json.dumps(table))
    _hub(monkeypatch, model_folder)
    assert runs_code(TRUSTED, sources.fetch(TRUSTED, "org/name", weights=False))
    assert not runs_code(TeacherConfig(model="org/name"), sources.fetch(TRUSTED, "org/name", weights=False))
    with pytest.raises(BrokenAtStart):
        runs_code(TRUSTED, sources.find(str(model_folder)))
    sources._ask_hub.cache_clear()


def test_no_loader_decides_about_code_by_itself() -> None:
    """`trust_remote_code=` is given what `runs_code` says, or what was made of it."""
    given = set()
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                given |= {
                    (path.name, ast.unparse(one.value)) for one in node.keywords if one.arg == "trust_remote_code"
                }
    assert given == {
        ("load.py", "may_run"),
        ("load.py", "runs_code(section, source)"),
        ("placement.py", "runs_code(section, source)"),
        ("gguf.py", "trust_remote_code"),
        ("load.py", "section.trust_remote_code"),  # of a configuration that `read_config` read
    }


# -- adapters --------------------------------------------------------------------------------------------


def _adapter(folder: Path, base: str) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    return folder


def test_an_adapter_s_base_by_address_needs_the_user_s_word(model_folder: Path, tmp_path: Path) -> None:
    adapter = _adapter(tmp_path / "adapter", f"file://{model_folder}")
    source = sources.find(str(adapter))
    for allowed in (None, "s3://mine", f"file://{model_folder}x"):
        with pytest.raises(BrokenAtStart):
            fetch_base(StudentConfig(allow_base=allowed), source, weights=True)
    found = fetch_base(StudentConfig(allow_base=f"file://{model_folder.parent}"), source, weights=True)
    assert (found.folder / "config.json").is_file()


def test_an_adapter_of_the_hub_names_no_folder_of_this_machine(model_folder: Path, tmp_path: Path) -> None:
    adapter = _adapter(tmp_path / "adapter", str(model_folder))
    assert fetch_base(TeacherConfig(), sources.find(str(adapter)), weights=False).is_local
    with refused(BrokenAtStart, "base_model_name_or_path", "org/adapter"):
        fetch_base(TeacherConfig(), Source("org/adapter", str(adapter), True, is_of_hub=True), weights=False)


# -- files that are left behind --------------------------------------------------------------------------


def test_a_traceback_is_for_the_user_alone_and_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    paths = [Path(fault_of(RuntimeError("x"), None).where) for _ in range(2)]
    assert len(set(paths)) == 2 and all(path.parent == tmp_path for path in paths)
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert str(os.getpid()) not in path.name
    assert "RuntimeError" in paths[0].read_text()


_LEAVES = """
import os, signal, sys
from pathlib import Path
from stillroom.core.files import replaced_folder
with replaced_folder(Path(sys.argv[1])) as folder:
    (folder / "model").write_bytes(b"x" * 1000)
    print(folder, flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_unfinished_folder_is_removed_once_its_process_is_dead_and_not_before(tmp_path: Path) -> None:
    final, other = tmp_path / "out", tmp_path / ".tmp-out-parts"
    other.mkdir()  # somebody else's
    with subprocess.Popen(
        [sys.executable, "-c", _LEAVES, str(final)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        left = Path(process.stdout.readline().strip())
        with replaced_folder(tmp_path / "out") as folder:
            (folder / "model").write_text("mine")
        assert (left / "model").exists(), "its process is alive"
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(60) == -signal.SIGKILL
    assert (left / "model").exists()
    with replaced_folder(final) as folder:
        (folder / "model").write_text("mine")
    assert not left.exists() and (final / "model").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-out-parts", "out"]


def test_a_shard_that_was_half_brought_is_brought_again_and_leaves_nothing(tmp_path: Path) -> None:
    rows = cases.rows_of([5, 6, 7])
    cases.write(tmp_path / "store" / "cache", rows)
    folder = folder_of(f"file://{tmp_path}/store/cache")
    (path,) = (folder / "shards").glob("*.shard")
    (path.parent / f".tmp-{path.name}-0123456789ab").write_bytes(b"half")
    assert Cache(folder).answer(cases.needed(rows)[0].key) is not None
    assert [one.name for one in path.parent.iterdir()] == [path.name]


# -- what we promise -------------------------------------------------------------------------------------


def test_every_line_of_the_security_page_names_a_test_that_is_there() -> None:
    root = SOURCE.parents[1]
    rows = [line for line in (root / "SECURITY.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.startswith("| what comes")]
    assert len(promises) >= 30
    for row in promises:
        path, _, name = row.split("|")[-2].strip(" `").partition("::")
        text = (root / path).read_text(encoding="utf-8")
        assert f"def {name}(" in text or f'"{name}"' in text, row
