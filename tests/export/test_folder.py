"""Laws of exports: what is read back is what was meant, nothing is half written, and nothing else is replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import begun
import pytest
import tiny
import torch
from commands import output, run
from refusals import refused
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from trl_templates import template

from stillroom.config import load_config
from stillroom.core.errors import CannotSave, ConfigError
from stillroom.export import folder as exports
from stillroom.export.folder import difference, export, own_rows
from stillroom.training.distill import distill


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template whose generation settings do not know the end of a turn."""
    path = tmp_path_factory.mktemp("models") / "chatty"
    begun.save(path, begun.byte_tokenizer(chat_template=template("llama3")))
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**settings, "use_cache": False}))
    return path


def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def test_a_folder_gives_the_same_logits_and_is_ready_for_use(chatty: Path, tmp_path: Path, capsys: Any) -> None:
    text = output(capsys, "export", str(chatty), "--out", str(tmp_path / "made" / "out"))
    assert "largest difference of a logit 0" in text
    out = tmp_path / "made" / "out"
    ids = list(range(20, 60))
    assert torch.equal(logits(out, ids), logits(chatty, ids))
    ours, theirs = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(chatty)
    assert ours.chat_template == theirs.chat_template and ours("the room") == theirs("the room")
    settings = GenerationConfig.from_pretrained(out)
    assert settings.eos_token_id == [2, ours.convert_tokens_to_ids("<|eot_id|>")] and settings.pad_token_id == 3
    assert json.loads((out / "config.json").read_text())["use_cache"] is True
    assert (out / "README.md").is_file() and not list(tmp_path.rglob(".tmp-*"))


def _use(folder: Path) -> None:
    """Run what the card says under Use."""
    code = (folder / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    exec(code.replace('name = "."', f"name = {str(folder)!r}").replace("max_new_tokens=64", "max_new_tokens=2"), {})


def test_the_card_s_code_runs_with_and_without_a_chat_template(
    chatty: Path, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, source in (("chat", chatty), ("plain", world / "student")):
        folder = export(str(source), tmp_path / name).folder
        capsys.readouterr()
        _use(folder)
        assert capsys.readouterr().out.strip()


def test_the_card_of_a_cut_student_says_what_it_was_cut_from(world: Path, tmp_path: Path) -> None:
    cut = {"student.init": "shrink", "student.shrink.layers": [1]}
    settings = {**tiny.settings(world, train__max_steps=1, eval__samples=0), **cut}
    del settings["student.model"]
    made = distill(load_config(overrides=settings), tmp_path / "run", device="cpu")
    card = (export(str(made.folder), tmp_path / "out").folder / "README.md").read_text(encoding="utf-8")
    assert "- student began as: cut from its teacher `teacher`, 1 of 2 layers\n" in card
    assert "builtin:student" not in card and "base_model" not in card and " of training, " in card


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_stored_and_its_cost_told(chatty: Path, tmp_path: Path, capsys: Any, dtype: str) -> None:
    said = json.loads(output(capsys, "export", str(chatty), "--out", str(tmp_path / "out"), "--dtype", dtype, "--json"))
    assert said["largest"] <= 1e-5 and 0 < said["rounded_largest"] < 1 and said["form"] == dtype
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {getattr(torch, dtype)}  # noqa: SIM118
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


def test_weights_that_overflow_are_refused_and_nothing_is_written(tmp_path: Path, capsys: Any) -> None:
    source = begun.save(tmp_path / "model", begun.byte_tokenizer())
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.lm_head.weight[5, 0] = 1e6
    model.save_pretrained(source)
    code, _out, err = run(capsys, "export", str(source), "--out", str(tmp_path / "out"), "--dtype", "float16")
    assert code == 24 and "float16" in err and "bfloat16" in err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".tmp-*"))


def test_a_folder_that_reads_back_otherwise_is_refused(chatty: Path, tmp_path: Path, monkeypatch: Any) -> None:
    reload = exports.reload

    def spoiled(folder: Path) -> Any:
        model, words = reload(folder)
        with torch.no_grad():
            model.lm_head.weight += 1e-3 * torch.randn_like(model.lm_head.weight)
        return model, words

    monkeypatch.setattr(exports, "reload", spoiled)
    with pytest.raises(CannotSave):
        export(str(chatty), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_place_that_holds_something_is_refused(chatty: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    for force in (False, True):
        with refused(ConfigError, "--out"):
            export(str(chatty), other, force=force)
    assert (other / "thesis.txt").read_text() == "years of work"
    out = tmp_path / "out"
    export(str(chatty), out)
    (out / "README.md").write_text("edited")
    with refused(ConfigError, "--out"):
        export(str(chatty), out)
    assert (out / "README.md").read_text() == "edited"
    export(str(chatty), out, force=True)
    assert (out / "README.md").read_text() != "edited"
    for place in (chatty, chatty.parent):
        with pytest.raises(ConfigError):
            export(str(chatty), place, force=True)
    (tmp_path / "file").write_text("")
    with refused(ConfigError, "--out"):
        export(str(chatty), tmp_path / "file")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--format", "zip"], "hf, gguf, onnx"),
        (["--dtype", "float8"], "not written as float8"),
        (["--gguf-type", "f16"], "--format gguf"),
        (["--format", "gguf", "--quantise", "q4"], "not written as q4"),
        (["--format", "gguf", "--dtype", "bfloat16"], "not written as bfloat16"),
    ],
)
def test_a_form_that_is_not_written_is_refused(
    chatty: Path, tmp_path: Path, capsys: Any, words: Any, told: str
) -> None:
    code, _out, err = run(capsys, "export", str(chatty), "--out", str(tmp_path / "out"), *words)
    assert code == 2 and told in " ".join(err.split())


