"""One owner for a folder in a store: a lease that its owner renews and that falls to others when it is not renewed.

Leases are numbered objects, and the highest number owns. Whoever takes over creates the next number, which only one of
several can where the store creates an object only if there is none. Only its owner writes to a lease. Nothing relies on
clocks of other machines: a lease that is not renewed while this process watches it for as long as one lasts is
abandoned. That of a process of this machine is abandoned once the process has ended.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from stillroom.errors import CannotSave, ConfigError, StillroomError
from stillroom.stores.files import HIDDEN, StoreFiles
from stillroom.stores.owner import describe_process, is_dead

LEASE_SECONDS = 120.0
_RENEWALS = 6  # in the time that a lease lasts
_NAME = re.compile(r"^lease-(\d{9})$")
_TRIES = 5

_held: set[str] = set()  # owners of this process whose leases are not released


Seen = dict[int, tuple[bytes, float]]  # a lease by its number: what it said, since when


class Lease:
    """Ownership of an address or of something below it, from `take` or `attempt` to `release`."""

    def __init__(
        self,
        files: StoreFiles,
        *,
        under: str = HIDDEN,
        seconds: float = LEASE_SECONDS,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._files, self._under, self._seconds, self._sleep = files, under, seconds, sleep
        self.owner = secrets.token_hex(8)
        self._number = 0
        self._count = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> Lease:
        """Own the address, or raise with the name of its owner. Waits for a lease whose owner may have ended."""
        for _ in range(_TRIES):
            last = self._last()
            if last and not self._is_abandoned(last):
                raise self._taken(self._told(last))
            if self._create(last + 1):
                return self
        raise self._taken({})

    def attempt(self, seen: Seen) -> bool:
        """Whether it is ours now. Does not wait: `seen` is what earlier attempts saw."""
        last = self._last()
        if not last:
            return self._create(1)
        is_ended, told = self._has_ended(last), self._files.read(self._name(last)) or b""
        if is_ended is None:
            if last not in seen or seen[last][0] != told:
                seen[last] = (told, time.monotonic())
            is_ended = time.monotonic() - seen[last][1] >= self._seconds
        return is_ended and self._create(last + 1)

    def _create(self, number: int) -> bool:
        self._number = number
        if not self._files.create(self._name(number), self._contents()):
            return False
        _held.add(self.owner)
        self._files.remove(self._name(older) for older in self._numbers() if older < number)
        self._thread = threading.Thread(target=self._keep_renewing, name="stillroom-lease", daemon=True)
        self._thread.start()
        return True

    def check(self) -> None:
        """Raise where another process has taken over: it would be two that write."""
        if self._is_lost():
            raise CannotSave(
                f"another process has taken over the run in {self._files.url}, because its lease was not renewed for "
                f"{self._seconds:.0f} seconds",
                where=self._files.url,
                advice=["let the other process finish it", "or copy this one's folder to another address"],
            )

    def release(self) -> None:
        self._ended.set()
        _held.discard(self.owner)
        if self._thread is not None:
            self._thread.join()
        try:
            self._files.remove([self._name(self._number)])
        except StillroomError:
            return  # the store is away: the lease runs out by itself

    # -- leases ------------------------------------------------------------------------------------------

    def _name(self, number: int) -> str:
        return f"{self._under}/lease-{number:09d}"

    def _numbers(self) -> list[int]:
        start = len(self._under) + 1
        found = (_NAME.match(name[start:]) for name in self._files.names(self._under))
        return sorted(int(one.group(1)) for one in found if one)

    def _last(self) -> int:
        """The number that owns; 0 where none does."""
        return max(self._numbers(), default=0)

    def _is_lost(self) -> bool:
        """Asks for the lease and its successor themselves, because a listing may be late."""
        own, next_ = (self._files.size(self._name(number)) for number in (self._number, self._number + 1))
        return own is None or next_ is not None

    def _contents(self) -> bytes:
        self._count += 1
        return json.dumps({"owner": self.owner, "renewed": self._count, **describe_process()}).encode("ascii")

    def _told(self, number: int) -> dict[str, Any]:
        try:
            told = json.loads(self._files.read(self._name(number)) or b"{}")
        except ValueError:
            return {}
        return told if isinstance(told, dict) else {}

    def _has_ended(self, number: int) -> bool | None:
        """Whether the owner of a lease has ended; None where that cannot be seen from here."""
        owner, here = self._told(number), describe_process()
        if is_dead(owner):
            return True
        if any(owner.get(key) != here[key] for key in ("host", "processes")):
            return None
        return owner.get("pid") == here["pid"] and owner.get("owner") not in _held  # released, and the store was away

    def _is_abandoned(self, number: int) -> bool:
        """Whether an owner has ended: seen on this machine at once, else by a lease that is not renewed."""
        seen, is_ended = self._files.read(self._name(number)), self._has_ended(number)
        if seen is None or is_ended is not None:
            return seen is None or bool(is_ended)
        for _ in range(_RENEWALS):
            self._sleep(self._seconds / _RENEWALS)
            now = self._files.read(self._name(number))
            if now != seen:
                return now is None
        return True

    def _keep_renewing(self) -> None:
        while not self._ended.wait(self._seconds / _RENEWALS):
            try:
                if self._is_lost():
                    return
                self._files.write(self._name(self._number), self._contents())
            except (StillroomError, OSError):
                continue  # the store is away; `check` tells before anything is written

    def _taken(self, owner: dict[str, Any]) -> ConfigError:
        who = "another process"
        if owner:
            who = f"process {owner.get('pid')} on {owner.get('name')}, started {owner.get('started')},"
        return ConfigError(
            f"{who} is writing to {self._files.url}",
            where="--out",
            advice=[
                "wait for it to end, or stop it: it saves, and can be resumed",
                "or choose another address with --out",
            ],
        )
