"""Stillroom's losses and teachers in a `Trainer` of transformers or trl.

    trainer = DistillTrainer(model=student, args=args, train_dataset=rows, teacher="org/large")
    trainer = Trainer(model=student, args=args, train_dataset=rows, compute_loss_func=as_loss(student, "org/large"))

The loss is the one of `stillroom.distill`: the objectives' mean over scored tokens, made by the fused head. What the
engine of Stillroom does around a step (guard, rollback, exact resume, one objective for training and evaluation by
task) is not part of it: there the Trainer is in charge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from stillroom.config.load import build, put
from stillroom.config.schema import Ramp, TeacherConfig
from stillroom.core.errors import ConfigError
from stillroom.core.types import IGNORED, Batch, Needs, Score, StudentView
from stillroom.losses.divergences import settings_of
from stillroom.losses.mix import Mix
from stillroom.models.anatomy import backbone, head_error, head_of
from stillroom.models.load import open_teacher
from stillroom.models.student import sequences_of
from stillroom.precision.device import teacher_dtype
from stillroom.teachers import Teacher
from stillroom.teachers.cache.reader import Cache, CachedTeacher
from stillroom.teachers.live import LiveTeacher
from stillroom.training.schedule import Curriculum

TeacherModel: TypeAlias = "str | Path | nn.Module | None"
_BAD = "bad_teacher_rows"
_TOLERANCE = 0.05  # of the logits' spread, between a model's own logits and those of its head as it is described


class DistillTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
    """A `Trainer` whose loss is Stillroom's.

    - `teacher`: a name or a model, also one with a LoRA adapter; or `cache`: a folder that `stillroom cache` wrote.
    - `objectives`: settings below `objectives` of a configuration, `{"kd.divergence": "jsd", "kd.temperature": 2.0,
      "ce.weight": 0.5}`; ramps follow the training's progress.
    - All other arguments are the Trainer's. Rows are padded on the right, one text each.

    The log has the unweighted means of the terms, `kd` and `ce`, and `bad_teacher_rows`, positions that were taught by
    their labels because the teacher's answer was not finite or not stored. The metrics of an evaluation have them as
    `eval_kd`, `eval_ce` and `eval_bad_teacher_rows`.
    """

    def __init__(
        self,
        *arguments: Any,
        teacher: TeacherModel = None,
        cache: str | Path | None = None,
        objectives: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        is_given = self.compute_metrics is not None or self.compute_loss_func is not None
        if is_given or self.args.label_smoothing_factor or self.args.torch_compile:
            raise ConfigError(
                "logits are never made here: compute_metrics, compute_loss_func, label_smoothing_factor and "
                "torch_compile cannot have them",
                where="DistillTrainer",
                advice=["leave them out, and score a saved student with stillroom.evaluate"],
            )
        if self.args.n_gpu > 1:
            raise ConfigError("nn.DataParallel over several GPUs is not served", where="DistillTrainer",
                              advice=["start with torchrun", "or give it one GPU by CUDA_VISIBLE_DEVICES"])  # fmt: skip
        self.loss_is_scaled_for_ga = None  # scaled where the Trainer gives the number of tokens of all micro-batches
        self.model_accepts_loss_kwargs = True  # so it does
        self._loss_shifts_labels = True  # and does not count the first, which is never predicted, for any model
        self._scorer = _Scorer(_causal(self.model), teacher, cache, objectives)
        self._seen: dict[str, tuple[Any, Any]] = {}  # sums and counts since the last entry of the log

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of a micro-batch, through the wrappers of DDP, FSDP and DeepSpeed."""
        inputs = dict(inputs)
        labels = inputs.pop("labels", None)
        batch, student = _batch(inputs, labels), _causal(self.accelerator.unwrap_model(model))
        progress = self.state.global_step / max(self.state.max_steps, 1)

        def forward(**given: Any) -> dict[str, Tensor]:
            """Instead of the model's own forward, inside of which a sharded head is whole."""
            with self.accelerator.autocast():
                hidden = backbone(student)(**given, use_cache=False).last_hidden_state
                score = self._scorer.score(student, hidden, batch, num_items_in_batch, progress)
            self._keep(score)
            return {"loss": score.loss}

        with _forward_of(student, forward):
            loss = model(**inputs)["loss"]
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())  # gradients are averaged
        return (loss, {}) if return_outputs else loss

    def _keep(self, score: Score) -> None:
        found = {term: (one.total.detach(), one.count) for term, one in score.terms.items()}
        for name, (total, count) in {**found, _BAD: (score.counters[_BAD], 1)}.items():
            before = self._seen.get(name, (0.0, 0.0))
            self._seen[name] = (before[0] + total, before[1] + count)

    def _take(self) -> dict[str, float]:
        """The terms since the last call, over all processes: each calls this at the same steps."""
        seen, self._seen = self._seen, {}
        if not seen:
            return {}
        mine = torch.tensor([[float(total), float(count)] for total, count in seen.values()], dtype=torch.float64)
        sums = self.accelerator.reduce(mine.to(self.args.device), "sum").tolist()
        return {name: total / (1.0 if name == _BAD else max(count, 1.0))
                for name, (total, count) in zip(seen, sums, strict=True)}  # fmt: skip

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Add the terms since the last entry to an entry of training."""
        super().log({**logs, **self._take()} if "loss" in logs else logs, *arguments, **options)

    def evaluation_loop(self, *arguments: Any, metric_key_prefix: str = "eval", **options: Any) -> Any:
        """Evaluate, and add the terms of the evaluation alone to its metrics."""
        training, self._seen = self._seen, {}
        try:
            found = super().evaluation_loop(*arguments, metric_key_prefix=metric_key_prefix, **options)
            found.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in self._take().items()})
        finally:
            self._seen = training
        return found


def as_loss(
    model: PreTrainedModel,
    teacher: TeacherModel = None,
    *,
    cache: str | Path | None = None,
    objectives: Mapping[str, Any] | None = None,
) -> Callable[..., Tensor]:
    """A `compute_loss_func` for any Trainer of this model; `teacher`, `cache` and `objectives` as in `DistillTrainer`.

    The model's forward is as it was and makes its logits, so memory is what it was too. Hooks note the inputs and the
    last hidden states of each call. A head that is sharded is not whole here: use `DistillTrainer` for that.
    """
    student = _causal(model)
    scorer, noted = _Scorer(student, teacher, cache, objectives), dict[str, Any]()
    if not scorer.is_constant:
        raise ConfigError("a compute_loss_func does not know the progress of the training", where="objectives",
                          advice=["give numbers instead of ramps", "or use DistillTrainer"])  # fmt: skip

    def note_inputs(_module: nn.Module, _given: tuple[Any, ...], named: dict[str, Any]) -> None:
        noted["inputs"] = named

    def note_hidden(_module: nn.Module, given: tuple[Any, ...]) -> None:
        noted["hidden"] = given[0]

    student.register_forward_pre_hook(note_inputs, with_kwargs=True)
    student.get_output_embeddings().register_forward_pre_hook(note_hidden)

    def loss(_outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        hidden = noted.pop("hidden")
        return scorer.score(student, hidden, _batch(noted.pop("inputs"), labels), num_items_in_batch).loss

    return loss


class _Scorer:
    """The objectives of a configuration, and the teacher that answers for them."""

    def __init__(
        self, student: Any, teacher: TeacherModel, cache: str | Path | None, objectives: Mapping[str, Any] | None
    ) -> None:
        table: dict[str, Any] = {}
        for key, value in (objectives or {}).items():
            put(table, f"objectives.{key}", value)
        config = build(table, "objectives")
        self._curriculum = Curriculum.of(config)
        read = [f"kd.{name}" for name in ("temperature", "top_k", *settings_of(config.objectives.kd.divergence))]
        used = (*self._curriculum.weights.values(), *map(self._curriculum.settings.get, read))
        self.is_constant = not any(isinstance(value, Ramp) for value in used)
        if odd := sorted(set(self._curriculum.weights) - {"kd", "ce"}):
            raise ConfigError(f"a Trainer has no hidden states for objectives.{odd[0]}", where="objectives",
                              advice=["use kd and ce here, or stillroom.distill for the others"])  # fmt: skip
        if (teacher is None) == (cache is None) and self._curriculum.uses_teacher:
            raise ConfigError("give a teacher or a cache, and not both", where="teacher")
        network = None if isinstance(teacher, str | Path | None) else _causal(teacher, "teacher")
        if network is student:
            raise ConfigError("teacher and student are one object", where="teacher",
                              advice=["give the teacher by name, or a copy.deepcopy of the model"])  # fmt: skip
        self._mix, self._given, self._cache = Mix(config.objectives), teacher if network is None else network, cache
        self._teacher: Teacher | None = None
        self._vocab_size = int(student.get_output_embeddings().weight.shape[0])
        _check_head(student, "student", self._vocab_size)

    def score(
        self, student: Any, hidden: Tensor, batch: Batch, num_items: Tensor | int | None, progress: float = 0.0
    ) -> Score:
        if batch.input_ids.device != hidden.device:
            batch = batch.to(hidden.device)
        weights = self._curriculum.at(progress)
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.positions)
        view = StudentView(chosen, head_of(student), {}, batch.positions, *sequences_of(batch))
        with torch.autocast(hidden.device.type, enabled=False):  # of the student: a teacher has its own dtype
            signal = self._answering(batch).observe(batch, Needs()) if weights.asks_teacher else None
        count = float(num_items) if num_items is not None else float(batch.num_scored)
        return self._mix.score(view, signal, batch, weights, {"kd": count, "ce": count})

    def _answering(self, batch: Batch) -> Teacher:
        """The teacher, brought to the device of the first batch."""
        device = batch.input_ids.device
        if self._teacher is None and self._cache is not None:
            stored = CachedTeacher(Cache(Path(self._cache)), device=device)
            self._mix.check_signal("sampled" if stored.kind == "sampled" else "top-k", stored.spec.temperature)
            self._teacher = stored
        elif self._teacher is None:
            network = self._given
            if not isinstance(network, PreTrainedModel):
                network = open_teacher(TeacherConfig(model=str(network)), teacher_dtype("auto", device)).network
            network.requires_grad_(False).eval()
            _check_head(network, "teacher", self._vocab_size)
            options: dict[str, Any] = {"vocab_size": self._vocab_size, "device": device, "offload": False}
            self._teacher = LiveTeacher(network, is_described=True, **options)
        if isinstance(self._teacher, CachedTeacher) and not self._teacher.cache.has(batch.keys).all():
            raise ConfigError("the cache has no answers to rows of this data", where=str(self._cache),
                              advice=["write it from the same texts, with data.packing = 'rows'"])  # fmt: skip
        return self._teacher


def _causal(model: Any, role: str = "model") -> Any:
    """The causal language model inside of a PEFT model, or the model itself."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        raise ConfigError(f"{type(model).__name__} is not a model of transformers", where=role,
                          advice=["give what AutoModelForCausalLM loads, alone or with a LoRA adapter"])  # fmt: skip
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ConfigError("an adapter of virtual tokens moves the positions", where=role, advice=["use LoRA"])
    if hasattr(inner.get_output_embeddings(), "base_layer"):
        raise ConfigError("the head has an adapter, which the fused head does not see", where=role,
                          advice=["leave lm_head out of target_modules"])  # fmt: skip
    return inner


