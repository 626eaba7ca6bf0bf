"""A teacher on a server: its top tokens and what they leave over, for a run or for a cache."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from stillroom.config import Config
from stillroom.config.schema import TeacherConfig
from stillroom.core.errors import ConfigError, ServerGone, ServerUnusable, masked
from stillroom.core.types import IGNORED, Batch, Needs, Signal
from stillroom.data import Rows, fixed_batches
from stillroom.models.files import fetch, read_json
from stillroom.teachers.base import SignalKind, Teacher, Window
from stillroom.teachers.served.client import Client, ServerRefused
from stillroom.teachers.served.shapes import (
    ECHO,
    PROMPT_LOGPROBS,
    Completions,
    LlamaCpp,
    MissingField,
    Prompt,
    Shape,
    num_tokens,
)
from stillroom.teachers.signals import (
    Entry,
    Given,
    RowAnswer,
    SignalSpec,
    Spelling,
    check_use,
    label_metrics,
    position_answer,
    served_spec,
    signal_of,
)
from stillroom.teachers.sparse import describe, to_device

# -- server ----------------------------------------------------------------------------------------
# A server that passed its probe: which model it has, in which shape it answers, and asking it prompts.
#
# What is asked of a server before it is believed, and again while it is used.
#
# The text is fixed, and some of what a right answer must be is known whatever the model:
#
# causal    With another token at place m, the answers up to and including that about token m stay, and that about token
#           m + 1 changes. An answer that changes earlier saw the token it answers; one that changes later is about the
#           token before. Either is a shift by one, even if the token that came was put into its table.
# tokens    What the server says tokens spell is what the tokenizer says.
# steady    Asked again, the answer is the same, until the server has another model.
#
# Of real rows of the data, those answers that fit much better when they are sharpened or flattened are log-
# probabilities of another temperature: see `fitted_temperature`.


TEXT = (
    "In the still room of the old house they kept spirits, waters and oils. The maid who kept the room knew how long a "
    "thing must be heated, how slowly it must drip, and what is left behind when the best of it has gone over. In the "
    "still room of the old house they kept"
)
_MOST_TOKENS = 64
_SHARE = 0.1  # of the largest change: more in an answer that cannot have changed is not rounding
_NOISES = 4.0  # times the rounding: what is less did not change
_LEAST_CHANGE = 1e-5  # in total variation: below it nothing depends on the token that was changed
_MOST_DRIFT = 0.05  # nats a token, mean: batches of half-precision servers differ by less, other models by more
_DEGREES = np.geomspace(0.25, 4.0, 33)
_FAR = 1.6  # a factor of temperature: text that a model does not know well makes a smaller one
_LEAST_GAIN = 0.02  # nats a token
_SIGMAS = 3.0


@dataclass(frozen=True)
class Probe:
    """The prompts of the causal test, in ids: they differ in one token."""

    ids: tuple[int, ...]
    other: tuple[int, ...]
    changed: int

    @staticmethod
    def of(tokenizer: Any) -> Probe:
        ids = tuple(int(one) for one in tokenizer(TEXT, add_special_tokens=False)["input_ids"])[:_MOST_TOKENS]
        changed = len(ids) // 2
        instead = next(token for token in (*ids[changed + 2 :], *ids) if token != ids[changed])
        return Probe(ids, (*ids[:changed], instead, *ids[changed + 1 :]), changed)


def spread_places(length: int, most: int | None) -> list[int]:
    """Tokens of a probe of this length that are asked about, from the second to the last; None: all of them."""
    if most is None or most >= length - 1:
        return list(range(1, length))
    return [1 + (length - 2) * number // max(1, most - 1) for number in range(most)]


def check_causal(one: Given, other: Given, changed: int, num_kept: int) -> None:
    """Raise where the change of a token shows in another answer first than in that about the next token.

    Answers about earlier tokens cannot have changed: how much they did is rounding, and what is several times that is
    not. A share of the largest change would not do: the letter after a changed one may hardly change, the next a lot.
    """
    changes = {
        place: _change(_top(one.entries[place], num_kept), _top(other.entries[place], num_kept))
        for place in one.entries
    }
    most = max(changes.values())
    if most < _LEAST_CHANGE:
        raise _wrong("its answers do not depend on the text: another token in the prompt changed nothing")
    quiet = max((change for place, change in changes.items() if place < changed), default=0.0)
    least = _SHARE * most if quiet > _SHARE * most else max(_LEAST_CHANGE, _NOISES * quiet)
    first = next(place for place, change in changes.items() if change > least)
    if first == changed + 1:
        return
    told = f"token {changed} of the prompt was changed, and the answers change from that about token {first} on"
    meaning = {
        changed: "each answer is about the token after the one it stands at: shifted by one",
        changed + 2: "each answer is about the token before the one it stands at: shifted by one",
    }.get(first, "an answer about a token must depend on all before it and on no other")
    raise _wrong(f"{told}: {meaning}")


def _top(entry: Entry, num_kept: int) -> Entry:
    """The top tokens of an entry, without the prompt's own token where it is not one of them."""
    return dict(sorted(entry.items(), key=lambda item: (-item[1], item[0]))[:num_kept])


