"""The card as a device type of its own, by torch's backends in plain Python: no compiler is needed.

Branches for `cuda` and the casts of autocast are not reached on it.
"""

from __future__ import annotations

from typing import Any

import card
import card_patches
import torch

NAME = "testcard"


def missing() -> str:
    """What the installed torch lacks for it; nothing where it works."""
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend  # noqa: F401
    except ImportError:
        return f"torch {torch.__version__} has no backends in plain Python"
    return ""


def install() -> None:
    from torch.utils import backend_registration as registration

    class Module(registration._DummyBackendModule):  # type: ignore[misc]
        def is_available(self) -> bool:
            return True

        def device_count(self) -> int:
            return 1

        def current_device(self) -> int:
            return 0

        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.float16, torch.bfloat16]

        def _is_in_bad_fork(self) -> bool:
            return False

        def manual_seed_all(self, number: int) -> None:
            card.Card.random = torch.Generator().manual_seed(number).get_state()

        def get_rng_state(self, _device: Any = None) -> torch.Tensor:
            return card.Card.random.clone()

        def set_rng_state(self, state: torch.Tensor, _device: Any = None) -> None:
            card.Card.random = state.clone()

    class Hook(registration._DummyPrivateUse1Hook):  # type: ignore[misc]
        def is_available(self) -> bool:
            return True

        def is_built(self) -> bool:
            return True

        def has_primary_context(self, _index: int) -> bool:
            return True

        def get_default_generator(self, _index: int) -> torch.Generator:
            return torch.default_generator

    registration._setup_privateuseone_for_python_backend(rename=NAME, backend_module=Module(), hook=Hook())
    card_patches.install(torch.device(f"{NAME}:0"))
