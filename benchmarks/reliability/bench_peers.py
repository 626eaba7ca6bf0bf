"""The same ten faults in Stillroom and in trl's GKD trainer (transformers.Trainer beneath): who survives what.

    .venv-bench/bin/python benchmarks/reliability/bench_peers.py

Same teacher, student, data, batch size, learning rate, steps and objective (forward KL at temperature 1). trl runs as
it comes: FP32 on a CPU, off-policy (lmbda 0), clipping at 1.0, its default schedule replaced by our cosine. It has no
recovery beyond clipping to switch on, and none was added. Survival means a finite held-out loss within 1 % of the same
trainer's clean run. Nothing was tried in FP16 for trl: on a CPU its trainer silently computes in FP32.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from common import SETTING, run, write

STEPS = 160
AT = 80
FAULTS = {
    "none": "",
    "inf_logit": f"inf_logit@{AT}",
    "nan_weight": f"nan_weight@{AT}",
    "huge_weight": f"huge_weight@{AT}",
    "lr_spike": f"lr_spike@{AT}x3",
    "teacher_nan": f"teacher_nan@{AT}x5",
    "teacher_garbage": f"teacher_garbage@{AT}x5",
    "all_masked": f"all_masked@{AT}",
    "bad_batch": f"bad_batch@{AT}x5",
    "nan_moment": f"nan_moment@{AT}",
    "inf_grad": f"inf_grad@{AT}",
}
OBJECTIVE = {"objectives.kd.weight": 1.0, "objectives.kd.temperature": 1.0, "objectives.ce.weight": 0.0}


def prepare() -> tuple[Any, Any, Any, list[Any], list[Any]]:
    """Models, tokenizer, training rows and held-out batches, through Stillroom's own rooms."""
    from stillroom.config import load_config
    from stillroom.data import Loader, fixed_batches, open_data
    from stillroom.precision.device import find_device
    from stillroom.training.models import load_models

    config = load_config(preset="demo", overrides={**SETTING, **OBJECTIVE})
    models = load_models(config, find_device("cpu"))
    corpus = open_data(config.data, models.tokenizer)
    loader = Loader(corpus.train, batch_size=config.train.batch_size, seed=0)
    rows = [row for index in range(STEPS) for batch in loader.window(index) for row in batch.input_ids]
    held_out = list(fixed_batches(corpus.evaluation, config.train.batch_size, config.eval.max_batches))
    return models.student, models.teacher, models.tokenizer, rows, held_out


def run_trl(name: str) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    torch.manual_seed(0)
    student, teacher, tokenizer, rows, held_out = prepare()
    times = int(FAULTS[name].partition("x")[2] or 1) if name != "none" else 0
    student.config.use_cache = False

    def due(step: int) -> bool:
        return AT <= step < AT + times

    class Faulty(GKDTrainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            step = self.state.global_step + 1
            if name == "all_masked" and due(step):
                inputs["labels"] = torch.full_like(inputs["labels"], -100)
                num_items_in_batch = None if num_items_in_batch is None else torch.tensor(0)
            if name == "bad_batch" and due(step):
                inputs["input_ids"] = torch.randint(0, len(tokenizer), inputs["input_ids"].shape)
                inputs["labels"] = inputs["input_ids"].clone()
            loss = super().training_step(model, inputs, num_items_in_batch)
            if name == "inf_grad" and due(step):
                next(p.grad for p in model.parameters() if p.grad is not None).view(-1)[0] = float("inf")
            return loss

    class Saboteur(TrainerCallback):
        def on_step_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
        ) -> None:
            step = state.global_step + 1
            matrices = [p for n, p in model.named_parameters() if p.ndim >= 2 and "embed" not in n and "head" not in n]
            with torch.no_grad():
                if name == "nan_weight" and due(step):
                    matrices[-1].view(-1)[matrices[-1].numel() // 2] = float("nan")
                if name == "huge_weight" and due(step):
                    matrices[-1].view(-1)[:8] = 3e4
                if name == "nan_moment" and due(step):
                    next(iter(optimizer.state.values()))["exp_avg"].view(-1)[0] = float("nan")

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            if name == "lr_spike" and due(state.global_step + 1):
                for group in optimizer.param_groups:
                    group["lr"] *= 1000

    folder = Path(tempfile.mkdtemp())
    args = GKDConfig(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=8, learning_rate=2e-3, lmbda=0.0, beta=0.0,
        lr_scheduler_type="cosine", warmup_steps=STEPS // 10, max_grad_norm=1.0, weight_decay=0.1, adam_beta2=0.95,
        report_to=[], logging_steps=1, save_strategy="no", use_cpu=True, gradient_checkpointing=False, bf16=False,
        fp16=False, disable_tqdm=True, dataloader_num_workers=0, seed=0,
    )  # fmt: skip

    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        ids = torch.tensor([item["input_ids"] for item in items])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    trainer = Faulty(
        model=student, teacher_model=teacher, args=args, data_collator=collate, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"input_ids": [row.tolist() for row in rows]}), callbacks=[Saboteur()],
    )  # fmt: skip
    calls = {"student": 0, "teacher": 0}

    def sabotage_student(_module: Any, _inputs: Any, output: Any) -> None:
        if name == "inf_logit" and due(trainer.state.global_step + 1):
            output.last_hidden_state.data[0, 0, 0] = float("inf")

    def sabotage_teacher(_module: Any, _inputs: Any, output: Any) -> None:
        calls["teacher"] += 1
        if due(trainer.state.global_step + 1):
            hidden = output.last_hidden_state
            if name == "teacher_nan":
                hidden.data.fill_(float("nan"))
            if name == "teacher_garbage":
                hidden.data.copy_(torch.randn_like(hidden) * 10 * hidden.std())

    student.base_model.register_forward_hook(sabotage_student)
    teacher.base_model.register_forward_hook(sabotage_teacher)
    status = "done"
    try:
        trainer.train()
    except (RuntimeError, ValueError) as error:  # a trainer that stops has not survived, and says why here
        status = f"{type(error).__name__}: {error}"[:200]
    loss = held_out_loss(student, held_out)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    shutil.rmtree(folder, ignore_errors=True)
    return {"fault": name, "status": status, "loss": loss, "last_logged_loss": logged[-1] if logged else None}


def held_out_loss(model: Any, batches: list[Any]) -> float | None:
    import torch

    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
            total += float(
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="sum"
                )
            )
            count += batch.num_scored
    return total / count if total == total and total != float("inf") else None


def main() -> None:
    import torch
    import trl

    torch.set_num_threads(2)
    lines = []
    for name, inject in FAULTS.items():
        ours = run({"name": name, "inject": inject, "set": OBJECTIVE})
        theirs = run_trl(name)
        line = {"fault": name, "stillroom": {key: ours[key] for key in ("status", "loss")}, "trl": theirs}
        print(json.dumps(line), flush=True)
        lines.append(line)
    clean = lines[0]
    for line in lines:
        for who in ("stillroom", "trl"):
            loss, reference = line[who]["loss"], clean[who]["loss"]
            line[who]["gap_percent"] = None if loss is None else 100 * (loss / reference - 1)
            line[who]["survived"] = loss is not None and line[who]["gap_percent"] <= 1.0
    write("peers", {"trl": trl.__version__, "runs": lines})


if __name__ == "__main__":
    main()
