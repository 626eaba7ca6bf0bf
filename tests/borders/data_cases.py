"""Data files that are damaged, foreign, or say nothing."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from typing import Any

import pyarrow
from border_cases import Case, Place, Words, add_each, case

DATA: list[Case] = []


def _file(place: Place, named: tuple[str, str | bytes]) -> Words:
    name, content = named
    return place.distill(data__train=str(place.file(name, content)))


def lines(*values: object) -> str:
    return "\n".join(json.dumps(value) for value in values) + "\n"


TEXT = "the still room keeps spirits and waters, and the maid who keeps the room knows how long"

add_each(
    DATA,
    2,
    {
        "data_empty": ("a.jsonl", ""),
        "data_blank": ("a.jsonl", "\n \n\t\n"),
        "data_only_nul": ("a.jsonl", b"\0" * 4096),
        "data_broken_json": ("a.jsonl", '{"text": "a\n{"text": "b\n'),
        "data_half_broken": ("a.jsonl", lines({"text": TEXT}) * 50 + '{"text": \n' * 50),
        "data_numbers": ("a.jsonl", "1\n2\n3\n"),
        "data_nulls": ("a.jsonl", "null\n" * 20),
        "data_lists": ("a.jsonl", "[]\n[1]\n"),
        "data_strange_fields": ("a.jsonl", lines({"foo": "a"}, {"bar": "b"})),
        "data_text_is_a_number": ("a.jsonl", lines({"text": 7}, {"text": 8})),
        "data_text_is_empty": ("a.jsonl", lines(*[{"text": " "}] * 20)),
        "data_text_is_an_object": ("a.jsonl", lines(*[{"text": {"a": 1}}] * 20)),
        "data_utf_16": ("a.jsonl", lines({"text": TEXT}).encode("utf-16")),
        "data_binary": ("a.jsonl", bytes(range(256)) * 64),
        "data_nested_deeply": ("a.jsonl", '{"text": ' + "[" * 100_000 + "\n"),
        "data_one_long_line": ("a.jsonl", '{"text": "' + "a" * (11 << 20) + '"}\n'),
        "data_one_document": ("a.jsonl", lines({"text": TEXT})),
        "data_of_copies": ("a.jsonl", lines(*[{"text": TEXT}] * 50)),
        "data_json_object": ("a.json", "{}"),
        "data_json_broken": ("a.json", "[{"),
        "data_json_empty_list": ("a.json", "[]"),
        "data_csv_empty": ("a.csv", ""),
        "data_csv_header_only": ("a.csv", "text\n"),
        "data_csv_other_columns": ("a.csv", "a,b\n1,2\n3,4\n"),
        "data_csv_ragged": ("a.csv", "text\n" + "a,b,c\n" * 50),
        "data_csv_nul": ("a.csv", b"text\n\0\0\n" * 20),
        "data_parquet_garbage": ("a.parquet", b"PAR1" + bytes(100)),
        "data_parquet_empty": ("a.parquet", b""),
        "data_parquet_text": ("a.parquet", TEXT),
        "data_text_file_empty": ("a.txt", ""),
        "data_text_file_blank": ("a.txt", "\n\n \n"),
        "data_of_another_kind": ("a.docx", TEXT),
        "data_without_a_kind": ("a", TEXT),
        "data_zip": ("a.jsonl", b"PK\x03\x04" + bytes(range(256)) * 8),
    },
    _file,
)


def _chat(place: Place, messages: object) -> Words:
    text = lines(*[{"messages": messages}] * 30)
    return place.distill(data__train=str(place.file("chat.jsonl", text)))


add_each(
    DATA,
    2,
    {
        "chat_is_text": "hello",
        "chat_is_empty": [],
        "chat_of_numbers": [1, 2],
        "chat_without_roles": [{"content": "a"}],
        "chat_without_answers": [{"role": "user", "content": "a"}],
        "chat_with_a_number": [{"role": "user", "content": 1}, {"role": "assistant", "content": 2}],
        "chat_with_empty_answers": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}],
        "chat_with_a_picture": [
            {"role": "user", "content": [{"type": "image", "url": "x"}]},
            {"role": "assistant", "content": "a"},
        ],
        "chat_role_is_null": [{"role": None, "content": "a"}],
    },
    _chat,
)


def _template(place: Place, template: str) -> Words:
    folder = place.copied("teacher", "model")
    (folder / "chat_template.jinja").write_text(template)
    messages = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}] for n in range(30)]
    data = place.file("chat.jsonl", lines(*({"messages": turns} for turns in messages)))
    return place.distill(
        teacher__model=str(folder), student__model=str(folder), data__train=str(data), train__max_steps=1
    )


add_each(
    DATA,
    2,
    {
        "template_divides_by_zero": "{{ 1 / 0 }}",
        "template_does_not_parse": "{% for %}",
        "template_is_undefined": "{{ nosuch.thing.at.all }}",
        "template_raises": "{{ raise_exception('no') }}",
        "template_builds_ten_billion_characters": "{{ 'a' * 10000000000 }}",
        "template_builds_them_in_steps": "{% set x = 'a' * 100000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
        "template_calls_itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "template_reaches_for_python": "{{ ''.__class__.__mro__ }}",
        "template_leaves_the_answers_out": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "template_takes_a_power": "{{ 10 ** 1000000000 }}",
    },
    _template,
)

add_each(DATA, 0, {"template_empty_is_none": ""}, _template)

add_each(
    DATA,
    2,
    {
        "spec_of_nothing": "no.jsonl",
        "spec_of_a_glob_that_matches_nothing": "no*.jsonl",
        "spec_of_a_folder": ".",
        "spec_of_no_dataset": "hf:",
        "spec_of_no_builtin": "builtin:sdtlib",
        "spec_empty": "",
        "spec_with_a_nul": "a\0b.jsonl",
        "spec_with_an_escape": "\x1b[2Ja.jsonl",
        "spec_of_a_device": "/dev/null",
        "spec_very_long": "y" * 5000 + ".jsonl",
    },
    lambda place, spec: place.distill(data__train=spec),
)


GOOD = lines(*({"text": f"{TEXT} {n}"} for n in range(60)))


def _zstd(content: str | bytes) -> bytes:
    raw = content.encode() if isinstance(content, str) else content
    return bytes(pyarrow.Codec("zstd").compress(raw, asbytes=True))


add_each(
    DATA,
    2,
    {
        "data_gz_cut_off": ("a.jsonl.gz", gzip.compress(os.urandom(9000).hex().encode())[:4000]),
        "data_zst_cut_off": ("a.jsonl.zst", _zstd(os.urandom(9000).hex())[:4000]),
    },
    _file,
    says="is cut off",
)
add_each(
    DATA,
    2,
    {
        "data_gz_is_plain_text": ("a.jsonl.gz", GOOD),
        "data_zst_is_plain_text": ("a.jsonl.zst", GOOD),
    },
    _file,
    says="is damaged or no",
)
add_each(
    DATA,
    2,
    {
        "data_gz_expands_without_end": ("a.jsonl.gz", gzip.compress(bytes(80 << 20))),
        "data_zst_expands_without_end": ("a.jsonl.zst", _zstd(bytes(80 << 20))),
        "data_gz_text_expands_without_end": ("a.txt.gz", gzip.compress(bytes(80 << 20))),
    },
    _file,
    says="expands to more than 67,108,864",
)
add_each(
    DATA,
    2,
    {
        "data_gz_empty": ("a.jsonl.gz", b""),
        "data_gz_of_nothing": ("a.jsonl.gz", gzip.compress(b"")),
        "data_zst_of_nothing": ("a.jsonl.zst", _zstd(b"")),
        "data_gz_of_no_format": ("a.gz", gzip.compress(GOOD.encode())),
        "data_parquet_gz_of_text": ("a.parquet.gz", gzip.compress(GOOD.encode())),
    },
    _file,
)
add_each(DATA, 0, {"data_gz_is_read": ("a.jsonl.gz", gzip.compress(GOOD.encode()))}, _file)


_LATIN1 = "".join(f"caf\u00e9 au lait, and {TEXT} {n}\n" for n in range(40)).encode("latin-1")
_JSON_LATIN1 = b"".join(b'{"text": "caf\xe9 ' + f'{TEXT} {n}"}}\n'.encode() for n in range(40))

add_each(
    DATA,
    2,
    {
        "data_latin1_jsonl": ("a.jsonl", _JSON_LATIN1),
        "data_latin1_among_good_ones": ("a.jsonl", GOOD.encode() + _JSON_LATIN1),
        "data_latin1_csv": ("a.csv", b"text\n" + _LATIN1),
        "data_latin1_text": ("a.txt", _LATIN1),
        "data_latin1_json": ("a.json", b'[{"text": "caf\xe9"}]'),
        "data_latin1_gz": ("a.jsonl.gz", gzip.compress(_JSON_LATIN1)),
        "data_cut_inside_a_character": ("a.txt", ("\u00e9" * 400).encode()[:-1]),
    },
    _file,
    says="not UTF-8",
)
add_each(
    DATA,
    0,
    {"data_with_one_text_in_latin1_goes_on_without_it": ("a.jsonl", GOOD.encode() * 2 + _JSON_LATIN1.splitlines()[0])},
    _file,
)


@case(DATA, 0)
def one_source_in_a_list_is_trained_on(place: Place) -> Words:
    place.file("a.jsonl", GOOD)
    return place.distill("--set", "data.train=['a.jsonl']")


@case(DATA, 0)
def student_with_its_teacher_s_weights_is_trained_and_told(place: Place) -> Words:
    return place.distill(student__model=str(place.world / "teacher"), train__max_steps=1)


def _measured(place: Place, change: Callable[[dict[str, Any]], object], *more: str) -> Words:
    """`eval` of a finished run whose description was changed."""
    run = place.run(is_finished=True)
    description = json.loads((run / "config.json").read_text())
    change(description)
    (run / "config.json").write_text(json.dumps(description))
    return ["eval", str(run), "--device", "cpu", "--max-batches", "1", *more]


def _on(place: Place, content: str | None) -> Callable[[dict[str, Any]], object]:
    path = place.folder / "other.jsonl" if content is None else place.file("other.jsonl", content)

    def change(description: dict[str, Any]) -> None:
        description["config"]["data"]["train"] = str(path)
        description["paths"].pop("data.train")

    return change


@case(DATA, 0)
def eval_of_a_run_on_what_it_held_out(place: Place) -> Words:
    return _measured(place, lambda _description: None)


@case(DATA, 2, "was changed")
def eval_of_a_run_whose_data_was_changed(place: Place) -> Words:
    return _measured(place, _on(place, GOOD))


@case(DATA, 2)
def eval_of_a_run_whose_data_is_gone(place: Place) -> Words:
    return _measured(place, _on(place, None))


@case(DATA, 2)
def eval_of_a_run_whose_data_is_one_document(place: Place) -> Words:
    return _measured(place, _on(place, lines({"text": TEXT})))


@case(DATA, 2, "config.json")
def eval_of_a_run_whose_data_section_is_damaged(place: Place) -> Words:
    return _measured(place, lambda description: description["config"].update(data=7))


@case(DATA, 2, "several kinds")
def spec_of_a_folder_of_several_kinds(place: Place) -> Words:
    place.file("d/a.jsonl", GOOD)
    place.file("d/readme.txt", TEXT)
    return place.distill(data__train=str(place.folder / "d"))


@case(DATA, 2, "cannot be loaded")
def spec_of_a_damaged_saved_dataset(place: Place) -> Words:
    for name in ("state.json", "dataset_info.json"):
        place.file(f"d/{name}", "{")
    return place.distill(data__train=str(place.folder / "d"))


@case(DATA, 2, "no column 'answer'")
def columns_that_are_not_there(place: Place) -> Words:
    path = place.file("a.jsonl", lines(*({"q": f"{n}?", "a": TEXT} for n in range(60))))
    return place.distill("--set", "data.columns={prompt='q', completion='answer'}", data__train=str(path))


@case(DATA, 2, "no column 'question'")
def template_of_columns_that_are_not_there(place: Place) -> Words:
    path = place.file("a.jsonl", lines(*({"q": f"{n}?", "a": TEXT} for n in range(60))))
    return place.distill("--set", "data.template='{question} {a}'", data__train=str(path))


add_each(
    DATA,
    2,
    {
        "template_of_no_column": "data.template='nothing'",
        "template_with_an_open_brace": "data.template='{a'",
        "template_reaches_into_a_column": "data.template='{a.__class__}'",
        "template_indexes_a_column": "data.template='{a[0]}'",
        "columns_of_no_shape": "data.columns={prompt='a'}",
        "columns_are_a_list": "data.columns=['a']",
        "scored_without_a_template": "data.scored='a'",
        "sources_empty": "data.train=[]",
        "sources_of_numbers": "data.train=[1, 2]",
        "sources_without_a_path": "data.train=[{weight=2}]",
        "sources_with_a_weight_of_nothing": "data.train=[{path='a.jsonl', weight=0}]",
        "sources_with_a_weight_of_nan": "data.train=[{path='a.jsonl', weight=nan}]",
        "sources_with_an_unknown_key": "data.train=[{path='a.jsonl', epoch=2}]",
        "sources_with_unknown_objectives": "data.train=[{path='a.jsonl', objectives='none'}]",
        "sources_one_of_which_is_missing": "data.train=['a.jsonl', 'b.jsonl']",
    },
    lambda place, setting: (place.file("a.jsonl", GOOD), place.distill("--set", setting))[1],
)


@case(DATA, 0)
def sources_of_two_kinds_are_trained_on(place: Place) -> Words:
    place.file("a.jsonl", GOOD)
    place.file("b.jsonl.gz", gzip.compress(lines(*({"q": f"{n}?", "a": TEXT} for n in range(60))).encode()))
    second = "{path='b.jsonl.gz', objectives='labels', template='{q} {a}', scored='a'}"
    return place.distill("--set", f"data.train=[{{path='a.jsonl', weight=0.5}}, {second}]")


@case(DATA, 2, "max_length")
def prompts_fill_every_row(place: Place) -> Words:
    rows = [{"prompt": f"{n} " + TEXT * 4, "completion": " yes"} for n in range(40)]
    return place.distill(data__train=str(place.file("a.jsonl", lines(*rows))), data__max_length=8)


@case(DATA, 2)
def data_is_a_broken_link(place: Place) -> Words:
    (place.folder / "a.jsonl").symlink_to("nowhere.jsonl")
    return place.distill(data__train=str(place.folder / "a.jsonl"))


@case(DATA, 0)
def data_with_lone_surrogates_is_read_and_counted(place: Place) -> Words:
    rows = [json.dumps({"text": f"{TEXT} {n} "})[:-2] + '\\ud800 tail"}' for n in range(60)]
    return place.distill(data__train=str(place.file("a.jsonl", "\n".join(rows))))


@case(DATA, 0)
def data_with_markup_and_escapes_is_only_text(place: Place) -> Words:
    rows = [{"text": f"<script>alert({n})</script> \x1b[31m \u202e {TEXT} </title> ]]>"} for n in range(60)]
    return place.distill(data__train=str(place.file("a.jsonl", lines(*rows))), eval__samples=1)


@case(DATA, 2, "s3://")
def data_in_a_store_without_a_bucket(place: Place) -> Words:
    return place.distill(data__train="s3://")


@case(DATA, 20, "s3://")
def teacher_in_a_store_without_a_bucket(place: Place) -> Words:
    return place.distill(teacher__model="s3://")