@torch.no_grad()
def _check_head(model: Any, role: str, num_rows: int) -> None:
    """Raise if the logits are not those of the last hidden states and the head, or of another vocabulary."""
    error = head_error(model, torch.arange(8, device=model.device).unsqueeze(0))
    rows = int(model.get_output_embeddings().weight.shape[0])
    if error > _TOLERANCE or rows != num_rows:
        found = f"has {rows:,} tokens, and the student {num_rows:,}" if rows != num_rows else "is not a plain product"
        raise ConfigError(f"the head of the {role} {found}", where=role, advice=["stillroom.distill serves such pairs"])


def _batch(inputs: Mapping[str, Any], labels: Tensor | None) -> Batch:
    """A micro-batch of a Trainer as Stillroom's: targets are the labels, shifted by one position."""
    ids = inputs.get("input_ids")
    if ids is None or labels is None:
        raise ConfigError(f"no {'input_ids' if ids is None else 'labels'} in a batch", where="data collator",
                          advice=["DataCollatorForLanguageModeling(tokenizer, mlm=False) makes both"])  # fmt: skip
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    if mask.dim() != 2 or bool((mask[:, 1:] > mask[:, :-1]).any()) or inputs.get("position_ids") is not None:
        raise ConfigError("rows must be padded on the right and hold one text each", where="data collator",
                          advice=["tokenizer.padding_side = 'right'", "packing=False, padding_free=False"])  # fmt: skip
    targets = torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], dim=1)
    mask = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)  # nothing follows the last token of a row
    return Batch(ids, mask, targets, torch.zeros_like(targets), tuple(str(row) for row in range(len(ids))))


@contextmanager
def _forward_of(model: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a model's wrappers call another forward in the body."""
    own = vars(model).get("forward")
    model.forward = forward
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own
