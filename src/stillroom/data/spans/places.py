"""Where the tokens of a text stand in its bytes.

If the tokens' own bytes are the text, or a space and the text, their places follow by addition. Otherwise the
tokenizer has changed the text (lower case, NFKC, dropped spaces, unknown characters): then the offsets that it reports
say where to look, and a group of tokens has a place only if its own bytes stand there. A token that cannot be verified
keeps the range it claims and is not sure: no span may hold it.

# N tokens, G groups of tokens whose claims overlap, X bytes of the text
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stillroom.data.spans.token_bytes import Bytes, Ints, TokenBytes
from stillroom.errors import DataError

Flags = npt.NDArray[np.bool_]
_SPACE = 0x20
_WHITE = np.zeros(256, np.bool_)
_WHITE[[0x09, 0x0A, 0x0B, 0x0C, 0x0D, 0x20]] = True


@dataclass(frozen=True)
class Placed:
    """Tokens in reading order. Starts and ends never fall; sure tokens do not overlap."""

    index: Ints  # [N], number of the token in its document
    starts: Ints  # [N], in bytes
    ends: Ints  # [N]
    is_sure: Flags  # [N], its own bytes are the text's at this place, but for a space that is invented or implied
    is_own: Flags  # [N], its own bytes are exactly the text's

    @staticmethod
    def none() -> Placed:
        nothing = np.zeros(0, np.int64)
        return Placed(nothing, nothing, nothing, nothing != 0, nothing != 0)

    def shifted(self, num_bytes: int, num_tokens: int) -> Placed:
        return replace(self, index=self.index + num_tokens, starts=self.starts + num_bytes, ends=self.ends + num_bytes)


def place_tokens(text: str, ids: Ints, offsets: tuple[Ints, Ints], table: TokenBytes) -> Placed:
    """Find the bytes of each token. `offsets` are the characters [start, end) that the tokenizer reports."""
    try:
        whole = np.frombuffer(text.encode("utf-8"), np.uint8)
    except UnicodeEncodeError as error:
        raise DataError(f"a text holds half of a surrogate pair, which has no bytes: {error.reason}") from error
    if not len(ids):
        return Placed.none()
    own, sizes = table.spelled(ids)
    if table.is_known[ids].all() and not table.implies_spaces:
        if np.array_equal(own, whole):
            return _added_up(sizes, 0)
        if len(own) == len(whole) + 1 and own[0] == _SPACE and np.array_equal(own[1:], whole):
            return _added_up(sizes, 1)
    claims = _byte_claims(text, *offsets)
    return _Groups(whole, own, sizes, claims, table.is_known[ids]).placed(text if table.implies_spaces else None)


def _added_up(sizes: Ints, num_invented: int) -> Placed:
    """Tokens whose bytes are the text, after `num_invented` bytes that are not."""
    ends = np.cumsum(sizes)
    is_own = ends - sizes >= num_invented
    ends = np.maximum(ends - num_invented, 0)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    return Placed(np.arange(len(sizes)), starts, ends, np.ones(len(sizes), np.bool_), is_own)


def _byte_claims(text: str, starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Character offsets as byte offsets; ends never fall."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    places = np.concatenate([[0], np.cumsum(widths)])
    ends = np.maximum.accumulate(np.maximum(ends, starts)) if len(ends) else ends
    return places[starts], places[ends]


class _Groups:
    """Tokens grouped where their claims overlap, compared with the text as groups."""

    def __init__(self, whole: Bytes, own: Bytes, sizes: Ints, claims: tuple[Ints, Ints], is_known: Flags) -> None:
        starts, ends = claims
        earliest = np.minimum.accumulate(starts[::-1])[::-1]  # a later token may reach back
        reached = np.concatenate([[0], ends[:-1]])
        is_first = earliest >= reached
        is_first[:1] = True
        self._group = np.cumsum(is_first) - 1  # [N]
        firsts = np.flatnonzero(is_first)
        self._whole, self._own, self._token_sizes = whole, own, sizes
        self._before = np.cumsum(sizes) - sizes  # own bytes before each token
        self.starts, self.ends = earliest[firsts], ends[np.append(firsts[1:], len(ends)) - 1]
        self.sizes = np.add.reduceat(sizes, firsts)
        self._own_starts = self._before[firsts]
        self._is_known = np.logical_and.reduceat(is_known, firsts)
        self._white_before = np.concatenate([[0], np.cumsum(_WHITE[whole])])
        padded = np.append(own, np.uint8(0))  # a group without bytes may stand at the end
        self._leads = (padded[self._own_starts] == _SPACE) & (self.sizes > 0)

    def placed(self, text: str | None) -> Placed:
        """`text` is given where words imply the spaces before them."""
        core, invented, is_sure = self._cores()
        sizes = self.sizes - invented
        ends = np.where(is_sure, core + sizes, self.ends)
        core = np.where(is_sure, core, self.starts)
        implied = self._implied(text, core, ends, is_sure) if text is not None else np.zeros(len(core), np.bool_)
        group = self._group
        inside = np.maximum(self._before - self._own_starts[group] - invented[group], 0)
        token_ends = self._before + self._token_sizes - self._own_starts[group] - invented[group]
        sure = is_sure[group]
        starts = np.where(sure, core[group] + inside, core[group])
        stops = np.where(sure, core[group] + np.maximum(token_ends, 0), ends[group])
        opens = np.concatenate([[True], group[1:] != group[:-1]])
        touched = (implied[group] & opens) | (invented[group] > self._before - self._own_starts[group])
        starts = starts - (implied[group] & opens)
        return Placed(np.arange(len(group)), starts, stops, sure, sure & ~touched)

    def _cores(self) -> tuple[Ints, Ints, Flags]:
        """Where each group's own bytes stand, how many of them (0 or 1) are an invented space, and which are found."""
        none = np.zeros(len(self.starts), np.int64)
        reached = np.concatenate([[0], self.ends[:-1]])
        before = np.where(self.starts > 0, self._whole[np.maximum(self.starts - 1, 0)], 0) if len(self._whole) else none
        takes_space = self._leads & (before == _SPACE) & (self.starts - 1 >= reached)
        whites = self._first_dark(self.starts) - self.starts
        tries = (
            (self.starts, none, np.ones(len(none), np.bool_)),
            (self.starts - 1, none, takes_space),
            (self.starts, none + 1, self._leads),
            (self.starts + whites, none, whites > 0),
        )
        core, invented, is_sure = self.starts.copy(), none.copy(), np.zeros(len(none), np.bool_)
        for begin, skipped, is_tried in tries:
            found = is_tried & ~is_sure & self._is_known & self._matches(begin, skipped)
            core, invented = np.where(found, begin, core), np.where(found, skipped, invented)
            is_sure |= found
        return core, invented, is_sure

    def _matches(self, begin: Ints, skipped: Ints) -> Flags:
        """Whether the own bytes after `skipped` stand at `begin`, and the rest of the claim is white space."""
        sizes = self.sizes - skipped
        ends = begin + sizes
        fits = (sizes >= 0) & (begin >= 0) & (ends <= self.ends)
        begin, sizes = np.where(fits, begin, 0), np.where(fits, sizes, 0)
        total = np.cumsum(sizes)
        inside = np.arange(int(total[-1]) if len(total) else 0) - np.repeat(total - sizes, sizes)
        group = np.repeat(np.arange(len(sizes)), sizes)
        differs = self._whole[begin[group] + inside] != self._own[self._own_starts[group] + skipped[group] + inside]
        num_different = np.bincount(group[differs], minlength=len(sizes))
        ends = np.where(fits, ends, 0)
        rest = self.ends - ends
        is_white = self._white_before[self.ends] - self._white_before[ends] == rest
        matches: Flags = fits & (num_different == 0) & is_white
        return matches

    def _first_dark(self, places: Ints) -> Ints:
        """The first byte at or after each place that is not white space."""
        dark = np.append(np.flatnonzero(~_WHITE[self._whole]), len(self._whole))
        return dark[np.searchsorted(dark, places)]

    def _implied(self, text: str, core: Ints, ends: Ints, is_sure: Flags) -> Flags:
        """The groups before which a single space between two words was dropped.

        Both neighbours must be letters or digits that the tokenizer would otherwise have read as one word: before and
        after punctuation, and between ideographs, the tokens are the same with and without the space.
        """
        reached = np.concatenate([[0], ends[:-1]])
        is_gap = is_sure & (core - reached == 1) & (core > 1)
        is_gap[1:] &= is_sure[:-1]
        places = np.maximum(core, 2)
        if not len(self._whole) or not is_gap.any():
            return np.zeros(len(core), np.bool_)
        is_gap &= self._whole[np.minimum(places - 1, len(self._whole) - 1)] == _SPACE
        is_gap[:1] = False
        is_word = _word_bytes(text)
        last = len(is_word) - 1
        implied: Flags = is_gap & is_word[np.minimum(places - 2, last)] & is_word[np.minimum(core, last)]
        return implied


def _word_bytes(text: str) -> Flags:
    """For each byte, whether its character is a letter or a digit of a script that writes words apart."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    distinct, place = np.unique(points, return_inverse=True)
    is_word = np.array([chr(point).isalnum() and not _is_ideograph(point) for point in distinct.tolist()], np.bool_)
    of_bytes: Flags = np.repeat(is_word[place], widths)
    return of_bytes


def _is_ideograph(point: int) -> bool:
    return 0x2E80 <= point <= 0x9FFF or 0xF900 <= point <= 0xFAFF or 0x20000 <= point <= 0x3FFFF
