"""`stillroom write`: let a model or a server answer prompts, and keep the answers as a data source.

Answers are written in units of `write.batch_size`. After each unit its lines are on the disk, then the progress file is
replaced; a command that was killed begins with the unit that was cut short. Each answer has its own seed and units are
always made of the same prompts, so the file is the same to the last byte.

    FILE            one JSON object a line: messages, or prompt and completion; prompt_ids and ids, the very tokens,
                    with the hash of their vocabulary; ended, log_prob, score, sample
    FILE.origin     who wrote it, with which weights, how, and what was left out; not read as data
    FILE.partial, FILE.progress   while it is written
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from stillroom.config import Config
from stillroom.config.schema import WriteConfig
from stillroom.core.errors import CannotSave, ConfigError, DataError, Interrupted, at_setting
from stillroom.core.files import reason_of, write_atomically
from stillroom.core.locks import LockHeld, hold
from stillroom.data import prompt_ids
from stillroom.data.chat import chat_ids, question_opening, turn_end_ids
from stillroom.data.checkers import RIGHT, Check, needs_reference, open_checker
from stillroom.data.prompts import Answer, Ask, Prompt, Refused, read_prompts
from stillroom.data.records import Tally, Turn, is_blank
from stillroom.data.sources import ORIGIN
from stillroom.models import LoadedModel, load_tokenizer, open_teacher, vocabulary_hash
from stillroom.models.files import teacher_identity
from stillroom.models.generate import continuation, decoded, end_ids
from stillroom.models.load import model_name
from stillroom.models.writer import Written, row_seed, write_rows
from stillroom.precision.device import find_device, teacher_dtype
from stillroom.teachers.served.write import ServedWriter
from stillroom.training.loop import Stop

FORMAT = 1
_NUM_REFUSALS = 5  # whose words are kept
_SAME_SHARE = 0.5  # of a server's answers that are repeated, from which it is told that seeds have no effect

Tell = Callable[[str], object]


class Source(Protocol):
    """Who answers. `tokenizer` is None where it is not known."""

    tokenizer: Any
    notes: list[str]

    @property
    def identity(self) -> Mapping[str, Any]: ...
    def is_chat(self, ask: Ask) -> bool:
        """Whether a prompt is asked by a chat template."""
        ...

    def answer(self, asks: Sequence[Ask]) -> list[Answer | Refused]: ...
    def close(self) -> None: ...


# -- a model on this machine -----------------------------------------------------------------------------


class LoadedWriter:
    """A loaded model that writes."""

    def __init__(self, loaded: LoadedModel, settings: WriteConfig, identity: Mapping[str, Any], bos: Any) -> None:
        self.network, self.tokenizer, self._settings, self._bos = loaded.network, loaded.tokenizer, settings, bos
        self._num_tokens = min(len(loaded.tokenizer), loaded.anatomy.vocab_rows)
        self.identity = identity
        self.notes = list(loaded.notes)
        if settings.start == "template" and not self.tokenizer.chat_template:
            raise ConfigError(
                "the model has no chat template, so it cannot write questions from its opening",
                where="write.start",
                advice=["--set write.start=documents begins with texts", "--set write.start=prompts answers prompts"],
            )

    def close(self) -> None:
        """Nothing is held but memory."""

    def is_chat(self, ask: Ask) -> bool:
        return bool(ask.prompt.turns) or self._is_asked

    @property
    def _is_asked(self) -> bool:
        settings = self._settings
        return bool(self.tokenizer.chat_template) and not (settings.raw or settings.start == "documents")

    def questions(self, seeds: Sequence[int]) -> list[Prompt | Refused]:
        """Questions that the model writes from the opening of a user's turn."""
        opening, ends = question_opening(self.tokenizer, bos=self._bos)
        rows = self._written([opening] * len(seeds), seeds, ends)
        return [self._question(row) for row in rows]

    def _question(self, row: Written) -> Prompt | Refused:
        text = decoded(self.tokenizer, row.ids).strip()
        if row.ended != "end":
            return Refused("unfinished_question")
        if is_blank(text):
            return Refused("empty_question")
        return Prompt(hashlib.sha256(text.encode("utf-8", "replace")).hexdigest(), text, (Turn("user", text),))

    def answer(self, asks: Sequence[Ask]) -> list[Answer | Refused]:
        prompts = [self._ids(ask) for ask in asks]
        ends = turn_end_ids(self.tokenizer) if any(self.is_chat(ask) for ask in asks) else set()
        rows = self._written(prompts, [ask.seed for ask in asks], ends)
        return [self._read(before, row) for before, row in zip(prompts, rows, strict=True)]

    def _ids(self, ask: Ask) -> list[int]:
        prompt = ask.prompt
        if prompt.turns:
            return chat_ids(self.tokenizer, prompt.turns, bos=self._bos)
        return prompt_ids(self.tokenizer, prompt.text, bos=self._bos, is_raw=not self._is_asked)[0]

    def _written(self, prompts: Sequence[list[int]], seeds: Sequence[int], ends: set[int]) -> list[Written]:
        settings, rows = self._settings, list[Written]()
        for begin in range(0, len(prompts), settings.batch_size):
            part = slice(begin, begin + settings.batch_size)
            rows += write_rows(
                self.network,
                prompts[part],
                seeds[part],
                ends=end_ids(self.network, self.tokenizer) | ends,
                num_tokens=self._num_tokens,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                note=self._note,
            )
        return rows

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _read(self, before: list[int], row: Written) -> Answer | Refused:
        if row.ended == "nonfinite":
            return Refused("nonfinite", "the model's logits are not finite")
        if not row.ids:
            return Refused("no_room", "a prompt fills the model's positions")
        text = continuation(self.tokenizer, before, row.ids)
        mean = math.fsum(row.log_probs) / len(row.log_probs)
        return Answer(text, row.ended, len(row.ids), before, row.ids, round(mean, 6))


