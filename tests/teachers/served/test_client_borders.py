"""Laws of asking at the borders: addresses, certificates, compression, sizes, and answers that are no JSON."""

from __future__ import annotations

import gzip
import json
import math
import shutil
import socket
import ssl
import subprocess
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from scripted_server import ENDLESS, Scripted, answer, scripting

from stillroom.config import load_config
from stillroom.config.schema import RequestsConfig
from stillroom.core.errors import ConfigError, ServerUnusable
from stillroom.teachers.served.client import Client, ServerRefused

FAST = RequestsConfig(retries=2, pause_seconds=0.01, timeout_seconds=5.0)


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripting() as found:
        yield found


@pytest.mark.parametrize(
    ("written", "asked"),
    [("", "/v1/models"), ("/", "/v1/models"), ("/v1/", "/v1/models"), ("/team/a/v1", "/team/a/v1/models")],
)
def test_a_path_before_the_api_is_kept_and_v1_is_not_doubled(server: Scripted, written: str, asked: str) -> None:
    Client(server.url + written, FAST).ask("GET", "/v1/models")
    assert server.paths == [asked]


def test_an_address_of_six_is_asked() -> None:
    try:
        with socket.socket(socket.AF_INET6) as here:
            here.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with scripting("::1") as found:
        assert Client(found.url, FAST).ask("POST", "/", {}) == {"fine": True}


