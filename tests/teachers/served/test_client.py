"""Laws of asking: what may be repeated is, what the server wishes is heeded, and the key stays secret."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from refusals import refused
from scripted_server import Give, answer, hang_up, scripting, stall

from stillroom.config.schema import RequestsConfig
from stillroom.core.errors import ServerGone, ServerUnusable
from stillroom.teachers.served.client import Address, Client, ServerRefused, _seconds

FAST = RequestsConfig(retries=3, pause_seconds=0.01, timeout_seconds=0.5)


@pytest.fixture
def scripted() -> Iterator[tuple[list[Give], str, list[float]]]:
    """(what is answered next, address, when each request came)."""
    with scripting() as found:
        yield found.script, found.url, found.times


FAULTS = {
    "repeated_server_error": answer(500, b"dead"),
    "repeated_rate_limit": answer(429, b"slow down"),
    "repeated_dropped": answer(200, b'{"fine": tr' + b"u" * 50, 5),
    "repeated_timeout": stall,
    "repeated_no_json": answer(200, b"not json"),
}


@pytest.mark.parametrize("counted", list(FAULTS))
def test_a_request_that_failed_for_a_while_is_answered_and_counted(scripted: Any, counted: str) -> None:
    script, url, _times = scripted
    script += [FAULTS[counted], FAULTS[counted]]
    client = Client(url, FAST)
    assert client.ask("POST", "/v1/completions", {}) == {"fine": True}
    assert client.counters == {"requests": 1, counted: 2}


def test_a_connection_that_is_closed_without_a_word_is_opened_again(scripted: Any) -> None:
    script, url, _times = scripted
    script += [answer(200, b"{}"), hang_up]
    client = Client(url, FAST)
    assert [client.ask("POST", "/", {}), client.ask("POST", "/", {})] == [{}, {"fine": True}]
    assert client.counters == {"requests": 2, "reconnected": 1}  # at once: the server had ended a kept connection


def test_retry_after_is_waited_for_by_every_thread(scripted: Any) -> None:
    script, url, times = scripted
    script += [answer(429, b"", Retry_After="0.4")]
    client = Client(url, FAST)
    first = threading.Thread(target=client.ask, args=("POST", "/", {}))
    first.start()
    while not times:
        time.sleep(0.01)
    time.sleep(0.1)  # the first thread has read its answer
    client.ask("POST", "/", {})
    first.join()
    assert min(times[1:]) - times[0] >= 0.39


def test_a_server_that_never_answered_is_a_broken_start_and_one_that_did_is_resumable(scripted: Any) -> None:
    script, url, _times = scripted
    script += [FAULTS["repeated_server_error"]] * 4
    client = Client(url, FAST)
    with refused(ServerUnusable, "http://", "4 tries", "status 500") as broken:
        client.ask("POST", "/", {})
    client.ask("POST", "/", {})
    script += [FAULTS["repeated_server_error"]] * 4
    with pytest.raises(ServerGone) as gone:
        client.ask("POST", "/", {})
    assert (broken.value.exit_code, gone.value.exit_code) == (20, 75)


def test_an_address_where_nobody_listens_is_named() -> None:
    client = Client("http://127.0.0.1:9", RequestsConfig(retries=1, pause_seconds=0.01))
    with refused(ServerUnusable, "http://127.0.0.1:9", "2 tries") as caught:
        client.ask("GET", "/v1/models")
    assert caught.value.where == "http://127.0.0.1:9"


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 422])
def test_a_refusal_is_final_and_tells_what_the_server_said(scripted: Any, status: int) -> None:
    script, url, times = scripted
    script += [answer(status, b'{"error": {"message": "no, because"}}', Location="http://elsewhere/")]
    with refused(ServerRefused, "http://", f"status {status}") as caught:
        Client(url, FAST).ask("POST", "/", {})
    assert caught.value.status == status and len(times) == 1


def test_the_key_is_sent_and_never_told(scripted: Any) -> None:
    script, url, _times = scripted
    heard = []

    def repeat_the_key(handler: Any) -> None:
        heard.append(handler.headers["Authorization"])
        answer(401, f"who is {heard[-1]}?".encode())(handler)

    script.append(repeat_the_key)
    with pytest.raises(ServerRefused) as caught:
        Client(url, FAST, "sk-secret-1234").ask("POST", "/", {})
    assert heard == ["Bearer sk-secret-1234"]
    assert "secret" not in str(caught.value) and "***" in str(caught.value)


def test_a_wish_for_hours_ends_the_asking(scripted: Any) -> None:
    script, url, _times = scripted
    script += [answer(200, b"{}"), answer(429, b"", Retry_After="86400")]
    client = Client(url, FAST)
    client.ask("POST", "/", {})
    with refused(ServerGone, "http://", "86,400"):
        client.ask("POST", "/", {})


def test_closing_ends_a_pause(scripted: Any) -> None:
    script, url, times = scripted
    script += [answer(429, b"", Retry_After="600")]
    client, ended = Client(url, FAST), threading.Event()

    def ask() -> None:
        with pytest.raises(ServerGone):
            client.ask("POST", "/", {})
        ended.set()

    threading.Thread(target=ask, daemon=True).start()
    while not times:
        time.sleep(0.01)
    client.close()
    assert ended.wait(30)


def test_retry_after_may_be_a_date() -> None:
    from email.utils import formatdate

    found = _seconds(formatdate(time.time() + 100, usegmt=True))
    assert found is not None and 90 < found < 101
    assert _seconds("soon") is None and _seconds("-3") == 0.0 and _seconds(None) is None


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://box:8000", "http://box:8000"),
        ("http://box:8000/v1/", "http://box:8000"),
        ("https://host/models/a/v1", "https://host/models/a"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_an_address_may_end_in_v1(url: str, told: str) -> None:
    assert str(Address.of(url)) == told
