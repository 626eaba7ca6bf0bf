"""Teachers that are quantised, streamed, in a GGUF file or on a server, asked for in ways that cannot work."""

from __future__ import annotations

import atexit
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf_files
from border_cases import Case, Place, Words, add_each, case
from scripted_server import ENDLESS, Give, answer, scripting

TEACHERS: list[Case] = []


@case(TEACHERS, 20, "teacher.max_quantisation_kl = 1e-12")
def quantised_above_the_bound(place: Place) -> Words:
    return place.distill(teacher__quantisation="int8", teacher__max_quantisation_kl=1e-12)


@case(TEACHERS, 20, "CUDA GPU")
def bitsandbytes_on_a_cpu(place: Place) -> Words:
    return place.distill(teacher__quantisation="bnb-4bit")


@case(TEACHERS, 2, "teacher.quantisation")
def quantisation_that_nobody_knows(place: Place) -> Words:
    return place.distill(teacher__quantisation="int3")


@case(TEACHERS, 2, "max_quantisation_kl")
def a_bound_of_nothing(place: Place) -> Words:
    return place.distill(teacher__quantisation="int8", teacher__max_quantisation_kl=0)


@case(TEACHERS, 2, "stays on the device")
def quantised_and_streamed(place: Place) -> Words:
    return place.distill(teacher__quantisation="int8", teacher__placement="stream")


@case(TEACHERS, 20, "is not a GGUF file")
def gguf_that_is_something_else(place: Place) -> Words:
    return place.distill(teacher__model=str(place.file("teacher.gguf", b"PK\x03\x04" * 64)))


@case(TEACHERS, 20, "was cut short")
def gguf_cut_short(place: Place) -> Words:
    path = gguf_files.write(place.world / "teacher", place.folder / "teacher.gguf")
    path.write_bytes(path.read_bytes()[:-1000])
    return place.distill(teacher__model=str(path))


@case(TEACHERS, 20, "'rwkv7'")
def gguf_of_an_unknown_architecture(place: Place) -> Words:
    path = gguf_files.write(place.world / "teacher", place.folder / "teacher.gguf", architecture="rwkv7")
    return place.distill(teacher__model=str(path))


@case(TEACHERS, 20, "there is no model")
def gguf_that_is_not_there(place: Place) -> Words:
    return place.distill(student__model=str(place.folder / "none.gguf"))


# -- on a server -----------------------------------------------------------------------------------------

_SERVERS = ExitStack()  # they answer until the tests end: a case returns words, and the command is run after it
atexit.register(_SERVERS.close)
_KEY = "sk-border-0123456789"
os.environ["STILLROOM_BORDER_KEY"] = _KEY


def _served(place: Place, *script: Give, **over: Any) -> Words:
    """A run with a teacher on a server that answers so, and then anything."""
    server = _SERVERS.enter_context(scripting())
    server.script += script
    return _asking(place, server.url, **over)


def _asking(place: Place, url: str, **over: Any) -> Words:
    quick = {"retries": 0, "pause_seconds": 0.01, "timeout_seconds": 0.5, "api_key_variable": "STILLROOM_BORDER_KEY"}
    asked = {f"teacher__requests__{name}": value for name, value in quick.items()}
    signal = {"teacher__signal__kind": "top_k", "teacher__signal__k": 4}
    return place.distill(teacher__server=url, **asked, **signal, **over)


def _says(*pages: Any, **headers: str) -> list[Give]:
    return [answer(200, json.dumps(page).encode(), **headers) for page in pages]


def _model(**fields: Any) -> dict[str, Any]:
    return {"data": [{"id": "tiny", **fields}]}


def _negative_chunk(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"-5\r\n{}\r\n0\r\n\r\n")
    handler.close_connection = True


add_each(
    TEACHERS,
    20,
    {f"server_without_end_of_its_{name}": give for name, give in ENDLESS.items()},
    _served,
    "no whole answer",
)
add_each(
    TEACHERS,
    20,
    {
        "server_that_repeats_the_key_in_a_place": answer(307, b"", Location=f"http://a/{_KEY}"),
        "server_that_repeats_the_key_in_a_coding": answer(200, b"{}", Content_Encoding=_KEY),
        "server_that_repeats_the_key_in_a_message": answer(403, _KEY.encode()),
    },
    _served,
    "***",
)
add_each(
    TEACHERS,
    20,
    {
        "server_with_a_negative_length": _says(_model(max_model_len=-5)),
        "server_with_no_length": _says(_model(max_model_len=0)),
        "server_with_a_length_in_words": _says(_model(max_model_len="long")),
        "server_with_a_name_of_a_megabyte": _says({"data": [{"id": "x" * 1_000_000}]}),
        "server_with_a_list_of_nothing": _says({"data": 7}),
        "server_with_a_chunk_of_negative_length": [_negative_chunk],
        "server_with_escapes_in_its_message": [answer(400, b"\x1b[2J\x1b]0;evil\x07 \xe2\x80\xae")],
    },
    lambda place, script: _served(place, *script),
)
add_each(
    TEACHERS,
    20,
    {
        "server_with_a_label_that_no_host_has": f"http://{'a' * 70}.invalid:1",
        "server_with_a_path_beyond_ascii": "http://127.0.0.1:9/\u00fc",
        "server_where_nobody_listens": "http://127.0.0.1:9",
    },
    _asking,
)


# -- behind an address -----------------------------------------------------------------------------------


@case(TEACHERS, 20, "no model")
def teacher_behind_an_address_that_is_not_there(place: Place) -> Words:
    return place.distill(teacher__model="memory://nowhere/teacher")


@case(TEACHERS, 20, "no model")
def student_behind_an_address_that_is_not_there(place: Place) -> Words:
    return place.distill(student__model=f"file://{place.folder}/nowhere")


@case(TEACHERS, 2, "the address cannot be used")
def data_behind_an_address_that_is_not_there(place: Place) -> Words:
    return place.distill(data__train="memory://nowhere/data.jsonl")


@case(TEACHERS, 2, "the address cannot be used")
def report_of_an_address_that_is_not_there(place: Place) -> Words:
    return ["report", "memory://nowhere/run"]


# -- logs of strangers -----------------------------------------------------------------------------------

_EVIL = "\x1b[2J\x1b]0;title\x07\x9b31m\u202enmd\r\n step 9 fine"


def _hostile_log(place: Place) -> Path:
    """A finished run with texts where its log has numbers, and escapes in all of them."""
    run = place.run(is_finished=True)

    def spoilt(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spoilt(one) for key, one in value.items()} | {_EVIL: _EVIL}
        return [spoilt(one) for one in value] if isinstance(value, list) else _EVIL

    path = run / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [json.dumps(spoilt(event) | {"event": event["event"]}) for event in events]
    path.write_text("\n".join(lines) + "\n")
    summary = run / "summary.json"
    summary.write_text(json.dumps(spoilt(json.loads(summary.read_text()))))
    return run


add_each(
    TEACHERS,
    0,
    {
        "watching_a_strangers_log": ["watch", "--no-wait"],
        "diagnosing_a_strangers_log": ["diagnose"],
        "reporting_a_strangers_log": ["report"],
    },
    lambda place, words: [words[0], str(_hostile_log(place)), *words[1:]],
)


@case(TEACHERS, 0)
def comparing_with_a_strangers_log(place: Place) -> Words:
    return ["compare", str(_hostile_log(place)), str(place.finished)]
