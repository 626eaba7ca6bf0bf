"""Laws of models as they are loaded: what is reported of one is what it computes itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from refusals import refused
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, RwkvConfig
from transformers.utils import logging

from stillroom import demo
from stillroom.config import load_config
from stillroom.config.schema import DataConfig, StudentConfig, TeacherConfig
from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.core.types import IGNORED
from stillroom.data import fixed_batches, open_eval
from stillroom.metrics.evaluate import assess
from stillroom.models import head_error, open_student, open_teacher, try_model
from stillroom.models.student import NAME
from stillroom.precision.device import find_device
from stillroom.training.distill import distill
from stillroom.training.finish import Result
from stillroom.training.models import load_models

ODD = ["recurrent_gemma", "modernbert-decoder", "doge"]  # a cap, a head with layers of its own, masks of its own


def save(folder: Path, family: str, **over: Any) -> Path:
    families.build(family, **over).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of families with a peculiar part, loud enough that it matters, and the text to try them on."""
    folder = tmp_path_factory.mktemp("odd")
    for family in ODD:
        model = families.build(family)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(20.0)
        model.save_pretrained(folder / family)
        tiny.tokenizer().save_pretrained(folder / family)
    tiny.save_model(folder / "student", width=16, num_layers=1)
    tiny.save_text(folder / "train.jsonl", 60)
    return folder


@torch.no_grad()
def own_perplexity(folder: Path, data: Path, length: int = 32) -> float:
    """By the model as transformers loads it, its own logits and torch's cross-entropy."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    corpus = open_eval(str(data), tiny.tokenizer(), DataConfig(train=str(data), max_length=length))
    total, count = 0.0, 0
    for batch in fixed_batches(corpus.evaluation, 8, 0):
        logits = model(input_ids=batch.input_ids, use_cache=False).logits.double()
        total += float(
            F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum")
        )
        count += batch.num_scored
    return math.exp(total / count)


@pytest.mark.parametrize("family", ODD)
def test_evaluation_reports_the_model_s_own_perplexity(odd: Path, family: str) -> None:
    data = odd / "train.jsonl"
    found = assess(str(odd / family), str(data), teacher=str(odd / family), max_length=32, device="cpu")
    expected = own_perplexity(odd / family, data)
    assert found["student"]["perplexity"] == pytest.approx(expected, rel=1e-3)
    assert found["teacher"]["perplexity"] == pytest.approx(expected, rel=1e-3)
    assert found["student"]["kl"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("family", ODD)
def test_the_summary_s_teacher_is_the_teacher(odd: Path, tmp_path: Path, family: str) -> None:
    """Its row is its own perplexity, and what the student is drawn to is the same distribution."""
    data = str(odd / "train.jsonl")
    over = tiny.settings(odd, teacher__model=str(odd / family), data__eval=data, train__max_steps=1)
    over |= {"eval.max_batches": 0, "eval.batch_size": 8, "eval.samples": 0}
    summary = distill(load_config(overrides=over), tmp_path / "run", device="cpu").summary
    assert summary["teacher"]["perplexity"] == pytest.approx(own_perplexity(odd / family, Path(data)), rel=1e-3)
    assert summary["teacher"]["kl"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("family", ["modernbert-decoder", "llama4_text", "hrm_text"])
def test_a_peculiar_student_is_trained_by_its_own_logits(odd: Path, tmp_path: Path, family: str) -> None:
    student, data = save(tmp_path / "student", family), odd / "train.jsonl"
    over = tiny.settings(odd, teacher__model=str(odd / "recurrent_gemma"), student__model=str(student))
    over |= {"data.eval": str(data), "train.max_steps": 2, "eval.max_batches": 0, "eval.samples": 0}
    result = distill(load_config(overrides=over), tmp_path / "run", device="cpu")
    kept = tmp_path / "run" / "student"
    assert result.summary["student"]["perplexity"] == pytest.approx(own_perplexity(kept, data), rel=1e-3)
    assert own_perplexity(kept, data) != pytest.approx(own_perplexity(student, data), rel=1e-6), "it was trained"


def test_the_demo_compares_with_the_teacher_s_own_answers(odd: Path, tmp_path: Path) -> None:
    done = Result(tmp_path, {"steps": 1, "best_step": 1, "tokens": 1, "seconds": 1.0})
    save(tmp_path / "student", "recurrent_gemma")
    data = str(odd / "train.jsonl")
    over = tiny.settings(odd, teacher__model=str(tmp_path / "student"), data__eval=data)
    row = demo._compared(done, load_config(overrides=over), "cpu", {})
    assert row["kl"] == pytest.approx(0.0, abs=1e-6)


# -- the trial -------------------------------------------------------------------------------------------


def test_a_cap_is_noticed_before_logits_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh model's logits are so small that its cap changes nothing yet: the description must hold later, too."""
    model = families.build("recurrent_gemma")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-2)
    ids = torch.arange(12).unsqueeze(0)
    assert head_error(model, ids) < 1e-3
    monkeypatch.setattr("stillroom.models.anatomy._CAPS", ())
    assert head_error(model, ids) > 0.1