def test_a_source_that_is_not_there_and_a_place_that_is_not_named_are_refused(tmp_path: Path, capsys: Any) -> None:
    code, _out, err = run(capsys, "export", str(tmp_path / "none"), "--out", str(tmp_path / "out"))
    assert code == 20 and "no model folder" in err and not (tmp_path / "out").exists()
    code, _out, err = run(capsys, "export", str(tmp_path / "none"))
    assert code == 2 and "--out" in err


def test_a_run_is_exported_with_its_provenance(world: Path, tmp_path: Path, capsys: Any) -> None:
    settings = tiny.settings(world, train__max_steps=4, eval__samples=0, eval__max_batches=0)
    made = distill(load_config(overrides=settings), tmp_path / "run", device="cpu")
    text = output(capsys, "export", str(made.folder), "--out", str(tmp_path / "out"))
    assert "train.jsonl" in text  # compared on the run's own rows
    card = (tmp_path / "out" / "README.md").read_text()
    for words in (
        "teacher: `teacher`",
        "train.jsonl",
        "kd x",
        "precision: `fp32`",
        "## Licence",
        "torch 2",
        "perplexity",
    ):
        assert words in card, words
    assert str(tmp_path) not in card and str(world) not in card
    with refused(ConfigError, "--out"):
        export(str(made.folder), made.folder / "student", force=True)
    ids = list(range(10, 50))
    assert torch.allclose(logits(tmp_path / "out", ids), logits(made.folder / "student", ids), atol=1e-5)


def test_an_adapter_is_exported_merged(world: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(world / "student")
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora" in name:
                weight.normal_(0, 0.2)
    adapted.save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(world / "student")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    tiny.tokenizer().save_pretrained(tmp_path / "adapter")
    ids = list(range(10, 50))
    with torch.no_grad():
        wanted = adapted.eval()(torch.tensor([ids])).logits[0]
    export(str(tmp_path / "adapter"), tmp_path / "out")
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert torch.allclose(logits(tmp_path / "out", ids), wanted, atol=1e-4)
    assert not torch.allclose(logits(tmp_path / "out", ids), logits(world / "student", ids), atol=1e-2)


def test_a_student_trained_by_an_adapter_is_exported_merged(world: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    settings = tiny.settings(world, train__max_steps=4, eval__samples=0, student__adapter__rank=4)
    made = distill(load_config(overrides=settings), tmp_path / "run", device="cpu")
    export(str(made.folder), tmp_path / "out")
    assert not list((tmp_path / "out").glob("adapter*"))
    ids = list(range(10, 50))
    assert torch.allclose(logits(tmp_path / "out", ids), logits(made.folder / "student", ids), atol=1e-5)
    assert not torch.equal(logits(tmp_path / "out", ids), logits(world / "student", ids))


def test_a_full_disk_leaves_what_was_there(chatty: Path, tmp_path: Path, monkeypatch: Any) -> None:
    export(str(chatty), tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    with refused(CannotSave, "out"):
        export(str(chatty), tmp_path / "out", force=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert not list(tmp_path.glob(".tmp-*"))


def test_without_the_extra_onnx_says_one_line(chatty: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    code, _out, err = run(capsys, "export", str(chatty), "--out", str(tmp_path / "out"), "--format", "onnx")
    assert code == 2 and "pip install 'stillroom[onnx]'" in err and not (tmp_path / "out").exists()


def test_a_difference_that_is_not_finite_is_infinite() -> None:
    good = [torch.zeros(3, 5)]
    bad = [torch.full((3, 5), float("nan"))]
    assert difference(good, bad).largest == difference(good, bad).kl == float("inf")
    assert difference(good, good).largest == 0
    assert all(row[0] == 1 and len(row) > 32 for row in own_rows(begun.byte_tokenizer()))