def _change(one: Entry, other: Entry) -> float:
    """A lower bound of the total variation of two tables. What is not in a table has at most its least mass."""
    floors = [math.exp(min(table.values())) for table in (one, other)]
    found = 0.0
    for token in {**one, **other}:
        masses = [math.exp(table[token]) if token in table else None for table in (one, other)]
        match masses:
            case [float() as mine, float() as theirs]:
                found += abs(mine - theirs)
            case [float() as mine, None]:
                found += max(0.0, mine - floors[1])
            case [None, float() as theirs]:
                found += max(0.0, theirs - floors[0])
    return found / 2.0


def own_log_probs(given: Given) -> list[float]:
    """[T - 1] What each token of the prompt but the first was given."""
    return [entry[given.ids[place]] for place, entry in given.entries.items()]


def check_steady(before: Sequence[float], now: Sequence[float], *, since: str) -> None:
    """Raise where the probe is answered otherwise than before."""
    if len(before) != len(now):
        raise _wrong(f"the probe has {len(now)} answers, and had {len(before)} {since}")
    drift = float(np.abs(np.maximum(before, -50.0) - np.maximum(now, -50.0)).mean())
    if drift > _MOST_DRIFT:
        raise ServerUnusable(
            f"the server answers the probe otherwise than {since}: by {drift:.3g} nats a token on average, and "
            f"{_MOST_DRIFT} is the most that rounding explains. It has another model",
            advice=["serve the model that was served before", "for another teacher begin another cache or run"],
        )


# -- temperature -----------------------------------------------------------------------------------------


def fitted_temperature(given: Sequence[Given], num_kept: int) -> tuple[float, float, float]:
    """(temperature, gain, standard error): the temperature that answers seem to have been given at.

    Among the kept tokens, those that came have probability softmax(log_probs) at the given temperature and
    softmax(d * log_probs) at d times a colder one, whatever the tail is. The d under which they were most likely is
    that temperature; `gain` is by how much, in nats a token. A model that knows its text has d near 1.
    """
    gains = []
    for one in given:
        for place, entry in one.entries.items():
            kept = dict(sorted(entry.items(), key=lambda item: -item[1])[:num_kept])
            if (came := one.ids[place]) in kept and kept[came] > -math.inf:
                gains.append(_scaled(np.array([kept[came], *kept.values()])))
    if not gains:
        return 1.0, 0.0, 0.0
    table = np.stack(gains)  # [positions, degrees], compared with the answers as they are
    best = int(table.mean(axis=0).argmax())
    chosen = table[:, best]
    return float(_DEGREES[best]), float(chosen.mean()), float(chosen.std() / math.sqrt(len(chosen)))


