"""How a teacher on a server is asked: the `teacher.requests` section."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from stillroom.config.sections import MOST_MINUTES, Section


class RequestsConfig(Section):
    model: str | None = Field(None, description="name of the model on the server; none: the only one it lists")
    shape: Literal["auto", "prompt_logprobs", "echo", "llama.cpp"] = Field(
        "auto",
        description="prompt_logprobs: the field of vLLM; echo: `echo` with `logprobs`, tokens as token_id:N; "
        "llama.cpp: `/completion` of llama.cpp's server, asked token by token; auto: the first that the server answers",
    )
    concurrency: Annotated[int, Field(ge=1, le=512)] = Field(8, description="requests under way at once")
    timeout_seconds: Annotated[float, Field(gt=0, le=60 * MOST_MINUTES)] = Field(
        300.0, description="for a whole answer, until asked again; what a server says of itself has 30 at most"
    )
    retries: Annotated[int, Field(ge=0, le=100)] = Field(
        8, description="of a request that got no answer, an answer cut short, or status 408, 429 or 5xx"
    )
    pause_seconds: Annotated[float, Field(gt=0, le=60 * MOST_MINUTES)] = Field(
        0.5, description="before the first retry; doubled with each, up to 60; Retry-After is heeded"
    )
    api_key_variable: str | None = Field(
        None, description="environment variable with the server's key; the key itself is never logged or written"
    )
    check_temperature: bool = Field(
        True,
        description="refuse answers that fit their own text much better sharpened or flattened, as log-probabilities "
        "of another temperature do",
    )


def check_url(url: str) -> None:
    """Raise ValueError for an address that cannot be asked, without repeating it: it may hold a secret."""
    try:
        parts = urlsplit(url)
        is_known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_known = False
    if not is_known:
        raise ValueError("teacher.server is no address of a server: write http://HOST:PORT")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "teacher.server holds more than scheme, host, port and path, and a run's configuration is written to its "
            "folder: name a variable with the key in teacher.requests.api_key_variable"
        )
