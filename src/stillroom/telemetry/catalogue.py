"""Every event of `events.jsonl`, with the meaning of its keys. The reference page of events is made from this.

A key that ends in `_nonfinite` stands beside one whose value is null because it was not finite; it is not listed.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class EventKind:
    """When an event is written, and what its keys mean. `sometimes` are keys that not every such event has."""

    when: str
    keys: dict[str, str] = field(default_factory=dict)
    sometimes: dict[str, str] = field(default_factory=dict)


HEADER = {
    "event": "name of the event",
    "schema": "version of the format, 1",
    "time": "UTC, ISO 8601, to the millisecond",
}
TERM = {
    "raw": "mean of the term over its count, unweighted",
    "weight": "its weight in this step",
    "scaled": "raw times weight",
    "share": "scaled over the whole objective",
}
_STEP = "optimizer steps applied so far"
_YARDSTICKS = {
    "perplexity": "exp of the mean negative log-likelihood of the targets",
    "bits_per_byte": "the same likelihood over the bytes of text",
    "kl": "mean KL(teacher, student), nats a token",
    "agreement": "share of positions where both models find the same token likeliest",
    "top5_agreement": "share of positions where the teacher's likeliest token is among the student's five",
    "top5_overlap": "mean share that the two sets of five likeliest tokens have in common",
    "acceptance": "mean of sum min(p, q), 1 - total variation",
    "calibration_error": "expected calibration error of the likeliest token",
    "intervals": "95 % interval of each yardstick, by bootstrap over documents",
    "documents": "documents the intervals are drawn over",
    "uncompared_tokens": "positions at which one of the two models gave no distribution",
}
_ALSO_STORED = ("perplexity", "bits_per_byte", "kl", "agreement")  # of a teacher that is not loaded
_BY_SPANS = {"kl_per_byte": "with two tokenizers: KL on spans, bits a byte"}

EVENTS: dict[str, EventKind] = {
    "run_start": EventKind(
        "A run begins, or begins again after a stop.",
        {
            "run": "name of the run's folder",
            "config": "the whole configuration",
            "versions": "of Python, stillroom and its libraries",
            "machine": "platform, processor, cores, memory",
            "precision": "mode, and the reason it was chosen",
            "schedule": "total_batches, gradient_accumulation, processes, optimizer_steps, warmup_steps, learning_rate",
            "teacher": "name, family, parameters, layers, width, vocabulary of the live teacher; null without one",
            "student": "the same of the student, and trained, its trained parameters",
            "data": "records, documents, targets, tokens, what was left out, lengths of rows, notes",
            "setup_seconds": "from the start of the command until this record",
        },
    ),
    "resume": EventKind("A run goes on from a checkpoint.", {"step": "step of the checkpoint"}),
    "changed_inputs": EventKind(
        "A resumed run goes on with other data or another model than it began with, as the user allowed.",
        {"step": "step of the checkpoint", "changes": "a sentence for each input that changed"},
    ),
    "note": EventKind(
        "Anything a reader of the log should know, in words: choices, warnings, what was left out.",
        {"text": "the sentence"},
        {
            "micro_batch_rows": "rows that now fit, where memory ran out",
            "reason": "what the device said",
            "norm": "gradient norm of a trained gate that was not applied",
        },
    ),
    "teacher_quantised": EventKind(
        "The teacher's layers were quantised and compared with the full ones.",
        {
            "kind": "as in teacher.quantisation",
            "kl": "KL(full, quantised), nats a token",
            "max_kl": "the most that is accepted",
            "positions": "positions it was measured on",
            "layers": "linear layers that were quantised",
            "full_bytes": "their size before",
            "bytes": "their size now",
        },
    ),
    "teacher_eval": EventKind(
        "The teacher was scored on the held-out data, before the first step.",
        {
            **{key: text for key, text in _YARDSTICKS.items() if key in _ALSO_STORED},
            "parameters": "of the teacher",
        },
        {
            **{key: text for key, text in _YARDSTICKS.items() if key not in _ALSO_STORED},
            **_BY_SPANS,
            "source": "`stored answers`, where it is not loaded",
        },
    ),
    "first_forward": EventKind(
        "Both models answered the first batch; shapes and alignment are checked.",
        {
            "rows": "sequences of the batch",
            "positions": "tokens of a sequence",
            "scored": "scored positions of the batch",
            "student_hidden": "[scored positions, width]",
            "teacher_hidden": "the same of a live teacher, else null",
            "student_logits": "[scored positions, vocabulary]",
            "teacher_logits": "the same of a live teacher, else null",
            "vocabulary": "size of the student's vocabulary",
            "vocabulary_hash": "digest of each model's vocabulary",
            "alignment": "loss with labels as given, one back and one ahead, and the doubt that follows",
            "temperature": "of the distillation term",
            "weights": "of all terms",
        },
    ),
    "step": EventKind(
        "An optimizer step was attempted, applied or refused.",
        {
            "step": "number of the step, from 1",
            "train_loss": "the objective on the window",
            "lr": "learning rate",
            "grad_norm": "norm of the student's gradient, unscaled, before clipping",
            "verdict": "keep, retry, skip, rollback, fallback, reset or halt",
            "success_rate": "share of the attempts so far that were applied",
            "consecutive_nans": "refused steps in a row",
            "loss_scale": "1 where losses are not scaled",
            "skipped": "steps skipped so far",
            "micro_batch_rows": "rows of a micro-batch, which may shrink where memory runs out",
            "rollbacks": "rollbacks so far",
            "tokens": "targets of the window",
            "tokens_per_second": "targets over the seconds of the step",
            "seconds": "by the clock",
            "loader_seconds": "of these, waiting for batches",
            "cpu_seconds": "of all threads of the process",
            "eta_seconds": "estimate of what is left",
            "phase": "phase of the curriculum",
            "temperature": "of the distillation term",
            "terms": "name -> raw, weight, scaled, share",
            "bad_teacher_rows": "positions where the teacher gave no distribution",
            "gpu_memory_gb": "peak on the card, 0 without one",
            "memory_gb": "resident size of the process",
            "memory_percent": "share of the device's memory in use",
        },
        {
            "fallback_loss": "mean cross-entropy of the bad_teacher_rows, which are taught by their labels",
            "idle_terms": "terms that the curriculum keeps at weight 0 now",
            "sources": "targets and raw terms by source, where there are several",
            "noop_update_fraction": "FP16 modes: share of sampled weights that an update left as they were",
            "zero_gradient_fraction": "FP16 modes: share of sampled gradients that are exactly 0",
            "clamped_fraction": "share of logits moved by guard.logit_clamp",
            "clamped_losses": "losses moved by guard.loss_clamp",
            "rows_without_contrast": "rows that were alone in their micro-batch",
        },
    ),
    "gradients": EventKind(
        "Each term's gradient was measured by itself (telemetry.gradient_steps).",
        {
            "step": _STEP + " and this one",
            "terms": "name -> norm, share of the summed norms",
            "cosines": "between the gradients of each two terms",
        },
    ),
    "phase": EventKind(
        "The curriculum entered another phase.",
        {"step": _STEP, "from": "phase that ended", "to": "phase that begins"},
    ),
    "guard": EventKind(
        "A step was refused, or the state was found bad between two steps.",
        {
            "step": "number of the step",
            "action": "retry, skip, rollback, fallback, reset or halt",
            "reason": "why, in words",
            "located": "the first tensor that is not finite, where one was looked for",
            "sample_ids": "records of the window",
            "evidence": "loss, grad_norm, terms, loss_scale, bad_teacher_rows",
        },
    ),
    "eval": EventKind(
        "The student was scored on the held-out data.",
        {
            "step": _STEP,
            **_YARDSTICKS,
            "objective": "the training objective at the present weights",
            "terms": "name -> raw, weight, scaled, share",
            "unscored_tokens": "targets whose probability is not finite",
            "tokens": "targets scored",
            "seconds": "by the clock",
            "best": "whether it is the best student so far",
        },
        _BY_SPANS,
    ),
    "checkpoint": EventKind(
        "A checkpoint is whole and in its place. Later steps may be in the log before it.",
        {
            "step": "optimizer steps that are in it",
            "path": "inside the run's folder",
            "bytes": "size on disk",
            "seconds": "from its beginning until it was whole",
            "waited_seconds": "of these, seconds in which training stood still",
        },
    ),
    "router_probe": EventKind(
        "Before the first step: would training the teacher's gates help (teacher.router.probe_steps)?",
        {
            "steps": "router steps that were tried",
            "updates": "of these, applied",
            "nll_before": "the teacher's held-out loss",
            "nll_after": "the same after the probe",
            "gain": "the difference",
            "threshold": "the least gain that counts",
            "is_worthwhile": "whether it was reached",
            "is_forced": "whether the gates are trained all the same",
        },
    ),
    "router": EventKind(
        "The gates of a mixture-of-experts teacher, at the start and at each evaluation.",
        {
            "step": _STEP,
            "mode": "as in teacher.router.mode",
            "is_frozen": "whether the gates are no longer trained",
            "teacher_nll": "held-out loss of the teacher as it stands",
            "teacher_nll_start": "the same before the run",
            "kl_to_original": "KL(original teacher, teacher), nats a token",
            "updates": "router updates applied so far",
            "skipped": "refused so far",
            "mended": "times that gates were not finite and were replaced by the last good ones",
            "grad_norm": "of the last update",
            "terms": "mean of each term of the gates' loss",
            "layers": "for each gate: name, share of each expert, entropy, drift",
            "alarm": "whether the teacher got worse by more than max_degradation and its gates were restored",
        },
    ),
    "advice": EventKind(
        "A cause of trouble was found in the run so far; each is said once.",
        {
            "step": "last step before it",
            "cause": "name, as in `stillroom diagnose`",
            "severity": "problem or warning",
            "steps": "steps it is seen at",
            "evidence": "in words",
            "advice": "what to try",
            "setting": "as an assignment for --set, or empty",
            "numbers": "the figures behind the evidence",
        },
    ),
    "sample": EventKind(
        "At the end: a held-out text continued by both models.",
        {"prompt": "beginning of the text", "student": "its continuation", "reference": "how the text goes on"},
        {"teacher": "its continuation, where it is loaded"},
    ),
    "replay": EventKind(
        "`stillroom replay` took a refused attempt again. Written to a log of its own.",
        {
            "step": "of the attempt",
            "attempt": "its number within the run",
            "checkpoint": "step of the checkpoint it was taken from",
            "then": "verdict, reason, located, loss, grad_norm as they were",
            "now": "loss, grad_norm, terms, located as they are",
            "samples": "records of the window",
            "text": "their text",
        },
    ),
    "run_end": EventKind(
        "The run ended, in whatever way it could still say so.",
        {"status": "done or stopped", "exit_code": "as the command ends"},
        {
            "steps": "steps applied",
            "seconds": "of training, in all sessions",
            "total_seconds": "of the commands, loading and evaluations included, as far as the log knows them",
            "reason": "why it stopped",
        },
    ),
}
