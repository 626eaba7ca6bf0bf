"""What was sent to a store: the index of the last commit there, and what this machine knows of it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from stillroom.errors import AddressUnusable
from stillroom.files import write_atomically
from stillroom.stores.files import HIDDEN, StoreFiles


@dataclass(frozen=True)
class Sent:
    """A file that is in the store: its size and time here, and its sum."""

    size: int
    time: int
    sha256: str
    num_bytes: int

    @property
    def stamp(self) -> tuple[int, int]:
        return self.size, self.time


@dataclass
class State:
    """What this machine last sent or brought, beside the folder that it works in."""

    run: str = ""  # a name for the run, the same on every machine
    number: int = 0  # commits that the store has
    next_number: int = 0  # of a commit that may have been cut short
    sent: dict[str, Sent] = field(default_factory=dict)
    NAME: ClassVar[str] = "mirror.json"

    @staticmethod
    def read(home: Path) -> State:
        """A state that cannot be read is that of a machine that knows nothing: all is compared with the store again."""
        try:
            told = json.loads((home / State.NAME).read_bytes())
            sent = {name: Sent(**one) for name, one in told["sent"].items()}
            return State(str(told["run"]), int(told["number"]), int(told["next_number"]), sent)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return State()

    def write(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        write_atomically(home / State.NAME, json.dumps(asdict(self)).encode("utf-8"))

    def stamp(self, name: str) -> tuple[int, int] | None:
        return self.sent[name].stamp if name in self.sent else None

    def begin(self, home: Path) -> None:
        """Before a commit: should this process be killed in it, its next one knows the commit for its own."""
        self.run = self.run or secrets.token_hex(8)
        self.next_number = self.number + 1
        self.write(home)

    def end(self, home: Path) -> None:
        self.number = self.next_number
        self.write(home)

    def is_of(self, index: Index) -> bool:
        """Whether the folder here is that of the store's last commit, or goes on from it."""
        return self.run == index.run and index.number in (self.number, self.next_number)


@dataclass(frozen=True)
class Index:
    """The last commit of a store: written after all of its files."""

    run: str
    number: int
    files: dict[str, dict[str, Any]]
    NAME: ClassVar[str] = f"{HIDDEN}/commit.json"
    AHEAD: ClassVar[str] = f"{HIDDEN}/commit-ahead.json"  # the same, while it is written

    @staticmethod
    def of(state: State, without: Collection[str] = ()) -> Index:
        kept = {name: one for name, one in state.sent.items() if name not in without}
        files = {name: {"bytes": one.num_bytes, "sha256": one.sha256} for name, one in kept.items()}
        return Index(state.run, state.next_number, files)

    @staticmethod
    def read(files: StoreFiles) -> Index | None:
        """The last commit; None before the first. One that a kill cut short stands whole under its second name."""
        contents = files.read(Index.NAME)
        if contents is None:
            return None
        found = Index._parsed(contents) or Index._parsed(files.read(Index.AHEAD) or b"")
        if found is None:
            raise AddressUnusable(
                f"{files.url}/{Index.NAME} is damaged",
                advice=["remove it: the files beside it are then taken as they are"],
            )
        return found

    @staticmethod
    def _parsed(contents: bytes) -> Index | None:
        try:
            told = json.loads(contents)
            named = {
                str(name): {"bytes": int(one["bytes"]), "sha256": str(one["sha256"])}
                for name, one in told["files"].items()
            }
            return Index(str(told["run"]), int(told["number"]), named)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def write(self, files: StoreFiles) -> None:
        """Write the commit. Until it is whole it stands under a second name: not every store replaces at once."""
        if not files.is_disk:
            files.write(Index.AHEAD, self.to_bytes())
        files.write(Index.NAME, self.to_bytes())
        if not files.is_disk:
            files.remove([Index.AHEAD])

    def to_bytes(self) -> bytes:
        return json.dumps({"run": self.run, "number": self.number, "files": self.files}).encode("utf-8")
