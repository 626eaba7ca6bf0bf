"""Which causal families of transformers read several texts in one row as they read each text alone.

    python benchmarks/data/packed_families.py
    python benchmarks/data/packed_families.py llama mamba      # only these; writes nothing

Each family is built small from its own configuration class (`tests/support/families.py`), with random weights, and
tried as a run tries it. Of a family that a run takes, the loss of every token in packed rows is compared with that of
the token in its text alone: `worst` is the largest difference, relative to the loss. Of the others the sentence of the
refusal is kept.
"""

from __future__ import annotations

import json
import platform
import sys
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import families  # noqa: E402
import tiny  # noqa: E402
from packed_texts import batch_of, texts  # noqa: E402

from stillroom.core.errors import BrokenAtStart, ConfigError  # noqa: E402
from stillroom.core.types import Batch, Needs  # noqa: E402
from stillroom.models import try_model  # noqa: E402
from stillroom.training.models import check_packing  # noqa: E402

RESULT = Path(__file__).parent / "results" / "packed_families.json"
TOLERANCE = 1e-5


def losses(student: Any, batch: Batch) -> torch.Tensor:
    """The loss of each scored position."""
    view = student.observe(batch, Needs())
    logits = view.hidden if view.head.is_identity else view.hidden @ view.head.weight.T
    return F.cross_entropy(logits.double(), batch.scored_targets, reduction="none")


@torch.no_grad()
def tried(family: str) -> dict[str, Any]:
    """`packed` with the worst difference; `refused` for packed rows alone; `not scored` by any run; or `not built`."""
    try:
        model = families.build(family)
    except Exception as error:  # noqa: BLE001 - any error means that the family is not built this way
        return {"verdict": "not built", "why": f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"}
    try:
        loaded = try_model(model, tiny.tokenizer(), name=family, role="student")
    except BrokenAtStart as error:
        return {"verdict": "not scored", "why": error.what}
    try:
        check_packing("student", loaded)
    except ConfigError as error:
        return {"verdict": "refused", "why": error.what}
    student = loaded.as_student()
    together = losses(student, batch_of(texts()))
    alone = [losses(student, replace(batch_of([[text]]), segments=None)) for row in texts() for text in row]
    expected = torch.cat(alone)
    worst = float(((together - expected).abs() / expected.abs().clamp_min(1.0)).max())
    attention = loaded.network.config.get_text_config()._attn_implementation
    return {"verdict": "packed" if worst <= TOLERANCE else "different", "worst": worst, "attention": attention}


def main() -> None:
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    found = {}
    for family in wanted or sorted(families.ALL):
        found[family] = tried(family)
        print(family, json.dumps(found[family]), flush=True)
    if not wanted:
        RESULT.write_text(json.dumps(table(found), indent=1) + "\n", encoding="utf-8")


def table(found: dict[str, Any]) -> dict[str, Any]:
    import transformers

    return {
        "tolerance": TOLERANCE,
        "verdicts": dict(Counter(one["verdict"] for one in found.values())),
        "families": found,
        "machine": {
            "processor": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


if __name__ == "__main__":
    main()
