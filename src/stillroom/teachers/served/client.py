"""Send JSON requests to a server over kept connections, and retry where that may help.

Repeated: no connection, no whole answer in time, an answer cut short or that is not JSON, status 408, 429 and 5xx.
Pauses double and are drawn at random, so that many clients do not come back at once. `Retry-After` holds for all
threads of a client. Any other status is final. A redirection is not followed: the key would go to another host.
Proxies of the environment are not used, for the same reason. No more of an answer is read, or unpacked, than it may
have, and not for longer: `timeout_seconds` is a bound on the whole answer, because a server that sends a byte now and
then is never idle.

By http.client and not by httpx, whose timeouts restart with each byte: a dripping head, body, chunk or 100 Continue
was never ended (httpx2 2.16, the servers of `ENDLESS` in the tests). Its own deadline would take a network backend.
"""

from __future__ import annotations

import email.utils
import http.client
import io
import json
import math
import random
import socket
import ssl
import threading
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

from stillroom.config.schema import RequestsConfig
from stillroom.core.errors import ServerGone, ServerUnusable, hide, masked
from stillroom.core.files import reason_of

_LONGEST_PAUSE = 60.0
_LONGEST_WISH = 900.0  # seconds of Retry-After that are waited for
_SHOWN = 300  # characters of a server's message
_MOST_BYTES = 16 << 20  # of an answer whose size the caller does not know
_LOOKED_UP = 30.0  # seconds at most for a GET: what a server says of itself needs no model
_GZIP = 16 + zlib.MAX_WBITS
_AGAIN = (408, 429, 500, 502, 503, 504, 529)
_ADVICE_KEY = "name the variable that holds the server's key: --set teacher.requests.api_key_variable=NAME"
_ADVICE_ADDRESS = "check the address of teacher.server: a page for people answers there"
_ADVICE_SCHEME = "check the address of teacher.server: its name, and http or https"
_RESUME = "give the same command again (`stillroom resume` for a run) when it answers: what is finished is kept"


class _Failed(Exception):
    """A try that may succeed when it is repeated. `kind` is what is counted."""

    def __init__(self, kind: str, what: str, wait: float | None = None) -> None:
        super().__init__(what)
        self.kind, self.wait = kind, wait


@dataclass(frozen=True)
class Address:
    """Where a server is. `prefix` stands before the paths of its API."""

    is_secure: bool
    host: str
    port: int | None
    prefix: str

    @staticmethod
    def of(url: str) -> Address:
        """From a URL with or without the /v1 that many write at its end."""
        parts = urlsplit(url)
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return Address(parts.scheme == "https", parts.hostname or "", parts.port, prefix)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = f":{self.port}" if self.port else ""
        return f"http{'s' if self.is_secure else ''}://{host}{port}{self.prefix}"


