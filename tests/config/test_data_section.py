"""The data section: sources as a name or a list, layouts, and what is refused with the key as it was written."""

from __future__ import annotations

from typing import Any

import pytest

from stillroom.config import load_config
from stillroom.config.schema import CONTEXTS, SHAPES, DataConfig, SourceConfig, template_pieces
from stillroom.core.errors import ConfigError
from stillroom.data.records import FIELDS


def refusal(**data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides={f"data.{key}": value for key, value in data.items()})
    assert caught.value.exit_code == 2
    return caught.value.what


def test_a_name_stays_a_name_and_a_list_becomes_sources() -> None:
    assert load_config(overrides={"data.train": "a.jsonl"}).to_dict()["data"]["train"] == "a.jsonl"
    assert [source.path for source in DataConfig(train="a.jsonl").sources] == ["a.jsonl"]
    config = DataConfig(train=["a.jsonl", {"path": "b.jsonl", "weight": 2, "objectives": "labels"}])  # type: ignore[arg-type]
    assert config.train == (
        SourceConfig(path="a.jsonl"),
        SourceConfig(path="b.jsonl", weight=2, objectives="labels"),
    )
    assert DataConfig(train={"path": "a.jsonl"}).train == (SourceConfig(path="a.jsonl"),)  # type: ignore[arg-type]


def test_a_configuration_with_sources_survives_json() -> None:
    config = load_config(overrides={"data.train": [{"path": "a.jsonl", "columns": {"text": "body"}}]})
    assert load_config(overrides={"data.train": config.to_dict()["data"]["train"]}) == config


def test_a_source_without_a_layout_has_that_of_the_section() -> None:
    config = DataConfig(
        columns={"text": "body"},
        train=[{"path": "a"}, {"path": "b", "template": "{x}"}],  # type: ignore[arg-type]
    )
    first, second = config.sources
    assert first.columns == {"text": "body"} and not first.template
    assert second.template == "{x}" and not second.columns
    assert config.named("eval").columns == {"text": "body"}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"train": []}, "data.train: "),
        ({"train": 5}, "data.train: "),
        ({"train": [{"path": "a", "weight": 0}]}, "data.train.0.weight: Input should be greater than 0"),
        ({"train": [{"path": "a", "weight": "x"}]}, "data.train.0.weight: "),
        ({"train": [{"path": "a"}, {"weight": 2}]}, "data.train.1.path: "),
        ({"train": [{"path": "a", "wieght": 2}]}, "unknown key data.train.0.wieght"),
        ({"train": [{"path": "a", "objectives": "none"}]}, "data.train.0.objectives: "),
        ({"train": [5]}, "data.train.0: "),
        ({"columns": {"prompt": "q"}}, "data.columns: names the fields prompt; a record is made of text or prompt"),
        ({"columns": {"body": "text"}}, "names the fields body"),
        ({"columns": {"text": ""}}, "empty name"),
        ({"columns": {"text": "a"}, "template": "{a}"}, "columns and template are both set"),
        ({"template": "no columns at all"}, "names no column"),
        ({"template": "{a"}, "data.template"),
        ({"template": "{a.b}"}, "must be the name of a column"),
        ({"template": "{a!r}"}, "must be the name of a column"),
        ({"template": "{a:>9}"}, "must be the name of a column"),
        ({"template": "{}"}, "must be the name of a column"),
        ({"template": "{a} {b}", "scored": "c"}, "scored names c, and the template has a, b"),
        ({"scored": ["a"]}, "template is not set"),
        ({"max_records": -1}, "data.max_records"),
    ],
)
def test_a_wrong_setting_is_refused_under_its_own_key(data: dict[str, Any], says: str) -> None:
    what = refusal(**data)
    assert says in what and "<" not in what.split(", got")[0]


def test_the_fields_of_a_map_are_those_that_records_are_made_of() -> None:
    assert {field for shape in (*SHAPES, CONTEXTS) for field in shape} == set(FIELDS) - {"tools"}
    DataConfig(columns={"prompt": "a", "completion": "b", "teacher_prompt": "c"})
    with pytest.raises(ValueError, match="teacher_prompt"):
        DataConfig(columns={"teacher_prompt": "c"})


def test_doubled_braces_stand_for_themselves() -> None:
    assert template_pieces("{{q}}: {q}.") == (("{", None), ("q}", None), (": ", "q"), (".", None))
