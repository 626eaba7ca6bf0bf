"""Train the teacher that ships in the package, from the text of the Python that runs this script.

    python scripts/make_builtin_teacher.py --out src/stillroom/builtin/models/teacher

A Llama of under three million parameters, trained with plain cross-entropy on the training modules of the
standard library, never on the held-out ones. Writes a Hugging Face folder in FP16 with its tokenizer, and
`training_log.jsonl` beside it: the settings, the machine, and the held-out loss along the way.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stillroom.builtin import corpus

END = "<|endoftext|>"
PAD = "<|pad|>"


def documents(split: str) -> list[str]:
    every = [*corpus.topics(), *corpus.modules()]
    return [document.text for document in every if corpus.split_of(document.group) == split]


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


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokens: np.ndarray, length: int) -> float:
    model.eval()
    blocks = torch.from_numpy(tokens[: len(tokens) // length * length].astype(np.int64)).view(-1, length)
    total = 0.0
    for part in blocks.split(32):
        total += model(part, labels=part).loss.item() * len(part)
    model.train()
    return total / len(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--feed-forward", type=int, default=448)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2.5e-3)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    log_path = args.out / "training_log.jsonl"
    log_path.unlink(missing_ok=True)

    def log(**record: object) -> None:
        line = json.dumps(record)
        print(line, flush=True)
        with log_path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    texts = documents("train")
    tokenizer = train_tokenizer(texts, args.vocab_size)
    train, held_out = stream(tokenizer, texts), stream(tokenizer, documents("eval"))
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.width,
        intermediate_size=args.feed_forward,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 32,
        num_key_value_heads=args.width // 32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=args.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    log(
        event="start",
        settings=settings,
        parameters=sum(p.numel() for p in model.parameters()),
        train_tokens=len(train),
        held_out_tokens=len(held_out),
        train_bytes=sum(len(text.encode()) for text in texts),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        machine=platform.machine(),
    )

    start = time.monotonic()
    warmup = max(1, args.steps // 20)
    for step in range(1, args.steps + 1):
        share = step / args.steps
        rate = args.learning_rate * min(step / warmup, 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = rng.integers(0, len(train) - args.length, args.batch)
        batch = torch.from_numpy(np.stack([train[s : s + args.length] for s in starts]).astype(np.int64))
        loss = model(batch, labels=batch).loss
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
            )
    model.half().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    log(event="end", seconds=round(time.monotonic() - start, 1))


if __name__ == "__main__":
    main()
