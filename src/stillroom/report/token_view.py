"""Teacher against student on held-out text: each token coloured by how far the two differ before it.

The tokens of a row are one stop of the tab key, and arrow keys move among them; the script shows both models' five
likeliest tokens for the one that is focused or pointed at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stillroom.report.markup import Html, element, join, text
from stillroom.report.record import RunRecord
from stillroom.telemetry.reading import items, section
from stillroom.telemetry.wording import as_number, clean, clip, format_count, format_percent

MAX_ROWS = 8
MAX_TOKENS = 128  # of a row
MAX_CHARACTERS = 40  # of a token
BOUNDS = (0.05, 0.15, 0.3, 0.5, 0.7)  # distances at which the colour changes
_SPACE, _LINE, _NOTHING = "\u00b7", "\u21b5", "\u25ab"  # how white space and no text of its own are shown


def tokens_part(run: RunRecord) -> Html | None:
    rows = list(_rows(run))
    if not rows:
        note = run.tokens.get("note")
        return element("p", f"Not shown: {clean(note)}.", class_="note") if note else None
    distances = [distance for row in rows for token in row["tokens"] if (distance := _distance(token)) is not None]
    if not distances:
        return None
    intro = (
        f"On {format_count(len(distances))} held-out tokens, student and teacher place "
        f"{format_percent(sum(distances) / len(distances), 0)} of their probability on different tokens on average. "
        f"Compared over {clean(run.tokens.get('compared', 'the stored tokens'))}. Underlined: their likeliest tokens "
        "differ. Point at a token, or tab to a row and use the arrow keys."
    )
    drawn = [_row(number, row, len(rows)) for number, row in enumerate(rows)]
    detail = element("p", "No token is chosen.", class_="note")
    panel = element("div", detail, id="token-detail", class_="token-detail", role="status", aria_live="polite")
    return join([element("p", intro, class_="note"), _legend(), *drawn, panel])


def token_data(run: RunRecord) -> dict[str, Any] | None:
    """What the script shows of each token: [distance, p of the teacher, p of the student, its top 5, theirs]."""
    rows = [[_numbers(token) for token in row["tokens"]] for row in _rows(run)]
    if not any(token for row in rows for token in row):
        return None
    used = {str(id_) for row in rows for token in row if token for id_, _ in [*token[3], *token[4]]}
    texts = {id_: visible(value) for id_, value in section(run.tokens, "texts").items() if id_ in used}
    return {"rows": rows, "texts": texts}


def _rows(run: RunRecord) -> Iterator[dict[str, Any]]:
    for row in items(run.tokens, "rows")[:MAX_ROWS]:
        if isinstance(row, Mapping):
            tokens = [token for token in items(row, "tokens") if isinstance(token, Mapping)]
            yield {**row, "tokens": tokens[:MAX_TOKENS]}


def _numbers(token: Mapping[str, Any]) -> list[Any] | None:
    distance = _distance(token)
    if distance is None:
        return None
    chances = [as_number(token.get(f"{side}_probability")) for side in ("teacher", "student")]
    return [distance, *chances, *(_pairs(token, side) for side in ("teacher", "student"))]


def _pairs(token: Mapping[str, Any], side: str) -> list[list[float]]:
    pairs = [pair for pair in items(token, side)[:5] if isinstance(pair, list) and len(pair) == 2]
    return [[int(id_), chance] for id_, chance in pairs if isinstance(id_, int) and as_number(chance) is not None]


def _distance(token: Mapping[str, Any]) -> float | None:
    distance = as_number(token.get("distance"))
    return distance if distance is not None and 0.0 <= distance <= 1.0 else None


def visible(value: object) -> str:
    """One line in which leading and trailing spaces, line breaks and emptiness can be seen."""
    shown = clean(value, keep_lines=True).replace("\n", _LINE)[:MAX_CHARACTERS]
    start, end = len(shown) - len(shown.lstrip(" ")), len(shown.rstrip(" "))
    if not shown.strip(" "):
        return _SPACE * len(shown) or _NOTHING
    return _SPACE * start + shown[start:end] + _SPACE * (len(shown) - end)


def _row(number: int, row: Mapping[str, Any], num_rows: int) -> Html:
    name = f"held-out row {number + 1} of {num_rows}: {clip(row.get('id'), 60)}"
    is_first, tokens = True, []
    for place, token in enumerate(row["tokens"]):
        distance = _distance(token)
        if distance is None:
            tokens.append(element("span", _shown(token), class_="unscored"))
            continue
        pairs = [_pairs(token, side) for side in ("teacher", "student")]
        differs = " differs" if all(pairs) and pairs[0][0][0] != pairs[1][0][0] else ""
        tokens.append(
            element(
                "span",
                _shown(token),
                class_=f"token d{sum(distance >= bound for bound in BOUNDS)}{differs}",
                role="option",
                aria_selected="false",
                tabindex="0" if is_first else "-1",
                data_at=f"{number}.{place}",
            )
        )
        is_first = False
    left_out = as_number(row.get("left_out"))
    more = element("span", f" ... {format_count(left_out)} more tokens", class_="note") if left_out else None
    box = element("div", *tokens, class_="tokens", role="listbox", aria_label=name, dir="auto")
    return element("div", element("h4", clip(row.get("id"), 60)), box, more, class_="token-row")


def _shown(token: Mapping[str, Any]) -> Html:
    """The text with its white space; a line break is also seen, and a token without text has a place."""
    shown = clean(token.get("text"), keep_lines=True)[:MAX_CHARACTERS]
    return text(shown.replace("\n", f"{_LINE}\n") or _NOTHING, keep_lines=True)


def _legend() -> Html:
    ends = ("0", *(f"{bound:g}" for bound in BOUNDS))
    swatches = [element("span", f"from {end}", class_=f"swatch d{level}") for level, end in enumerate(ends)]
    return element("p", "Distance, 0 to 1 (total variation):", *swatches, class_="legend")
