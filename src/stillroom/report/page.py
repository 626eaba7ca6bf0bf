"""Assemble the page: style, script, words, tables and figures in one file that loads nothing.

The content security policy in the head lists the two scripts by their hashes, so a browser would not run text from a
run even if it got into the page unescaped.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

from stillroom.report import sections
from stillroom.report.drawing import ROLES, Figure, dark_partners
from stillroom.report.figures import all_figures
from stillroom.report.markup import Html, element, join, json_block
from stillroom.report.record import RunRecord
from stillroom.report.router import router_part
from stillroom.report.sources import sources_table
from stillroom.report.words import facts, headline, size_sentence, story


def render(run: RunRecord) -> str:
    """The report of a run as one HTML document."""
    figures = all_figures(run)
    parts = [
        _section("result", "Result", sections.results_table(run), "No result was recorded."),
        _section("yardsticks", "Beside the teacher", sections.yardsticks_table(run)),
        _section("checks", "Checks", sections.checks_list(run)),
        _section("sources", "Sources", sources_table(run)),
        _section("curves", "Curves", _figures(figures), "No step was recorded, so there is nothing to draw."),
        _section("router", "The teacher's gates", router_part(run)),
        _section("guard", "What the guard did", sections.guard_table(run)) if run.history.num_events else None,
        _section("samples", "Samples", sections.samples_part(run)),
        _section("notes", "Notes", sections.notes_list(run)),
        _section("settings", "Settings", sections.settings_part(run)),
    ]
    present = [part for part in parts if part is not None]
    names = {"figures": [_drawing(figure) for figure in figures], "dark": dark_partners()}
    body = element("main", _top(run), *present, _foot())
    scripts = [_plotly(), _script()] if figures else []
    document = element(
        "html",
        _head(run, scripts),
        element("body", body, json_block("drawings", names), *(element("script", script) for script in scripts)),
        lang="en",
    )
    return f"<!doctype html>\n{document}\n"


def _head(run: RunRecord, scripts: list[Html]) -> Html:
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts) or "'none'"
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return element(
        "head",
        element("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{run.name} - stillroom"),
        element("style", _style()),
    )


def _top(run: RunRecord) -> Html:
    first, *rest = headline(run) or ["Nothing is known about this run's result."]
    numbers = [element("div", element("dt", name), element("dd", value)) for name, value in facts(run)]
    missing = [element("li", sentence) for sentence in run.missing]
    size, sentences = size_sentence(run), story(run)
    return element(
        "header",
        element("p", "stillroom", Html(" &middot; "), run.name, class_="eyebrow"),
        element("h1", first),
        element("p", " ".join([*rest, *([size] if size else [])]), class_="lead") if rest or size else None,
        element("ul", *[element("li", sentence) for sentence in sentences], class_="note") if sentences else None,
        element("aside", element("p", "Parts of this run are missing."), element("ul", *missing)) if missing else None,
        element("dl", *numbers, class_="facts") if numbers else None,
    )


def _section(identifier: str, title: str, content: Html | None, otherwise: str | None = None) -> Html | None:
    if content is None and otherwise is None:
        return None
    inner = content if content is not None else element("p", otherwise, class_="note")
    return element("section", element("h2", title), inner, id=identifier)


def _figures(figures: list[Figure]) -> Html | None:
    if not figures:
        return None
    drawn = [
        element(
            "figure",
            element("figcaption", element("h3", figure.title), element("p", figure.caption)),
            element("div", id=f"figure-{figure.key}", class_="plot", role="img", aria_label=figure.title),
            class_="wide" if figure.is_wide else None,
        )
        for figure in figures
    ]
    without = element("noscript", element("p", "The figures need JavaScript; the numbers above do not.", class_="note"))
    return join([without, element("div", *drawn, class_="figures")])


def _drawing(figure: Figure) -> dict[str, object]:
    return {"id": f"figure-{figure.key}", "data": figure.traces, "layout": figure.layout}


def _foot() -> Html:
    return element("footer", element("p", "Drawn from events.jsonl, summary.json and config.json of the run's folder."))


# -- style and script ------------------------------------------------------------------------------------


def _style() -> Html:
    light = "".join(f"--{role}:{colours[0]};" for role, colours in ROLES.items())
    dark = "".join(f"--{role}:{colours[1]};" for role, colours in ROLES.items())
    schemes = f":root{{{light}}}@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"
    return Html(schemes + _asset("page.css"))


def _script() -> Html:
    return Html(_asset("page.js"))


@cache
def _plotly() -> Html:
    return Html(_asset("vendor/plotly-basic.min.js"))


def _asset(name: str) -> str:
    return files("stillroom.report").joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
