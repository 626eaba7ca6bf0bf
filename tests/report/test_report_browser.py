"""The report in a real browser: figures are drawn, and nothing is refused, thrown or fetched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import IS_THERE, Browser, browser
from synthetic import write_run

from stillroom.report import write_report, write_reports

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not IS_THERE, reason="apt-get install chromium chromium-driver"),
]

FIGURES = ["perplexity", "objective", "shares", "raw", "weighted", "pulls", "gradients", "rates", "pace", "verdicts"]
WIDTHS = (360, 820, 1600)
HOSTILE = (
    "<a href='https://evil.example/'>x</a></script><script>document.title='owned'</script>"
    "<img src=x onerror=\"document.title='owned'\">"
)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_run(tmp_path_factory.mktemp("runs") / "run", num_steps=60))


def drawn(window: Browser) -> list[str]:
    """The figures in which plotly drew a line or a mark."""
    found: list[str] = window.run(
        """return [...document.querySelectorAll('.js-plotly-plot')]
           .filter((plot) => plot.querySelector('path.js-line, .points path, .stackgroup path, .js-fill'))
           .map((plot) => plot.id.replace('figure-', ''))"""
    )
    return found


def check_quiet(window: Browser, path: Path) -> None:
    assert window.console() == []
    assert window.requests() == [path.resolve().as_uri()]


@pytest.mark.parametrize("kind", ["finished", "crashed", "hostile"])
def test_every_figure_is_drawn_and_nothing_is_refused_or_fetched(window: Browser, tmp_path: Path, kind: str) -> None:
    until = 30 if kind == "crashed" else None
    name = HOSTILE if kind == "hostile" else None
    path = write_report(write_run(tmp_path / "run", num_steps=60, until=until, name=name))
    window.open(path)
    assert set(FIGURES) <= set(drawn(window))
    check_quiet(window, path)
    assert window.run("return document.title") != "owned"
    assert window.run("return document.querySelectorAll('a, img, iframe, object, embed, form').length") == 0


def test_every_figure_is_valid_to_plotly(window: Browser, page: Path) -> None:
    window.open(page)
    # An attribute without effect ("unused") is no fault. Plotly itself fails to validate the legend of a single trace.
    problems = window.run(
        """return JSON.parse(document.getElementById('drawings').textContent).figures.flatMap((figure) => {
             const { legend, ...others } = figure.layout;
             const layout = figure.data.length > 1 ? figure.layout : others;
             return (Plotly.validate(figure.data, layout) || []).filter((one) => one.code !== 'unused');
           }).map((one) => one.msg)"""
    )
    assert problems == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("is_dark", [False, True])
def test_nothing_has_to_be_scrolled_sideways(window: Browser, page: Path, width: int, is_dark: bool) -> None:
    window.open(page, width=width, is_dark=is_dark)
    inner, scrolled = window.run("return [innerWidth, document.documentElement.scrollWidth]")
    assert inner == width and scrolled <= width
    too_wide = window.run(
        """return [...document.querySelectorAll('main *')].filter((one) => !one.closest('svg') &&
           one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.tagName + '.' + one.className)"""
    )
    assert too_wide == []


def test_a_token_of_many_spaces_stays_in_its_box(window: Browser, page: Path) -> None:
    window.open(page, width=WIDTHS[0])
    token, box = window.run(
        """const one = document.querySelector('.tokens .token'); one.textContent = ' '.repeat(200);
           return [one, one.closest('.tokens')].map((each) => each.getBoundingClientRect().right)"""
    )
    assert token <= box


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("is_dark", [False, True])
def test_words_and_tokens_can_be_read_on_their_background(window: Browser, page: Path, is_dark: bool) -> None:
    """A contrast of at least 4.5, as WCAG 2 asks of text."""
    window.open(page, is_dark=is_dark)
    pairs: list[list[str]] = window.run(
        """const behind = (one) => { for (let at = one; at; at = at.parentElement) {
             const colour = getComputedStyle(at).backgroundColor;
             if (!colour.startsWith('rgba')) return colour; } return 'rgb(255, 255, 255)'; };
           return [...document.querySelectorAll('h1, .lead, .note, td, .token, .swatch, .unscored, h4, .detail')]
             .map((one) => [getComputedStyle(one).color, behind(one), one.className])"""
    )
    assert len(pairs) > 50
    for ink, paper, where in pairs:
        light, dim = sorted((luminance(ink), luminance(paper)), reverse=True)
        assert (light + 0.05) / (dim + 0.05) >= 4.5, (where, ink, paper)


def test_figures_take_the_colours_of_a_dark_screen(window: Browser, page: Path) -> None:
    strokes: dict[bool, Any] = {}
    for is_dark in (False, True):
        window.open(page, is_dark=is_dark)
        strokes[is_dark] = window.run(
            "return getComputedStyle(document.querySelector('#figure-perplexity path.js-line')).stroke"
        )
    assert strokes == {False: "rgb(29, 111, 121)", True: "rgb(98, 188, 198)"}


def test_the_token_view_is_used_by_keyboard_alone(window: Browser, page: Path) -> None:
    window.open(page)
    for _ in range(40):
        window.press("tab")
        if window.run("return document.activeElement.classList.contains('token')"):
            break
    at = "return document.activeElement.dataset.at"
    assert window.run(at) == "0.2"
    window.press("right", "right")
    assert window.run(at) == "0.4"
    words = window.run("return document.getElementById('token-detail').innerText")
    assert "distance" in words and "teacher" in words and "student" in words and words.count("%") == 12
    assert window.run("return document.activeElement.getAttribute('aria-selected')") == "true"
    assert window.run("return document.querySelectorAll('[aria-selected=true]').length") == 1
    window.press("end")
    assert window.run(at) == "0.61"
    window.press("home", "left")
    assert window.run(at) == "0.2"
    window.press("tab")
    assert window.run(at) == "1.2", "a row is one stop of the tab key"
    assert window.console() == []


def test_a_token_that_is_pointed_at_shows_both_models(window: Browser, page: Path) -> None:
    window.open(page)
    window.run(
        """document.querySelector("[data-at='1.5']").dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"""
    )
    lists = window.run("return [...document.querySelectorAll('#token-detail ol')].map((list) => list.children.length)")
    assert lists == [5, 5]


def test_several_runs_are_drawn_on_one_page(window: Browser, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", num_steps=60), write_run(tmp_path / "b", num_steps=60, until=40, name=HOSTILE)]
    path = write_reports(runs, tmp_path / "compared.html")
    window.open(path, width=360)
    assert set(drawn(window)) == {"perplexity", "objective", "gradients", "rates"}
    assert window.run("return document.documentElement.scrollWidth") <= 360
    check_quiet(window, path)


def test_a_run_without_steps_has_a_page_without_scripts(window: Browser, tmp_path: Path) -> None:
    path = write_report(tmp_path)
    window.open(path)
    assert "Nothing of this run" in window.run("return document.body.innerText")
    assert window.run("return document.scripts.length") == 0
    check_quiet(window, path)


def test_the_watch_itself_sees_a_refused_script(window: Browser, tmp_path: Path) -> None:
    """The other tests rest on an empty console meaning something."""
    report = write_report(write_run(tmp_path / "run", num_steps=60))
    broken = report.read_text(encoding="utf-8").replace("</main>", "<script>document.title='owned'</script></main>", 1)
    report.write_text(broken, encoding="utf-8")
    window.open(report)
    assert any("Content Security Policy" in message for message in window.console())
    assert window.run("return document.title") != "owned"
