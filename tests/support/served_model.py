"""A small server in the shape of vLLM's, in a thread, with a real model; it can lie and fail in known ways."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Table = dict[str, Any] | None
NAME = "tiny-teacher"


class ServedModel:
    """`lie` is how every answer is wrong; `faults` are used up, one a request, before answers are given."""

    program = "tiny/1"  # the Server header

    def __init__(self, folder: Path, lie: str = "honest") -> None:
        self.lie = lie
        self.faults: list[str] = []
        self.key = ""
        self.max_logprobs = 1000
        self.max_model_len = 4096
        self.num_asked = 0
        self.num_at_once = self.most_at_once = 0
        self.heard: list[dict[str, Any]] = []
        self.retry_after = "0.05"
        self.other_after: int | None = None  # number of prompts after which another model answers
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        torch.manual_seed(99)
        self._other = AutoModelForCausalLM.from_config(self._model.config).eval()
        self._lock = threading.Lock()
        self.released = threading.Event()  # ends all stalls
        self.url = ""

    # -- answers -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _log_probs(self, ids: list[int]) -> Any:
        """[T, V] after each token of the prompt, computed for this prompt alone."""
        with self._lock:
            self.num_asked += 1
            is_other = self.other_after is not None and self.num_asked > self.other_after
            logits = (self._other if is_other else self._model)(torch.tensor([ids])).logits[0].float()
        if self.lie == "logits":
            return logits - logits.min()
        if self.lie == "heavy":
            return torch.log_softmax(logits, -1) + 0.5
        return torch.log_softmax(logits / {"warm": 2.0, "cold": 0.4}.get(self.lie, 1.0), -1)

    def _table(self, log_probs: Any, own: int, num: int, name: Callable[[int], str]) -> dict[str, Any]:
        num = num // 2 if self.lie == "few" else num
        kept = log_probs.topk(min(num, len(log_probs)))
        found = dict(zip(kept.indices.tolist(), kept.values.tolist(), strict=True))
        found.setdefault(own, float(log_probs[own]))
        return {
            name(token): {"logprob": value, "rank": rank, "decoded_token": self._text(token)}
            for rank, (token, value) in enumerate(found.items(), start=1)
        }

    def _text(self, token: int) -> str:
        if self.lie == "tokenizer":
            token = (token + 7) % len(self._tokenizer)
        return str(self._tokenizer.decode([token]))

    def _tables(self, ids: list[int], num: int, name: Callable[[int], str]) -> list[Table]:
        after = self._log_probs(ids)
        shift = {"shifted": 1, "shifted back": -1, "shifted values": 1}.get(self.lie, 0)
        tables: list[Table] = [None]
        for place in range(1, len(ids)):
            seen = min(max(place - 1 + shift, 0), len(ids) - 1)
            own = ids[place] if self.lie == "shifted values" else ids[min(seen + 1, len(ids) - 1)]
            tables.append(self._table(after[seen], own, num, name))
        return tables

    def page(self, path: str) -> tuple[int, Any]:
        """What GET answers."""
        listed = {"data": [{"id": NAME, "max_model_len": self.max_model_len}]}
        found = {"/v1/models": listed, "/version": {"version": "0.0-tiny"}}.get(path)
        return (200, found) if found else (404, {"detail": "Not Found"})

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """What POST answers."""
        if path == "/v1/completions":
            return self.completion(body)
        if path == "/detokenize" and self.lie != "mute":
            shift = 7 if self.lie == "other spelling" else 0
            return 200, {"prompt": self._tokenizer.decode([token + shift for token in body["tokens"]])}
        return 404, {"detail": "Not Found"}

    def completion(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        ids = body["prompt"]
        if not all(isinstance(one, int) for one in ids):
            return 400, {"error": {"message": "this server takes token ids"}}
        choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": "length", "logprobs": None}
        answer = {
            "object": "text_completion",
            "model": NAME,
            "choices": [choice],
            "usage": {"prompt_tokens": len(ids) + (self.lie == "mark"), "completion_tokens": 1},
        }
        wanted = body.get("prompt_logprobs")
        if wanted is not None and wanted > self.max_logprobs:
            told = f"Requested prompt logprobs of {wanted}, which is greater than max allowed: {self.max_logprobs}"
            return 400, {"error": {"message": told}}
        if self.lie == "missing":
            return 200, answer
        only_echo = self.lie in ("echo", "echo texts", "mute", "other spelling")
        if wanted is not None and not only_echo:
            name = self._text if self.lie == "texts" else str
            choice["prompt_logprobs"] = self._tables(ids, wanted, name)
            if body.get("return_token_ids"):
                choice["prompt_token_ids"] = ids
        elif only_echo and body.get("echo"):
            by_id = body.get("return_tokens_as_token_ids") and self.lie != "echo texts"
            choice["logprobs"] = self._echo(
                ids, body["logprobs"], (lambda one: f"token_id:{one}") if by_id else self._text
            )
        return 200, answer

    def _echo(self, ids: list[int], num: int, name: Callable[[int], str]) -> dict[str, Any]:
        tables = self._tables(ids, num, name)
        top = [None if table is None else {key: one["logprob"] for key, one in table.items()} for table in tables]
        own = [None, *(table[name(token)] for token, table in zip(ids[1:], top[1:], strict=True) if table)]
        generated = name(0)
        return {
            "tokens": [*(name(token) for token in ids), generated],
            "token_logprobs": [*own, -1.0],
            "top_logprobs": [*top, {generated: -1.0}],
        }

    # -- http --------------------------------------------------------------------------------------------

    def take_fault(self) -> str:
        with self._lock:
            return self.faults.pop(0) if self.faults else ""


def _handler(served: ServedModel) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else each answer waits for the client's delayed ACK
        server_version, sys_version = served.program, ""

        def log_message(self, *_words: Any) -> None:
            """Tests print nothing."""

        def do_GET(self) -> None:
            if self._is_known():
                self._send(*served.page(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self._is_known():
                return
            served.heard.append(body)
            match served.take_fault():
                case "stall":
                    served.released.wait(20)
                    self.close_connection = True
                case "500" | "503" as status:
                    self._send(int(status), {"error": {"message": "the engine is dead"}})
                case "429":
                    self._send(429, {"error": {"message": "slow down"}}, {"Retry-After": served.retry_after})
                case "drop":
                    self._send(200, {"choices": ["cut short"] * 50}, sends=100)
                case "garbage":
                    self._send_bytes(200, b"<html>not json</html>")
                case _:
                    with served._lock:
                        served.num_at_once += 1
                        served.most_at_once = max(served.most_at_once, served.num_at_once)
                    try:
                        self._send(*served.answer(self.path, body))
                    finally:
                        with served._lock:
                            served.num_at_once -= 1

        def _is_known(self) -> bool:
            if served.key and self.headers.get("Authorization") != f"Bearer {served.key}":
                self._send(401, {"error": {"message": f"bad key {self.headers.get('Authorization')}"}})
                return False
            return True

        def _send(
            self, status: int, found: Any, headers: dict[str, str] | None = None, sends: int | None = None
        ) -> None:
            self._send_bytes(status, json.dumps(found).encode(), headers, sends)

        def _send_bytes(
            self, status: int, held: bytes, headers: dict[str, str] | None = None, sends: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(held)))
            self.end_headers()
            self.wfile.write(held[:sends])
            if sends is not None:
                self.close_connection = True

    return Handler


@contextmanager
def serving(folder: Path, lie: str = "honest", kind: type[ServedModel] = ServedModel) -> Iterator[Any]:
    """The server while the body runs."""
    served = kind(folder, lie)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(served))
    server.daemon_threads = True
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        served.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
