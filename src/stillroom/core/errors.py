"""Every exception we raise on purpose.

Each says what happened, where, and what to try, and has the exit code of the command line. Code below the command line
never prints and never exits: it raises one of these.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# -- secret keys -----------------------------------------------------------------------------------
# Keep keys out of logs, terminals, errors and reports: `masked` replaces each one that this process knows.
#
# Known are the keys in the environment variables of the hubs, stores and trackers we use, what `hide` was told (the
# key of a teacher's server), what looks like a token of the Hub, which a notebook may keep in a vault, and what URLs
# carry: user names and passwords, signatures and tokens in their queries.
# Text is masked where it leaves the process: by the event log, the console, our errors, the report and the file of a
# traceback.


MASK = "***"
_SHORTEST = 6  # characters; hiding a shorter key would hide parts of ordinary words
_VARIABLES = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_CONNECTION_STRING",
    "WANDB_API_KEY",
)
_HUB_TOKEN = re.compile(r"\bhf_(?:oauth_|jwt_)?[A-Za-z0-9]{30,}(?:\.[\w-]+)*")
_USER = re.compile(r"(?<=://)[^\s/?#@\"'<>]+(?=@)")
_SIGNED = re.compile(
    r"(?i)(?<=[?&])((?:x-amz-|x-goog-)?(?:signature|credential|security-token)|awsaccesskeyid|googleaccessid|sig|"
    r"(?:[\w-]*[_-])?(?:token|api_?key|key|secret|password))=[^\s&#\"'<>]+"
)
_hidden: set[str] = set()


def hide(secret: str) -> None:
    """Mask `secret` from now on. One of fewer than six characters is not masked: it may be part of any word."""
    if len(secret) >= _SHORTEST:
        _hidden.add(secret)


def masked(text: str) -> str:
    """`text` with every known key replaced by ***."""
    if len(text) < _SHORTEST:
        return text
    for secret in _known():
        if secret in text:
            text = text.replace(secret, MASK)
    if "hf_" in text:
        text = _HUB_TOKEN.sub(MASK, text)
    if "://" in text:
        text = _USER.sub(MASK, text)
        text = _SIGNED.sub(rf"\1={MASK}", text)
    return text


def _known() -> list[str]:
    """The longest first: one key may begin with another. The environment is asked each time: notebooks set it late."""
    found = {*_hidden, _hub_token()}
    found.update(os.environ.get(name, "").strip() for name in _VARIABLES)
    return sorted((secret for secret in found if len(secret) >= _SHORTEST), key=len, reverse=True)


_tokens: dict[str, str] = {}  # by the file that `huggingface-cli login` writes, read once


def _hub_token() -> str:
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    place = os.environ.get("HF_TOKEN_PATH") or f"{home}/token"
    if place not in _tokens:
        try:
            _tokens[place] = Path(place).expanduser().read_text(encoding="utf-8", errors="replace").strip()
        except (OSError, RuntimeError):  # a user without a home
            _tokens[place] = ""
    return _tokens[place]


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a library in Rust, which is not an `Exception`."""
    return type(error).__name__ == "PanicException" and not isinstance(error, Exception)


