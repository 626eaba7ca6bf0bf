"""The report of one run: words, tables and figures in the order in which a reader asks."""

from __future__ import annotations

from stillroom.report import sections
from stillroom.report.about_data import data_part
from stillroom.report.advice import advice_part
from stillroom.report.configured import differences_part, reproduce_part
from stillroom.report.document import REFRESH_SECONDS, document, figures_part, section
from stillroom.report.evaluated import evaluated_part
from stillroom.report.figures import all_figures
from stillroom.report.markup import Html, element, join
from stillroom.report.record import RunRecord
from stillroom.report.router import router_part
from stillroom.report.sources import sources_table
from stillroom.report.token_view import token_data, tokens_part
from stillroom.report.words import facts, headline, size_sentence, story


def render(run: RunRecord, foot: str = "") -> str:
    """The report of a run as one HTML document."""
    figures = all_figures(run)
    no_result = None if run.is_running else "No result was recorded."
    settings = [part for part in (differences_part(run), sections.settings_part(run)) if part is not None]
    parts = [
        section("result", "Result", sections.results_table(run), no_result),
        section("yardsticks", "Beside the teacher", sections.yardsticks_table(run)),
        section("evaluated", "Measured by stillroom eval", evaluated_part(run)),
        section("checks", "Checks", sections.checks_list(run)),
        section("advice", "Advice", advice_part(run)),
        section("curves", "Curves", figures_part(figures), "No step was recorded, so there is nothing to draw."),
        section("tokens-view", "Token by token", tokens_part(run)),
        section("router", "The teacher's gates", router_part(run)),
        section("guard", "What the guard did", sections.guard_table(run)) if run.history.num_events else None,
        section("samples", "Samples", sections.samples_part(run)),
        section("data", "Data", data_part(run)),
        section("sources", "Sources", sources_table(run)),
        section("notes", "Notes", sections.notes_list(run)),
        section("settings", "Settings", join(settings) if settings else None),
        section("again", "How to run it again", reproduce_part(run)),
    ]
    present = [part for part in parts if part is not None]
    body = element("main", _top(run), *present, _foot(foot))
    return document(run.name, body, figures, token_data(run), is_refreshed=run.is_running)


def _top(run: RunRecord) -> Html:
    first, *rest = headline(run) or ["Nothing is known about this run's result."]
    numbers = [element("div", element("dt", name), element("dd", value)) for name, value in facts(run)]
    missing = [element("li", sentence) for sentence in run.missing]
    size, sentences = size_sentence(run), story(run)
    running = f"Written while the run goes on; this page loads itself again every {REFRESH_SECONDS} seconds."
    return element(
        "header",
        element("p", "stillroom", Html(" &middot; "), run.name, class_="eyebrow"),
        element("h1", first),
        element("p", " ".join([*rest, *([size] if size else [])]), class_="lead") if rest or size else None,
        element("p", running, class_="running", role="status") if run.is_running else None,
        element("ul", *[element("li", sentence) for sentence in sentences], class_="note") if sentences else None,
        element("aside", element("p", "Parts of this run are missing."), element("ul", *missing)) if missing else None,
        element("dl", *numbers, class_="facts") if numbers else None,
    )


def _foot(more: str) -> Html:
    said = "Drawn from events.jsonl, summary.json, tokens.json, eval.json and config.json of the run's folder."
    return element("footer", element("p", said), element("p", more) if more else None)