def test_proxies_of_the_environment_are_not_used(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert Client(server.url, FAST).ask("POST", "/", {}) == {"fine": True}


def test_a_redirection_is_refused_with_its_place_and_the_key_stays(server: Scripted) -> None:
    with scripting() as elsewhere:
        server.script.append(answer(307, b"", Location=f"{elsewhere.url}/v1"))
        with refused(ServerRefused, "http://", "status 307") as caught:
            Client(server.url, FAST, "sk-secret").ask("POST", "/", {})
        assert f"it points to {elsewhere.url}/v1" in str(caught.value)
        assert not elsewhere.paths


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_a_certificate_that_does_not_hold_is_final_and_a_trusted_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run(["openssl", "req", "-x509", *kind, *named, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with scripting(secured=context) as found:
        with refused(ServerUnusable, "https://", "certificate") as caught:
            Client(found.url, FAST).ask("POST", "/", {})
        assert "SSL_CERT_FILE" in str(caught.value) and not found.paths
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        assert Client(found.url, FAST).ask("POST", "/", {}) == {"fine": True}


def test_a_name_that_is_not_known_and_a_server_without_tls_are_final_at_the_start(server: Scripted) -> None:
    for url in ("http://no-such-host.invalid:1", server.url.replace("http://", "https://")):
        client = Client(url, RequestsConfig(retries=9, pause_seconds=60.0))
        with refused(ServerUnusable, url) as caught:
            client.ask("POST", "/", {})
        assert "http or https" in str(caught.value) and client.counters == {"requests": 1}


def test_a_page_for_people_is_final_at_the_start_and_a_passing_one_later(server: Scripted) -> None:
    page = answer(200, b"<!doctype html><title>welcome to the proxy</title>", Content_Type="text/html")
    server.script.append(page)
    with refused(ServerUnusable, "http://", "welcome to the proxy"):
        Client(server.url, FAST).ask("POST", "/", {})
    assert len(server.paths) == 1
    client = Client(server.url, FAST)
    client.ask("POST", "/", {})
    server.script.append(page)
    assert client.ask("POST", "/", {}) == {"fine": True}


def test_gzip_that_was_not_asked_for_is_read_and_other_codings_are_refused(server: Scripted) -> None:
    server.script += [
        answer(200, gzip.compress(b'{"fine": "packed"}'), Content_Encoding="gzip"),
        answer(200, b"garbage", Content_Encoding="gzip"),
        answer(200, b"{}", Content_Encoding="br"),
    ]
    client = Client(server.url, FAST)
    assert client.ask("POST", "/", {}) == {"fine": "packed"}
    with refused(ServerUnusable, "http://", "'br'"):
        client.ask("POST", "/", {})
    assert client.counters["repeated_dropped"] == 1  # the broken one was asked for again


@pytest.mark.parametrize("kind", list(ENDLESS))
def test_an_answer_without_end_is_a_timeout_of_the_whole_answer(server: Scripted, kind: str) -> None:
    quick = RequestsConfig(retries=1, pause_seconds=0.01, timeout_seconds=0.5)
    server.script += [ENDLESS[kind]] * 2
    client, ended = Client(server.url, quick), threading.Event()

    def ask() -> None:
        with pytest.raises(ServerUnusable):
            client.ask("POST", "/", {})
        ended.set()

    threading.Thread(target=ask, daemon=True).start()
    assert ended.wait(30)
    assert client.counters == {"requests": 1, "repeated_timeout": 1}
    assert client.ask("POST", "/", {}) == {"fine": True}  # the next answer has its own time


@pytest.mark.parametrize("packed", [False, True])
def test_no_more_of_an_answer_is_held_than_it_may_have(server: Scripted, packed: bool) -> None:
    large = b'"' + b"a" * 40_000_000 + b'"'
    held = gzip.compress(large, 1) if packed else large
    server.script.append(answer(200, held, **({"Content_Encoding": "gzip"} if packed else {})))
    client = Client(server.url, FAST)
    tracemalloc.start()
    try:
        with refused(ServerUnusable, "http://", "1,000,000"):
            client.ask("POST", "/", {}, most_bytes=1_000_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000
    assert client.ask("POST", "/", {}) == {"fine": True}


def test_an_answer_of_the_very_size_is_read(server: Scripted) -> None:
    held = json.dumps({"text": "x" * 500}).encode()
    server.script.append(answer(200, held))
    assert Client(server.url, FAST).ask("POST", "/", {}, most_bytes=len(held))["text"] == "x" * 500


def test_an_object_that_names_a_token_twice_is_refused(server: Scripted) -> None:
    server.script.append(answer(200, b'{"prompt_logprobs": [null, {"5": -1.0, "5": -2.0}]}'))
    with refused(ServerUnusable, "http://", "twice"):
        Client(server.url, FAST).ask("POST", "/", {})


def test_literals_that_are_no_json_arrive_as_numbers_and_are_judged_by_the_shape(server: Scripted) -> None:
    server.script.append(answer(200, b"[NaN, Infinity, -Infinity]"))
    found = Client(server.url, FAST).ask("POST", "/", {})
    assert math.isnan(found[0]) and found[1:] == [math.inf, -math.inf]


def test_a_key_at_the_edge_of_what_is_shown_is_hidden_whole(server: Scripted) -> None:
    server.script.append(answer(403, b"a" * 290 + b" sk-secret-1234567890"))
    with pytest.raises(ServerRefused) as caught:
        Client(server.url, FAST, "sk-secret-1234567890").ask("POST", "/", {})
    assert "sk-s" not in str(caught.value)


@pytest.mark.parametrize("field", ["Location", "Content-Encoding", "Server", "body"])
def test_a_key_that_the_server_repeats_is_hidden_wherever_it_stands(server: Scripted, field: str) -> None:
    key = "sk-Secret-" + "1234567890" * 8  # longer than what is shown of a coding
    headers = {field.replace("-", "_"): f"http://a/{key}"} if field != "body" else {}
    status = 200 if field == "Content-Encoding" else 307
    server.script.append(answer(status, key.encode() if field == "body" else b"{}", **headers))
    client = Client(server.url, FAST, key)
    with pytest.raises(ServerUnusable) as caught:
        client.ask("POST", "/", {})
    assert "secret" not in (str(caught.value) + client.server_header).lower()


def test_a_chunk_of_negative_length_is_an_answer_cut_short(server: Scripted) -> None:
    def give(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"-5\r\n{}\r\n0\r\n\r\n")
        handler.close_connection = True

    server.script.append(give)
    client = Client(server.url, FAST)
    assert client.ask("POST", "/", {}) == {"fine": True}
    assert client.counters == {"requests": 1, "repeated_dropped": 1}


@pytest.mark.parametrize("url", [f"http://{'a' * 70}.example:1", "http://localhost:9/\u00fc"])
def test_an_address_that_cannot_be_sent_is_refused(url: str) -> None:
    with pytest.raises(ServerUnusable):
        Client(url, FAST).ask("GET", "/v1/models")


@pytest.mark.parametrize(
    "url",
    [
        "http://user:word@box",
        "http://box?key=sk-1",
        "ftp://box",
        "http://",
        "http://box:99999",
        "box:8000",
        "http://a#b",
    ],
)
def test_an_address_that_holds_a_secret_or_is_none_is_refused_without_repeating_it(url: str) -> None:
    with refused(ConfigError, "", "teacher.server") as caught:
        load_config(overrides={"teacher.server": url})
    assert "word" not in str(caught.value) and "sk-1" not in str(caught.value)