def _scaled(values: Any) -> Any:
    """[degrees] Log-probability of the first among the others at each degree, less that at degree 1."""
    own, among = values[0], values[1:]
    degrees = np.concatenate([_DEGREES, [1.0]])
    scores = degrees[:, None] * (np.maximum(among, -500.0) - among.max())[None]
    found = degrees * (max(own, -500.0) - among.max()) - np.log(np.exp(scores).sum(axis=1))
    return found[:-1] - found[-1]


def check_temperature(given: Sequence[Given], num_kept: int, *, is_raw: bool = False) -> str:
    """Raise where answers are certainly those of another temperature. Answers with what was found, for the log.

    A small model on text that it does not know is as sharp as one that was sharpened. Where the server's answers are
    known to be raw (`is_raw`), that is logged and not refused; answers that are too flat have no such cause.
    """
    degree, gain, error = fitted_temperature(given, num_kept)
    told = f"the server's answers fit the text best as log-probabilities of temperature {degree:.2g}"
    told += f", by {gain:.3g} nats a token over temperature 1"
    is_far = degree >= _FAR or degree <= 1.0 / _FAR
    if is_far and gain > _LEAST_GAIN and gain > _SIGMAS * error:
        way = "flatter" if degree > 1.0 else "sharper"
        if is_raw and degree < 1.0:
            return f"{told}: the teacher is surer of this text than it has reason to be; its log-probabilities are raw"
        raise ServerUnusable(
            f"{told}: they are {way} than the text allows",
            advice=[
                "have the server give log-probabilities of temperature 1 (vLLM: --logprobs-mode raw_logprobs)",
                "where the teacher is known to be so: --set teacher.requests.check_temperature=false",
            ],
        )
    return told


def _wrong(what: str) -> ServerUnusable:
    return ServerUnusable(f"the server's answers cannot be used: {what}", where="the probe")


# -- the server --------------------------------------------------------------------------------------------


_MODELS, _VERSION, _DETOKENIZE = "/v1/models", "/version", "/detokenize"
_OTHER_SHAPE = (400, 404, 405, 422, 501)  # a request that the server does not know, or not so
_LONGEST_NAME = 500  # characters of a model's name or of a version
_TRIED = (
    "programs that give log-probabilities of prompts as token ids: vLLM and llama.cpp's server; others may likewise"
)
_SHAPES: dict[str, Callable[[Client], Shape]] = {
    PROMPT_LOGPROBS.name: lambda client: Completions(PROMPT_LOGPROBS, client),
    ECHO.name: lambda client: Completions(ECHO, client),
    LlamaCpp.name: LlamaCpp,
}


@dataclass(frozen=True)
class Facts:
    """What a server says of itself. Nothing of it is secret."""

    url: str
    model: str
    version: str | None
    max_tokens: int | None  # of a prompt with the token that is generated after it

    def to_dict(self) -> dict[str, Any]:
        return {"server": self.url, "served_model": self.model, "server_version": self.version}


class Server:
    """Asks prompts of ids. Every answer is checked: see `shapes.py`."""

    def __init__(self, client: Client, facts: Facts, shape: Shape, *, num_wanted: int, vocab_size: int) -> None:
        self.client, self.shape = client, shape
        self.facts = replace(
            facts,
            version=masked(shape.version or facts.version or "")[:_LONGEST_NAME] or None,
            max_tokens=facts.max_tokens or shape.max_tokens,
        )
        self.num_wanted, self._vocab_size = min(num_wanted, vocab_size), vocab_size
        self.notes: tuple[str, ...] = ()  # what could not be checked
        self.is_raw = False  # log-probabilities cannot be those of another temperature
        self.probe: Probe | None = None
        self.probed: list[float] = []  # the probe's own tokens, as they were answered first

    def score(self, ids: Sequence[int], places: Sequence[int] | None = None) -> Given:
        """What the server says about tokens of a prompt: about `places`, or all but the first."""
        return self.shape.score(self.facts.model, Prompt.of(ids, places, self.num_wanted, self._vocab_size))

    def check_again(self) -> None:
        """Raise where the probe is answered otherwise than at first."""
        assert self.probe is not None
        places = spread_places(len(self.probe.ids), self.shape.num_rechecked)
        now = own_log_probs(self.score(self.probe.ids, places))
        check_steady([self.probed[place - 1] for place in places], now, since="at the start")


