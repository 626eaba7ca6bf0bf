"""Configurations, options and prompts that cannot be meant."""

from __future__ import annotations

import json

from border_cases import Case, Place, Words, add_each, case

SETTINGS: list[Case] = []


def _config(place: Place, named: tuple[str, str | bytes]) -> Words:
    name, content = named
    return ["distill", str(place.file(name, content)), "--out", str(place.folder / "out")]


add_each(
    SETTINGS,
    2,
    {
        "config_with_a_typo": ("a.toml", "[train]\nlerning_rate = 1\n"),
        "config_not_toml": ("a.toml", "train = ["),
        "config_latin_1": ("a.toml", '[teacher]\nmodel = "\xe9"\n'.encode("latin-1")),
        "config_binary": ("a.toml", bytes(range(256)) * 16),
        "config_utf_16": ("a.toml", "[train]\nepochs = 1\n".encode("utf-16")),
        "config_twice_the_same_key": ("a.toml", "[train]\nepochs = 1\nepochs = 2\n"),
        "config_json_list": ("a.json", "[]"),
        "config_json_number": ("a.json", "3"),
        "config_json_broken": ("a.json", "{"),
        "config_json_nested_deeply": ("a.json", "[" * 100_000),
        "config_toml_nested_deeply": ("a.toml", "a = " + "[" * 100_000),
        "config_of_another_kind": ("a.yaml", "train: 1"),
        "config_section_is_a_number": ("a.toml", "train = 3\n"),
        "config_section_unknown": ("a.toml", "[trian]\nepochs = 1\n"),
        "config_with_a_date": ("a.toml", "[train]\nepochs = 2020-01-01\n"),
        "config_preset_unknown": ("a.toml", 'preset = "bsae"\n'),
        "config_preset_is_a_number": ("a.toml", "preset = 3\n"),
        "config_preset_is_empty": ("a.toml", 'preset = ""\n'),
        "config_preset_is_a_list": ("a.toml", 'preset = ["base"]\n'),
        "config_phases_out_of_order": (
            "a.toml",
            '[[curriculum.phases]]\nname="a"\nuntil=0.9\n[[curriculum.phases]]\nname="b"\nuntil=0.1\n',
        ),
        "config_key_with_an_escape": ("a.toml", '[train]\n"\\u001b[31mrate" = 1\n'),
    },
    _config,
)

add_each(
    SETTINGS,
    2,
    {
        "rate_nan": "train.learning_rate=nan",
        "rate_infinite": "train.learning_rate=inf",
        "rate_negative": "train.learning_rate=-1",
        "rate_text": "train.learning_rate=fast",
        "steps_negative": "train.max_steps=-1",
        "steps_fraction": "train.max_steps=1.5",
        "batch_zero": "train.batch_size=0",
        "seed_above_64_bits": f"train.seed={2**64}",
        "seed_enormous": f"train.seed={10**400}",
        "seed_negative": "train.seed=-1",
        "temperature_zero": "objectives.kd.temperature=0",
        "weight_negative": "objectives.kd.weight=-1",
        "nothing_to_learn": "objectives.kd.weight=0",
        "length_zero": "data.max_length=0",
        "share_above_one": "data.eval_share=1.5",
        "assignment_without_a_value": "train.epochs",
        "assignment_of_nothing": "=3",
        "assignment_to_a_section": "train=3",
        "assignment_to_nothing_known": "train.nosuch=3",
        "assignment_nested_deeply": "train.epochs=" + "[" * 50_000,
        "batch_above_63_bits": f"train.batch_size={2**63}",
        "batch_of_63_bits": f"train.batch_size={2**63 - 1}",
        "length_of_63_bits": f"data.max_length={2**63 - 1}",
        "steps_above_63_bits": f"train.max_steps={2**63}",
        "epochs_beyond_counting": "train.epochs=1e300",
        "minutes_beyond_waiting": "train.peer_timeout_minutes=1e300",
        "batch_is_true": "train.batch_size=true",
        "checkpointing_is_a_word": 'student.gradient_checkpointing="false"',
    },
    lambda place, words: place.distill("--set", words),
)

