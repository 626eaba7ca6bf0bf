"""Text from a model, for people to look at."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    prompt: str | list[int],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """The continuation of a prompt, without the prompt. Greedy at temperature 0.

    Sampling is done here, in FP32 and with a generator of its own: FP16 logits that overflow would otherwise
    end in a device assertion, and the run's random state must not notice that someone looked.
    """
    device = next(model.parameters()).device
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] if isinstance(prompt, str) else list(prompt)
    if not ids:
        ids = [tokenizer.bos_token_id or tokenizer.eos_token_id or 0]
    limit = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0) or len(ids) + max_new_tokens
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    written: list[int] = []
    for _ in range(max_new_tokens):
        context = torch.tensor([ids[-limit:]], device=device)
        logits = model(input_ids=context, use_cache=False, logits_to_keep=1).logits[0, -1].float().cpu()
        if not torch.isfinite(logits).all():
            written_text = tokenizer.decode(written)
            model.train(was_training)
            return f"{written_text} [stopped: logits are not finite]"
        chosen = int(_pick(logits[: len(tokenizer)], temperature, generator))
        if chosen == tokenizer.eos_token_id:
            break
        ids.append(chosen)
        written.append(chosen)
    model.train(was_training)
    return str(tokenizer.decode(written))


def _pick(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if temperature <= 0:
        return logits.argmax()
    return torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
