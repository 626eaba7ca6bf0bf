"""Chromium for tests, driven by chromedriver over the WebDriver protocol, with the standard library alone."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
IS_THERE = CHROMIUM is not None and DRIVER is not None
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
KEYS = {"tab": "\ue004", "right": "\ue014", "left": "\ue012", "end": "\ue010", "home": "\ue011"}


class Browser:
    """One window. `console` and `requests` hold what happened since the last `open`."""

    def __init__(self, base: str) -> None:
        self._base = base

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body if body is not None else {}).encode() if method == "POST" else None
        request = urllib.request.Request(f"{self._base}{path}", data=data, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.call("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def open(self, path: Path, *, width: int = 1280, height: int = 900, is_dark: bool = False) -> None:
        self.call("POST", "/url", {"url": "about:blank"})
        self.console(), self.requests()  # forget those of the page before
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.command("Emulation.setEmulatedMedia", media="screen", features=scheme)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        self.call("POST", "/url", {"url": path.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def press(self, *names: str) -> None:
        keys = [{"type": kind, "value": KEYS[name]} for name in names for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": keys}]})

    def console(self) -> list[str]:
        return [entry["message"] for entry in self.call("POST", "/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """The addresses that the page asked for, itself included."""
        entries = self.call("POST", "/se/log", {"type": "performance"})
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        return [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start a driver and a window; end both."""
    assert CHROMIUM and DRIVER
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    root = Browser(f"http://127.0.0.1:{port}")
    window: Browser | None = None
    try:
        _wait_until_ready(root)
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options}
        wanted["goog:loggingPrefs"] = {"browser": "ALL", "performance": "ALL"}
        session = root.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        window = Browser(f"http://127.0.0.1:{port}/session/{session['sessionId']}")
        yield window
    finally:
        if window is not None:
            with suppress(OSError):
                window.call("DELETE", "")
        driver.terminate()
        driver.wait(timeout=30)


def _wait_until_ready(root: Browser) -> None:
    for _ in range(300):
        with suppress(OSError):
            if root.call("GET", "/status")["ready"]:
                return
        time.sleep(0.1)
    raise RuntimeError("chromedriver does not answer")
