"""Commit files to a model repository of the Hugging Face Hub, and keep runs there (hf://ORG/NAME[@BRANCH][/FOLDER]).

A commit is atomic: readers see all of its files or none. It names its parent and fails if the branch has moved since,
so a run has no owner file that is renewed: its commits form one line, and a process whose line another has continued
sends nothing more. Files are compared by their hashes after the commit, in one listing.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from stillroom.core.errors import CannotSave, ConfigError
from stillroom.core.files import FileSum, is_hidden, reason_of, sum_of_bytes
from stillroom.core.remote import COMMIT, Commit, RemoteFile, Store, again, as_url, read_commit

Contents = Path | bytes

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(f"{_PART}/{_PART}", re.ASCII)
_ADDRESS = re.compile(rf"hf://(?P<name>{_NAME.pattern})(?:@(?P<branch>[\w.%-]+))?(?:/(?P<folder>.+))?", re.ASCII)
_OTHER_KINDS = ("datasets/", "spaces/", "models/", "kernels/")
_HASH = re.compile("[0-9a-f]{40}")
_MAIN = "main"


def is_repository(url: str) -> bool:
    """Whether an address is a repository of the Hub. A bucket of the Hub is a store like others."""
    return url.startswith("hf://") and not url.startswith("hf://buckets/")


class Repository:
    """A branch of a model repository. Every method retries; what still fails is raised as a StillroomError."""

    def __init__(self, name: str, branch: str = _MAIN) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is not the name of a repository", where="--to", advice=["name it ORG/NAME, as on the Hub"]
            )
        from huggingface_hub import HfApi

        self.name, self.branch, self._api = name, branch, HfApi()

    @property
    def address(self) -> str:
        """The address of its page."""
        return f"{self._api.endpoint}/{self.name}" + (f"/tree/{self.branch}" if self.branch != _MAIN else "")

    def check_token(self) -> None:
        """Raise unless the Hub knows the token, and it is not one that may only read."""
        told = self._ask(self._api.whoami)
        if ((told.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
            raise ConfigError(
                f"the token of {told.get('name')} may read from the Hub and not write to it",
                advice=["make one that may write at huggingface.co/settings/tokens, and give it in HF_TOKEN"],
            )

    def info(self) -> Any:
        """What the Hub tells of the branch: `sha` is its commit. None if the repository or the branch is missing."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        def ask() -> Any:
            with contextlib.suppress(RepositoryNotFoundError, RevisionNotFoundError):
                return self._api.model_info(self.name, revision=self.branch)

        return self._ask(ask)

    def head(self) -> str:
        """The commit of the branch; empty if there is none."""
        info = self.info()
        return str(info.sha or "") if info is not None else ""

    def files(self, commit: str) -> dict[str, Any]:
        """The files of a commit, with size and hash each."""
        tree = self._ask(lambda: list(self._api.list_repo_tree(self.name, recursive=True, revision=commit)))
        return {one.path: one for one in tree if hasattr(one, "blob_id")}

    def create(self, *, private: bool | None) -> None:
        """Create the repository and the branch where they are missing. `private` is of a repository that is new."""

        def make() -> None:
            self._api.create_repo(self.name, private=private, exist_ok=True)
            if self.branch != _MAIN:
                self._api.create_branch(self.name, branch=self.branch, exist_ok=True)

        again(make, f"hf://{self.name}", is_read=False)

    def send(
        self,
        files: Mapping[str, tuple[Contents, FileSum]],
        message: str,
        *,
        remove: Iterable[str] = (),
        check: Callable[[str], object] = bool,
        has_bars: bool = False,
    ) -> str:
        """Make the branch hold these files, and none of `remove`, by one commit. Return the commit.

        `check` gets the commit that will be the parent and may raise. A try whose answer was lost is not repeated: what
        the branch holds is looked at first, and again after the commit.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        def differing() -> tuple[str, list[str], list[str]]:
            head = self.head()
            if not head:
                raise FileNotFoundError(f"there is no branch {self.branch}")
            check(head)
            there = self.files(head)
            todo = [name for name, one in files.items() if name not in there or not _is_same(there[name], *one)]
            return head, todo, [name for name in remove if name in there]

        def send() -> str:
            head, todo, gone = differing()
            if not todo and not gone:
                return head
            operations: list[Any] = [
                *(CommitOperationDelete(path_in_repo=name) for name in gone),
                *(CommitOperationAdd(name, _given(files[name][0])) for name in todo),
            ]
            try:
                with contextlib.nullcontext() if has_bars else quiet():
                    self._api.create_commit(
                        self.name, operations, commit_message=message, revision=self.branch, parent_commit=head
                    )
            except (RuntimeError, ValueError) as error:  # of an upload: its cause is what the connection raised
                raise OSError(reason_of(error.__cause__ or error)) from error
            head, todo, gone = differing()
            if todo or gone:
                raise OSError(f"{(*todo, *gone)[0]} is not in the commit as it was sent")
            return head

        return str(again(send, f"hf://{self.name}", is_read=False))

    def _ask(self, work: Callable[[], Any]) -> Any:
        return again(work, f"hf://{self.name}")


def _given(contents: Contents) -> str | bytes:
    return contents if isinstance(contents, bytes) else str(contents)


def _is_same(there: Any, contents: Contents, known: FileSum) -> bool:
    """Whether a file of the Hub has these contents: large files have a sha256, others the hash that git gives them."""
    if there.lfs is not None:
        return bool(there.lfs.sha256 == known.sha256)
    if there.size != known.bytes:
        return False
    held = contents if isinstance(contents, bytes) else contents.read_bytes()
    return bool(there.blob_id == hashlib.sha1(b"blob %d\0" % len(held) + held, usedforsecurity=False).hexdigest())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the library's progress bars and warnings about retries, which would interleave with our log."""
    from huggingface_hub import utils

    library: Any = utils
    level, has_bars = library.logging.get_verbosity(), not library.are_progress_bars_disabled()
    library.logging.set_verbosity_error()
    library.disable_progress_bars()
    try:
        yield
    finally:
        library.logging.set_verbosity(level)
        if has_bars:
            library.enable_progress_bars()