def key_of(section: TeacherConfig) -> str:
    """The server's key, from the environment; empty where none is named."""
    name = section.requests.api_key_variable
    if name is None:
        return ""
    if not (found := os.environ.get(name, "").strip()):
        raise ConfigError(
            f"the environment has no variable {name}", where="teacher.requests.api_key_variable", advice=["export it"]
        )
    if not found.isascii() or not found.isprintable():
        raise ConfigError(f"the key in {name} cannot be sent", where="teacher.requests.api_key_variable")
    return found


def open_server(section: TeacherConfig, tokenizer: Any, *, num_wanted: int, vocab_size: int) -> Server:
    """A server that was asked the probe and answered correctly. `tokenizer` is the one that texts are read with."""
    assert section.server is not None
    client = Client(section.server, section.requests, key_of(section))
    facts = facts_of(client, section.requests.model)
    probe = Probe.of(tokenizer)
    wanted = section.requests.shape
    shapes = list(_SHAPES) if wanted == "auto" else [wanted]
    failures: list[str] = []
    for name in shapes:
        try:
            server = Server(client, facts, _SHAPES[name](client), num_wanted=num_wanted, vocab_size=vocab_size)
            given = server.score(probe.ids)
        except ServerUnusable as error:
            failures.append(f"{name}: {error.what}")
            may_differ = isinstance(error, MissingField) or getattr(error, "status", 0) in _OTHER_SHAPE
            if may_differ and name != shapes[-1]:
                continue
            raise _no_shape(client, failures, error, shapes) from error
        server.probe, server.probed = probe, own_log_probs(given)
        server.notes = _check_spelling(server, given, tokenizer)
        check_causal(given, server.score(probe.other), probe.changed, server.num_wanted)
        server.check_again()
        server.is_raw = server.shape.is_raw(facts.model, Prompt.of(probe.ids, None, num_wanted, vocab_size))
        return server
    raise AssertionError  # the last shape returned or raised


def _no_shape(client: Client, failures: Sequence[str], last: ServerUnusable, shapes: Sequence[str]) -> ServerUnusable:
    """The reason of each shape that was tried."""
    advice = [*last.advice, _TRIED]
    if client.server_header.lower().startswith(LlamaCpp.name) and LlamaCpp.name not in shapes:
        advice = [f"--set teacher.requests.shape={LlamaCpp.name}", *advice]
    told = "; ".join(failures)
    return ServerUnusable(
        f"the server gives no usable log-probabilities: {told}", where=str(client.address), advice=advice
    )


def facts_of(client: Client, wanted: str | None) -> Facts:
    """The model that is asked for, or the only one there is."""
    url = str(client.address)
    try:
        listed = client.ask("GET", _MODELS)
        models = {masked(str(one["id"])): one for one in listed["data"]}
        if any(len(name) > _LONGEST_NAME for name in models):
            raise ServerUnusable(f"{_MODELS} has a name of more than {_LONGEST_NAME:,} characters", where=url)
    except ServerRefused as error:
        if error.status not in (404, 405, 501) or wanted is None:
            raise
        models = {}
    except (KeyError, TypeError) as error:
        raise ServerUnusable(f"{_MODELS} gives no list of models", where=url, advice=[_TRIED]) from error
    if wanted is None and len(models) != 1:
        raise ConfigError(
            f"the server has {len(models)} models: {', '.join(sorted(models)[:8])}",
            where="teacher.requests.model",
            advice=["name one of them: --set teacher.requests.model=NAME"],
        )
    if wanted is not None and models and wanted not in models:
        raise ConfigError(
            f"the server has no model {wanted!r}, but {', '.join(sorted(models)[:8])}",
            where="teacher.requests.model",
            advice=["name one of them: --set teacher.requests.model=NAME"],
        )
    name = wanted or next(iter(models))
    about = models.get(name, {})
    limit = about.get("max_model_len") if isinstance(about, Mapping) else None
    most = None if limit is None else num_tokens(limit, f"{_MODELS}: `max_model_len`")
    return Facts(url, name, _version(client), most)


