"""A server in a thread that answers what a test tells it, one answer after another."""

from __future__ import annotations

import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Give = Callable[[Any], None]


def answer(status: int, held: bytes, cut: int | None = None, **headers: str) -> Give:
    """An answer, or its first `cut` bytes and the end of the connection."""

    def give(handler: Any) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(held)))
        handler.end_headers()
        handler.wfile.write(held[:cut])
        handler.close_connection = cut is not None

    return give


def stall(handler: Any) -> None:
    handler.scripted.ended.wait(20)
    handler.close_connection = True


def drip(handler: Any) -> None:
    """An answer that comes by one space every tenth of a second, until the test ends."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    while not handler.scripted.ended.wait(0.1):
        handler.wfile.write(b" ")


def keep_continuing(handler: Any) -> None:
    """Interim answers without end."""
    while not handler.scripted.ended.wait(0.1):
        handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def drip_the_head(handler: Any) -> None:
    """A header by a letter every tenth of a second."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while not handler.scripted.ended.wait(0.1):
        handler.wfile.write(b"a")


def drip_chunks(handler: Any) -> None:
    """A body in chunks of one byte."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    while not handler.scripted.ended.wait(0.1):
        handler.wfile.write(b"1\r\n \r\n")


ENDLESS = {"body": drip, "head": drip_the_head, "chunks": drip_chunks, "100 continue": keep_continuing}


def hang_up(handler: Any) -> None:
    handler.close_connection = True


@dataclass
class Scripted:
    """At the end of the script every answer is {"fine": true}."""

    url: str = ""
    script: list[Give] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when each request came
    paths: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)  # ends all stalls


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is what some tests are about."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _SixServer(_Server):
    address_family = socket.AF_INET6


@contextmanager
def scripting(host: str = "127.0.0.1", secured: ssl.SSLContext | None = None) -> Iterator[Scripted]:
    found = Scripted()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        scripted = found

        def log_message(self, *_words: Any) -> None:
            """Nothing."""

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self) -> None:
            found.times.append(time.monotonic())
            found.paths.append(self.path)
            (found.script.pop(0) if found.script else answer(200, b'{"fine": true}'))(self)

    kind = _SixServer if ":" in host else _Server
    server = kind((host, 0), Handler)
    if secured is not None:
        server.socket = secured.wrap_socket(server.socket, server_side=True)
    scheme, name = ("https" if secured else "http"), (f"[{host}]" if ":" in host else host)
    found.url = f"{scheme}://{name}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
