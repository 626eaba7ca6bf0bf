"""The device that a run is planned for: this machine's, or one that is named."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import psutil
import torch

from stillroom.config.train import STRATEGIES
from stillroom.engine.building.device import find_device
from stillroom.errors import ConfigError
from stillroom.parallel.mesh import check_shard_size
from stillroom.planning.cards import CARDS, Card
from stillroom.planning.sharing import Sharing
from stillroom.precision.device import DeviceFacts, facts_of


@dataclass(frozen=True)
class Target:
    device: torch.device
    facts: DeviceFacts
    bound: int  # bytes that a run may take there
    main_memory: int  # free on this machine
    card: Card | None = None
    notes: tuple[str, ...] = ()
    sharing: Sharing = field(default_factory=Sharing)

    @property
    def is_card(self) -> bool:
        return self.device.type == "cuda"


def find_target(device: str = "auto", device_memory: int | None = None, card: str | None = None) -> Target:
    """A named card, a card of so many bytes where this machine has none, or this machine's device."""
    main = int(psutil.virtual_memory().available)
    if card is not None:
        chosen = _card(card)
        facts = DeviceFacts("cuda", chosen.name, chosen.has_native_bf16, chosen.memory_bytes,
                            has_tensor_cores=chosen.has_tensor_cores)  # fmt: skip
        return Target(torch.device("cuda"), facts, device_memory or chosen.memory_bytes, main, chosen)
    if device == "auto" and device_memory is not None and not torch.cuda.is_available():
        facts = DeviceFacts("cuda", "a card", True, device_memory)
        note = "planned for a card with native bf16; --card T4 plans for one that has none, --device cpu for this CPU"
        return Target(torch.device("cuda"), facts, device_memory, main, notes=(note,))
    here = find_device(device)
    free = int(torch.cuda.mem_get_info(here)[0]) if here.type == "cuda" else main
    return Target(here, facts_of(here), device_memory or free, main)


def with_processes(
    target: Target, num_processes: int, strategy: str = "auto", shard_size: int = 0, teacher_ranks: int = 0
) -> Target:
    """The same device for one of several processes, each with a device of its own.

    `shard_size` belongs to fsdp. The last `teacher_ranks` processes do not train.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"{strategy!r} is no strategy", where="--strategy", advice=[" or ".join(STRATEGIES)])
    teacher_ranks = teacher_ranks if num_processes > 1 else 0
    num_processes -= teacher_ranks
    if strategy != "fsdp" or num_processes == 1:
        return replace(target, sharing=Sharing(num_processes, teacher_ranks=teacher_ranks))
    check_shard_size(shard_size, num_processes, strategy)
    return replace(target, sharing=Sharing(num_processes, True, shard_size, teacher_ranks))


def _card(name: str) -> Card:
    found = next((card for card in CARDS if card.name.lower() == name.lower()), None)
    if found is None:
        raise ConfigError(
            f"no figures of a card {name!r} are known",
            where="--card",
            advice=[f"one of {', '.join(card.name for card in CARDS)}", "--device-memory 16GB for any other"],
        )
    return found
