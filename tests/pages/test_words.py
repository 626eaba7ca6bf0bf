"""No text that users see has a term of the left column of the word list in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from stillroom.cli import app

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "stillroom"
# Names in code, and the sources of figures at the end of a page, which name fields of result files.
HIDDEN = re.compile(r"<!--.*?-->|`[^`\n]*`", re.DOTALL)
IDENTIFIER = re.compile(r"[\w.:/-]*")  # keys and names in code are no texts
# Packages whose texts are not plain yet, with the reference pages written from them. To be emptied.
PENDING: tuple[str, ...] = ()
PENDING_PAGES = ("commands.md", "events.md") if PENDING else ()
PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "recipes/README.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in PENDING_PAGES),
]
SOURCES = [path for path in sorted(SOURCE.rglob("*")) if path.relative_to(SOURCE).parts[0] not in PENDING]
PLAIN = [path for path in SOURCES if path.suffix in (".toml", ".html", ".j2")]
MODULES = [path for path in (*SOURCES, *sorted((ROOT / "recipes").rglob("*"))) if path.suffix == ".py"]


def word_list() -> dict[str, list[str]]:
    """Each term that is not to be written, with the phrases in which it is right."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text[text.index("| do not write |") :].split("\n\n")[0].splitlines()[2:]
    terms = {}
    for row in table:
        left, _right, allowed = (cell.strip() for cell in row.strip("|").split("|"))
        terms |= {term: re.findall(r"`([^`]+)`", allowed) for term in re.findall(r"`([^`]+)`", left)}
    return terms


TERMS = word_list()
WANTED = re.compile("|".join(rf"(?<![\w-]){re.escape(term)}(?!\w)" for term in TERMS), re.IGNORECASE)
ALLOWED = re.compile("|".join(re.escape(phrase) for phrases in TERMS.values() for phrase in phrases), re.IGNORECASE)


def found(text: str) -> list[str]:
    """The terms in a text, each with the words around it. Line breaks may stand between two words."""
    text = ALLOWED.sub("", " ".join(HIDDEN.sub("", text).split()))
    return [text[max(0, match.start() - 30) : match.end() + 30] for match in WANTED.finditer(text)]


def literals(path: Path) -> Iterator[str]:
    """Docstrings and string literals of a module, without names and keys; of an f-string what is written as it is."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not IDENTIFIER.fullmatch(node.value):
            yield node.value


def unreleased() -> str:
    """The topmost section of the changelog."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return text.split("\n## ")[1]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_page_has_a_term_of_the_left_column(path: Path) -> None:
    assert found(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_preset_or_template_has_a_term_of_the_left_column(path: Path) -> None:
    assert found(path.read_text(encoding="utf-8").replace("\n#", "\n")) == []


def test_no_message_or_docstring_has_a_term_of_the_left_column() -> None:
    wrong = [
        (path.relative_to(ROOT).as_posix(), terms)
        for path in MODULES
        for text in literals(path)
        if (terms := found(text))
    ]
    assert wrong == []


@pytest.mark.skipif("cli" in PENDING, reason="help texts are not plain yet")
def test_no_help_text_has_a_term_of_the_left_column() -> None:
    def texts(command: object) -> Iterator[str]:
        yield getattr(command, "help", "") or ""
        for option in getattr(command, "params", []):
            yield getattr(option, "help", "") or ""
        for inner in getattr(command, "commands", {}).values():
            yield from texts(inner)

    assert [term for text in texts(typer.main.get_command(app)) for term in found(text)] == []


def test_the_newest_part_of_the_changelog_has_no_term_of_the_left_column() -> None:
    assert found(unreleased()) == []


def test_the_notebook_has_no_term_of_the_left_column() -> None:
    cells = json.loads((ROOT / "docs" / "start" / "t4.ipynb").read_text(encoding="utf-8"))["cells"]
    assert [term for cell in cells for term in found("".join(cell["source"]))] == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the student stands Beside\nits teacher", 1),
        ("a model card with figures", 0),
        ("a card without bf16", 1),
        ("--card T4", 0),
        ("discard, cardinal, besides", 0),
        ("the run goes\n    on", 1),
    ],
)
def test_a_term_is_found_as_a_word_and_allowed_in_its_phrases(text: str, number: int) -> None:
    assert len(found(text)) == number
