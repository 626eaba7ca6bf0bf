"""Tokenizers that begin their texts in different ways, as those of real models do."""

from __future__ import annotations

import json
from pathlib import Path

import tiny
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, LlamaTokenizer, PreTrainedTokenizerFast

BOS, EOS = "<s>", "</s>"
MARKS = ["<unk>", BOS, EOS, "<pad>", "[gMASK]", "<sop>"]
TURNS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

# What each kind puts before a text when it is asked for special tokens, and what it puts after.
PUTS = {
    "bos": (f"{BOS} $A", [BOS]),  # as Llama 3
    "bos and eos": (f"{BOS} $A {EOS}", [BOS]),  # as tokenizers saved with add_eos_token
    "two": ("[gMASK] <sop> $A", ["[gMASK]", "<sop>"]),  # as GLM
    "none": ("$A", []),  # as GPT-2, Qwen and SmolLM
}


def byte_tokenizer(
    kind: str = "bos", *, has_bos: bool = True, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose post-processor does what `kind` says."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        tiny.sentences(100, 0),
        trainers.BpeTrainer(
            vocab_size=tiny.VOCAB - len(TURNS),
            special_tokens=MARKS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    raw.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in TURNS])
    numbers = [(mark, raw.token_to_id(mark)) for mark in MARKS]
    raw.post_processor = processors.TemplateProcessing(single=PUTS[kind][0], special_tokens=numbers)
    named = {"bos_token": BOS} if has_bos else {}
    found = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=EOS, pad_token="<pad>", unk_token="<unk>", **named)
    found.chat_template = chat_template
    return found


def llama_tokenizer() -> LlamaTokenizer:
    """The class of Llama 2 itself: pieces that carry their leading space, BOS by its own default."""
    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    letters = sorted(set("".join(tiny.sentences(100, 0))) - {" "})
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", BOS, EOS], initial_alphabet=letters, show_progress=False
    )
    raw.train_from_iterator(tiny.sentences(100, 0), trainer)
    model = json.loads(raw.to_str())["model"]
    return LlamaTokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]], add_bos_token=True)


def save(path: Path, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, width: int = 32) -> Path:
    """A small Llama with this tokenizer."""
    torch.manual_seed(seed)
    config = tiny.config("llama", width=width, vocab_size=tiny.VOCAB)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 3
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
