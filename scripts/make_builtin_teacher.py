"""Train a teacher that ships in the package, from the text of the Python that runs this script.

    python scripts/make_builtin_teacher.py --out src/stillroom/builtin/models/teacher
    python scripts/make_builtin_teacher.py --out src/stillroom/builtin/models/moe-teacher \\
        --experts 8 --width 160 --layers 4 --feed-forward 112 --tokenizer src/stillroom/builtin/models/teacher

A Llama, or with --experts a Qwen3-MoE, of under three million parameters, trained with plain cross-entropy on the
training modules of the standard library, never on the held-out ones. Writes a Hugging Face folder in FP16 with its
tokenizer, and `training_log.jsonl` beside it: the settings, the machine, and the held-out loss along the way.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from stillroom import builtin

END = "<|endoftext|>"
PAD = "<|pad|>"
# Of the family's own load-balancing term, which looks at all layers together: a layer may still leave experts idle.
BALANCE_WEIGHT = 0.01


def documents(split: str) -> list[str]:
    every = [*builtin.topics(), *builtin.modules()]
    return [document.text for document in every if builtin.split_of(document.group) == split]


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=PAD, model_max_length=1024
    )


def stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    pieces = tokenizer(texts, add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    return np.concatenate([np.array([*piece, end], dtype=np.uint16) for piece in pieces])


def make_model(args: argparse.Namespace, tokenizer: Any) -> Any:
    """A dense model, or with experts a mixture: `feed_forward` is then the width of one expert."""
    shared = {
        "vocab_size": len(tokenizer),
        "hidden_size": args.width,
        "intermediate_size": args.feed_forward,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.width // 32,
        "num_key_value_heads": args.width // 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if not args.experts:
        return LlamaForCausalLM(LlamaConfig(**shared))
    config = Qwen3MoeConfig(
        **shared,
        head_dim=32,
        moe_intermediate_size=args.feed_forward,
        num_experts=args.experts,
        num_experts_per_tok=args.active_experts,
        norm_topk_prob=True,
        router_aux_loss_coef=BALANCE_WEIGHT,
    )
    return Qwen3MoeForCausalLM(config)


@torch.no_grad()
def held_out_loss(model: Any, tokens: np.ndarray, length: int) -> float:
    """Mean cross-entropy alone: whatever else is trained is not in it."""
    model.eval()
    blocks = torch.from_numpy(tokens[: len(tokens) // length * length].astype(np.int64)).view(-1, length)
    total = 0.0
    for part in blocks.split(32):
        total += model(part, labels=part).loss.item() * len(part)
    model.train()
    return total / len(blocks)


def make_optimizer(model: Any, learning_rate: float) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )


def train(args: argparse.Namespace, model: Any, tokens: np.ndarray, held_out: np.ndarray, log: Any) -> None:
    optimizer = make_optimizer(model, args.learning_rate)
    rng = np.random.default_rng(args.seed)
    extra = {"output_router_logits": True} if args.experts else {}  # asks for the load-balancing term
    start = time.monotonic()
    warmup = max(1, args.steps // 20)
    for step in range(1, args.steps + 1):
        share = step / args.steps
        rate = args.learning_rate * min(step / warmup, 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = rng.integers(0, len(tokens) - args.length, args.batch)
        batch = torch.from_numpy(np.stack([tokens[s : s + args.length] for s in starts]).astype(np.int64))
        loss = model(batch, labels=batch, **extra).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 200 == 0 or step == args.steps:
            log(
                event="eval",
                step=step,
                train_loss=round(loss.item(), 4),
                held_out_loss=round(held_out_loss(model, held_out, args.length), 4),
                seconds=round(time.monotonic() - start, 1),
                cpu_seconds=round(time.process_time(), 1),
            )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer to take; without it one is trained")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--feed-forward", type=int, default=448)
    parser.add_argument("--experts", type=int, default=0, help="0: a dense model")
    parser.add_argument("--active-experts", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2.5e-3)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    log_path = args.out / "training_log.jsonl"
    log_path.unlink(missing_ok=True)

    def log(**record: object) -> None:
        line = json.dumps(record)
        print(line, flush=True)
        with log_path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    texts = documents("train")
    if args.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    else:
        tokenizer = train_tokenizer(texts, args.vocab_size)
    tokens, held_out = stream(tokenizer, texts), stream(tokenizer, documents("eval"))
    model = make_model(args, tokenizer)
    log(
        event="start",
        settings={key: value for key, value in vars(args).items() if key not in ("out", "tokenizer")},
        family=model.config.model_type,
        parameters=sum(p.numel() for p in model.parameters()),
        train_tokens=len(tokens),
        held_out_tokens=len(held_out),
        train_bytes=sum(len(text.encode()) for text in texts),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        machine=platform.machine(),
    )
    train(args, model, tokens, held_out, log)
    model.half().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    log(event="end", cpu_seconds=round(time.process_time(), 1))


if __name__ == "__main__":
    main()
