"""One HTML document that loads nothing: style, scripts and data are in it.

The content security policy in the head lists the scripts by their hashes, so a browser would not run text from a run
even if it got into the page unescaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from stillroom.report.drawing import APART, ROLES, Figure, dark_partners
from stillroom.report.markup import Html, element, join, json_block

REFRESH_SECONDS = 30


def document(
    title: str, body: Html, figures: Sequence[Figure], tokens: dict[str, Any] | None, *, is_refreshed: bool = False
) -> str:
    """The page. `is_refreshed`: the browser loads it again every REFRESH_SECONDS."""
    drawings = {"figures": [_drawing(figure) for figure in figures], "dark": dark_partners()}
    data = [json_block("drawings", drawings)] if figures else []
    data += [json_block("tokens", tokens)] if tokens else []
    scripts = [*([_plotly()] if figures else []), *([_asset("page.js")] if data else [])]
    whole = element(
        "html",
        _head(title, scripts, is_refreshed),
        element("body", body, *data, *(element("script", script) for script in scripts)),
        lang="en",
    )
    return f"<!doctype html>\n{whole}\n"


def section(identifier: str, title: str, content: Html | None, otherwise: str | None = None) -> Html | None:
    """A part of the page under a heading; None where there is nothing to say."""
    if content is None and otherwise is None:
        return None
    inner = content if content is not None else element("p", otherwise, class_="note")
    heading = element("h2", title, id=f"{identifier}-title")
    return element("section", heading, inner, id=identifier, aria_labelledby=f"{identifier}-title")


def figures_part(figures: Sequence[Figure]) -> Html | None:
    if not figures:
        return None
    drawn = [
        element(
            "figure",
            element("figcaption", element("h3", figure.title), element("p", figure.caption)),
            element(
                "div",
                id=f"figure-{figure.key}",
                class_="plot",
                role="img",
                aria_label=f"{figure.title}. {figure.caption}",
            ),
            class_="wide" if figure.is_wide else None,
        )
        for figure in figures
    ]
    without = element("noscript", element("p", "The figures need JavaScript; the numbers above do not.", class_="note"))
    return join([without, element("div", *drawn, class_="figures")])


def _drawing(figure: Figure) -> dict[str, object]:
    return {"id": f"figure-{figure.key}", "data": figure.traces, "layout": figure.layout}


def _head(title: str, scripts: Sequence[Html], is_refreshed: bool) -> Html:
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts) or "'none'"
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return element(
        "head",
        element("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Html(f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">') if is_refreshed else None,
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{title} - stillroom"),
        element("style", _style()),
    )


def _style() -> Html:
    roles = {**ROLES, **APART}
    light = "".join(f"--{role}:{colours[0]};" for role, colours in roles.items())
    dark = "".join(f"--{role}:{colours[1]};" for role, colours in roles.items())
    schemes = f":root{{{light}}}@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"
    return Html(schemes + _asset("page.css"))


@cache
def _plotly() -> Html:
    return _asset("vendor/plotly-basic.min.js")


@cache
def _asset(name: str) -> Html:
    return Html(files("stillroom.report").joinpath(name).read_text(encoding="utf-8"))


@cache
def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