def open_source(config: Config, device: str) -> Source:
    """The model or server of [teacher]. The folder of a run means its student."""
    section = config.teacher
    if section.server:
        named = section.model if "teacher.model" in config.given else None
        tokenizer = load_tokenizer(section, section.model) if named else None
        return ServedWriter(section, config.write, tokenizer)
    if section.placement != "device" or section.quantisation != "none":
        raise ConfigError(
            "a model writes token by token, whole and on the device",
            where="teacher.placement, teacher.quantisation",
            advice=["leave both out", "a model that does not fit: serve it, and set teacher.server"],
        )
    section = section.model_copy(update={"model": model_name(section.model)})
    where = find_device(device)
    dtype = teacher_dtype(section.dtype, where)
    loaded = open_teacher(section, dtype)
    loaded.network.to(where)
    identity = {"model": config.teacher.model, **teacher_identity(section, dtype), "device": where.type}
    return LoadedWriter(loaded, config.write, identity, config.data.bos)


# -- what is kept ----------------------------------------------------------------------------------------


@dataclass
class Keeper:
    """Decide which answers are kept, and count the rest."""

    settings: WriteConfig
    vocabulary: str | None
    check: Check | None
    counters: Counter[str] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)
    refusals: list[str] = field(default_factory=list)

    def rows(self, asks: Sequence[tuple[Ask, bool]], answers: Sequence[Answer | Refused]) -> list[dict[str, Any]]:
        """The lines of a unit, in order. `asks` with whether the prompt is asked as a chat."""
        found = list[tuple[str, dict[str, Any]]]()
        for (ask, is_chat), answer in zip(asks, answers, strict=True):
            self.counters["asked"] += 1
            if isinstance(answer, Refused):
                self.refuse(answer)
                continue
            self.counters["tokens"] += answer.num_tokens or 0
            self.counters[f"ended_{answer.ended}"] += 1
            if is_blank(answer.text):
                self.counters["dropped_empty"] += 1
                continue
            row = self._row(ask, answer, is_chat)
            if self.settings.keep == "right" and row["score"] < RIGHT:
                self.counters["dropped_wrong"] += 1
                continue
            found.append((ask.prompt.key, row))
        if self.settings.keep == "best":
            found = self._best(found)
        return [row for _key, row in found if self._is_new(row)]

    def refuse(self, answer: Refused) -> None:
        self.counters[f"refused_{answer.reason}"] += 1
        if answer.words and answer.words not in self.refusals and len(self.refusals) < _NUM_REFUSALS:
            self.refusals.append(answer.words)

    def _row(self, ask: Ask, answer: Answer, is_chat: bool) -> dict[str, Any]:
        prompt = ask.prompt
        if is_chat:
            turns = prompt.turns or (Turn("user", prompt.text),)
            messages = [{"role": turn.role, "content": turn.content} for turn in turns]
            row: dict[str, Any] = {"messages": [*messages, {"role": "assistant", "content": answer.text}]}
        else:
            row = {"prompt": prompt.text, "completion": answer.text}
        if self.check is not None:
            row["score"] = self.check(answer.text.strip(), (prompt.reference or "").strip(), prompt.text)
            self.counters["right"] += row["score"] >= RIGHT
        tokens = {"prompt_ids": answer.prompt_ids, "ids": answer.ids, "tokenizer": self.vocabulary}
        facts = {"ended": answer.ended, "log_prob": answer.log_prob, "sample": ask.sample}
        return {**row, **facts, **(tokens if answer.ids is not None else {})}

    def _best(self, found: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
        """The first of the best answers to each prompt: by the checker, then by mean log-probability."""
        best = dict[str, dict[str, Any]]()
        for key, row in found:
            if key not in best or _rank(row) > _rank(best[key]):
                best[key] = row
        self.counters["dropped_not_best"] += len(found) - len(best)
        return list(best.items())

    def _is_new(self, row: Mapping[str, Any]) -> bool:
        key = content_of(row)
        if key in self.seen:
            self.counters["dropped_repeated"] += 1
            return False
        self.seen.add(key)
        self.counters["kept"] += 1
        self.counters["kept_without_ids"] += "ids" not in row
        return True


def _rank(row: Mapping[str, Any]) -> tuple[float, float]:
    return float(row.get("score", 0.0)), -math.inf if row["log_prob"] is None else float(row["log_prob"])


def content_of(row: Mapping[str, Any]) -> str:
    """A digest of what a line says, by which it is kept once."""
    content = row.get("messages") or [row.get("prompt"), row.get("completion")]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


# -- files -----------------------------------------------------------------------------------------------


@dataclass
class Output:
    """The files of one command. `plan` is what the bytes depend on; a file of another plan is not continued."""

    path: Path
    plan: Mapping[str, Any]
    num_units: int = 0  # that are whole on the disk
    num_bytes: int = 0
    seconds: float = 0.0

    def beside(self, suffix: str) -> Path:
        return self.path.with_name(f"{self.path.name}{suffix}")

    @property
    def mark(self) -> str:
        return hashlib.sha256(json.dumps(self.plan, sort_keys=True).encode()).hexdigest()

    def finished(self) -> dict[str, Any] | None:
        """What is known of a finished file of this plan; None where there is none. Raise for one of another plan."""
        if not self.path.exists():
            return None
        known = _read_json(self.beside(ORIGIN))
        if known.get("plan") != self.mark:
            raise self._other(self.path)
        self.beside(".progress").unlink(missing_ok=True)  # of a command that was killed right after its end
        return {name: value for name, value in known.items() if name != "plan"}

    def begin(self, keeper: Keeper) -> None:
        """Find what was written by a command that was cut short, and drop a unit that is not whole."""
        progress, partial = self.beside(".progress"), self.beside(".partial")
        if not progress.exists():
            partial.write_bytes(b"")
            return
        known = _read_json(progress)
        if known.get("plan") != self.mark:
            raise self._other(progress)
        self.num_units, self.num_bytes = int(known["units"]), int(known["bytes"])
        self.seconds = float(known["seconds"])
        keeper.counters.update({str(name): int(count) for name, count in known["counters"].items()})
        keeper.refusals += [str(text) for text in known["refusals"]]
        with partial.open("r+b") as file:
            file.truncate(self.num_bytes)
            whole = file.read()
        if len(whole) != self.num_bytes or hashlib.sha256(whole).hexdigest() != known["sha256"]:
            raise DataError(
                "what was written so far is damaged",
                where=str(partial),
                advice=[f"remove {partial.name} and {progress.name}: everything is written again"],
            )
        keeper.seen |= {content_of(json.loads(line)) for line in whole.splitlines()}

    def add(self, rows: Sequence[Mapping[str, Any]], keeper: Keeper, digest: Any, seconds: float) -> None:
        """Append a unit and make it count."""
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8", "surrogatepass")
        with self.beside(".partial").open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        digest.update(lines)
        self.num_units, self.num_bytes, self.seconds = self.num_units + 1, self.num_bytes + len(lines), seconds
        known = {
            "plan": self.mark,
            "units": self.num_units,
            "bytes": self.num_bytes,
            "sha256": digest.hexdigest(),
            "seconds": seconds,
            "counters": dict(keeper.counters),
            "refusals": keeper.refusals,
        }
        write_atomically(self.beside(".progress"), json.dumps(known).encode())

    def end(self, about: Mapping[str, Any]) -> None:
        """Put the file in its place, its origin first: a file without one is not finished."""
        write_atomically(self.beside(ORIGIN), json.dumps({"plan": self.mark, **about}, indent=1).encode())
        self.beside(".partial").replace(self.path)
        self.beside(".progress").unlink()

    def _other(self, found: Path) -> ConfigError:
        return ConfigError(
            "the file is there, written by another model, from other prompts or with other settings",
            where=str(found),
            advice=["name another file with --out", f"remove {found.name} to write it again"],
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    try:
        with hold(out.with_name(f"{out.name}.lock")):
            yield
    except LockHeld as error:
        raise ConfigError("another process writes this file", where=str(out), advice=["wait for it"]) from error
    except OSError as error:
        raise CannotSave(f"cannot write {out}: {reason_of(error)}", where="--out") from error


# -- the command -----------------------------------------------------------------------------------------


def write_text(
    config: Config,
    out: Path,
    *,
    device: str = "auto",
    max_minutes: float = 0.0,
    tell: Tell = lambda _text: None,
    on_progress: Callable[[Mapping[str, Any]], object] = lambda _known: None,
) -> dict[str, Any]:
    """Write the answers that [write] asks for into a file. One that was begun is continued, to the same bytes."""
    if out.suffix != ".jsonl":
        raise ConfigError(f"{out.name} is to be read as data", where="--out", advice=["name it FILE.jsonl"])
    settings, stop = config.write, Stop(max_minutes)
    stop.heed_clock()
    with stop.on_signals(), _alone(out):
        with stop.while_loading():
            tally = Tally()
            prompts = _prompts(config, tally)
            source = open_source(config, device)
            if settings.start == "documents":
                prompts = _beginnings(prompts, source.tokenizer, settings.start_tokens)
        try:
            for text in tally.notes:
                tell(text)
            vocabulary = vocabulary_hash(source.tokenizer) if source.tokenizer is not None else None
            check = open_checker(settings.checker) if settings.checker else None
            output = Output(out, _plan(config, source, prompts, vocabulary))
            if known := output.finished():
                tell(f"{out} is finished already: nothing is written again")
                return {"file": str(out), "already_finished": True, **known}
            keeper = Keeper(settings, vocabulary, check)
            output.begin(keeper)
            if output.num_units:
                asked, kept = keeper.counters["asked"], keeper.counters["kept"]
                tell(f"continues after {asked:,} answers, {kept:,} of them kept")
            _write(source, prompts, settings, output, keeper, stop, tell, on_progress)
            about = _about(config, source, output, keeper, len(prompts))
            output.end(about)
        finally:
            source.close()
    for text in _doubts(about, settings):
        tell(text)
    return {"file": str(out), "already_finished": False, **about}


def _prompts(config: Config, tally: Tally) -> list[Prompt]:
    settings = config.write
    if settings.start == "template":
        return [Prompt(f"question {number}", "") for number in range(settings.max_prompts)]
    sources = [config.data.named(settings.prompts)] if settings.prompts else list(config.data.sources)
    found = list[Prompt]()
    for source in sources:
        options: dict[str, Any] = {"as_documents": settings.start == "documents"}
        with at_setting("write.prompts" if settings.prompts else "data.train"):
            found += read_prompts(source, tally, **options, max_bad_share=config.data.max_bad_share)
    if settings.max_prompts:
        found = found[: settings.max_prompts]
    if settings.checker and needs_reference(settings.checker):
        lacking = sum(one.reference is None for one in found)
        if lacking:
            raise DataError(
                f"write.checker = '{settings.checker}' compares with the record's answer, and {lacking:,} of "
                f"{len(found):,} prompts have none",
                where="write.checker",
                advice=["give records with answers", "use json, regex:PATTERN without a group, or a checker of yours"],
            )
    return found


def _beginnings(documents: Sequence[Prompt], tokenizer: Any, num_tokens: int) -> list[Prompt]:
    """The first tokens of each document, as text, cut where a character ends."""
    if tokenizer is None:
        raise ConfigError(
            "documents are cut after write.start_tokens tokens, and the server's tokenizer is not known",
            where="teacher.model",
            advice=["name its tokenizer: --set teacher.model=MODEL"],
        )
    found = []
    for one in documents:
        ids = tokenizer([one.text[: 64 * num_tokens]], add_special_tokens=False, verbose=False)["input_ids"][0]
        text = decoded(tokenizer, list(ids)[:num_tokens]).rstrip("\ufffd")
        found.append(replace(one, text=text))
    return found


def _plan(config: Config, source: Source, prompts: Sequence[Prompt], vocabulary: str | None) -> dict[str, Any]:
    """What the bytes depend on. Where the weights came from is not part of it, only what they are."""
    contents = hashlib.sha256("\n".join(f"{one.key} {one.reference}" for one in prompts).encode("utf-8", "replace"))
    settings = config.write.model_dump(mode="json", exclude={"prompts", "max_prompts"})
    identity = {name: value for name, value in source.identity.items() if name != "model"}
    return {
        "format": FORMAT,
        "settings": settings,
        "prompts": contents.hexdigest(),
        "writer": identity,
        "vocabulary": vocabulary,
        "bos": config.data.bos,
        "template": getattr(source.tokenizer, "chat_template", None),
    }


def _write(
    source: Source,
    prompts: Sequence[Prompt],
    settings: WriteConfig,
    output: Output,
    keeper: Keeper,
    stop: Stop,
    tell: Tell,
    on_progress: Callable[[Mapping[str, Any]], object],
) -> None:
    size = max(1, settings.batch_size // settings.samples)
    began, before, told = time.monotonic(), output.seconds, 0
    digest = hashlib.sha256(output.beside(".partial").read_bytes())
    for begin in range(output.num_units * size, len(prompts), size):
        if stop.is_wanted():
            raise Interrupted(
                f"stopped with {len(prompts) - begin:,} of {len(prompts):,} prompts left: {stop.reason}",
                where=str(output.path),
                advice=["give the same command again: what is written is kept"],
            )
        unit = _asked(source, prompts[begin : begin + size], settings, keeper, begin)
        answers = source.answer([ask for ask, _is_chat in unit])
        rows = keeper.rows(unit, answers)
        output.add(rows, keeper, digest, before + time.monotonic() - began)
        for text in source.notes[told:]:
            tell(text)
        told = len(source.notes)
        on_progress({"prompts": min(begin + size, len(prompts)), "of": len(prompts), **_rates(keeper, output)})


def _asked(
    source: Source, prompts: Sequence[Prompt], settings: WriteConfig, keeper: Keeper, begin: int
) -> list[tuple[Ask, bool]]:
    """Every sample of a unit's prompts; with start = 'template' the questions are written first."""
    if settings.start == "template":
        assert isinstance(source, LoadedWriter)
        seeds = [row_seed(settings.seed, "question", begin + place) for place in range(len(prompts))]
        questions = source.questions(seeds)
        for one in questions:
            if isinstance(one, Refused):
                keeper.refuse(one)
        prompts = [one for one in questions if isinstance(one, Prompt)]
    asks = [
        Ask(prompt, sample, row_seed(settings.seed, prompt.key, sample))
        for prompt in prompts
        for sample in range(settings.samples)
    ]
    return [(ask, source.is_chat(ask)) for ask in asks]


def _rates(keeper: Keeper, output: Output) -> dict[str, Any]:
    counters = keeper.counters
    return {
        "rows": counters["kept"],
        "tokens": counters["tokens"],
        "tokens_per_second": round(counters["tokens"] / max(output.seconds, 1e-9), 2),
        "kept_share": counters["kept"] / counters["asked"] if counters["asked"] else None,
    }


def _about(config: Config, source: Source, output: Output, keeper: Keeper, num_prompts: int) -> dict[str, Any]:
    """What FILE.origin says."""
    counters = {name: count for name, count in sorted(keeper.counters.items()) if count}
    if not keeper.counters["kept"]:
        raise DataError(
            f"nothing is kept of {keeper.counters['asked']:,} answers: "
            + (", ".join(f"{name} {count:,}" for name, count in counters.items()) or "none was written"),
            where=str(output.path),
            advice=["look at what is dropped and why", "--set write.keep=all keeps wrong answers too"],
        )
    requests = getattr(source, "counters", None)
    return {
        **_rates(keeper, output),
        "prompts": num_prompts,
        "seconds": round(output.seconds, 3),
        "counters": counters,
        "refusals": keeper.refusals,
        **({"requests": dict(requests)} if requests else {}),
        "writer": dict(source.identity),
        "vocabulary": keeper.vocabulary,
        "settings": config.write.model_dump(mode="json"),
        "torch": torch.__version__,
        "notes": source.notes,
    }


def _doubts(about: Mapping[str, Any], settings: WriteConfig) -> Iterator[str]:
    counters = about["counters"]
    asked, length = counters.get("asked", 0), counters.get("ended_length", 0)
    if length > _SAME_SHARE * asked:
        most = settings.max_new_tokens
        yield f"{length:,} of {asked:,} answers reached write.max_new_tokens = {most:,} without an end"
    repeated = counters.get("dropped_repeated", 0)
    if "requests" in about and settings.samples > 1 and repeated > _SAME_SHARE * asked:
        yield f"{repeated:,} of {asked:,} answers repeat another: the server may not heed the seed"