# -- a run -----------------------------------------------------------------------------------------------


class HubStore(Store):
    """A run on a branch: read at one commit, written by commits of which each continues the last. Its own owner."""

    is_exclusive = True

    def __init__(self, url: str) -> None:
        found = _ADDRESS.fullmatch(as_url(url))
        if found is None or found["name"].startswith(_OTHER_KINDS) or _HASH.fullmatch(found["branch"] or ""):
            raise ConfigError(
                f"a run cannot be kept at {url}",
                where="--out",
                advice=[
                    "a run is kept on a branch of a model repository: hf://ORG/NAME, or hf://ORG/NAME@BRANCH",
                    "to continue from an earlier commit, make a branch of it: "
                    "hf repos branch create ORG/NAME BRANCH --revision COMMIT",
                ],
            )
        super().__init__(url)
        self._repository = Repository(found["name"], unquote(found["branch"] or _MAIN))
        self._folder = f"{found['folder'].strip('/')}/" if found["folder"] else ""
        self._last = ""  # the run's commit that this process continues
        self._silence = contextlib.ExitStack()  # the library's switch for progress bars is not of a thread

    def own(self) -> HubStore:
        """Take up the branch as it is now. Whoever continues it first has it; the other is told by `check`."""
        self._repository.check_token()
        self._last = self._read_at(self._repository.head())
        return self

    def check(self) -> None:
        self._check(self._repository.head())

    def release(self) -> None:
        """End the silence of the run. There is nothing else: no file says that this process writes."""
        self._silence.close()

    def prepare(self) -> list[str]:
        """Create the repository, private, and the branch, empty. Say so where everybody can read it."""
        if not self._repository.head():
            self._repository.create(private=True)
            names = [] if self._folder else self._repository.files(self._repository.head())
            self._repository.send({}, "Stillroom: empty", remove=[name for name in names if not is_hidden(name)])
        self._silence.enter_context(quiet())
        info = self._repository.info()
        is_public = info is not None and info.private is False
        return [f"{self.url} is public: everybody can read the run, with samples of its data"] if is_public else []

    def copy(self, file: RemoteFile, into: Path) -> None:
        with quiet():
            super().copy(file, into)

    def send(self, files: Mapping[str, Path], commit: Commit, known: dict[str, FileSum | None]) -> None:
        """Send all files as one commit. One whose answer was lost is found by its id."""
        manifest = commit.to_bytes()
        sent: dict[str, tuple[Contents, FileSum]] = {
            f"{self._folder}{name}": (files[name], one) for name, one in commit.files.items()
        }
        sent[f"{self._folder}{COMMIT}"] = (manifest, sum_of_bytes(manifest))
        gone = [f"{self._folder}{name}" for name in known.keys() - commit.files.keys()]
        head = self._repository.send(
            sent, f"Stillroom: {_title(commit)}", remove=gone, check=lambda head: self._check(head, commit.id)
        )
        self._pin(head)
        self._last = commit.id
        known.clear()
        known.update(commit.files)

    def _check(self, head: str, ours: str = "") -> None:
        if self._read_at(head) not in (self._last, ours):
            raise CannotSave(
                f"another process has continued the run in {self.url}",
                where=self.url,
                advice=["let the other process finish it", "or copy this one's folder to another address"],
            )

    def _read_at(self, head: str) -> str:
        """Read a commit of the branch. Return the id of the run's commit in it; empty if it has none."""
        self._pin(head)
        commit = read_commit(self)
        return commit.id if commit is not None else ""

    def _pin(self, head: str) -> None:
        """Read from one commit, whatever happens to the branch."""
        if head:
            self._root = f"{self._repository.name}@{head}/{self._folder}".rstrip("/")


def _title(commit: Commit) -> str:
    """What the history of the branch shows for a commit of a run."""
    steps = [name.split("/")[1] for name in commit.files if re.fullmatch(r"checkpoints/[^/]+/manifest\.json", name)]
    end = ", finished" if "summary.json" in commit.files else ""
    return f"{max(steps, default='no checkpoint yet')}{end}"
