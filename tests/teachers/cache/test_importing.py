"""Log-probabilities of other programs: what is right is taken over, what is shifted or misspelt is refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import tiny
import torch
import yaml
from pyarrow import parquet
from refusals import refused

from stillroom.config import load_config
from stillroom.config.schema import TeacherConfig
from stillroom.core.errors import ConfigError, DataError
from stillroom.core.types import Needs, TopKSignal
from stillroom.data import open_data
from stillroom.models import open_teacher
from stillroom.teachers.cache.build import required_rows
from stillroom.teachers.cache.imports import read_distillkit
from stillroom.teachers.cache.reader import Cache, CachedTeacher
from stillroom.training.distill import distill
from stillroom.training.write_cache import import_cache

K = 6
Line = dict[str, Any]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    tiny.save_trained(folder / "teacher", width=32, num_layers=1, steps=80)
    tiny.save_model(folder / "student", "llama", width=16, num_layers=1, seed=2)
    lines = tiny.sentences(40, 0)
    pairs = [{"prompt": text[: len(text) // 3], "completion": text[len(text) // 3 :]} for text in lines]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def said(small: Path) -> list[Line]:
    """What a server would say of every row: all log-probs of all tokens."""
    loaded = open_teacher(TeacherConfig(model=str(small / "teacher")), torch.float32)
    config = load_config(overrides=settings(small))
    lines = []
    for row in required_rows(config, open_data(config.data, loaded.tokenizer)):
        ids = row.rows.row(row.index).tolist()
        with torch.no_grad():
            log_probs = torch.log_softmax(loaded.network(torch.tensor([ids])).logits[0].double(), dim=-1)
        lines.append({"name": row.name, "ids": ids, "log_probs": log_probs, "words": loaded.tokenizer})
    return lines


def settings(small: Path, **over: Any) -> dict[str, Any]:
    return tiny.settings(small, train__max_steps=3, eval__samples=0, data__max_length=64, **over)


def top(line: Line, place: int, *, own: bool) -> dict[int, float]:
    """Of the token at a place: the K likeliest, and with `own` the one that came."""
    values, ids = line["log_probs"][place - 1].topk(K)
    found = dict(zip(ids.tolist(), values.tolist(), strict=True))
    token = line["ids"][place]
    return {**found, token: float(line["log_probs"][place - 1][token])} if own else found


def vllm(line: Line, shift: int = 0) -> Line:
    tables: list[Any] = [None]
    for place in range(1, len(line["ids"])):
        entry = top(line, min(len(line["ids"]) - 1, max(1, place + shift)), own=True)
        spelt = {token: line["words"].decode([token]) for token in entry}
        tables.append({str(token): {"logprob": entry[token], "decoded_token": spelt[token]} for token in entry})
    return {"choices": [{"prompt_token_ids": line["ids"], "prompt_logprobs": tables}]}


def distillkit(line: Line, shift: int = 0) -> Line:
    entries = [top(line, min(len(line["ids"]) - 1, max(1, place + shift)), own=False)
               for place in range(1, len(line["ids"]))]  # fmt: skip
    return {
        "input_ids": line["ids"],
        "token_ids": [list(entry) for entry in entries],
        "logprobs": [list(entry.values()) for entry in entries],
    }


def openai(line: Line, begin: int, *, named: bool) -> Line:
    """Of the answer alone, its end mark left out: after a prompt whose ids are given, or of a row that is named."""
    spelt = Counter(line["words"].decode([token]) for token in line["words"].get_vocab().values())

    def word(token: int) -> str:
        text = str(line["words"].decode([token]))
        return text if named and spelt[text] == 1 else f"token_id:{token}"

    content = []
    for place in range(begin, len(line["ids"]) - 1):
        entry = top(line, place, own=False)
        tokens = [{"token": word(token), "logprob": value} for token, value in entry.items()]
        content.append({"token": word(line["ids"][place]), "top_logprobs": tokens})
    which = {"id": line["name"]} if named else {"prompt_token_ids": line["ids"][:begin]}
    return {**which, "choices": [{"logprobs": {"content": content}}]}


def write(path: Path, lines: list[Line]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


@pytest.mark.parametrize(("kind", "form"), [("vllm", vllm), ("distillkit", distillkit)])
def test_a_file_becomes_the_top_k_answers_of_its_rows(
    small: Path, said: list[Line], tmp_path: Path, kind: str, form: Callable[[Line], Line]
) -> None:
    path = write(tmp_path / "file.jsonl", [form(line) for line in said])
    config = load_config(overrides=settings(small))
    told = import_cache(config, tmp_path / "cache", path, kind)
    assert told["missing_rows"] == 0 and told["unmatched_records"] == 0 and told["signal"]["k"] == K
    teacher = CachedTeacher(Cache(tmp_path / "cache"), device=torch.device("cpu"))
    rows = open_data(config.data, said[0]["words"]).train
    batch = rows.batch([3])
    signal = teacher.observe(batch, Needs())
    assert isinstance(signal, TopKSignal)
    line = next(one for one in said if one["ids"] == rows.row(3).tolist())
    places = batch.positions.tolist()
    expected = line["log_probs"][places].topk(K)
    assert torch.equal(signal.ids, expected.indices)
    assert torch.allclose(signal.log_probs.double(), expected.values, atol=0.004)
    assert torch.allclose(signal.tail_log_mass.double().exp(), 1 - expected.values.exp().sum(-1), atol=0.004)
    known = teacher.own_metrics([batch])
    if kind == "vllm":
        losses = [-float(line["log_probs"][place, line["ids"][place + 1]]) for place in places]
        assert known is not None and math.log(known["perplexity"]) == pytest.approx(sum(losses) / len(losses), abs=3e-3)
    else:
        assert known is None  # the label is not among the answers, so its probability is not known


def test_a_run_trains_from_an_imported_cache(small: Path, said: list[Line], tmp_path: Path) -> None:
    path = write(tmp_path / "file.jsonl", [vllm(line) for line in said])
    import_cache(load_config(overrides=settings(small)), tmp_path / "cache", path, "vllm")
    over = settings(small, teacher__cache=str(tmp_path / "cache"), objectives__kd__divergence="reverse_kl")
    summary = distill(load_config(overrides=over), tmp_path / "run", device="cpu").summary
    assert summary["steps"] == 3 and summary["teacher_signal"]["unknown_positions"] == 0


@pytest.mark.parametrize("named", [True, False], ids=["texts of a named row", "ids after a prompt"])
def test_answers_that_end_before_the_end_mark_leave_it_to_its_label(
    small: Path, said: list[Line], tmp_path: Path, named: bool
) -> None:
    config = load_config(overrides=settings(small))
    rows = required_rows(config, open_data(config.data, said[0]["words"]))
    scored = {row.name: int(row.rows.batch([row.index]).num_scored) for row in rows}
    lines = [openai(line, len(line["ids"]) - scored[line["name"]], named=named) for line in said]
    told = import_cache(config, tmp_path / "cache", write(tmp_path / "file.jsonl", lines), "openai")
    assert told["missing_rows"] == 0 and told["unanswered_positions"] == told["unusable_positions"] == len(said)


def test_parquet_columns_are_read(small: Path, said: list[Line], tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist([distillkit(line) for line in said]), tmp_path / "file.parquet")
    told = import_cache(
        load_config(overrides=settings(small)), tmp_path / "cache", tmp_path / "file.parquet", "distillkit"
    )
    assert told["missing_rows"] == 0


def test_a_renormalised_import_says_what_mass_was_stored(small: Path, said: list[Line], tmp_path: Path) -> None:
    path = write(tmp_path / "file.jsonl", [vllm(line) for line in said])
    over = {"teacher__signal__kind": "renormalised", "teacher__signal__k": 2}
    import_cache(load_config(overrides=settings(small, **over)), tmp_path / "cache", path, "vllm")
    teacher = CachedTeacher(Cache(tmp_path / "cache"), device=torch.device("cpu"))
    mass = teacher.cache.mean_mass
    assert mass is not None and 0.3 < mass < 0.98
    assert any(f"{mass:.4f}" in note and "overconfident" in note for note in teacher.notes)


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize(("kind", "form"), [("vllm", vllm), ("distillkit", distillkit), ("axolotl", "axolotl")])
def test_a_file_that_is_shifted_by_one_is_refused(
    small: Path, said: list[Line], tmp_path: Path, kind: str, form: Any, shift: int
) -> None:
    form = axolotl if form == "axolotl" else form
    path = write(tmp_path / "file.jsonl", [form(line, shift) for line in said])
    with pytest.raises(DataError, match="shifted"):
        import_cache(load_config(overrides=settings(small)), tmp_path / "cache", path, kind)


def _misspelt(line: Line) -> Line:
    for table in line["choices"][0]["prompt_logprobs"][1:]:
        for value in table.values():
            value["decoded_token"] = value["decoded_token"] + "x"
    return line


def _outside(line: Line) -> Line:
    line["choices"][0]["prompt_logprobs"][1]["99999"] = {"logprob": -3.0}
    return line


def _logits(line: Line) -> Line:
    for table in line["choices"][0]["prompt_logprobs"][1:]:
        for value in table.values():
            value["logprob"] += 9.0
    return line


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (_misspelt, "spell something else"),
        (_outside, "outside the tokenizer"),
        (_logits, "not log-probabilities"),
        (lambda line: {"prompt_logprobs": []}, "prompt_token_ids are missing"),
        (lambda line: {"choices": [{**line["choices"][0], "prompt_logprobs": [None]}]}, "not one entry for each"),
    ],
)
def test_what_cannot_be_believed_is_refused_by_name(
    small: Path, said: list[Line], tmp_path: Path, spoil: Callable[[Line], Line], word: str
) -> None:
    path = write(tmp_path / "file.jsonl", [spoil(vllm(line)) for line in said])
    with pytest.raises(DataError, match=word) as caught:
        import_cache(load_config(overrides=settings(small)), tmp_path / "cache", path, "vllm")
    assert caught.value.advice and not (tmp_path / "cache").exists()


def test_a_file_of_other_texts_and_an_unknown_format_are_refused(small: Path, said: list[Line], tmp_path: Path) -> None:
    path = write(tmp_path / "file.jsonl", [vllm(line) for line in said])
    other = tiny.save_text(tmp_path / "other.jsonl", count=30, seed=8)
    with refused(DataError, "file.jsonl", "39"):
        import_cache(load_config(overrides=settings(small, data__train=str(other))), tmp_path / "cache", path, "vllm")
    with refused(ConfigError, "--format", "gguf"):
        import_cache(load_config(overrides=settings(small)), tmp_path / "cache", path, "gguf")


# -- packed columns of DistillKit --------------------------------------------------------------------------

EXACT = {"exact_k": K, "polynomial_terms": None, "residual_bins": [], "delta_encoding": False}
CURVE = {
    "exact_k": 3,
    "exact_dtype": "float16",
    "polynomial_terms": [0, 1, "sqrt"],
    "term_dtype": "float64",
    "residual_bins": [],
    "normalize_t": True,
    "delta_encoding": True,
}
BINS = {
    "exact_k": 1,
    "exact_dtype": "bfloat16",
    "polynomial_terms": [0, 1],
    "residual_bins": [
        {"scale_dtype": "float32", "element_bits": 11, "num_elements": 3},
        {"scale_dtype": "float16", "element_bits": 13, "num_elements": 2},
    ],
    "delta_encoding": True,
}
LAYOUTS = {"exact": EXACT, "curve": CURVE, "bins": BINS}


def bits_of(numbers: list[int], width: int) -> bytes:
    """Integers end to end, the highest bit first, up to a whole byte."""
    text = "".join(format(number, f"0{width}b") for number in numbers)
    text += "0" * (-len(text) % 8)
    return int(text, 2).to_bytes(len(text) // 8, "big")


def floats_of(numbers: Any, dtype: str) -> bytes:
    return bytes(torch.tensor(numbers, dtype=getattr(torch, dtype)).view(torch.uint8).tolist())


def packed(line: Line, layout: dict[str, Any]) -> Line:
    """A row as the sampler of DistillKit writes it, with a padding token after the text in place of an end mark."""
    width, rows = (layout["d"] - 1).bit_length(), []
    for place in range(1, len(line["ids"])):
        entry = top(line, place, own=False)
        values = np.array(list(entry.values()))
        values = np.diff(values, prepend=0.0) if layout["delta_encoding"] else values
        told = floats_of(values[: layout["exact_k"]], layout.get("exact_dtype", "float32"))
        rest = values[layout["exact_k"] :]
        if terms := layout["polynomial_terms"]:
            steps = np.linspace(0, 1, len(rest)) if layout.get("normalize_t") else np.arange(len(rest)) * 1.0
            curve = np.stack([np.sqrt(steps) if term == "sqrt" else steps**term for term in terms], -1)
            fit = np.linalg.lstsq(curve, rest, rcond=None)[0]
            told += floats_of(fit, layout.get("term_dtype", "float32"))
            rest = rest - curve @ fit
        for one in layout["residual_bins"]:
            part, rest = np.split(rest, [one["num_elements"]])
            half = 2 ** (one["element_bits"] - 1)
            scale = float(torch.tensor(max(abs(part).max() / (half - 1), 1e-6)).to(getattr(torch, one["scale_dtype"])))
            told += floats_of([scale], one["scale_dtype"])
            told += bits_of([int(np.clip(round(x / scale), -half, half - 1)) + half for x in part], one["element_bits"])
        rows.append((list(told), list(bits_of(list(entry), width))))
    columns = zip(("compressed_logprobs", "bytepacked_indices"), zip(*rows, strict=True), strict=True)
    return {"input_ids": [*line["ids"][:-1], 0], **{name: list(column) for name, column in columns}}


def sampled(folder: Path, said: list[Line], layout: dict[str, Any]) -> Path:
    """A folder of two Parquet files and their configuration, as the sampler leaves it."""
    folder.mkdir()
    layout = {"d": 300, "k": K, **layout}
    (folder / "compression_config.yaml").write_text(yaml.safe_dump(layout), encoding="utf-8")
    for number, lines in enumerate((said[:20], said[20:])):
        table = pyarrow.Table.from_pylist([packed(line, layout) for line in lines])
        parquet.write_table(table, folder / f"data_{number}.parquet")
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_columns_hold_the_answers_that_were_packed(
    small: Path, said: list[Line], tmp_path: Path, name: str
) -> None:
    folder = sampled(tmp_path / "sampled", said, LAYOUTS[name])
    by_ids = {tuple(line["ids"][:-1]): line for line in said}
    exact = 0.0
    for one in read_distillkit(folder, int):
        line = by_ids[one.ids[:-1]]
        assert sorted(one.entries) == list(range(1, len(line["ids"])))
        for place, entry in one.entries.items():
            wanted = top(line, place, own=False)
            assert set(entry) == set(wanted)
            exact = max(exact, *(abs(entry[token] - wanted[token]) for token in wanted))
    assert exact < {"exact": 1e-6, "curve": 0.02, "bins": 0.05}[name]  # float16 and bfloat16 in the exact part
    told = import_cache(load_config(overrides=settings(small)), tmp_path / "cache", folder, "distillkit")
    assert told["missing_rows"] == told["unmatched_records"] == told["unusable_positions"] == 0
    assert told["signal"]["k"] == K


def test_the_legacy_columns_are_read(said: list[Line], tmp_path: Path) -> None:
    line, width = said[0], 9
    entries = [top(line, place, own=False) for place in range(1, len(line["ids"]))]
    row: Line = {"input_ids": line["ids"], "packed_indices": [], "exact_values": [], "coeffs": []}
    curve = np.stack([1 / np.arange(1.0, 4) ** power for power in range(3)], -1)
    for entry in entries:
        tokens, values = list(entry), np.array(list(entry.values()))
        row["packed_indices"].append([sum(token << (width * place) for place, token in enumerate(tokens))])
        row["exact_values"].append(values[:3].tolist())
        row["coeffs"].append(np.linalg.solve(curve, values[3:]).tolist())
    layout = {"k": K, "exact_k": 3, "polynomial_degree": 2, "vocab_size": 300}
    (tmp_path / "compression_config.yaml").write_text(yaml.safe_dump(layout), encoding="utf-8")
    (given,) = read_distillkit(write(tmp_path / "file.jsonl", [row]), int)
    for place, entry in enumerate(entries, 1):
        assert given.entries[place] == pytest.approx(entry, abs=1e-6)


@pytest.mark.parametrize("change", [{"k": K + 1}, {"exact_k": 2}, {"exact_dtype": "float16"}, {"d": 3000}, {"d": None}])
def test_packed_columns_that_do_not_fill_their_layout_are_refused(
    said: list[Line], tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = sampled(tmp_path / "sampled", said[:2], EXACT)
    path = folder / "compression_config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change), encoding="utf-8")
    with refused(DataError, "data_0.parquet:1", "compression_config.yaml"):
        list(read_distillkit(folder, int))
    path.unlink()
    with refused(DataError, "sampled", "compression_config.yaml"):
        list(read_distillkit(folder, int))


# -- axolotl -----------------------------------------------------------------------------------------------


def axolotl(line: Line, shift: int = 0, *, renormalised: bool = False) -> Line:
    """As the plugin prepares it: a list for each token, the first filled up, the mask of the labels."""
    ids, values, masks = [[*range(K)]], [[-math.inf] * K], [[0] * K]
    for place in range(1, len(line["ids"])):
        entry = top(line, min(len(line["ids"]) - 1, max(1, place + shift)), own=False)
        left = math.log(math.fsum(map(math.exp, entry.values()))) if renormalised else 0.0
        ids.append(list(entry))
        values.append([value - left for value in entry.values()])
        masks.append([1] * K)
    return {"input_ids": line["ids"], "target_token_ids": ids, "target_logprobs": values, "target_mask": masks}


def test_columns_of_axolotl_are_read_and_renormalised_ones_must_be_called_so(
    small: Path, said: list[Line], tmp_path: Path
) -> None:
    parquet.write_table(pyarrow.Table.from_pylist([axolotl(line) for line in said]), tmp_path / "file.parquet")
    config = load_config(overrides=settings(small))
    told = import_cache(config, tmp_path / "cache", tmp_path / "file.parquet", "axolotl")
    assert told["missing_rows"] == 0 and told["signal"]["k"] == K
    path = write(tmp_path / "sums.jsonl", [axolotl(line, renormalised=True) for line in said])
    with refused(DataError, "sums.jsonl", "teacher.signal.kind=renormalised"):
        import_cache(config, tmp_path / "sums", path, "axolotl")
    over = settings(small, teacher__signal__kind="renormalised")
    assert import_cache(load_config(overrides=over), tmp_path / "sums", path, "axolotl")["missing_rows"] == 0


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda row: row["target_mask"].pop(), "masks"),
        (lambda row: row["target_token_ids"][2].__setitem__(0, 9999), "outside the tokenizer"),
        (lambda row: row["target_token_ids"][2].__setitem__(0, row["target_token_ids"][2][1]), "stands twice"),
        (lambda row: row["target_logprobs"][2].__setitem__(0, 0.7), "not log-probabilities"),
        (lambda row: row.__setitem__("kd_temperature", 2.0), "temperature 1"),
    ],
)
def test_what_axolotl_wrote_is_not_believed_either(
    small: Path, said: list[Line], tmp_path: Path, spoil: Callable[[Line], Any], word: str
) -> None:
    rows = [axolotl(line) for line in said]
    spoil(rows[0])
    path = write(tmp_path / "file.jsonl", rows)
    with pytest.raises(DataError, match=word) as caught:
        import_cache(load_config(overrides=settings(small)), tmp_path / "cache", path, "axolotl")
    assert caught.value.exit_code == 2 and not (tmp_path / "cache").exists()
