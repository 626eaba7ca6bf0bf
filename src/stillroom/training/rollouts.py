"""Let the student write rounds of text that it learns on from the teacher.

`ensure_round` is called before each window. Where the window needs a round that is not there, the present student
writes it, in pieces: a request to stop takes effect between two of them, and a resumed run keeps those that are
written. With several processes each writes every nth piece, so that a round does not depend on their number.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stillroom.config import Config
from stillroom.config.schema import RolloutsConfig
from stillroom.core.errors import CannotSave, ConfigError, Diverged
from stillroom.core.files import reason_of
from stillroom.core.types import DenseSignal, Needs
from stillroom.data import Corpus, Loader
from stillroom.data.chat import turn_end_ids
from stillroom.data.corpus import open_eval
from stillroom.data.rollouts import (
    Answers,
    Prompt,
    Rollout,
    RolloutLoader,
    Round,
    RoundFacts,
    RoundStore,
    chosen_prompts,
    rows_of,
)
from stillroom.models.generate import ability_of, end_ids
from stillroom.models.writer import ENDED, Written, row_seed, write_rows
from stillroom.parallel import Parallel
from stillroom.parallel.base import fingerprint
from stillroom.teachers.rounds import RoundTeacher, union_answers
from stillroom.training.guard import WINDOW_STEPS
from stillroom.training.schedule import Schedule, value_at

if TYPE_CHECKING:
    from stillroom.training.run import Run, RunState

_UNFINISHED = 0.5  # share of answers without an end from which a round is remarked upon
_TOO_LONG = 2.0  # times the length of the data's answers


@dataclass(frozen=True)
class Rollouts:
    """What the rounds of a run are written with and kept in. Their number is counted in RunState."""

    section: RolloutsConfig
    loader: RolloutLoader
    prompts: Sequence[Prompt]
    store: RoundStore
    teacher: RoundTeacher | None  # where answers are stored
    answer_length: float  # of the data's answers; 0: the data is plain text
    notes: tuple[str, ...] = ()
    told: set[str] = field(default_factory=set)  # remarks of this process, each made once

    def serve(self, rounds: Sequence[Round], device: torch.device) -> None:
        """Learn on the last of these rounds from now on, mixed with the others."""
        self.loader.take(rounds)
        if self.teacher is not None:
            self.teacher.take(rounds, device)

    def read(self, number: int) -> list[Round]:
        """A sealed round and the older ones that it is mixed with."""
        return [*self.older(number), self.store.read(number)]

    def older(self, number: int) -> list[Round]:
        return [self.store.read(one) for one in self.store.numbers() if one in self.loader.older(number)]


def plan_rollouts(
    config: Config,
    section: RolloutsConfig,
    corpus: Corpus,
    tokenizer: Any,
    data: Loader,
    schedule: Schedule,
    parallel: Parallel,
    store: RoundStore,
) -> Rollouts:
    """Prepare what rounds are written with. Raise where nothing can be answered."""
    if parallel.is_sharded:
        raise ConfigError(
            "[rollouts]: a student in parts cannot write",
            where="train.strategy",
            advice=["set train.strategy = 'ddp' or 'single'"],
        )
    rows = corpus.train
    if section.prompts != "train":
        rows = open_eval(section.prompts, tokenizer, config.data, setting="rollouts.prompts").evaluation
    found = list(rows.prompts(section.prompt_tokens))
    room = config.data.max_length + 1 - section.most_new_tokens
    prompts = [(name, ids) for name, ids, _ in found if 0 < len(ids) <= room]
    if not prompts:
        raise ConfigError(
            f"none of the {len(found):,} prompts of {section.prompts} leaves room for {section.most_new_tokens:,} "
            f"tokens in rows of {config.data.max_length:,}",
            where="rollouts.prompts, rollouts.max_new_tokens",
            advice=["lower rollouts.max_new_tokens", "raise data.max_length"],
        )
    loader = RolloutLoader(
        data,
        share=lambda progress: value_at(section.share, progress),
        num_steps=schedule.num_steps,
        every=section.every,
        keep_rounds=section.keep_rounds,
        max_length=config.data.max_length,
        pad_id=tokenizer.pad_token_id or 0,
    )
    temperature = config.objectives.kd.temperature
    is_stored = section.answers == "stored" and isinstance(temperature, float)
    lengths = [num_answer for _, _, num_answer in found if num_answer]
    lost = len(found) - len(prompts)
    notes = [f"the student answers {len(prompts):,} prompts of {section.prompts}, in rounds"]
    if lost:
        notes.append(f"{lost:,} prompts are left out: they are empty or leave no room for an answer in a row")
    return Rollouts(
        section,
        loader,
        prompts,
        store,
        RoundTeacher(float(temperature)) if is_stored else None,  # type: ignore[arg-type]
        sum(lengths) / len(lengths) if lengths else 0.0,
        tuple(notes),
    )


# -- which round serves ----------------------------------------------------------------------------------


def ensure_round(run: Run, state: RunState) -> None:
    """Have the round that the next window needs: the one in use, a sealed one of this very student, or a new one."""
    rollouts = run.rollouts
    if rollouts is None or not rollouts.loader.uses_rollouts(state.cursor):
        return
    number = rollouts.loader.round_of(state.cursor)
    if state.round >= number:
        if not rollouts.loader.known(state.cursor):  # the run was resumed, or returned to a step that it served
            rollouts.serve(rollouts.read(number), run.device)
        return
    try:
        _begin_round(run, state, rollouts, number)
    except OSError as error:
        raise CannotSave(
            f"round {number} of the rollouts cannot be written: {reason_of(error)}",
            where=str(rollouts.store.folder),
            advice=["free some space, then give the same command again: what is written is kept"],
        ) from error
    # Other text has other losses. Rounds that change within the guard's statistics are part of their spread.
    if state.round < 0 or rollouts.section.every >= WINDOW_STEPS:
        run.guard.forget()
    state.round = number


def forget_rounds(run: Run, state: RunState) -> None:
    """After a return to an earlier step: drop the rounds that were written after it."""
    rollouts = run.rollouts
    if rollouts is None:
        return
    rollouts.loader.forget()
    if run.parallel.is_first and (dropped := rollouts.store.remove_after(state.round)):
        numbers = ", ".join(map(str, dropped))
        run.log.write("note", text=f"rounds of rollouts written after step {state.applied} are dropped: {numbers}")
    run.parallel.wait()


def _begin_round(run: Run, state: RunState, rollouts: Rollouts, number: int) -> None:
    """Write and seal a round, or take the sealed one where this student wrote it at this step, as before a kill."""
    store, parallel = rollouts.store, run.parallel
    processor = time.process_time()
    writer = _writer(run, rollouts)
    if parallel.is_first:
        store.remove_after(state.round, but=number)  # of steps that were left
    parallel.wait()
    older = rollouts.older(number)
    num_rows = rollouts.loader.rows_wanted(number, older)
    known = store.facts(number)
    is_reused = known is not None and (known.step, known.writer, known.rows) == (state.applied, writer, num_rows)
    parallel.wait()  # every process has looked before one writes
    if not is_reused:
        _write_round(run, state, rollouts, number, writer, num_rows)
    new = store.read(number)
    if not new.rollouts:
        raise Diverged(
            f"the student wrote nothing to learn on at step {state.applied}: {_ends(new.facts)}",
            where="rollouts",
            advice=["set rollouts.on_loop = 'cut'", "lower train.learning_rate", "begin with a longer warm start"],
        )
    rollouts.serve([*older, new], run.device)
    told = _event(state, rollouts, new, older, is_reused=is_reused)
    run.log.write("rollouts", **told, cpu_seconds=time.process_time() - processor)
    for name, text in _remarks(rollouts, new):
        if name not in rollouts.told:
            rollouts.told.add(name)
            run.log.write("note", text=text)


_DIGITS = 16  # of the fingerprint of the weights, and of the hash of the settings


def _writer(run: Run, rollouts: Rollouts) -> str:
    """Who writes: a fingerprint of what is trained of the student, and a hash of the settings that decide its text."""
    trained = {name: one.data for name, one in run.student.model.named_parameters() if one.requires_grad}
    temperature = rollouts.teacher.temperature if rollouts.teacher is not None else None
    settings = [rollouts.section.model_dump(mode="json"), run.config.train.seed, temperature]
    told = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    return f"{fingerprint(trained):0{_DIGITS}x}{told[:_DIGITS]}"


# -- writing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """An answer to be written: its unique name, its prompt and its seed."""

    name: str
    prompt: list[int]
    seed: int


def _tasks(rollouts: Rollouts, num_rows: int, seed: int, number: int) -> list[_Task]:
    prompts = chosen_prompts(rollouts.prompts, num_rows, rollouts.section.samples, seed, number)
    seen: Counter[str] = Counter()
    tasks = []
    for name, ids in prompts:
        sample = seen[name]
        seen[name] += 1
        tasks.append(_Task(f"{name}#{number}.{sample}", ids, row_seed(seed, number, str(ids), sample)))
    return tasks


def _write_round(run: Run, state: RunState, rollouts: Rollouts, number: int, writer: str, num_rows: int) -> None:
    """Write the pieces that are not there yet, each process its share, and seal the round."""
    store, parallel, section = rollouts.store, run.parallel, rollouts.section
    began = time.monotonic()
    if parallel.is_first:
        store.begin(number, writer)
    parallel.wait()
    tasks = _tasks(rollouts, num_rows, run.config.train.seed, number)
    size = section.batch_size
    pieces = [tasks[start : start + size] for start in range(0, len(tasks), size)]
    num_new = max(1, round(value_at(section.max_new_tokens, state.applied / max(run.schedule.num_steps, 1))))
    for turn in range(-(-len(pieces) // parallel.size)):
        state.between_batches()  # as often in every process: any of them may have been asked to stop
        place = turn * parallel.size + parallel.rank
        if place < len(pieces) and store.piece(number, writer, place) is None:
            store.keep_piece(number, writer, place, _write_piece(run, rollouts, pieces[place], num_new))
    parallel.wait()
    if parallel.is_first:
        written = [row for place in range(len(pieces)) for row in store.piece(number, writer, place) or ()]
        ended = Counter(row.ended for row in written)
        store.seal(
            RoundFacts(
                round=number,
                step=state.applied,
                weights=writer[:_DIGITS],
                settings=writer[_DIGITS:],
                rows=len(written),
                tokens=sum(len(row.ids) for row in written),
                seconds=time.monotonic() - began,
                ended={name: ended[name] for name in ENDED},
                drops=["nonfinite", *(["loop"] if section.on_loop == "drop" else [])],
                pieces=store.sums(number, writer, len(pieces)),
            )
        )
    parallel.wait()


def _write_piece(run: Run, rollouts: Rollouts, tasks: Sequence[_Task], num_new: int) -> list[Rollout]:
    section, model = rollouts.section, run.student.model
    # The family's cache is tried in the weights' own precision: rounding of a mixed mode is no fault of the cache.
    ability_of(model)
    with run.precision.autocast():
        written = write_rows(
            model,
            [task.prompt for task in tasks],
            [task.seed for task in tasks],
            ends=end_ids(model, run.tokenizer) | turn_end_ids(run.tokenizer),
            num_tokens=run.student.vocab_size,
            max_new_tokens=num_new,
            temperature=section.temperature,
            top_p=section.top_p,
            num_top=section.student_top if rollouts.teacher is not None else 0,
            cuts_loops=section.on_loop != "keep",
            note=lambda text: run.log.write("note", text=text),
        )
    rows = [
        Rollout(task.name, task.prompt, one.ids, one.log_probs, one.ended)
        for task, one in zip(tasks, written, strict=True)
    ]
    return rows if rollouts.teacher is None else _answered(run, rollouts, rows, written)


@torch.no_grad()
def _answered(run: Run, rollouts: Rollouts, rows: Sequence[Rollout], written: Sequence[Written]) -> list[Rollout]:
    """Rows with the teacher's answers. One without a token has none."""
    section, temperature = rollouts.section, rollouts.teacher.temperature if rollouts.teacher else 1.0
    width = section.student_top + section.teacher_top
    nothing = Answers(np.zeros((0, width), np.int32), np.zeros((0, width), np.float32), np.zeros(0, np.float32))
    places = [place for place, row in enumerate(rows) if row.ids]
    found = [replace(row, answers=nothing) for row in rows]
    size = run.config.train.rows_per_batch
    for start in range(0, len(places), size):
        part = places[start : start + size]
        held = rows_of([rows[place] for place in part], run.config.data.max_length, 0)
        batch = held.batch(range(len(part))).to(run.device)
        signal = run.teacher.whole_answer(batch, run.teacher.observe(batch, Needs()))
        if not isinstance(signal, DenseSignal):
            raise ConfigError(
                "this teacher gives a few tokens, and stored answers to rollouts are chosen from all of them",
                where="rollouts.answers",
                advice=["set rollouts.answers = 'live'", "set teacher.signal.kind = 'dense'"],
            )
        own = torch.from_numpy(np.concatenate([written[place].top_ids for place in part])).long().to(run.device)
        kept = union_answers(signal, own, section.teacher_top, temperature)
        sizes = [len(rows[place].ids) for place in part]
        arrays = (kept.ids.to(torch.int32).cpu(), kept.log_probs.cpu(), kept.tail_log_mass.cpu())
        for place, *answers in zip(part, *(torch.split(one, sizes) for one in arrays), strict=True):
            found[place] = replace(rows[place], answers=Answers(*(one.numpy() for one in answers)))
    return found


