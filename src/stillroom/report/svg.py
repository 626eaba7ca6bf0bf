"""A figure as a small SVG file, drawn without a browser: for a README, a mail, a slide."""

from __future__ import annotations

from stillroom.report.drawing import Figure, colour
from stillroom.report.markup import Html, element, text
from stillroom.report.picture import HEIGHT, WIDTH, Dot, Shape, Stroke, Words, shapes


def draw(figure: Figure) -> str:
    """The figure as an SVG document."""
    size = {"width": WIDTH, "height": HEIGHT, "viewBox": f"0 0 {WIDTH} {HEIGHT}"}
    head = {"xmlns": "http://www.w3.org/2000/svg", "font_family": "system-ui, sans-serif", "role": "img"}
    surface = element("rect", width=WIDTH, height=HEIGHT, fill=colour("surface"))
    parts = [element("title", figure.title), surface, *map(_drawn, shapes(figure))]
    return str(element("svg", *parts, **head, **size)) + "\n"


def _drawn(shape: Shape) -> Html:
    match shape:
        case Stroke():
            return _line(shape)
        case Dot(x, y, radius, stroke, is_open):
            paint = {"fill": "none" if is_open else stroke, "stroke": stroke, "stroke_width": 2 if is_open else 0}
            return element("circle", cx=x, cy=y, r=radius, **paint)
        case Words(x, y, said, fill, size, anchor):
            place = {"x": round(x, 1), "y": round(y, 1), "text_anchor": anchor, "font_size": size}
            return element("text", text(said), **place, fill=fill)


def _line(stroke: Stroke) -> Html:
    dashes = " ".join(f"{length:g}" for length in stroke.dashes) or None
    paint = {"stroke": stroke.colour, "stroke_width": stroke.width, "stroke_dasharray": dashes}
    if stroke.is_rule:
        (x1, y1), (x2, y2) = stroke.points
        return element("line", x1=x1, x2=x2, y1=y1, y2=y2, **paint)
    path = " ".join(f"{x},{y}" for x, y in stroke.points)
    return element("polyline", points=path, fill="none", **paint)
