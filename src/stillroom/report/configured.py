"""The page's part about the configuration: what differs from the nearest preset, and how to run it again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from stillroom.config import preset_names
from stillroom.config.load import build, read_preset
from stillroom.errors import StillroomError
from stillroom.report.markup import Html, element, join, text
from stillroom.report.record import RunRecord, mapping
from stillroom.telemetry.wording import clean, clip

MAX_DIFFERENCES = 60
MAX_CHARACTERS = 300


def differences_part(run: RunRecord) -> Html | None:
    """A table of the settings in which the run differs from the preset that is nearest to it."""
    if not run.config:
        return None
    name, rows = nearest_preset(run.config)
    if name is None:
        return None
    if not rows:
        return element("p", f"The configuration is that of the preset {name}.", class_="note")
    head = element("tr", *(element("th", word, scope="col") for word in ("setting", f"preset {name}", "this run")))
    body = [
        element(
            "tr",
            element("th", key, scope="row"),
            element("td", shown(there), data_label="preset"),
            element("td", shown(here), data_label="this run"),
        )
        for key, there, here in rows[:MAX_DIFFERENCES]
    ]
    note = f"The nearest preset is {name}; {len(rows)} settings differ from it."
    if len(rows) > MAX_DIFFERENCES:
        note += f" The first {MAX_DIFFERENCES} are listed."
    table = element("table", element("thead", head), element("tbody", *body), class_="differences")
    return join([element("p", note, class_="note"), table])


def nearest_preset(config: Mapping[str, Any]) -> tuple[str | None, list[tuple[str, Any, Any]]]:
    """(the preset with the fewest differing settings, (key, its value, ours) of each). None: no preset can be read."""
    best: tuple[str | None, list[tuple[str, Any, Any]]] = (None, [])
    ours = dict(flat(config))
    for name in preset_names():
        try:
            theirs = dict(flat(build(read_preset(name), name).to_dict()))
        except StillroomError:  # a preset of an objective that is not installed here
            continue
        keys = [key for key in ours if theirs.get(key) != ours[key]]  # one that the run did not know is no difference
        if best[0] is None or len(keys) < len(best[1]):
            best = name, [(key, theirs.get(key), ours.get(key)) for key in keys]
    return best


def reproduce_part(run: RunRecord) -> Html | None:
    """Commands that run the same configuration again."""
    if not run.config or not run.start:
        return None
    versions = mapping(run.start, "versions")
    wanted = [name for name in ("stillroom", "torch", "transformers") if versions.get(name)]
    named = " ".join(f"{name}=={clean(versions[name]).split('+')[0]}" for name in wanted)
    python = f"Python {clean(versions['python'])}, " if versions.get("python") else ""
    commands = [
        f"pip install {named or 'stillroom'}",
        """python -c "import json; print(json.dumps(json.load(open('config.json'))['config']))" > again.json""",
        "stillroom distill again.json --out runs/again",
        "stillroom report . runs/again",
    ]
    machine = ", ".join(f"{clean(key)} {clip(value, 60)}" for key, value in mapping(run.start, "machine").items())
    note = f"In the run's folder, with {python}and the models and data in the places that the configuration names."
    if machine:
        note += f" The run was made on: {machine}. Other devices and versions round differently."
    whole = element("details", element("summary", "The whole configuration as JSON"), element("pre", _json(run.config)))
    return join(
        [
            element("p", note, class_="note"),
            element("pre", text("\n".join(commands), keep_lines=True), class_="commands"),
            whole,
        ]
    )


def _json(config: Mapping[str, Any]) -> Html:
    return text(json.dumps(config, indent=1, ensure_ascii=True, default=str)[:60_000], keep_lines=True)


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{name}.")
        else:
            yield name, value


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return clip(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), MAX_CHARACTERS)
