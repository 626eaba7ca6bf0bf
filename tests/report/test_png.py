"""Laws of the picture as points: a file that any reader takes, with lines where they belong and legible words."""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from synthetic import write_run

from stillroom.report import RunRecord, write_report
from stillroom.report.drawing import colour
from stillroom.report.figures import perplexity
from stillroom.report.history import History
from stillroom.report.picture import HEIGHT, WIDTH
from stillroom.report.png import SCALE, Canvas, channels, dashed, draw, encode


def decoded(contents: bytes) -> np.ndarray:
    """The points of a PNG file, each chunk's checksum held against its contents."""
    assert contents[:8] == b"\x89PNG\r\n\x1a\n"
    place, kinds, packed, size = 8, [], b"", (0, 0)
    while place < len(contents):
        (length,) = struct.unpack(">I", contents[place : place + 4])
        kind, inner = contents[place + 4 : place + 8], contents[place + 8 : place + 8 + length]
        (checksum,) = struct.unpack(">I", contents[place + 8 + length : place + 12 + length])
        assert checksum == zlib.crc32(kind + inner)
        kinds.append(kind)
        size = struct.unpack(">II", inner[:8]) if kind == b"IHDR" else size
        packed += inner if kind == b"IDAT" else b""
        place += 12 + length
    assert kinds[0] == b"IHDR" and kinds[-1] == b"IEND"
    lines = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(size[1], 1 + 3 * size[0])
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(size[1], size[0], 3)


def test_points_come_back_as_they_were() -> None:
    points = np.random.default_rng(0).integers(0, 256, (7, 5, 3)).astype(np.uint8)
    assert np.array_equal(decoded(encode(points)), points)


def test_the_main_figure_stands_beside_the_page_in_every_colour_of_its_lines(tmp_path: Path) -> None:
    write_report(write_run(tmp_path / "run", num_steps=60))
    contents = (tmp_path / "run" / "report.png").read_bytes()
    points = decoded(contents)
    assert points.shape == (SCALE * HEIGHT, SCALE * WIDTH, 3) and len(contents) < 200_000
    assert (points == channels(colour("surface"))).all(-1).mean() > 0.85, "a light background"
    for role in ("student", "teacher", "baseline", "baseline_equal_compute", "ink", "muted", "grid"):
        assert (points == channels(colour(role))).all(-1).sum() > 100, role


def test_a_run_without_an_evaluation_has_no_picture(tmp_path: Path) -> None:
    write_report(tmp_path)
    assert not (tmp_path / "report.png").exists()


def test_the_same_run_gives_the_same_bytes() -> None:
    events = [{"event": "eval", "step": step, "perplexity": 9.0 - step} for step in range(3)]
    figures = [perplexity(RunRecord("run", history=History.of(events))) for _ in range(2)]
    assert figures[0] is not None and figures[1] is not None and draw(figures[0]) == draw(figures[1])


def test_a_line_covers_as_many_points_as_it_is_long_and_wide() -> None:
    for end in ((90.0, 20.0), (90.0, 60.0), (20.0, 90.0)):
        canvas = Canvas(110, 110, "#ffffff")
        canvas.line([(20.0, 20.0), end], 3.0, "#000000")
        covered = (255.0 - canvas.points[..., 0]).sum() / 255
        length = math.dist((20, 20), end)
        assert covered == pytest.approx(3.0 * length + math.pi * 1.5**2, rel=0.02)


def test_a_ring_is_empty_inside_and_a_dot_is_full() -> None:
    canvas = Canvas(40, 40, "#ffffff")
    canvas.dot(20.5, 20.5, 10.0, "#000000", ring=2.0)
    assert canvas.points[20, 20, 0] == 255 and canvas.points[20, 30, 0] == 0
    canvas.dot(20.5, 20.5, 10.0, "#000000")
    assert canvas.points[20, 20, 0] == 0 and canvas.points[20, 35, 0] == 255


def test_what_leaves_the_surface_is_cut_off() -> None:
    canvas = Canvas(20, 20, "#ffffff")
    canvas.line([(-50.0, -50.0), (-40.0, -45.0)], 3.0, "#000000")
    canvas.line([(10.0, 10.0), (500.0, 10.0)], 3.0, "#000000")
    assert canvas.points[10, 19, 0] == 0 and canvas.points[0, 0, 0] == 255


def test_dashes_are_drawn_and_left_out_in_turn_round_corners_too() -> None:
    corner = [(0.0, 0.0), (10.0, 0.0), (10.0, 10.0)]
    parts = list(dashed(corner, [4, 2]))
    lengths = [sum(math.dist(a, b) for a, b in itertools.pairwise(part)) for part in parts]
    assert lengths == pytest.approx([4, 4, 4, 2])
    assert parts[1][0] == (6.0, 0.0)
    assert list(dashed(corner, [])) == [corner]
