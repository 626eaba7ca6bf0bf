"""Keep keys out of logs, terminals, errors and reports: `masked` replaces each one that this process knows.

Known are the keys in the environment variables of the hubs, stores and trackers we use, what `hide` was told (the key
of a teacher's server), and what URLs carry: user names and passwords, signatures and tokens in their queries. Text is
masked where it leaves the process: by the event log, the console, our errors, the report and the file of a traceback.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

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
