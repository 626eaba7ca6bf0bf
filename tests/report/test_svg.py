"""Laws of the picture beside the page."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from synthetic import write_run

from stillroom.report import RunRecord, write_report
from stillroom.report.figures import perplexity
from stillroom.report.history import History
from stillroom.report.picture import HEIGHT, WIDTH
from stillroom.report.svg import draw

NAMES = {"svg": "http://www.w3.org/2000/svg"}


def test_the_main_figure_stands_beside_the_page_as_a_picture(tmp_path: Path) -> None:
    write_report(write_run(tmp_path / "run", num_steps=60))
    picture = ElementTree.parse(tmp_path / "run" / "report.svg").getroot()
    lines = picture.findall("svg:polyline", NAMES)
    assert len(lines) == 4  # student, teacher, two baselines
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    words = [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "2,000" in words and "plain training, equal tokens" in words
    assert any("Held-out perplexity fell" in text for text in words)


def test_the_student_falls_on_the_picture_as_its_perplexity_does() -> None:
    evals = [{"event": "eval", "step": step, "perplexity": value} for step, value in ((0, 9.0), (10, 8.0), (20, 7.5))]
    figure = perplexity(RunRecord("run", history=History.of(evals)))
    assert figure is not None
    (line,) = ElementTree.fromstring(draw(figure)).findall("svg:polyline", NAMES)
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert heights == sorted(heights) and heights[0] < heights[-1]  # down the screen


def test_a_run_without_an_evaluation_has_no_picture(tmp_path: Path) -> None:
    write_report(tmp_path)
    assert not (tmp_path / "report.svg").exists()