def _version(client: Client) -> str | None:
    """What the server says of its version; its Server header where it has no page for that."""
    try:
        found = client.ask("GET", _VERSION)
    except ServerRefused:
        return client.server_header or None
    return str(found["version"]) if isinstance(found, Mapping) and "version" in found else client.server_header or None


def _check_spelling(server: Server, given: Given, tokenizer: Any) -> tuple[str, ...]:
    """Raise where tokens spell something else on the server. Answers with what could not be checked, for the log."""
    spelling, wrong = Spelling(tokenizer), None
    if found := spelling.fault([given]):
        wrong = found[0]
    elif not given.texts:
        try:
            asked = {"model": server.facts.model, "tokens": list(given.ids)}
            told = server.client.ask("POST", _DETOKENIZE, asked)
        except (ServerRefused, ServerGone) as error:
            return (f"the server does not say what its tokens spell ({error.what}): its tokenizer is not checked",)
        held = told if isinstance(told, Mapping) else {}
        text = held.get("prompt", held.get("content"))  # vLLM's name, and llama.cpp's
        ours = tokenizer.decode(list(given.ids), clean_up_tokenization_spaces=False)
        if not isinstance(text, str) or text.strip() != ours.strip():
            wrong = f"the probe's tokens spell {masked(str(text))[:60]!r} there and {ours[:60]!r} in the tokenizer"
    if wrong is None:
        return ()
    raise ServerUnusable(
        f"the server has another tokenizer: {wrong}",
        where=server.facts.url,
        advice=[
            "name the folder or hub id of the served model in teacher.model",
            "choose a student with its tokens",
        ],
    )


_LEAST_TAIL = 1e-6  # what is left of 1 after some dozens of FP32 log-probabilities is rounding below this
_COMPARED = (
    "held-out KL and agreement are taken from these tokens and what they leave over, not from the whole vocabulary: "
    "KL is a lower bound"
)
_LEAST_ROW = 8  # tokens that data.max_length has at least
_TRIAL_ROWS = 64  # spread over the data; they are asked until there are enough positions
_TRIAL_POSITIONS = 512  # of the data, by which the temperature is told


