"""Small trained models that ship with the package, and a corpus read from the running Python."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MODELS = ("teacher", "moe-teacher", "student")


def model_path(name: str) -> Path:
    """The folder of a builtin model, e.g. `teacher`."""
    return Path(__file__).resolve().parent / "models" / name


# -- corpus ----------------------------------------------------------------------------------------
# The embedded corpus: the text of the running Python installation.
#
# Every Python has several megabytes of English and code: the language reference behind `help()` and the source of the
# standard library. It is read in place, neither downloaded nor shipped. The split depends on the *name* of the top-
# level package, so it is the same in every Python version, and a package is never on both sides.


Split = Literal["train", "eval"]

HELD_OUT_SHARE = 0.10
TOPICS = "topics"

# Left out: Python's own tests (17 MB), character tables, third-party packages, and the topics file, which is read as
# documents instead.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
_MIN_CHARACTERS = 200


@dataclass(frozen=True)
class Document:
    """One text, and the name of the group it is held out with."""

    name: str
    group: str
    text: str


def hash_share(key: str) -> float:
    """Hash a key to [0, 1); the same on every machine and in every version."""
    digest = hashlib.sha256(key.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def split_of(group: str) -> Split:
    if group == TOPICS:
        return "train"  # pages quote each other, so none can be held out
    return "eval" if hash_share(f"stdlib:{group}") < HELD_OUT_SHARE else "train"


def topics() -> Iterator[Document]:
    """The reference pages behind `help("topics")`."""
    try:
        from pydoc_data.topics import topics as pages
    except ImportError:  # a stripped installation; the caller reports it
        return
    for name, text in sorted(pages.items()):
        if len(text) >= _MIN_CHARACTERS:
            yield Document(f"topic:{name}", TOPICS, text)


def _module_files(root: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not _SKIPPED_FOLDERS.intersection(parts[:-1]) and not parts[0].startswith("config-"):
            yield ".".join(parts).removesuffix(".py").removesuffix(".__init__"), path


def modules(root: Path | None = None) -> Iterator[Document]:
    """The source of every module of the standard library, grouped by top-level package."""
    root = root or Path(sysconfig.get_path("stdlib"))
    for name, path in _module_files(root):
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= _MIN_CHARACTERS:
            yield Document(name, name.split(".")[0].lstrip("_"), text)


def docstrings(root: Path | None = None) -> Iterator[Document]:
    """The docstrings of each module, one document a module."""
    for module in modules(root):
        entries = [f"{name}\n\n{text}" for name, _, text in _documented(module.text)]
        text = "\n\n".join(entries)
        if len(text) >= _MIN_CHARACTERS:
            yield Document(module.name, module.group, text)


def question_answers(root: Path | None = None) -> Iterator[tuple[Document, str, str]]:
    """(document, prompt, completion): a signature and the beginning of its docstring."""
    for module in modules(root):
        for name, signature, text in _documented(module.text):
            answer = text.split("\n\n")[0].strip()
            if signature and len(answer) >= 20:
                prompt = f"What does {module.name}.{name}{signature} do?\n"
                yield Document(f"{module.name}.{name}", module.group, text), prompt, answer


def _documented(source: str) -> Iterator[tuple[str, str, str]]:
    """(name, signature, docstring) of each documented object in a source text; nothing if it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # templates and test data in other Python dialects
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node)
            if text:
                name = getattr(node, "name", "module")
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield name, f"({ast.unparse(node.args)})", text
                else:
                    yield name, "", text


def own_text() -> Iterator[Document]:
    """Stillroom's own source: the fallback for a Python without the text of its standard library."""
    for document in modules(Path(__file__).resolve().parent.parent):
        yield Document(f"stillroom.{document.name}", document.name, document.text)
