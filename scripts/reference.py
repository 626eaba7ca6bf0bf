"""Write the reference pages from the schema, the command line and the catalogue of events.

python scripts/reference.py            write docs/reference/*.md
python scripts/reference.py --check    exit code 1 where a page is not what would be written
"""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stillroom.cli import app
from stillroom.config import Config, preset_names, preset_text
from stillroom.config.schema import PhaseConfig, Ramp, SourceConfig
from stillroom.core import errors
from stillroom.core.errors import StillroomError
from stillroom.telemetry.events import EVENTS, HEADER, TERM

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
MADE = "<!-- written by scripts/reference.py -->\n"


# -- configuration ----------------------------------------------------------------------------------------


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class of a field, also of one that may be left out; None for any other value."""
    kinds = [annotation, *get_args(annotation)]
    found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not Ramp]
    return found[0] if found and get_origin(annotation) is not tuple else None


def values_of(annotation: Any) -> list[str]:
    """What may be written for a field, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return values_of(arguments[0])
    if origin is Literal:
        return [f"`{value}`" for value in arguments]
    if origin in (Union, types.UnionType):
        return list(dict.fromkeys(word for one in arguments for word in values_of(one)))
    if origin is tuple:
        return ["list"]
    if origin is dict:
        return ["table"]
    words = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "none", Ramp: "ramp"}
    return [words.get(annotation, "table")]