@contextmanager
def foreign_errors(as_ours: Callable[[BaseException], StillroomError]) -> Iterator[None]:
    """Convert any error of a library, a Rust panic included. Ours, lack of memory and interrupts pass unchanged."""
    try:
        yield
    except (StillroomError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise as_ours(error) from error


class StillroomError(Exception):
    """Base of our errors. `advice` is what to try, most promising first. No text holds a key that we know."""

    exit_code = 1
    title = "stillroom stopped"

    def __init__(self, what: str, *, where: str = "", advice: tuple[str, ...] | list[str] = ()) -> None:
        self.what, self.where = masked(what), masked(where)
        self.advice = tuple(masked(text) for text in advice)
        super().__init__(self.what)

    def __str__(self) -> str:
        lines = [f"{self.what}" + (f" ({self.where})" if self.where else "")]
        lines += [f"  try: {advice}" for advice in self.advice]
        return "\n".join(lines)


@contextmanager
def at_setting(setting: str) -> Iterator[None]:
    """Name the setting as the place of an error of ours that has none."""
    try:
        yield
    except StillroomError as error:
        error.where = error.where or setting
        raise


class ConfigError(StillroomError):
    """The configuration is not valid or cannot be carried out."""

    exit_code = 2
    title = "the configuration cannot be used"


class CommandUnusable(ConfigError):
    """The command line is not understood."""

    title = "the command line is not understood"


class UnknownCommand(CommandUnusable):
    """There is no command of this name."""

    title = "unknown command"


class DataError(StillroomError):
    """The data cannot be read, or too little of it can be used."""

    exit_code = 2
    title = "the data cannot be used"


class OutsideName(DataError, ValueError):
    """A name from a file or a store leads out of the folder that it belongs to, or is hidden."""


class AddressUnusable(DataError):
    """What lies behind an address (data, a run, a cache) does not exist, may not be read or cannot be copied."""

    title = "the address cannot be used"


class BrokenAtStart(StillroomError):
    """Student, teacher or device cannot be used before training begins."""

    exit_code = 20
    title = "cannot begin"


class CacheDamaged(BrokenAtStart):
    """A teacher's stored answers are not what was written."""

    title = "the teacher's cache is damaged"


class ServerUnusable(BrokenAtStart):
    """A teacher's server gives answers that cannot be used, or refuses to answer."""

    title = "the teacher's server cannot be used"


class SelftestFailed(BrokenAtStart):
    """This machine computes something incorrectly."""

    title = "the self-test failed"


class OutOfMemory(StillroomError):
    """The machine or its device has too little memory for the configuration."""

    exit_code = 20
    title = "out of memory"


class TooManySkips(StillroomError):
    """Too many steps were refused."""

    exit_code = 21
    title = "too many skipped steps"


class Diverged(StillroomError):
    """The run diverged and no rollback is left."""

    exit_code = 22
    title = "the run diverged"


class FinishedBadly(StillroomError):
    """The run finished, and its result is not what was asked for.

    `folder` and `summary` are the finished run's: its record is complete, and its report can be written.
    """

    def __init__(self, what: str, *, folder: object, summary: Mapping[str, Any], advice: list[str]) -> None:
        super().__init__(what, where=str(folder), advice=advice)
        self.folder = folder
        self.summary = summary


class NoBetterStudent(FinishedBadly, Diverged):
    """No evaluation was better than the student before training."""

    title = "the student got worse"


class LossScaleAtFloor(StillroomError):
    """FP16 gradients overflow even at the smallest loss scale."""

    exit_code = 23
    title = "the loss scale is at its floor"


class CannotSave(StillroomError):
    """The result cannot be written."""

    exit_code = 24
    title = "cannot save"


class StudentDiffers(FinishedBadly, CannotSave):
    """The folder of the student was written, and read again it differs from the trained model."""

    title = "the student does not read back"


class CheckpointUnusable(StillroomError):
    """No checkpoint of the run passes verification."""

    exit_code = 25
    title = "no usable checkpoint"


class InputsChanged(CheckpointUnusable):
    """The data, the teacher or the first student changed since the run began."""

    title = "the inputs of the run have changed"


class ResumeDiffers(CheckpointUnusable):
    """A run that was killed and resumed differs from the uninterrupted one."""

    title = "resume is not bit-exact"


class Interrupted(StillroomError):
    """Stopped from outside after saving: the run can be resumed."""

    exit_code = 75
    title = "interrupted, resumable"


class StoppedByCaller(Interrupted):
    """The loop over a run's steps was left: what is trained is saved."""


class PeerGone(Interrupted):
    """Another process of the run has ended or does not answer."""


class ServerGone(Interrupted):
    """A teacher's server answered before and does not any more: what is finished is kept."""

    title = "the teacher's server does not answer, resumable"


class Fault(StillroomError):
    """A bug in Stillroom: no known cause outside it."""

    exit_code = 70
    title = "a fault in stillroom itself"