class ServedTeacher(Teacher):
    """Asks each row as a prompt of ids, several at once, and the rows of the next window ahead.

    Each piece of a packed row is a prompt by itself: a server cannot be told that attention stops there. After the rows
    of a window, or of a batch of a cache, the probe is asked again, so that no answer of another model is kept unseen.
    """

    def __init__(
        self,
        server: Server,
        spec: SignalSpec,
        *,
        vocab_size: int,
        device: torch.device,
        concurrency: int,
        window: Window | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.server, self.spec = server, spec.within(vocab_size)
        self.kind: SignalKind = "top-k"
        self.num_exact = self.spec.exact
        self.batch_tokens = server.shape.batch_tokens
        facts = server.facts
        told = f"the teacher is not loaded: {facts.model} on {facts.url} answers with {describe(self.spec)}"
        at_once = min(concurrency, server.shape.most_at_once or concurrency)
        self.notes = (f"{told}, {at_once} requests at once, by {server.shape.name}", _COMPARED)
        self.notes += (*server.notes, *notes)
        self._device, self._window = device, window
        self._least_tail = 0.0 if self.spec.exact >= vocab_size else _LEAST_TAIL
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="stillroom-server")
        self._ahead: dict[str, Future[RowAnswer]] = {}
        self._probing: Future[None] | None = None
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._mass = 0.0

    def close(self) -> None:
        """Give up what is under way."""
        self.server.client.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- answering ---------------------------------------------------------------------------------------

    def observe(self, batch: Batch, needs: Needs) -> Signal:
        answers = self._rows(batch)
        self._mass += sum(float(answer.mass.sum()) for answer in answers)
        with self._lock:
            self._counters["observed"] += batch.num_scored
        return to_device(signal_of(RowAnswer.join(answers), self.spec), self._device)

    def answer_rows(self, batch: Batch, specs: Sequence[SignalSpec]) -> list[list[RowAnswer]]:
        """For a cache. Its signals are those of the server: `served_spec` refused all others."""
        answers = self._rows(batch)
        self.server.check_again()
        for spec in specs:
            if (spec.exact, spec.temperature, spec.draws) != (self.spec.exact, 1.0, 0):
                raise ConfigError(f"a server gives {describe(self.spec)}, and the cache holds {describe(spec)}")
        return [answers for _ in specs]

    def _rows(self, batch: Batch) -> list[RowAnswer]:
        asked = {
            key: self._ahead.get(key) or self._pool.submit(self._answer, *row)
            for key, row in zip(batch.keys, _rows_of(batch), strict=True)
        }
        try:
            found = {key: future.result() for key, future in asked.items()}
        except BaseException:
            self.close()
            raise
        return [found[key] for key in batch.keys]

    def _answer(self, ids: list[int], targets: list[int], pieces: list[int]) -> RowAnswer:
        """The answer to a row without padding. Tokens after the last scored one are not sent."""
        parts, counters = [RowAnswer.unusable(0, self.spec)], Counter[str]()
        for begin, end in _stretches(pieces):
            scored = [place for place in range(begin, end) if targets[place] != IGNORED]
            if not scored:
                continue
            places = [place - begin + 1 for place in scored]
            given = self.server.score([*ids[begin : scored[-1] + 1], targets[scored[-1]]], places)
            parts += [
                position_answer(
                    given.entries[place - begin + 1],
                    targets[place],
                    self.spec,
                    counters,
                    least_tail=self._least_tail,
                )
                for place in scored
            ]
        with self._lock:
            self._counters.update(counters)
        return RowAnswer.join(parts)

    # -- asking ahead ------------------------------------------------------------------------------------

    def begin_window(self, window: Sequence[Batch], cursor: int) -> None:
        """Send for the rows of this window and the next, and then the probe, whose answer is looked at next time."""
        self._end_probing()
        upcoming = self._window(cursor + 1) if self._window is not None else ()
        batches = (*window, *upcoming)
        wanted = {key for batch in batches for key in batch.keys}
        for key in [known for known in self._ahead if known not in wanted]:
            self._ahead.pop(key).cancel()
        for batch in batches:
            for key, row in zip(batch.keys, _rows_of(batch), strict=True):
                if key not in self._ahead:
                    self._ahead[key] = self._pool.submit(self._answer, *row)
        self._probing = self._pool.submit(self.server.check_again)

    def verify(self) -> None:
        """Raise if the server had another model after a window, so that nothing of it is saved."""
        self._end_probing()

    def _end_probing(self) -> None:
        if self._probing is not None:
            self._probing.result()
            self._probing = None

    # -- what is known of it -----------------------------------------------------------------------------

    def own_metrics(self, batches: Sequence[Batch]) -> dict[str, Any] | None:
        answers = [answer for batch in batches for answer in self._rows(batch)]
        return label_metrics(answers, batches, parameters=None, source=f"answers of {self.server.facts.url}")

    def check_stored(self, probed: Sequence[float]) -> None:
        """Raise where the probe was answered otherwise when a cache was begun."""
        check_steady(probed, self.server.probed, since="when the cache was begun")

    def try_rows(self, batches: Sequence[Batch]) -> str:
        """Ask rows of the data, raise where their answers are of another temperature, and say what was found."""
        given: list[Given] = []
        for batch in batches:
            for ids, targets, pieces in _rows_of(batch):
                begin, end = next(iter(_stretches(pieces)))
                if end - begin > 1 and targets[end - 1] != IGNORED:
                    given.append(self.server.score([*ids[begin:end], targets[end - 1]]))
            if sum(len(one.entries) for one in given) >= _TRIAL_POSITIONS:
                break
        return check_temperature(given, self.spec.exact, is_raw=self.server.is_raw)

    def summary(self) -> dict[str, Any]:
        observed = self._counters["observed"]
        mass = self._mass / observed if observed else None
        return {
            "teacher_signal": {**self.spec.to_dict(), "mean_mass": mass},
            "teacher_server": {**self.server.facts.to_dict(), **self.facts()},
        }

    def facts(self) -> dict[str, int]:
        """What was counted: requests and their repetitions, tails that are too small to be told."""
        return {**self.server.client.counters, "unresolved_tails": self._counters["unresolved_tails"]}