def shown(value: Any) -> str:
    """A default as TOML writes it."""
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        pairs = ", ".join(f"{key} = {json.dumps(one)}" for key, one in value.model_dump(exclude_defaults=True).items())
        return f"`{{{pairs}}}`"
    if isinstance(value, float):
        return f"`{value!r}`"
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def default_of(field: FieldInfo) -> str:
    return "required" if field.is_required() else shown(field.get_default(call_default_factory=True))


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def sections(kind: type[BaseModel], name: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted name, class) of a section and of those inside it."""
    yield name, kind
    for key, field in kind.model_fields.items():
        if inner := section_of(field.annotation):
            yield from sections(inner, f"{name}.{key}")


def rows_of(kind: type[BaseModel], name: str) -> Iterator[str]:
    for key, field in kind.model_fields.items():
        if section_of(field.annotation):
            continue
        described = cell(field.description or "")
        values = ", ".join(values_of(field.annotation))
        full = f"{name}.{key}" if name else key
        yield f"| `{full}` | {default_of(field)} | {values} | {described} |"


def table(rows: list[str]) -> str:
    return "\n".join(["| key | default | values | what it does, and why |", "|---|---|---|---|", *rows])


def configuration() -> str:
    parts = [
        "# Configuration",
        MADE,
        "Every key with its default. A run is configured by a TOML or JSON file with these sections; `--set KEY=VALUE` "
        "sets one on the command line and wins over the file, the file wins over `preset`, and a preset wins over the "
        "defaults here. An unknown key is an error; one that was given and that the run does not read is a note at the "
        "start, and an error with `--strict`. `stillroom presets NAME` prints a preset with its reasons.",
        'In addition to the sections a file may have `preset = "NAME"`. Objectives that other packages bring have '
        "their own sections `objectives.NAME`: [extending](../guides/extending.md). Paths are relative to the "
        "current folder, not to the file.",
    ]
    for name, field in Config.model_fields.items():
        top = section_of(field.annotation)
        assert top is not None
        for dotted, kind in sections(top, name):
            rows = list(rows_of(kind, dotted))
            if rows:
                optional = dotted in ("student.adapter", "rollouts")
                parts += [f"## {dotted}", *(["None by default; any key makes it a table."] if optional else [])]
                parts.append(table(rows))
    parts += [
        "## Ramps",
        "A number marked *ramp* may be a table in place of a constant. Progress goes from 0 to 1 over the run.",
        table(list(rows_of(Ramp, ""))),
        "## Sources",
        "`data.train` may be a list of such tables in place of one name.",
        table(list(rows_of(SourceConfig, ""))),
        "## Phases",
        "`curriculum.phases` is a list of such tables.",
        table(list(rows_of(PhaseConfig, ""))),
        "## Presets",
        "| preset | what it is for |\n|---|---|\n"
        + "\n".join(
            f"| `{name}` | {cell(preset_text(name).splitlines()[0].lstrip('# '))} |" for name in preset_names()
        ),
    ]
    return "\n\n".join(parts) + "\n"


# -- commands ---------------------------------------------------------------------------------------------


def option_row(option: Any) -> str:
    if option.param_type_name == "argument":
        return f"| `{cell((option.metavar or option.name.upper()).strip('[]'))}` | | {help_of(option)} |"
    names = "`" + "`, `".join([*option.opts, *option.secondary_opts]) + "`"
    default = option.default() if callable(option.default) else option.default
    is_plain = isinstance(default, str | int | float) and not isinstance(default, bool) and default != ""
    given = f"`{default}`" if is_plain else ""
    return f"| {names} | {given} | {help_of(option)} |"


def help_of(option: Any) -> str:
    """The help with the options it names as code, which is not broken after its hyphens."""
    return re.sub(r"(?<![`\w-])--[a-z][\w-]*", r"`\g<0>`", cell(option.help or ""))


def command_part(name: str, command: Any) -> str:
    parts = [f"## {name}", paragraphs(command.help or "")]
    rows = [option_row(one) for one in command.params if not one.name.startswith("help") and not one.hidden]
    if rows:
        parts.append("| argument or option | default | meaning |\n|---|---|---|\n" + "\n".join(rows))
    inner = getattr(command, "commands", {})
    return "\n\n".join([*parts, *(command_part(f"{name} {one}", inner[one]) for one in inner)])


def paragraphs(text: str) -> str:
    blocks = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(" ".join(block.split()) for block in blocks)


def exit_codes() -> str:
    found: dict[int, list[str]] = {}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, StillroomError) and kind is not StillroomError:
            found.setdefault(kind.exit_code, []).append(paragraphs((kind.__doc__ or "").split("\n\n")[0]))
    lines = [f"| {code} | {cell(' '.join(dict.fromkeys(found[code])))} |" for code in sorted(found)]
    return "| exit code | how it ended |\n|---|---|\n| 0 | Done. |\n" + "\n".join(lines)


def commands() -> str:
    group: Any = typer.main.get_command(app)
    parts = [
        "# Commands",
        MADE,
        "Names of options may be written with `-` or `_`. `stillroom COMMAND --help` prints the same. "
        "`stillroom --version` prints the version. `stillroom --install-completion` lets your shell complete commands, "
        "options and presets; `stillroom --show-completion` prints the script instead.",
        *(command_part(name, group.commands[name]) for name in group.commands),
        "## Exit codes",
        exit_codes(),
    ]
    return "\n\n".join(parts) + "\n"


# -- events -----------------------------------------------------------------------------------------------


def keys_table(keys: dict[str, str], sometimes: dict[str, str]) -> str:
    rows = [f"| `{key}` | {cell(text)} |" for key, text in keys.items()]
    rows += [f"| `{key}` (not always) | {cell(text)} |" for key, text in sometimes.items()]
    return "\n".join(["| key | meaning |", "|---|---|", *rows])


def events() -> str:
    parts = [
        "# Events",
        MADE,
        "`events.jsonl` in a run's folder has one JSON object a line, each written whole. It is strict JSON: a value "
        "that is not finite is `null` and a key `NAME_nonfinite` says `nan`, `inf` or `-inf`. Console, report, `watch` "
        "and `diagnose` read nothing else. A program may rely on these keys; others may be added.",
        "Every event has",
        keys_table(HEADER, {}),
        "and each entry of `terms` in `step` and `eval` has",
        keys_table(TERM, {}),
    ]
    for name, kind in EVENTS.items():
        parts += [f"## {name}", kind.when, keys_table(kind.keys, kind.sometimes)]
    return "\n\n".join(parts) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "commands.md": commands,
    "events.md": events,
}


def main() -> int:
    is_check = "--check" in sys.argv[1:]
    old = [name for name, make in PAGES.items() if not (FOLDER / name).is_file() or make() != read(name)]
    if is_check:
        for name in old:
            print(f"docs/reference/{name} is not current: python scripts/reference.py")
        return 1 if old else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in old:
        (FOLDER / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"docs/reference/{name}")
    return 0


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
