"""A model on its own: what it scores, what it writes, how large and how fast it is."""

from __future__ import annotations

import time
from typing import Any

import torch

from stillroom.config.schema import DataConfig, StudentConfig, TeacherConfig
from stillroom.data import Bos, fixed_batches, open_eval, prompt_ids
from stillroom.engine.build import find_device
from stillroom.engine.loop import memory
from stillroom.evaluate import evaluate
from stillroom.models import Student, agree_on_vocabulary, anatomy, load_teacher, load_tokenizer
from stillroom.models.generate import generate
from stillroom.models.names import model_name
from stillroom.precision import resolve
from stillroom.teachers import LiveTeacher


def assess(
    model: str,
    data: str,
    *,
    teacher: str | None = None,
    max_length: int = 256,
    batch_size: int = 8,
    max_batches: int = 0,
    bos: Bos = "auto",
    device: str = "auto",
) -> dict[str, Any]:
    """Yardsticks of a model on a text, and of a teacher beside it, with size, speed and memory of each.

    The folder of a run stands for its student.
    """
    where = find_device(device)
    model, teacher = model_name(model), model_name(teacher) if teacher is not None else None
    tokenizer = load_tokenizer(StudentConfig(model=model), model)
    corpus = open_eval(data, tokenizer, DataConfig(train=data, max_length=max_length, bos=bos))
    network = _load(model, where)
    size = anatomy(network).vocab_rows
    source = None
    result: dict[str, Any] = {"model": model, "data": data, "device": str(where)}
    if teacher is not None:
        teacher_network = _load(teacher, where)
        teacher_tokenizer = load_tokenizer(TeacherConfig(model=teacher), teacher)
        size = agree_on_vocabulary(teacher_tokenizer, tokenizer, anatomy(teacher_network).vocab_rows, size)
        source = LiveTeacher(teacher_network, vocab_size=size, device=where, offload=False, is_described=True)

    def measure(network: Any, against: LiveTeacher | None) -> dict[str, Any]:
        batches = fixed_batches(corpus.evaluation, batch_size, max_batches)
        student = Student(network, vocab_size=size)
        found = evaluate(student, batches, precision=resolve("fp32", where), teacher=against)
        parameters = anatomy(network).num_parameters
        return {
            **found.yardsticks(),
            "parameters": parameters,
            "weight_megabytes": parameters * 4 / 1e6,
            "unscored_tokens": found.unscored_tokens,
            "tokens": found.tokens,
            "tokens_per_second": _speed(network, corpus, batch_size, where),
        }

    result["student"] = measure(network, source)
    if source is not None:
        result["teacher"] = measure(source.model, source)
        result["retention"] = result["teacher"]["perplexity"] / result["student"]["perplexity"]
    gpu, resident, _percent = memory(where)
    return {**result, "gpu_memory_gb": gpu, "memory_gb": resident, "notes": list(corpus.notes)}


def _load(name: str, device: torch.device) -> Any:
    return load_teacher(TeacherConfig(model=name), torch.float32).to(device)


@torch.no_grad()
def _speed(network: Any, corpus: Any, batch_size: int, device: torch.device) -> float:
    """Tokens a second of a plain forward pass over a few batches, the first left out as warm-up."""
    batches = [batch.to(device) for batch in fixed_batches(corpus.evaluation, batch_size, 4)]
    tokens, seconds = 0, 0.0
    for number, batch in enumerate(batches):
        began = time.perf_counter()
        network.base_model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number or len(batches) == 1:
            tokens += batch.input_ids.numel()
            seconds += time.perf_counter() - began
    return tokens / max(seconds, 1e-9)


def continue_text(
    name: str, prompt: str, *, device: str = "auto", is_raw: bool = False, bos: Bos = "auto", **options: Any
) -> tuple[str, bool]:
    """What a model writes after a prompt, and whether it answers it as a turn of a chat.

    A tokenizer with a chat template writes the prompt with it, unless `is_raw`. The folder of a run stands for its
    student.
    """
    where, name = find_device(device), model_name(name)
    tokenizer = load_tokenizer(StudentConfig(model=name), name)
    ids, is_chat = prompt_ids(tokenizer, prompt, bos=bos, is_raw=is_raw)
    return str(generate(_load(name, where), tokenizer, ids, **options)), is_chat
