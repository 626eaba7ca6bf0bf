"""A Hub on this machine: the HTTP API that huggingface_hub calls, with commits in memory and faults of a test."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml
from scripted_server import _Server

TOKEN = "hf_PlantedTokenThatMustNotBeSeenAnywhere0"
_LARGE = (".safetensors", ".gguf", ".bin", ".idx", ".npy")


@dataclass
class Repo:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # the files of each
    branches: dict[str, str] = field(default_factory=dict)
    titles: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], title: str) -> str:
        listing = sorted((name, hashlib.sha1(held).hexdigest()) for name, held in files.items())
        parent = self.branches.get(branch, "")
        oid = hashlib.sha1(json.dumps([parent, title, len(self.commits), listing]).encode()).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        self.titles.append(title)
        return oid

    def at(self, revision: str) -> dict[str, bytes] | None:
        return self.commits.get(self.branches.get(revision, revision))

    def head(self, branch: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches[branch]]


@dataclass
class Hub:
    """Faults are functions of (method, path) that answer (status, message), "drop", or None for no fault."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)  # uploaded, whether committed or not
    requests: list[str] = field(default_factory=list)
    fault: Callable[[str, str], Any] = lambda _method, _path: None
    after: Callable[[str, str], Any] = lambda _method, _path: None  # done what was asked, the answer is not given
    role: str = "write"
    seconds: float = 0.0  # of every answer
    ignored: str = ""  # end of names that .gitignore of the repository leaves out

    def count(self, part: str) -> int:
        return sum(part in request for request in self.requests)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_words: Any) -> None:
        """Nothing."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.hub.requests.append(f"{self.command} {path}")
        time.sleep(self.hub.seconds)
        answer = self.hub.fault(self.command, path)
        if answer is None:
            answer = self._answer(path, parse_qs(parts.query), body)
            if self.hub.after(self.command, path) == "drop":
                answer = "drop"
        if answer == "drop":
            self.close_connection = True
            return
        status, held, *headers = answer
        contents = held if isinstance(held, bytes) else json.dumps(held).encode()
        if status >= 400:
            contents = json.dumps(held if isinstance(held, dict) else {"error": held}).encode()
        self.send_response(status)
        for name, value in headers[0].items() if headers else ():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(contents)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(contents)

    do_GET = do_POST = do_PUT = do_HEAD = _serve  # noqa: N815 - as http.server calls them

    def _answer(self, path: str, query: dict[str, list[str]], body: bytes) -> Any:
        hub = self.hub
        if path.startswith("/large/"):  # presigned: without a token
            oid = path.removeprefix("/large/")
            if hashlib.sha256(body).hexdigest() != oid:
                return 400, "the sum is wrong"
            hub.large[oid] = body
            return 200, {}
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, "Invalid credentials in Authorization header", {"X-Error-Message": "Invalid credentials"}
        if path == "/api/whoami-v2":
            return 200, {"name": "ada", "orgs": [], "auth": {"accessToken": {"role": hub.role}}}
        if path == "/api/validate-yaml":
            front = json.loads(body)["content"].split("---")[1]
            return (200, {}) if isinstance(yaml.safe_load(front), dict) else (400, "no metadata")
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        found = re.fullmatch(r"/(?:api/models/)?([\w.-]+/[\w.-]+?)(?:\.git/info/lfs)?(/.*)?", path)
        repo = hub.repos.get(found[1]) if found else None
        if found is None or repo is None:
            return 404, "Repository not found", {"X-Error-Code": "RepoNotFound"}
        _, verb, *rest = (found[2] or "/").split("/", 3)
        given = json.loads(body) if body and verb != "commit" else {}
        return self._of_repo(found[1], repo, verb, rest, query, given, body)

    def _create(self, given: dict[str, Any]) -> Any:
        name = f"{given['organization']}/{given['name']}"
        if name in self.hub.repos:
            return 409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}
        if given["organization"] not in ("ada", "org"):
            return 403, "You don't have the rights to create a model under this namespace"
        self.hub.repos[name] = Repo(given.get("visibility") == "private" or bool(given.get("private")))
        self.hub.repos[name].commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        return 200, {"url": f"{self.hub.url}/{name}"}

    def _of_repo(self, name: str, repo: Repo, verb: str, rest: list[str], query: Any, given: Any, body: bytes) -> Any:
        if verb == "objects":
            return 200, {"transfer": "basic", "objects": [self._upload(one) for one in given["objects"]]}
        if verb == "branch":
            if rest[0] in repo.branches:
                return 409, "Reference already exists"
            repo.branches[rest[0]] = repo.branches[given.get("startingPoint") or "main"]
            return 200, {}
        revision = rest[0] if rest else "main"
        files = repo.at(revision)
        if files is None:
            return 404, "Revision not found", {"X-Error-Code": "RevisionNotFound"}
        match verb:
            case "" | "revision":
                sha = repo.branches.get(revision, revision)
                return 200, {"id": name, "sha": sha, "private": repo.private, "siblings": [], "tags": []}
            case "tree":
                return self._tree(files, rest[1] if len(rest) > 1 else "", query.get("recursive") == ["true"])
            case "paths-info":
                return 200, [_described(path, files[path]) for path in given["paths"] if path in files]
            case "preupload":
                return 200, {"files": [self._preupload(one, files) for one in given["files"]]}
            case "commit":
                return self._commit(name, repo, revision, body)
            case "resolve":
                held = files.get(rest[1])
                if held is None:
                    return 404, "Entry not found", {"X-Error-Code": "EntryNotFound"}
                begin, _, end = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
                return 200, held[int(begin) : int(end) + 1 if end else None], {"ETag": f'"{len(held)}"'}
        return 404, f"{verb} is unknown here"

    def _tree(self, files: dict[str, bytes], under: str, is_deep: bool) -> Any:
        below = f"{under}/" if under else ""
        listed = {path: held for path, held in files.items() if path.startswith(below)}
        if under and not listed:
            return 404, "Entry not found", {"X-Error-Code": "EntryNotFound"}
        found: dict[str, Any] = {}
        for path, held in sorted(listed.items()):
            names = path[len(below) :].split("/")
            for depth in range(1, len(names)):
                folder = below + "/".join(names[:depth])
                found.setdefault(folder, {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0})
            found[path] = _described(path, held)
        shown = [one for path, one in found.items() if is_deep or "/" not in path[len(below) :]]
        return 200, shown

    def _upload(self, given: dict[str, Any]) -> dict[str, Any]:
        if given["oid"] in self.hub.large:
            return {"oid": given["oid"], "size": given["size"]}
        href = f"{self.hub.url}/large/{given['oid']}"
        return {"oid": given["oid"], "size": given["size"], "actions": {"upload": {"href": href}}}

    def _preupload(self, given: dict[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
        path = given["path"]
        mode = "lfs" if path.endswith(_LARGE) else "regular"
        ignored = bool(self.hub.ignored) and path.endswith(self.hub.ignored)
        held = files.get(path)
        oid = None if held is None else (_described(path, held).get("lfs") or _described(path, held))["oid"]
        return {"path": path, "uploadMode": mode, "shouldIgnore": ignored, "oid": oid}

    def _commit(self, name: str, repo: Repo, branch: str, body: bytes) -> Any:
        lines = [json.loads(line) for line in body.splitlines()]
        header = lines[0]["value"]
        if branch not in repo.branches:
            return 404, "Revision not found", {"X-Error-Code": "RevisionNotFound"}
        if header.get("parentCommit") not in (None, repo.branches[branch]):
            return 412, "A commit has happened since. Please refresh and try again."
        files = dict(repo.head(branch))
        for line in lines[1:]:
            value, path = line["value"], line["value"]["path"]
            match line["key"]:
                case "file":
                    files[path] = base64.b64decode(value["content"])
                case "lfsFile":
                    if value["oid"] not in self.hub.large:
                        return 400, f"{path} was not uploaded"
                    files[path] = self.hub.large[value["oid"]]
                case "deletedFile":
                    if files.pop(path, None) is None:
                        return 404, "A file with this name doesn't exist", {"X-Error-Code": "EntryNotFound"}
        oid = repo.commit(branch, files, header["summary"])
        return 200, {"commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "success": True}


def _described(path: str, held: bytes) -> dict[str, Any]:
    found = {"type": "file", "path": path, "size": len(held)}
    if path.endswith(_LARGE):
        sha256 = hashlib.sha256(held).hexdigest()
        found |= {"lfs": {"oid": sha256, "size": len(held), "pointerSize": 134}}
        held = f"oid sha256:{sha256}".encode()
    return found | {"oid": hashlib.sha1(b"blob %d\0" % len(held) + held).hexdigest()}


@contextmanager
def hub_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The Hub for this process, with a token in the environment. Nothing waits between tries."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    hub = Hub()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template[template.index("/{") :])
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_http, "time", SimpleNamespace(**{**vars(time), "sleep": lambda _seconds: None}))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    _http.close_session()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        _http.close_session()