add_each(
    SETTINGS,
    2,
    {
        "precision_unknown": ["--precision", "fp8"],
        "preset_unknown": ["--preset", "bsae"],
        "preset_outside": ["--preset", "../../etc/passwd"],
        "inject_unknown": ["--inject", "nan_wieght@3"],
        "inject_without_a_step": ["--inject", "nan_weight"],
        "inject_at_a_step_that_is_no_number": ["--inject", "nan_weight@soon"],
        "inject_never": ["--inject", "nan_weight@3x0"],
        "option_unknown": ["--nosuch"],
        "option_is_a_setting": ["--learning-rate", "1e-4"],
        "preset_empty": ["--preset", ""],
        "strict_with_a_setting_that_nothing_reads": ["--strict", "--set", "train.step_rows=4"],
        "strict_with_a_revision_of_a_folder": ["--strict", "--set", "teacher.revision=v1.0"],
        "option_without_a_value": ["--max-steps"],
        "steps_not_a_number": ["--max-steps", "many"],
    },
    lambda place, words: place.distill(*words),
)

add_each(
    SETTINGS,
    (2, 20),
    {
        "device_unknown": "gpu",
        "device_absent": "cuda",
        "device_absent_by_number": "cuda:7",
        "device_with_an_escape": "\x1b[31mcpu",
        "device_empty": "",
        "device_meta": "meta",
    },
    lambda place, name: [*place.distill(), "--device", name],
)


@case(SETTINGS, 2)
def config_missing(place: Place) -> Words:
    return ["distill", str(place.folder / "no.toml")]


@case(SETTINGS, 2)
def config_is_a_folder(place: Place) -> Words:
    (place.folder / "a.toml").mkdir()
    return ["distill", str(place.folder / "a.toml")]


def _out(place: Place, where: str) -> Words:
    place.file("file", "something")
    place.file("full/letter.txt", "something")
    words = place.distill()
    words[words.index("--out") + 1] = where.format(folder=place.folder)
    return words


add_each(
    SETTINGS,
    (2, 24),
    {
        "out_is_a_file": "{folder}/file",
        "out_is_below_a_file": "{folder}/file/run",
        "out_is_full_of_something_else": "{folder}/full",
        "out_has_a_name_too_long": "{folder}/" + "z" * 300,
        "out_has_a_nul": "{folder}/a\0b",
        "out_is_below_proc": "/proc/nosuch/run",
    },
    _out,
)


@case(SETTINGS, 2, "another configuration")
def out_holds_another_run(place: Place) -> Words:
    words = place.distill(train__seed=5)
    words[words.index("--out") + 1] = str(place.run())
    return words


add_each(
    SETTINGS,
    (2, 20),
    {
        "generate_from_nothing": ["generate", "./nowhere", "--prompt", "a"],
        "generate_less_than_nothing": ["generate", "{student}", "--prompt", "a", "--max-new-tokens", "-1"],
        "generate_at_a_negative_temperature": ["generate", "{student}", "--prompt", "a", "--temperature", "-1"],
        "generate_at_no_temperature": ["generate", "{student}", "--prompt", "a", "--temperature", "nan"],
        "eval_of_nothing": ["eval", "--model", "./nowhere", "--data", "{data}"],
        "eval_on_nothing": ["eval", "--model", "{student}", "--data", "nowhere.jsonl"],
        "eval_in_rows_of_nothing": ["eval", "--model", "{student}", "--data", "{data}", "--max-length", "0"],
        "eval_in_batches_of_nothing": ["eval", "--model", "{student}", "--data", "{data}", "--batch-size", "0"],
        "eval_against_nothing": ["eval", "--model", "{student}", "--data", "{data}", "--teacher", "./nowhere"],
        "command_unknown": ["destill"],
        "data_of_nothing": ["data", "nowhere.jsonl", "--model", "{student}"],
        "data_read_by_nothing": ["data", "{data}", "--model", "./nowhere"],
        "data_in_no_rows": ["data", "{data}", "--model", "{student}", "--rows", "-1"],
    },
    lambda place, words: [
        word.format(student=place.world / "student", data=place.world / "train.jsonl") for word in words
    ],
)