class _TimedReader(io.RawIOBase):
    """Read a socket until a deadline; the socket's own timeout restarts with each byte."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        self._sock, self._raw, self._end = sock, sock.makefile("rb", buffering=0), end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedAnswer(http.client.HTTPResponse):
    """An answer that ends by a moment: its head, the interim answers before it and its body."""

    def __init__(self, sock: socket.socket, *more: Any, end: float, **named: Any) -> None:
        super().__init__(sock, *more, **named)
        self.fp.close()
        self.fp = io.BufferedReader(_TimedReader(sock, end))


class Client:
    """One server. Threads may ask at the same time; each keeps a connection."""

    def __init__(self, url: str, settings: RequestsConfig, key: str = "") -> None:
        self.address = Address.of(url)
        self.server_header = ""  # of the last answer: names the program, where it says so
        self._settings, self._key = settings, key
        hide(key)
        self._local = threading.local()
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._not_before = 0.0
        self._closed = threading.Event()
        self._chance = random.Random()  # its own: a run's random state is part of its checkpoints
        self._has_answered = False

    @property
    def counters(self) -> dict[str, int]:
        """Requests, and how often one was repeated, by cause."""
        with self._lock:
            return dict(self._counters)

    def close(self) -> None:
        """End all pauses: threads that wait to ask again give up."""
        self._closed.set()

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, most_bytes: int = _MOST_BYTES
    ) -> Any:
        """The JSON that the server answers. Raise `ServerUnusable` where it refuses, `ServerGone` where it is gone."""
        held = None if body is None else json.dumps(body).encode("ascii")
        self._count("requests")
        for number in range(self._settings.retries + 1):
            self._wait(self._not_before - time.monotonic())
            try:
                found = self._try(method, path, held, most_bytes)
            except _Failed as failed:
                self._forget_connection()
                last = failed
                if number < self._settings.retries:
                    self._count(f"repeated_{failed.kind}")
                    self._pause(number, failed)
                continue
            self._has_answered = True
            return found
        raise self._gone(last)

    # -- one try -----------------------------------------------------------------------------------------

    def _try(self, method: str, path: str, held: bytes | None, most_bytes: int) -> Any:
        answer, told = self._exchange(method, path, held, most_bytes)
        self.server_header = masked(answer.headers.get("Server", ""))
        if answer.status in _AGAIN:
            wish = _seconds(answer.headers.get("Retry-After"))
            kind = "rate_limit" if answer.status == 429 else "server_error"
            raise _Failed(kind, f"status {answer.status}{self._said(told)}", wish)
        if answer.status != 200:
            raise self._refused(method, path, answer, told)
        try:
            return json.loads(told, object_pairs_hook=_once_each)
        except _Twice as error:
            raise ServerUnusable(f"{method} {path}: {error}", where=str(self.address)) from error
        except (ValueError, RecursionError) as error:
            what = f"an answer of {len(told):,} bytes is not JSON{self._said(told)}"
            if not self._has_answered and told.lstrip()[:1] == b"<":
                raise ServerUnusable(what, where=str(self.address), advice=[_ADVICE_ADDRESS]) from error
            raise _Failed("no_json", what) from error

    def _exchange(
        self, method: str, path: str, held: bytes | None, most_bytes: int
    ) -> tuple[http.client.HTTPResponse, bytes]:
        headers = {"Accept": "application/json"}
        if held is not None:
            headers["Content-Type"] = "application/json"
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        longest = self._settings.timeout_seconds
        longest = min(longest, _LOOKED_UP) if method == "GET" else longest
        try:
            answer = self._send(method, path, held, headers, time.monotonic() + longest)
            told = answer.read(most_bytes + 1)
            if len(told) <= most_bytes and answer.length:  # with a limit, `read` does not notice
                raise http.client.IncompleteRead(told, answer.length)
        except TimeoutError as error:
            raise _Failed("timeout", f"no whole answer in {longest:g} seconds") from error
        except ssl.SSLCertVerificationError as error:
            raise ServerUnusable(
                f"its certificate does not hold: {error.verify_message}",
                where=str(self.address),
                advice=["SSL_CERT_FILE=FILE names the certificates that are trusted"],
            ) from error
        except (http.client.HTTPException, OSError, ValueError) as error:  # ValueError: a chunk of negative length
            what = f"the connection failed: {reason_of(error)}"
            if isinstance(error, ssl.SSLError | socket.gaierror | UnicodeError) and not self._has_answered:
                raise ServerUnusable(what, where=str(self.address), advice=[_ADVICE_SCHEME]) from error
            raise _Failed("dropped", what) from error
        return answer, self._unpacked(answer, told, most_bytes)

    def _send(
        self, method: str, path: str, held: bytes | None, headers: Mapping[str, str], end: float
    ) -> http.client.HTTPResponse:
        """The head of the answer. A kept connection that the server closed meanwhile is opened again, without a pause.

        Servers close connections that are idle for some seconds, and llama.cpp's after 100 requests.
        """
        was_kept = getattr(self._local, "connection", None) is not None
        try:
            return self._send_once(method, path, held, headers, end)
        except (ConnectionResetError, BrokenPipeError, ConnectionAbortedError):  # RemoteDisconnected is one of them
            if not was_kept:
                raise
        self._forget_connection()
        self._count("reconnected")
        return self._send_once(method, path, held, headers, end)

    def _send_once(
        self, method: str, path: str, held: bytes | None, headers: Mapping[str, str], end: float
    ) -> http.client.HTTPResponse:
        connection = self._connection()
        connection.timeout = max(end - time.monotonic(), 0.001)
        connection.response_class = cast(Any, partial(_TimedAnswer, end=end))
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        connection.request(method, f"{self.address.prefix}{path}", held, headers)
        return connection.getresponse()

    def _unpacked(self, answer: http.client.HTTPResponse, told: bytes, most_bytes: int) -> bytes:
        """The answer's bytes. Compressed ones were not asked for, and a proxy may send them all the same."""
        coding = masked(answer.headers.get("Content-Encoding") or "identity").strip().lower()
        if coding == "gzip":
            try:
                told = zlib.decompressobj(_GZIP).decompress(told, most_bytes + 1)
            except zlib.error as error:
                raise _Failed("dropped", f"a compressed answer is broken: {error}") from error
        elif coding != "identity":
            raise ServerUnusable(
                f"it answers in the coding {coding[:40]!r}, which was not asked for", where=str(self.address)
            )
        if len(told) > most_bytes:
            self._forget_connection()
            raise ServerUnusable(
                f"an answer has more than {most_bytes:,} bytes, and the request has no such answer",
                where=str(self.address),
            )
        return told

    def _connection(self) -> http.client.HTTPConnection:
        if getattr(self._local, "connection", None) is None:
            kind = http.client.HTTPSConnection if self.address.is_secure else http.client.HTTPConnection
            self._local.connection = kind(self.address.host, self.address.port)
        found: http.client.HTTPConnection = self._local.connection
        return found

    def _forget_connection(self) -> None:
        if (connection := getattr(self._local, "connection", None)) is not None:
            connection.close()
            self._local.connection = None

    # -- trying again ------------------------------------------------------------------------------------

    def _pause(self, number: int, failed: _Failed) -> None:
        """Wait as the server wishes, or longer each time. What a rate limit says holds for every thread."""
        if failed.wait is not None:
            if failed.wait > _LONGEST_WISH:
                raise self._gone(failed, f", and it asks to wait {failed.wait:,.0f} seconds")
            with self._lock:
                self._not_before = max(self._not_before, time.monotonic() + failed.wait)
            return
        longest = min(_LONGEST_PAUSE, self._settings.pause_seconds * 2**number)
        self._wait(longest * (0.5 + 0.5 * self._chance.random()))

    def _wait(self, seconds: float) -> None:
        if self._closed.wait(max(0.0, seconds)) or self._closed.is_set():
            raise ServerGone("asking was ended", where=str(self.address))

    def _count(self, name: str) -> None:
        with self._lock:
            self._counters[name] += 1

    # -- giving up ---------------------------------------------------------------------------------------

    def _gone(self, last: _Failed, more: str = "") -> ServerGone | ServerUnusable:
        what = f"the teacher's server gave no answer in {self._settings.retries + 1} tries: {last}{more}"
        if self._has_answered:
            return ServerGone(what, where=str(self.address), advice=[_RESUME, "check the server's own log"])
        return ServerUnusable(
            what, where=str(self.address), advice=["check that it runs and the address of teacher.server"]
        )

    def _refused(self, method: str, path: str, answer: http.client.HTTPResponse, told: bytes) -> ServerUnusable:
        status, place = answer.status, masked(answer.headers.get("Location", ""))
        advice = {401: [_ADVICE_KEY], 403: [_ADVICE_KEY], 404: ["check the address of teacher.server"]}.get(status, [])
        if 300 <= status < 400 and place:
            advice = [f"it points to {place[:_SHOWN]}: if that is the server, write its address in teacher.server"]
        return ServerRefused(
            f"{method} {path}: status {status}{self._said(told)}", status, where=str(self.address), advice=advice
        )

    def _said(self, told: bytes) -> str:
        """Return the server's message, shortened. Masked first: half a key would not be recognised."""
        text = told[:4096].decode("utf-8", errors="replace")
        try:
            found = json.loads(told)
            error = found.get("error", found)
            text = str(error.get("message", error) if isinstance(error, dict) else error)
        except (ValueError, AttributeError, RecursionError):
            pass
        text = " ".join(masked(text).split())[:_SHOWN]
        return f": {text}" if text else ""


class ServerRefused(ServerUnusable):
    """A status that repeating does not change."""

    def __init__(self, what: str, status: int = 0, *, where: str = "", advice: Any = ()) -> None:
        super().__init__(what, where=where, advice=advice)
        self.status = status


class _Twice(Exception):
    """An object of an answer that has a name twice."""


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raise where a name occurs twice, of which the parser alone would keep the last value."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Twice("an object of the answer has a name twice: one of its values would be lost")
    return found


def _seconds(wish: str | None) -> float | None:
    """What Retry-After says: seconds, or a date."""
    if not wish:
        return None
    try:
        found = float(wish)
    except ValueError:
        try:
            found = email.utils.parsedate_to_datetime(wish).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, found) if math.isfinite(found) else None