def seconds_of_answer(run: Run) -> float | None:
    """Write one piece and throw it away: the seconds of an answer; None where the run has no rollouts."""
    rollouts = run.rollouts
    if rollouts is None:
        return None
    tasks = _tasks(rollouts, rollouts.section.batch_size, run.config.train.seed, 0)
    began = time.perf_counter()
    _write_piece(run, rollouts, tasks, rollouts.section.most_new_tokens)
    return (time.perf_counter() - began) / len(tasks)


# -- what is told of a round -----------------------------------------------------------------------------


def _event(
    state: RunState, rollouts: Rollouts, new: Round, older: Sequence[Round], *, is_reused: bool
) -> dict[str, Any]:
    facts, learned = new.facts, new.rollouts
    log_probs = [value for row in learned for value in row.log_probs]
    served = rollouts.loader.rows_served(new.number)
    return {
        "step": state.applied,
        "round": new.number,
        "rows": len(learned),
        "dropped": facts.rows - len(learned),
        "served": served,
        "replayed": sum(len(one.rollouts) for one in older),
        "repeated": max(0, served - len(learned) - sum(len(one.rollouts) for one in older)),
        "tokens": facts.tokens,
        "seconds": round(facts.seconds, 3),
        "tokens_per_second": facts.tokens / max(facts.seconds, 1e-9),
        "mean_length": facts.tokens / max(facts.rows, 1),
        "data_length": rollouts.answer_length,
        "ended": facts.ended,
        "entropy": -sum(log_probs) / len(log_probs),  # estimated by the tokens that were drawn
        "weights": facts.weights,
        "reused": is_reused,
    }


def _ends(facts: RoundFacts) -> str:
    return ", ".join(f"{count:,} ended by {name}" for name, count in facts.ended.items() if count)


def _remarks(rollouts: Rollouts, new: Round) -> Iterator[tuple[str, str]]:
    """What a user should know of a round: by a name, so that each is reported once."""
    facts = new.facts
    if not rollouts.answer_length:  # plain text has no end to compare with
        return
    unfinished = 1.0 - facts.ended["end"] / max(facts.rows, 1)
    if unfinished > _UNFINISHED:
        yield (
            "unfinished",
            f"{unfinished:.0%} of the answers of round {new.number} do not end ({_ends(facts)}): give "
            "rollouts.max_new_tokens more room, or begin with a longer warm start (rollouts.share)",
        )
    length = facts.tokens / max(facts.rows, 1)
    if length > _TOO_LONG * rollouts.answer_length:
        yield (
            "long",
            f"answers of round {new.number} have {length:.0f} tokens on average, those of the data "
            f"{rollouts.answer_length:.0f}: long answers weigh more in a mean over tokens",
        )
