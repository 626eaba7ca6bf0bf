"""State files of a run and of a cache with one thing wrong in them, and with sums that hold all the same."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutations
from safetensors.torch import load_file, save_file

Values = Callable[[Any], Any]


def linked(source: Path, target: Path) -> Path:
    """A copy of a folder with hard links to its tensors, which are replaced and never written in place."""

    def copy(one: str, other: str) -> None:
        (os.link if one.endswith(".safetensors") else shutil.copyfile)(one, other)

    return Path(shutil.copytree(source, target, copy_function=copy))


def rewrite(path: Path, content: bytes) -> None:
    """Replace a file without touching other links to it."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def edit(path: Path, change: Values) -> None:
    """Replace the JSON value of a file by what `change` gives for it."""
    rewrite(path, json.dumps(change(json.loads(path.read_bytes()))).encode())


def reseal(checkpoint: Path) -> None:
    """Write the sums of a checkpoint's files into its manifest, as they are now."""

    def sums(manifest: dict[str, Any]) -> dict[str, Any]:
        for name in manifest["files"]:
            content = (checkpoint / name).read_bytes()
            manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        return manifest

    edit(checkpoint / "manifest.json", sums)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    return sorted((run / "checkpoints").glob("step-*"), reverse=True)


def note_rollback(run: Path) -> Path:
    """Write the note of a rollback that a kill left behind, as the run would have written it."""
    saved = json.loads((checkpoints(run)[0] / "state.json").read_bytes())
    history = {"state": saved["state"], "guard": saved["guard"], "events": saved["events"]}
    path = run / "checkpoints" / "rollback.json"
    path.write_text(json.dumps({"line": 1, "to": int(saved["state"]["applied"]), "history": history}))
    return path


def damage_bytes(path: Path, chance: random.Random) -> None:
    """Cut a file short, flip bits of it, or put other bytes into it."""
    content = bytearray(path.read_bytes())
    match chance.randrange(4):
        case 0:
            content = content[: chance.randrange(len(content) + 1)]
        case 1:
            for _ in range(chance.choice([1, 1, 8])):
                content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        case 2:
            place = chance.randrange(len(content))
            content[place : place + chance.randrange(16)] = chance.randbytes(chance.randrange(16))
        case _:
            content = bytearray(chance.choice([b"", b"null", b"[]", b"{}", b"7", b"[" * 100_000, b"\xff\xfe" * 64]))
    rewrite(path, bytes(content))


def damage_json(path: Path, chance: random.Random, num_changes: int = 1) -> None:
    """Put a value of another type or size somewhere into a JSON file, or remove one."""
    value = json.loads(path.read_bytes())
    for _ in range(num_changes):
        value = mutations.mutated(value, chance) if isinstance(value, dict | list) and value else value
    rewrite(path, json.dumps(value).encode())


def damage_lines(path: Path, chance: random.Random) -> None:
    """The same in one to three lines of a log."""
    lines = path.read_bytes().splitlines()
    for number in chance.sample(range(len(lines)), min(len(lines), chance.choice([1, 1, 3]))):
        lines[number] = json.dumps(mutations.mutated(json.loads(lines[number]), chance)).encode()
    rewrite(path, b"\n".join(lines) + b"\n")


def damage_tensors(path: Path, chance: random.Random) -> None:
    """Give one tensor of a file another type, shape or range, or leave it out."""
    tensors = dict(load_file(path))
    name = chance.choice(sorted(tensors))
    tensor = tensors.pop(name)
    match chance.randrange(6):
        case 0:
            tensors[name] = tensor.double() if tensor.is_floating_point() else tensor.float()
        case 1:
            tensors[name] = tensor.reshape(-1)[:1].clone()
        case 2:
            tensors[name] = tensor.reshape(-1).clone()
        case 3 if not tensor.is_floating_point():
            tensors[name] = tensor.long() + 10**6
        case 4 if not tensor.is_floating_point():
            tensors[name] = tensor.long() - 10**6
        case _:
            pass
    temporary = path.with_name("damaged")
    save_file(tensors, temporary)
    temporary.replace(path)
