"""Laws of text written by a server: what it lies about is refused and counted, what it drops is asked for again."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tiny
from refusals import refused

from stillroom import load_config
from stillroom.core.errors import ConfigError, ServerGone, ServerUnusable
from stillroom.models import load_tokenizer
from stillroom.training.write import write_text

Reply = Callable[[str, dict[str, Any], int], Any]  # path, body, number of the request -> JSON, or a status


def fair(path: str, body: dict[str, Any], number: int = 0) -> dict[str, Any]:
    """A text that depends on prompt and seed alone, as a server does that heeds seeds."""
    asked = json.dumps([body.get("messages") or body["prompt"], body["seed"]])
    text = f" answer {hashlib.sha256(asked.encode()).hexdigest()[:8]}"
    said = {"message": {"role": "assistant", "content": text}} if path.endswith("chat/completions") else {"text": text}
    return {"choices": [{"index": 0, "finish_reason": "stop", **said}], "usage": {"completion_tokens": 4}}


@contextmanager
def serving(reply: Reply) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    seen: list[dict[str, Any]] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_words: Any) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            self._give(200, {"data": [{"id": "a-model"}]} if self.path == "/v1/models" else {"version": "1"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                seen.append({"path": self.path, **body})
                number = len(seen) - 1
            found = reply(self.path, body, number)
            if found is None:
                self.close_connection = True
                return
            self._give(*(found if isinstance(found, tuple) else (200, found)))

        def _give(self, status: int, value: Any) -> None:
            held = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(held)))
            self.end_headers()
            self.wfile.write(held)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(6)))
    return path


def written(url: str, prompts: Path, out: Path, **over: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    base: dict[str, Any] = {"teacher.server": url, "write.prompts": str(prompts), "write.batch_size": 4}
    base |= {"teacher.requests.pause_seconds": 0.01, "teacher.requests.timeout_seconds": 5.0}
    config = load_config(overrides={**base, **{key.replace("__", "."): value for key, value in over.items()}})
    result = write_text(config, out)
    return [json.loads(line) for line in out.read_text().splitlines()], result


def test_chats_and_texts_are_asked_where_they_belong(prompts: Path, tmp_path: Path) -> None:
    with serving(fair) as (url, seen):
        rows, result = written(url, prompts, tmp_path / "a.jsonl", write__samples=2)
        assert {one["path"] for one in seen} == {"/v1/chat/completions"}
        assert [row["messages"][0]["content"] for row in rows[::2]] == [f"question {n}" for n in range(6)]
        assert len(rows) == 12 and len({row["messages"][-1]["content"] for row in rows}) == 12
        assert len({one["seed"] for one in seen}) == 12
        assert all((one["top_k"], one["min_p"]) == (0, 0.0) for one in seen), "its defaults would cut the distribution"
        raw, _ = written(url, prompts, tmp_path / "raw.jsonl", write__raw=True)
        assert seen[-1]["path"] == "/v1/completions" and raw[0]["prompt"] == "question 0"
    assert result["writer"]["served_model"] == "a-model" and result["counters"]["kept_without_ids"] == 12


def test_a_server_that_drops_is_slow_or_overloaded_loses_nothing(prompts: Path, tmp_path: Path) -> None:
    with serving(fair) as (url, _seen):
        whole, _ = written(url, prompts, tmp_path / "whole.jsonl", write__samples=2)

    tries: dict[int, int] = {}

    def flaky(path: str, body: dict[str, Any], _number: int) -> Any:
        """Each answer comes at the fourth try: hung up, overloaded, and for one prompt too slow before that."""
        number = tries[body["seed"]] = tries.get(body["seed"], 0) + 1
        if number == 3 and body["messages"][0]["content"] == "question 1":
            time.sleep(1.2)
        return {1: None, 2: (503, {}), 3: (429, {})}.get(number, fair(path, body))

    with serving(flaky) as (url, _seen):
        more = {"write__samples": 2, "teacher__requests__timeout_seconds": 1.0}
        rows, result = written(url, prompts, tmp_path / "a.jsonl", **more)
    assert rows == whole
    assert sum(count for name, count in result["requests"].items() if name.startswith("repeated_")) > 0


def test_a_server_that_goes_away_is_continued_to_the_same_bytes(prompts: Path, tmp_path: Path) -> None:
    with serving(fair) as (url, _seen):
        written(url, prompts, tmp_path / "whole.jsonl")

    class Gone:
        is_gone = True

        def __call__(self, path: str, body: dict[str, Any], number: int) -> Any:
            return (503, {}) if self.is_gone and number >= 5 else fair(path, body)

    reply = Gone()
    with serving(reply) as (url, _seen):
        with pytest.raises(ServerGone):
            written(url, prompts, tmp_path / "a.jsonl", teacher__requests__retries=1)
        assert (tmp_path / "a.jsonl.partial").read_bytes().count(b"\n") == 4, "the first unit is kept"
        reply.is_gone = False
        written(url, prompts, tmp_path / "a.jsonl", teacher__requests__retries=1)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def lie(kind: str, answer: dict[str, Any]) -> Any:
    choice = answer["choices"][0]
    match kind:
        case "no_answer":
            return {"choices": []}
        case "several":
            return {"choices": [choice, choice]}
        case "no_text":
            return {"choices": [{"finish_reason": "stop", "message": {"content": None}}]}
        case "other_end":
            return {"choices": [{**choice, "finish_reason": "content_filter"}]}
        case "too_long":
            return {**answer, "usage": {"completion_tokens": 10_000}}
        case "no_object":
            return [1, 2]
    raise AssertionError(kind)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("no_answer", "no_answer"),
        ("several", "no_answer"),
        ("no_object", "no_answer"),
        ("no_text", "no_text"),
        ("other_end", "other_end"),
        ("too_long", "too_long"),
    ],
)
def test_what_a_server_lies_about_is_refused_counted_and_told(
    prompts: Path, tmp_path: Path, kind: str, reason: str
) -> None:
    def reply(path: str, body: dict[str, Any], number: int) -> Any:
        answer = fair(path, body)
        return lie(kind, answer) if body["messages"][-1]["content"] == "question 2" else answer

    with serving(reply) as (url, seen):
        rows, result = written(url, prompts, tmp_path / "a.jsonl")
    assert [row["messages"][0]["content"] for row in rows] == [f"question {n}" for n in (0, 1, 3, 4, 5)]
    assert result["counters"][f"refused_{reason}"] == 1 and result["refusals"]
    assert sum(one["messages"][-1]["content"] == "question 2" for one in seen) == 3, "asked again before it is refused"


def test_a_server_that_repeats_itself_is_kept_once_and_told(prompts: Path, tmp_path: Path) -> None:
    def same(path: str, body: dict[str, Any], _number: int) -> Any:
        return fair(path, {**body, "seed": 0})

    told: list[str] = []
    with serving(same) as (url, _seen):
        base = {"teacher.server": url, "write.prompts": str(prompts), "write.samples": 4}
        result = write_text(load_config(overrides=base), tmp_path / "a.jsonl", tell=told.append)
    assert result["rows"] == 6 and result["counters"]["dropped_repeated"] == 18
    assert any("seed" in text for text in told)


def test_fields_that_a_service_does_not_know_are_left_out_and_told(prompts: Path, tmp_path: Path) -> None:
    def strict(path: str, body: dict[str, Any], number: int) -> Any:
        return (400, {"error": {"message": "unknown field"}}) if "top_k" in body else fair(path, body)

    with serving(strict) as (url, seen):
        rows, result = written(url, prompts, tmp_path / "a.jsonl")
    assert len(rows) == 6 and any("top_k" in note for note in result["notes"])
    assert sum("top_k" in one for one in seen) <= 4, "asked once more at most by each thread of the first unit"


@pytest.mark.parametrize("what", ["whole", "other text", "no tokens", "no end"])
def test_ids_that_a_server_tells_are_held_against_its_text(
    world: Path, prompts: Path, tmp_path: Path, what: str
) -> None:
    tokenizer = load_tokenizer(load_config().teacher, str(world / "teacher"))

    def reply(path: str, body: dict[str, Any], number: int) -> Any:
        answer = fair(path, body)
        choice = answer["choices"][0]
        ids = tokenizer(choice["message"]["content"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        ids = {"whole": ids, "other text": ids[2:], "no tokens": [*ids, 10**6], "no end": ids[:-1]}[what]
        return {**answer, "prompt_token_ids": [5, 6, 7], "choices": [{**choice, "token_ids": ids}]}

    with serving(reply) as (url, _seen):
        more = {"teacher__model": str(world / "teacher")}
        if what in ("other text", "no tokens"):
            with pytest.raises(Exception, match="refused_"):
                written(url, prompts, tmp_path / "a.jsonl", **more)
            return
        rows, _ = written(url, prompts, tmp_path / "a.jsonl", **more)
    assert all(("ids" in row) == (what == "whole") for row in rows)
    if what == "whole":
        assert rows[0]["ids"][-1] == tokenizer.eos_token_id and rows[0]["prompt_ids"] == [5, 6, 7]


def test_what_a_server_cannot_do_is_refused(prompts: Path, tmp_path: Path) -> None:
    with serving(fair) as (url, _seen):
        with refused(ConfigError, "write.start"):
            written(url, prompts, tmp_path / "a.jsonl", write__start="template", write__max_prompts=2)
        with refused(ConfigError, "write.keep"):
            written(url, prompts, tmp_path / "a.jsonl", write__keep="best")
        documents = tmp_path / "texts.jsonl"
        documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in tiny.sentences(3, 0)))
        with refused(ConfigError, "teacher.model"):
            written(url, documents, tmp_path / "a.jsonl", write__start="documents")
    with serving(lambda *_words: (404, {})) as (url, _seen), pytest.raises(ServerUnusable):
        written(url, prompts, tmp_path / "b.jsonl")
