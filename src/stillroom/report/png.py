"""A figure as a PNG file, drawn point by point: for places that show no SVG, such as many mails and chats.

Everything is a line with round ends: how much of a point it covers follows from the point's distance to it, which
gives smooth edges without drawing at a larger size first.

# S pieces of a line, H and W points of the patch they touch
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from stillroom.report.drawing import Figure, colour
from stillroom.report.lettering import advance, strokes_of, unit, width_of
from stillroom.report.picture import HEIGHT, WIDTH, Dot, Point, Stroke, Words, shapes

SCALE = 2  # points of the picture for each of the figure: sharp on today's screens
_DOTS_PER_METRE = round(96 * SCALE / 0.0254)  # shown as large as the SVG
_PEN = 0.095  # of the size of a text; bolder where it is large
_PIECES, _AREA = 32, 1_000_000  # pieces of a line that are drawn at once, and pieces times points: bounds the memory

Floats = NDArray[np.float32]


def draw(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    canvas = Canvas(SCALE * WIDTH, SCALE * HEIGHT, colour("surface"))
    for shape in shapes(figure):
        match shape:
            case Stroke(points, stroke, width, dashes):
                scaled = [(SCALE * x, SCALE * y) for x, y in points]
                for piece in dashed(scaled, [SCALE * length for length in dashes]):
                    canvas.line(piece, SCALE * width, stroke)
            case Dot(x, y, radius, stroke, is_open):
                canvas.dot(SCALE * x, SCALE * y, SCALE * radius, stroke, ring=2.0 * SCALE if is_open else 0.0)
            case Words():
                _write(canvas, shape)
    return encode(canvas.points)


class Canvas:
    """A surface of points in red, green and blue."""

    def __init__(self, width: int, height: int, paint: str) -> None:
        self.points = np.empty((height, width, 3), np.uint8)
        self.points[:] = channels(paint)

    def line(self, points: Sequence[Point], width: float, paint: str) -> None:
        """A line through points. Its pieces join without a seam: a point takes what covers it most."""
        pieces = list(itertools.pairwise(points)) or [(points[0], points[0])]
        for begin in range(0, len(pieces), _PIECES):
            for part in _parts(np.array(pieces[begin : begin + _PIECES], np.float32)):
                self._cover(part, width / 2, paint)

    def dot(self, x: float, y: float, radius: float, paint: str, *, ring: float = 0.0) -> None:
        """A full circle, or with `ring` a circle of a line that wide."""
        self._cover(np.array([[[x, y], [x, y]]], np.float32), radius, paint, ring=ring)

    def _cover(self, pieces: Floats, radius: float, paint: str, *, ring: float = 0.0) -> None:
        height, width, _ = self.points.shape
        margin = radius + ring + 1.0
        low, high = pieces.min((0, 1)) - margin, pieces.max((0, 1)) + margin
        left, top = max(0, math.floor(low[0])), max(0, math.floor(low[1]))
        right, bottom = min(width, math.ceil(high[0])), min(height, math.ceil(high[1]))
        if left >= right or top >= bottom:
            return
        xs = np.arange(left, right, dtype=np.float32) + np.float32(0.5)  # the middle of each point
        ys = np.arange(top, bottom, dtype=np.float32) + np.float32(0.5)
        apart = _distances(pieces, xs, ys)
        inside = ring / 2 - np.abs(apart - radius) if ring else radius - apart
        share = np.clip(inside + 0.5, 0.0, 1.0)[..., None]
        patch = self.points[top:bottom, left:right]
        patch[:] = np.rint(patch + share * (np.array(channels(paint), np.float32) - patch)).astype(np.uint8)


def _parts(pieces: Floats) -> Iterator[Floats]:
    """Pieces in groups, each small enough to be drawn at once. [S, 2, 2]"""
    area = float(np.prod(np.ptp(pieces, (0, 1)) + 1.0))
    if len(pieces) == 1 or len(pieces) * area <= _AREA:
        yield pieces
        return
    middle = len(pieces) // 2
    yield from _parts(pieces[:middle])
    yield from _parts(pieces[middle:])


def _distances(pieces: Floats, xs: Floats, ys: Floats) -> Floats:
    """The distance of each point to the nearest piece. [S, 2, 2], [W], [H] -> [H, W]"""
    start, along = pieces[:, 0], pieces[:, 1] - pieces[:, 0]
    squared = np.maximum((along**2).sum(-1), 1e-12)[:, None, None]
    dx, dy = xs[None, None, :] - start[:, 0, None, None], ys[None, :, None] - start[:, 1, None, None]
    ax, ay = along[:, 0, None, None], along[:, 1, None, None]
    share = np.clip((dx * ax + dy * ay) / squared, 0.0, 1.0)
    nearest: Floats = np.sqrt(((dx - share * ax) ** 2 + (dy - share * ay) ** 2).min(0))
    return nearest


def dashed(points: Sequence[Point], lengths: Sequence[float]) -> Iterator[list[Point]]:
    """The parts of a line that are drawn: `lengths` are drawn and left out in turn. Without lengths, all of it."""
    if not lengths:
        yield list(points)
        return
    left, place, is_drawn = lengths[0], 0, True
    part = [points[0]]
    for begin, end in itertools.pairwise(points):
        whole, done = math.dist(begin, end), 0.0
        while whole - done > left:
            done += left
            at = (begin[0] + (end[0] - begin[0]) * done / whole, begin[1] + (end[1] - begin[1]) * done / whole)
            if is_drawn:
                yield [*part, at]
            place = (place + 1) % len(lengths)
            left, is_drawn, part = lengths[place], not is_drawn, [at]
        left -= whole - done
        part.append(end)
    if is_drawn:
        yield part


def _write(canvas: Canvas, words: Words) -> None:
    """A line of text. One that is wider than the picture is written smaller."""
    size = float(SCALE * words.size)
    room = SCALE * (WIDTH - 2 * min(words.x, 24.0))
    size = size * min(1.0, room / max(width_of(words.text, size), 1e-6))
    shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[words.anchor] * width_of(words.text, size)
    x, y, scale = SCALE * words.x - shift, SCALE * words.y, unit(size)
    for letter in words.text:
        for stroke in strokes_of(letter):
            canvas.line([(x + scale * px, y - scale * py) for px, py in stroke], _PEN * size, words.colour)
        x += advance(letter, size)


def channels(paint: str) -> tuple[int, int, int]:
    """`#1d6f79` as red, green and blue."""
    return int(paint[1:3], 16), int(paint[3:5], 16), int(paint[5:7], 16)


def encode(points: NDArray[np.uint8]) -> bytes:
    """Points as a PNG file (ISO/IEC 15948): eight bits for each of red, green and blue, lines stored as they are."""
    height, width, _ = points.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), points.reshape(height, -1)], axis=1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    size = struct.pack(">IIB", _DOTS_PER_METRE, _DOTS_PER_METRE, 1)
    chunks = [(b"IHDR", head), (b"pHYs", size), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, *zip(*chunks, strict=True)))


def _chunk(kind: bytes, contents: bytes) -> bytes:
    return struct.pack(">I", len(contents)) + kind + contents + struct.pack(">I", zlib.crc32(kind + contents))
