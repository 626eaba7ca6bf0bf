"""A teacher and a student with a tokenizer each: what such a run cannot have, and which tokens both have."""

from __future__ import annotations

from typing import Any

from stillroom.config import Config
from stillroom.data.spans.groups import token_groups
from stillroom.data.spans.pieces import by_bytes
from stillroom.data.spans.token_bytes import TokenBytes
from stillroom.engine.building.cache_build import uses_cache
from stillroom.errors import ConfigError
from stillroom.objectives.crosstok.span_terms import needs_live_teacher
from stillroom.objectives.objective import Matched
from stillroom.teachers.router.paired import SAME_TOKENS_ONLY
from stillroom.teachers.spec import cache_spec, live_spec


def reads_its_own_tokens(config: Config) -> bool:
    """Whether the objectives compare spans, so that each model reads its own tokens. Raise for what it cannot have."""
    spans = config.objectives.span_weights
    if not spans:
        return False
    names = " and ".join(spans)
    by_token = [name for name in config.objectives.weights if name not in (*spans, "ce")]
    by_token = [name for name in by_token if config.objectives.weights[name] != 0.0]
    if by_token:
        raise ConfigError(
            f"objectives {names} compare spans of two tokenizers, and {' and '.join(by_token)} compare token by token",
            where="objectives",
            advice=[
                f"set objectives.{by_token[0]}.weight = 0",
                f"models with one tokenizer need no {names}: set their weights to 0",
            ],
        )
    is_sparse = uses_cache(config) or config.teacher.signal.kind not in ("auto", "dense")
    for name in spans:
        if is_sparse and name not in ("alm", "exact_match", "prefix_match"):
            raise needs_live_teacher(name)
    _ = cache_spec(config) if uses_cache(config) else live_spec(config)  # raise for kinds that would be biased
    refused = {
        "teacher.server": bool(config.teacher.server) and "a server gives few tokens, and they say nothing of spans",
        "teacher.router.mode": config.teacher.router.mode in SAME_TOKENS_ONLY
        and f"{config.teacher.router.mode} needs the student's distribution over the teacher's own tokens",
        "student.init": config.student.init == "shrink" and "a student cut from its teacher has the teacher's tokens",
    }
    for where, why in refused.items():
        if why:
            raise ConfigError(
                f"objectives {names} compare spans of two tokenizers, and {where} does not go with that: {why}",
                where=where,
                advice=[f"leave {where} out", f"set the weights of {names} to 0"],
            )
    return True


def matched_tokens(student: Any, teacher: Any) -> Matched:
    """The tokens of two vocabularies that stand for the same bytes, and the marks for the end of a text.

    Of several tokens with the same bytes on one side (a character and <0xNN>) the one that is no single byte counts.
    """
    if student.get_vocab() == teacher.get_vocab():
        everyone, alone = sorted(student.get_vocab().values()), token_groups(student, teacher)
        return Matched(everyone, everyone, 0, 0, "", alone.student, alone.teacher, alone.num_groups)
    tables = TokenBytes.of(student, "student"), TokenBytes.of(teacher, "teacher")
    if any(table.implies_spaces for table in tables):
        return Matched((), (), 0, 0, "tokens of one stand for a word with or without the space before it")
    ours, theirs = (by_bytes(table) for table in tables)
    shared = [spelled for spelled in ours if spelled in theirs]
    pairs = [(ours[spelled], theirs[spelled]) for spelled in shared]
    rests = [len(one) - len(shared) for one in (ours, theirs)]
    if student.eos_token_id is not None and teacher.eos_token_id is not None:
        taken = {own for own, _ in pairs}, {their for _, their in pairs}
        if student.eos_token_id not in taken[0] and teacher.eos_token_id not in taken[1]:
            pairs.append((int(student.eos_token_id), int(teacher.eos_token_id)))
    pairs.sort()
    groups = token_groups(student, teacher)
    return Matched(
        [own for own, _ in pairs],
        [their for _, their in pairs],
        rests[0],
        rests[1],
        "",
        groups.student,
        groups.teacher,
        groups.num_groups,
    )
