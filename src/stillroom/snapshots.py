"""Good states that a rollback returns to: copies in main memory, or the checkpoints on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from stillroom.checkpoint import CheckpointStore, Saved


class Snapshots(Protocol):
    """Good states to return to."""

    def keep(self, saved: Saved) -> None: ...
    def newest(self) -> Saved | None: ...
    def drop_newest(self) -> None: ...
    def settle(self) -> None: ...
    def __len__(self) -> int: ...


class SnapshotRing:
    """The last few good states, in main memory whatever device the run is on."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._states: list[Saved] = []

    def keep(self, saved: Saved) -> None:
        """Copy a state. The oldest is dropped first, so there are never more copies than `size`."""
        del self._states[: max(0, len(self._states) + 1 - self.size)]
        self._states.append(saved.copied())

    def newest(self) -> Saved | None:
        return self._states[-1] if self._states else None

    def drop_newest(self) -> None:
        """The state behind the newest snapshot led into trouble twice: fall back to the one before."""
        if self._states:
            self._states.pop()

    def settle(self) -> None:
        """Nothing to do: what was dropped is gone."""

    def __len__(self) -> int:
        return len(self._states)


class CheckpointSnapshots:
    """The newest verified checkpoints instead of copies in memory, where memory is short."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self._dropped: set[int] = set()

    def keep(self, saved: Saved) -> None:
        """Nothing to do: what is on disk is what there is."""

    def newest(self) -> Saved | None:
        return self.store.load_newest(without=self._dropped)

    def drop_newest(self) -> None:
        self._dropped.update([step for step in self.store.steps() if step not in self._dropped][:1])

    def settle(self) -> None:
        """What was dropped is abandoned on the disk as well: a later checkpoint of that step is another."""
        self._dropped.clear()

    def __len__(self) -> int:
        return len([step for step in self.store.steps() if step not in self._dropped])