def test_a_head_of_zeros_does_not_hide_an_encoder() -> None:
    model = families.build("bert", tie_word_embeddings=False)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
        model.get_output_embeddings().bias.zero_()
    with refused(BrokenAtStart, "BertLMHeadModel"):
        try_model(model, tiny.tokenizer(), name="bert", role="teacher")


def test_a_model_that_answers_by_chance_is_refused() -> None:
    model = families.build("llama")
    hook = model.model.register_forward_hook(
        lambda _module, _inputs, output: output.__setitem__("last_hidden_state", torch.randn_like(output[0]))
    )
    with pytest.raises(BrokenAtStart, match="alike twice"):
        try_model(model, tiny.tokenizer(), name="chance", role="teacher")
    hook.remove()


def test_a_trial_leaves_no_trace() -> None:
    model = families.build("llama").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    try_model(model, tiny.tokenizer(), name="llama", role="student")
    assert torch.equal(state, torch.get_rng_state()) and model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_attention_is_switched_only_where_the_answers_stay(odd: Path) -> None:
    masked = open_teacher(TeacherConfig(model=str(odd / "doge")), torch.float32)
    plain = open_teacher(TeacherConfig(model=str(odd / "student")), torch.float32)
    assert masked.network.config._attn_implementation == "sdpa" and "attention masks" in " ".join(masked.notes)
    assert plain.network.config._attn_implementation == NAME and not plain.notes


def test_a_model_is_tried_once_in_a_run(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def count(model: Any, ids: torch.Tensor) -> float:
        asked.append(type(model).__name__)
        assert ids.shape[1] > 8 and ids.max() > 64 and len(ids.unique()) > 16, "tokens of the whole vocabulary"
        return 0.0

    monkeypatch.setattr("stillroom.models.load.head_error", count)
    over = tiny.settings(odd, teacher__model=str(odd / "recurrent_gemma"))
    load_models(load_config(overrides=over), find_device("cpu"))
    assert sorted(asked) == ["LlamaForCausalLM", "RecurrentGemmaForCausalLM"]


def test_a_tokenizer_that_does_not_fit_is_refused_without_a_teacher(odd: Path, tmp_path: Path) -> None:
    """Plain training asks no teacher, so nothing else compares the tokenizer with the embeddings."""
    tiny.save_model(tmp_path / "student", width=16, num_layers=1)
    tiny.tokenizer(400).save_pretrained(tmp_path / "student")
    over = tiny.settings(odd, student__model=str(tmp_path / "student"))
    over |= {"objectives.kd.weight": 0.0, "objectives.ce.weight": 1.0}
    with refused(ConfigError, "", "377", "320"):
        load_models(load_config(overrides=over), find_device("cpu"))


def test_looking_at_a_student_does_not_change_its_weights(tmp_path: Path) -> None:
    """RWKV with more than six layers halves weights in place when it evaluates: a student must be saved as trained."""
    torch.manual_seed(0)
    sizes = {"context_length": 128, "intermediate_size": 32, "hidden_size": 16, "num_hidden_layers": 8}
    AutoModelForCausalLM.from_config(RwkvConfig(**sizes, vocab_size=tiny.VOCAB)).save_pretrained(tmp_path / "student")
    tiny.tokenizer().save_pretrained(tmp_path / "student")
    loaded = open_student(StudentConfig(model=str(tmp_path / "student")), tiny.tokenizer(), seed=0)
    before = {name: tensor.clone() for name, tensor in loaded.network.state_dict().items()}
    loaded.network.eval()(torch.arange(2, 10)[None])
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.network.state_dict().items())


def test_loading_leaves_the_logging_of_transformers_as_it_was(tmp_path: Path) -> None:
    tiny.save_model(tmp_path / "student", width=16, num_layers=1)
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        open_student(StudentConfig(model=str(tmp_path / "student")), tiny.tokenizer(), seed=0)
        assert logging.get_verbosity() == logging.INFO and logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity(before)


def test_a_student_whose_steps_cannot_be_repeated_is_refused() -> None:
    """Reformer draws the seeds of its hashes from the machine, and sets torch's own random state with them."""
    model, state = families.build("reformer"), torch.random.get_rng_state()
    with refused(BrokenAtStart, "ReformerModelWithLMHead") as caught:
        try_model(model, tiny.tokenizer(), name="reformer", role="student")
    assert caught.value.exit_code == 20 and torch.equal(torch.random.get_rng_state(), state)
    try_model(model, tiny.tokenizer(), name="reformer", role="teacher")