def _rows_of(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    """(ids, targets, which piece each position is in) of each row, without padding."""
    pieces = torch.zeros_like(batch.input_ids) if batch.segments is None else batch.segments
    found = []
    for number in range(batch.input_ids.shape[0]):
        length = max(1, int(batch.attention_mask[number].sum()))
        found.append(tuple(one[number, :length].tolist() for one in (batch.input_ids, batch.targets, pieces)))
    return found  # type: ignore[return-value]


def _stretches(pieces: Sequence[int]) -> list[tuple[int, int]]:
    """Where each piece of a row begins and ends."""
    begins = [0, *(place for place in range(1, len(pieces)) if pieces[place] != pieces[place - 1])]
    return list(zip(begins, [*begins[1:], len(pieces)], strict=True))


# -- for a run or a cache --------------------------------------------------------------------------------


def served_rows(section: TeacherConfig, student_rows: int) -> int:
    """Rows of the served model's head, where its configuration lies next to its tokenizer; else the student's."""
    source = fetch(section, section.model, weights=False)
    if source.is_gguf or not (source.folder / "config.json").is_file():
        return student_rows
    told = read_json(source, "config.json")
    found = told.get("vocab_size", told.get("text_config", {}).get("vocab_size"))
    return found if isinstance(found, int) else student_rows


def served_teacher(
    config: Config,
    tokenizer: Any,
    vocab_size: int,
    rows: Rows,
    device: torch.device,
    *,
    window: Window | None = None,
) -> ServedTeacher:
    """The server as a teacher, after its probe and a trial on rows of the data."""
    spec, section = served_spec(config), config.teacher
    server = open_server(section, tokenizer, num_wanted=spec.exact, vocab_size=vocab_size)
    _check_length(server, rows)
    teacher = ServedTeacher(
        server,
        spec,
        vocab_size=vocab_size,
        device=device,
        concurrency=section.requests.concurrency,
        window=window,
        notes=check_use(config, spec),
    )
    if section.requests.check_temperature:
        teacher.notes += (teacher.try_rows(list(fixed_batches(rows, 1, _TRIAL_ROWS))),)
    return teacher


def _check_length(server: Server, rows: Rows) -> None:
    """A row is sent with its last target, and the server generates one token, which is not used."""
    limit = server.facts.max_tokens
    longest = int(rows.longest.max()) + 2 if len(rows) else 0
    if limit is not None and longest > limit:
        raise ConfigError(
            f"a row and the tokens after it are {longest:,} tokens, and the server takes {limit:,}",
            where="data.max_length",
            advice=[
                *([f"--set data.max_length={limit - 2}"] if limit >= _LEAST_ROW + 2 else []),
                "start the server with a longer context",
            ],
        )