@case(SETTINGS, 0)
def config_of_the_seeds_form_is_read(place: Place) -> Words:
    old = {"batch_size": 2, "learning_rate": 1e-3, "max_length": 32, "temperature": 2.0, "eval_steps": 1}
    path = place.file("old.json", json.dumps(old))
    words = place.distill()
    return [words[0], str(path), *words[1:]]


add_each(
    SETTINGS,
    2,
    {
        "legacy_curriculum_is_a_word": {"use_curriculum": "false", "seed": 1},
        "legacy_top_k_is_a_fraction": {"kd_top_k": 2.9, "seed": 1},
        "legacy_top_k_is_a_word": {"kd_top_k": "abc", "seed": 1},
        "legacy_weight_enormous": {"use_curriculum": True, "alpha_feature": 10**400, "seed": 1},
    },
    lambda place, table: ["distill", str(place.file("old.json", json.dumps(table))), "--out", str(place.folder / "o")],
)


def _near_miss(place: Place, named: tuple[str, str, list[str]]) -> Words:
    name, content, more = named
    return ["distill", str(place.file(name, content)), "--out", str(place.folder / "out"), *more]


# A near miss, and the word that its explanation must hold.
for _name, _says, _value in (
    ("near_miss_training", "did you mean train", ("a.toml", "[training]\nlearning_rate = 1e-4\n", [])),
    ("near_miss_lr", "train.learning_rate", ("a.toml", "lr = 1e-4\n", [])),
    ("near_miss_yaml", "TOML", ("a.yaml", "train:\n  epochs: 1\n", [])),
    ("near_miss_set_is_not_the_file", "command line", ("a.toml", "[train]\n", ["--set", "train.epochs=-1"])),
    ("two_presets", "--preset", ("a.toml", 'preset = "base"\n', ["--preset", "instruct"])),
    ("near_miss_hub_data", "hf:openai/gsm8k", ("a.toml", '[data]\ntrain = "openai/gsm8k"\n[teacher]\nmodel = '
     '"builtin:teacher"\n[student]\nmodel = "builtin:student"\n', [])),
    ("gap_of_a_student", "--student", ("a.toml", 'preset = "base"\n', ["--teacher", "./mine", "--data", "x.jsonl"])),
    ("gap_of_data", "--data", ("a.toml", '[teacher]\nmodel = "./t"\n[student]\nmodel = "./s"\n', [])),
    ("gap_of_both_in_a_file", "student.model", ("a.toml", '[teacher]\nmodel = "./t"\n', [])),
):  # fmt: skip
    add_each(SETTINGS, 2, {_name: _value}, _near_miss, _says)


@case(SETTINGS, 2, "the current folder")
def config_used_from_another_folder(place: Place) -> Words:
    place.file("other/data.jsonl", '{"text": "a"}\n')
    path = place.file("other/a.toml", '[data]\ntrain = "data.jsonl"\n')
    return ["distill", str(path), "--out", str(place.folder / "out")]


@case(SETTINGS, 2, "data.columns")
def columns_of_other_names(place: Place) -> Words:
    path = place.file("data.jsonl", '{"frage": "a", "antwort": "b"}\n' * 20)
    return place.distill(data__train=str(path))


add_each(
    SETTINGS,
    2,
    {
        "plan_memory_without_a_unit": ["--device-memory", "16"],
        "plan_batch_above_63_bits": ["--set", f"train.batch_size={2**63}"],
        "plan_batch_of_63_bits": ["--set", f"train.batch_size={2**63 - 1}"],
        "plan_gap_of_a_student": ["--teacher", "./mine", "--data", "x.jsonl"],
    },
    lambda place, words: ["plan", "--quick", "--device", "cpu", *words],
)
