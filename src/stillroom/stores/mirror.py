"""Send a folder of this machine to a store while it grows: commits of files, the ones that vouch for others last.

The folder here is the one that is worked in; the store is brought to its state at each commit. A commit is taken in
the calling thread (large files by hard links, so that nothing waits for the store and nothing is sent that changes) and
sent by a thread of its own. While one is sent, the newest other one waits. A store that stays away costs commits, not
the run: the next commit sends all that is missing.

Order within a commit: plain files, files of checkpoints, their manifests, the summary, and the index of the commit.
What is gone here is removed there after that, manifests first. So whoever reads a manifest finds what it vouches for.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stillroom.errors import CannotSave, StillroomError
from stillroom.files import TEMPORARY, reason_of
from stillroom.stores.files import StoreFiles
from stillroom.stores.index import Index, Sent, State
from stillroom.stores.lease import Lease

MANIFEST, LAST = "manifest.json", ("summary.json",)
_NOT_SENT = ("run.lock", "events.jsonl.tmp")
_LINKED = ("checkpoints/", "student/")  # files there are never written to again, only replaced
_CHECKPOINTS, _TRIES = "checkpoints", 3
_COMMITTED_AT = frozenset({"checkpoint", "eval"})


@dataclass(frozen=True)
class Commit:
    """What the folder held at a moment: every name, and a copy of each file that the store does not have."""

    aside: Path
    names: set[str] = field(default_factory=set)
    copies: dict[str, Path] = field(default_factory=dict)
    stamps: dict[str, tuple[int, int]] = field(default_factory=dict)

    def forget(self) -> None:
        shutil.rmtree(self.aside, ignore_errors=True)


class Mirror:
    """Sends `folder` to a store. `home` is a folder of ours on the same disk."""

    def __init__(self, files: StoreFiles, folder: Path, home: Path, lease: Lease) -> None:
        self.folder, self._files, self._home, self._lease = folder, files, home, lease
        self.state = State.read(home)
        self.num_commits = self.num_failed = self._num_taken = 0
        self._write_note: Callable[[str], object] | None = None
        self._notes: list[str] = []
        self._is_away = False
        self._lost: Exception | None = None  # raised in the thread of the run
        self._changed = threading.Condition()
        self._waiting: Commit | None = None
        self._is_sending = False
        self._thread: threading.Thread | None = None
        shutil.rmtree(home / "staged", ignore_errors=True)

    # -- during the run ----------------------------------------------------------------------------------

    def attach(self, log: Any) -> None:
        """Commit at the checkpoints and evaluations of a log, and note in it what goes wrong."""
        self._write_note = lambda text: log.write("note", text=text)
        log.listen(self.handle)

    def handle(self, event: dict[str, Any]) -> None:
        if self._lost is not None and event["event"] != "run_end":
            raise self._lost
        while self._notes and self._write_note is not None and event["event"] != "run_end":
            self._write_note(self._notes.pop(0))
        if event["event"] not in _COMMITTED_AT:
            return
        try:
            commit = self._take()
        except OSError as error:
            self._failed(f"its files cannot be put aside here: {reason_of(error)}")
            return
        with self._changed:
            replaced, self._waiting = self._waiting, commit
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="stillroom-mirror", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if replaced is not None:
            replaced.forget()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None)
                commit, self._waiting, self._is_sending = self._waiting, None, True
            assert commit is not None
            try:
                self._send(commit)
                if self._is_away:
                    self._notes.append(f"{self._files.url} takes files again, after {self.num_failed} failed commits")
                self._is_away = False
            except (StillroomError, OSError) as error:  # of the store, or of the disk here
                self._failed(error.what if isinstance(error, StillroomError) else reason_of(error))
            except Exception as error:  # noqa: BLE001 - a fault of ours is raised where the run sees it
                self._lost = error
            finally:
                commit.forget()
                with self._changed:
                    self._is_sending = False
                    self._changed.notify_all()

    def _failed(self, reason: str) -> None:
        self.num_failed += 1
        if not self._is_away:
            self._notes.append(
                f"{self._files.url} is not up to date, and the run goes on in {self.folder}: {reason}; tried again at "
                "every commit"
            )
        self._is_away = True

    def wait(self) -> None:
        """Until nothing is being sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None and not self._is_sending)

    def finish(self) -> None:
        """Bring the store to the state of the folder. Raises where it cannot: nothing here is lost."""
        with self._changed:
            left, self._waiting = self._waiting, None
        if left is not None:
            left.forget()
        self.wait()
        if not (self.folder / "config.json").exists():
            return  # a run that could not begin leaves nothing
        try:
            commit = self._take()
            try:
                self._send(commit)
            finally:
                commit.forget()
        except (StillroomError, OSError) as error:
            self.num_failed += 1
            reason = error.what if isinstance(error, StillroomError) else reason_of(error)
            raise CannotSave(
                f"{self._files.url} does not have all of the run: {reason}",
                where=str(self.folder),
                advice=[
                    f"nothing is lost, the run is in {self.folder}",
                    f"when the store answers, send what is missing: stillroom resume {self._files.url}",
                ],
            ) from error

    # -- a commit ----------------------------------------------------------------------------------------

    def _take(self) -> Commit:
        """Checkpoints first, each as a whole: a thread may be saving or pruning. Then the log, which is ahead."""
        self._num_taken += 1
        commit = Commit(aside=self._home / "staged" / str(self._num_taken))
        try:
            for checkpoint in sorted(self.folder.glob(f"{_CHECKPOINTS}/*/")):
                for _ in range(_TRIES):
                    if self._take_whole(checkpoint, commit):
                        break
            for path in _others(self.folder):
                with contextlib.suppress(FileNotFoundError):  # a mark of a rollback that was just removed
                    self._take_file(path, commit)
        except OSError:
            commit.forget()
            raise
        return commit

    def _take_whole(self, checkpoint: Path, commit: Commit) -> bool:
        """Whether the folder of a checkpoint was neither replaced nor removed meanwhile."""
        part = Commit(aside=commit.aside)
        try:
            before = checkpoint.stat().st_ino
            for path in sorted(checkpoint.iterdir()):
                self._take_file(path, part)
            if checkpoint.stat().st_ino != before:
                return False
        except FileNotFoundError:
            return False
        commit.names.update(part.names)
        commit.copies.update(part.copies)
        commit.stamps.update(part.stamps)
        return True

    def _take_file(self, path: Path, commit: Commit) -> None:
        name = path.relative_to(self.folder).as_posix()
        if not path.is_file() or path.is_symlink() or name in _NOT_SENT or _is_hidden(name):
            return
        stamp = _stamp(path)
        if stamp == self.state.stamp(name):
            commit.names.add(name)
            return
        copy = commit.aside / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.unlink(missing_ok=True)
        _copy(path, copy, is_linked=name.startswith(_LINKED))
        commit.names.add(name)
        commit.copies[name], commit.stamps[name] = copy, stamp

    def _send(self, commit: Commit) -> None:
        try:
            self._lease.check()
        except CannotSave as error:
            self._lost = error
            raise
        state, known = self.state, self.state.sent
        todo = sorted((name for name in commit.copies if _is_news(commit, name, known)), key=_order)
        gone = sorted((name for name in known if name not in commit.names), key=_order, reverse=True)
        if not todo and not gone and state.number:
            return
        state.begin(self._home)
        replaced = [name for name in todo if name.endswith(f"/{MANIFEST}") and name in known]
        self._files.remove(replaced)  # of a checkpoint that was saved again: it vouches for other files
        for name in todo:
            sums = self._files.put(name, commit.copies[name])
            known[name] = Sent(*commit.stamps[name], sums.sha256, sums.num_bytes)
        Index.of(state, without=gone).write(self._files)
        state.end(self._home)
        self.num_commits += 1
        for name in gone:
            self._files.remove([name])
            known.pop(name)
        if gone:
            state.write(self._home)


def _is_news(commit: Commit, name: str, known: dict[str, Sent]) -> bool:
    """Whether a commit has a file that the store has not: the commit before it may have sent it meanwhile."""
    return name not in known or known[name].stamp != commit.stamps[name]


def _order(name: str) -> tuple[int, str]:
    """Files that vouch for others come after them."""
    if name in LAST:
        return 3, name
    if name.startswith("checkpoints/"):
        return (2 if name.endswith(f"/{MANIFEST}") else 1), name
    return 0, name


def _others(folder: Path) -> Iterator[Path]:
    """All files but those within checkpoints."""
    for root, folders, names in os.walk(folder):
        place = Path(root)
        folders[:] = sorted(name for name in folders if not _is_hidden(name) and place != folder / _CHECKPOINTS)
        yield from (place / name for name in sorted(names))


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", TEMPORARY)) for part in name.split("/"))


def _stamp(path: Path) -> tuple[int, int]:
    told = path.stat()
    return told.st_size, told.st_mtime_ns


def _copy(path: Path, into: Path, *, is_linked: bool) -> None:
    if is_linked:
        with contextlib.suppress(OSError):  # a disk without hard links
            os.link(path, into)
            return
    shutil.copyfile(path, into)
