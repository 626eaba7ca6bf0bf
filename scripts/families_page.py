"""Try every causal family of the installed transformers, and write docs/reference/families.md.

    python scripts/families_page.py                       # all of them, some minutes
    python scripts/families_page.py --only llama mamba    # print these, write nothing

Each is built tiny from its own configuration class (tests/support/families.py) and saved. A run then distils it from
itself for two steps; a second run is stopped after the first step and resumed, and must end with the same bits; the
student is loaded again, which tries its causality and its head. A family that is refused has the sentence with which it
is refused. What is done is kept in build/families.json: the same command goes on after a stop.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, KEPT = ROOT / "docs" / "reference" / "families.md", ROOT / "build" / "families.json"
_LONG = 240


@dataclass(frozen=True)
class Row:
    """What came of a family."""

    family: str
    outcome: str  # works, refused, not built, or fault
    network: str = ""
    head: str = ""  # fused, or its own logits
    detail: str = ""


def try_family(family: str) -> Row:
    """Build, train, resume, save and load a family.

    Some families have a tokenizer class that adds a token to the one that is used here: those get a larger head.
    """
    import families
    import tiny

    row = _try(family)
    if "the tokenizer goes up to" not in row.detail:
        return row
    families._SIZES["vocab_size"] = tiny.VOCAB + 16  # also that of a text model within another
    try:
        return _try(family)
    finally:
        families._SIZES["vocab_size"] = tiny.VOCAB


def _try(family: str) -> Row:
    import families

    try:
        model = families.build(family)
    except Exception as error:  # noqa: BLE001 - what cannot be built small is left out, with its reason
        return Row(family, "not built", detail=_line(f"{type(error).__name__}: {error}"))
    from stillroom.core.errors import StillroomError

    network = type(model).__name__
    with tempfile.TemporaryDirectory() as folder:
        try:
            return _tried(family, network, model, Path(folder))
        except StillroomError as error:
            return Row(family, "refused", network, detail=_line(error.what.replace(folder, "FOLDER")))
        except Exception as error:  # noqa: BLE001 - the page names it, and the command ends with an error
            return Row(family, "fault", network, detail=_line(f"{type(error).__name__}: {error}"))
        finally:
            gc.collect()


def _tried(family: str, network: str, model: Any, folder: Path) -> Row:
    import tiny
    import torch
    from safetensors.torch import load_file

    from stillroom.config import load_config
    from stillroom.config.schema import TeacherConfig
    from stillroom.models import open_teacher
    from stillroom.training.distill import distill, resume

    model.save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    tiny.save_text(folder / "train.jsonl", count=30)
    asked = {
        "teacher.model": str(folder / "model"), "student.model": str(folder / "model"), "data.max_length": 16,
        "train.max_steps": 2, "train.eval_steps": 2, "train.batch_size": 2, "eval.max_batches": 1, "eval.samples": 0,
        "precision.mode": "fp32",
    }  # fmt: skip
    config = load_config(overrides=tiny.settings(folder, **asked))
    distill(config, folder / "whole", device="cpu")
    _stop_after_one(config, folder / "stopped")
    resume(folder / "stopped", device="cpu")
    whole, again = (load_file(folder / name / "student" / "model.safetensors") for name in ("whole", "stopped"))
    if any(not torch.equal(whole[name], again[name]) for name in whole):
        return Row(family, "fault", network, detail="a resumed run ends with other weights")
    found = open_teacher(TeacherConfig(model=str(folder / "whole" / "student")), torch.float32)
    ids = torch.tensor([[5, 9, 2, 7, 11, 3]])
    with torch.no_grad():
        logits = found.network(input_ids=ids, use_cache=False).logits
    if not bool(torch.isfinite(logits).all()):
        return Row(family, "fault", network, detail="the saved student answers with values that are not finite")
    return Row(family, "works", network, "fused" if found.is_described else "own logits")


def _stop_after_one(config: Any, out: Path) -> None:
    """A run that is stopped from outside after its first step."""
    from stillroom.core.errors import Interrupted
    from stillroom.training.distill import distill
    from stillroom.training.loop import Stop

    wanted, asked = Stop.is_wanted, []

    def is_wanted(_stop: Stop) -> bool:
        asked.append(1)
        return len(asked) > 1

    Stop.is_wanted = is_wanted  # type: ignore[method-assign]
    try:
        distill(config, out, device="cpu")
    except Interrupted:
        return
    finally:
        Stop.is_wanted = wanted  # type: ignore[method-assign]
    raise AssertionError("the run was not stopped")


def _line(text: str) -> str:
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= _LONG else line[: _LONG - 3] + "..."


# -- the page --------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    found = {name: metadata.version(name) for name in ("stillroom", "transformers", "torch")}
    return {
        **found,
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
    }


def page(rows: list[Row], made_with: dict[str, str]) -> str:
    counts = Counter(row.outcome for row in rows)
    told = ", ".join(f"{name} {version}" for name, version in made_with.items())
    lines = [
        "# Families",
        "",
        f"Every causal family of the installed transformers ({len(rows)}), made by `python scripts/families_page.py` "
        f"({told}).",
        "",
        "Each was built tiny from its own configuration, distilled from itself for two steps, stopped and resumed to "
        "the same bits, saved and loaded again. `fused`: its head is evaluated in chunks; `own logits`: the head "
        "cannot be described, and a [tokens, vocabulary] tensor is kept.",
        "",
        f"{counts['works']} work, {counts['refused']} are refused by name, {counts['not built']} could not be built "
        f"this small, {counts['fault']} fail.",
        "",
        "| family | class | outcome | head | what was said |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.family} | {row.network} | {row.outcome} | {row.head} | {row.detail} |"
        for row in sorted(rows, key=lambda row: row.family)
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="+", help="try these and print them")
    asked = arguments.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import families

    if asked.only:
        rows = [try_family(family) for family in asked.only]
        print(page(rows, versions()))
        return int(any(row.outcome == "fault" for row in rows))
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if kept.get("versions") != versions():
        kept = {"versions": versions(), "rows": {}}
    KEPT.parent.mkdir(exist_ok=True)
    for family in families.ALL:
        if family not in kept["rows"]:
            kept["rows"][family] = asdict(try_family(family))
            KEPT.write_text(json.dumps(kept, indent=1))
            print(family, kept["rows"][family]["outcome"], kept["rows"][family]["detail"], flush=True)
    rows = [Row(**kept["rows"][family]) for family in families.ALL]
    PAGE.write_text(page(rows, versions()), encoding="utf-8")
    return int(any(row.outcome == "fault" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
