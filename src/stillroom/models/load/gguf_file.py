"""A model in one GGUF file, as llama.cpp and its relatives use them: configuration, tokenizer and weights.

Quantised weights are turned into numbers of the asked dtype when they are loaded. What is loaded is then an ordinary
model: it can be trained, cut, saved and quantised again.
"""

from __future__ import annotations

import copy
import importlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    modeling_gguf_pytorch_utils,
)

from stillroom.errors import BrokenAtStart
from stillroom.models.load.empty import empty_network
from stillroom.models.load.gguf_header import GgufHeader, read_header
from stillroom.models.load.gguf_rotation import FOLDER, scaled_rotation

ENDING = ".gguf"


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ENDING and path.is_file()


def gguf_config(path: Path) -> Any:
    """The configuration that the file describes. Read once: the lists of tokens take seconds."""
    _check(path)
    stamp = path.stat()
    return copy.deepcopy(_config(path, stamp.st_size, stamp.st_mtime_ns))


@lru_cache(maxsize=4)
def _config(path: Path, _size: int, _stamp: int) -> Any:
    try:
        with _alone() as folder:
            config = AutoConfig.from_pretrained(folder, gguf_file=str(path.absolute()))
    except (ValueError, KeyError) as error:
        if "not supported yet" not in str(error):
            raise
        kind = read_header(path).architecture
        raise BrokenAtStart(
            f"{path} is a {kind!r}, which transformers {transformers.__version__} does not read from GGUF",
            advice=[FOLDER],
        ) from error
    scaling = scaled_rotation(read_header(path))
    if scaling:
        config.rope_parameters = {**config.rope_parameters, **scaling}
    return config


def gguf_tokenizer(path: Path) -> Any:
    _check(path)
    num_tokens = read_header(path).num_tokens
    if not num_tokens:
        raise BrokenAtStart(f"{path} holds no tokenizer", advice=["get a file that was converted with its tokenizer"])
    with _alone() as folder:
        return _without_foreign(AutoTokenizer.from_pretrained(folder, gguf_file=str(path.absolute())), num_tokens)


def _without_foreign(tokenizer: Any, num_tokens: int) -> Any:
    """Without the special tokens that transformers adds for its own families: the model has no embeddings for them."""
    if max(tokenizer.get_vocab().values()) < num_tokens:
        return tokenizer
    table = json.loads(tokenizer.backend_tokenizer.to_str())
    table["added_tokens"] = [token for token in table["added_tokens"] if token["id"] < num_tokens]
    known = {token["content"] for token in table["added_tokens"]} | set(table["model"]["vocab"])
    special = {role: token for role, token in tokenizer.special_tokens_map.items() if token in known}
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(table)), **special)
    plain.chat_template = tokenizer.chat_template
    return plain


def gguf_network(path: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any], list[str]]:
    """The network, the loader's report of weights that are missing or left over, and notes.

    The loader marks its model as quantised and refuses to save it, though its weights are plain numbers. So move them
    into a model of the same configuration that was never marked.
    """
    config = gguf_config(path)
    with _alone() as folder, _without_bar():
        marked, report = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=str(path.absolute()), dtype=dtype, output_loading_info=True
        )
    network = empty_network(config, dtype)
    network.load_state_dict(marked.state_dict(), assign=True)
    network.tie_weights()
    pre = read_header(path).fields.get("tokenizer.ggml.pre", "not named")
    notes = [
        f"{path} was read as {config.model_type} in {str(dtype).removeprefix('torch.')}",
        f"its tokenizer was made from the lists in the file: how text is split before that is called {pre!r} there, "
        "and is what transformers makes of it",
    ]
    return network, report, notes


@contextmanager
def _without_bar() -> Iterator[None]:
    """The reader of GGUF draws a bar that the settings of transformers do not reach."""
    reader: Any = modeling_gguf_pytorch_utils
    bar, reader.tqdm = reader.tqdm, lambda tensors, **_options: tensors
    try:
        yield
    finally:
        reader.tqdm = bar


@contextmanager
def _alone() -> Iterator[str]:
    """An empty folder: a loader would also read what lies beside the file, which may be of another model."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def _check(path: Path) -> None:
    """Refuse a file that is damaged, partial, or would be loaded as something else than it is."""
    header = read_header(path)
    if not header.architecture:
        raise BrokenAtStart(f"{path} does not say which architecture it is", advice=["get the file again"])
    parts = int(header.fields.get("split.count") or 1)
    if parts > 1:
        raise BrokenAtStart(
            f"{path} is one of {parts} parts of a model",
            advice=["put them together with llama.cpp: llama-gguf-split --merge FIRST OUT", FOLDER],
        )
    try:
        library: Any = importlib.import_module("gguf")
    except ImportError as error:
        raise BrokenAtStart(
            f"{path} is a GGUF file and needs gguf", advice=["pip install 'stillroom[gguf]'"]
        ) from error
    _check_whole(header, library)
    scaled_rotation(header)


def _check_whole(header: GgufHeader, library: Any) -> None:
    end, sizes = 0, {int(kind): size for kind, size in library.GGML_QUANT_SIZES.items()}
    for name, tensor in header.tensors.items():
        if tensor.kind not in sizes:
            raise BrokenAtStart(
                f"{header.path} stores {name} in type {tensor.kind}, which this gguf does not know",
                advice=["pip install -U gguf", FOLDER],
            )
        block, num_bytes = sizes[tensor.kind]
        end = max(end, tensor.offset + tensor.num_elements // block * num_bytes)
    if not header.tensors or end > header.num_bytes:
        raise BrokenAtStart(
            f"{header.path} was cut short: it has {header.num_bytes:,} bytes, and its {len(header.tensors):,} tensors "
            f"end at {end:,}",
            advice=["get the file again"],
        )
