"""How many positions a chunk has, and what a pass over chunks holds in memory.

Legend: C positions of a chunk, V real vocabulary.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

_STRIDE = 64  # an odd row length makes the logits product a third slower: rows start at multiples of this
_SCRATCH_BYTES = 128 * 2**20  # on a CPU, for student and teacher together
_LEAST_CHUNK, _MOST_CHUNK = 64, 1024  # products of fewer rows waste half the machine; of more gain nothing
_MOST_ON_DEVICE = 2048  # each chunk adds to the whole weight gradient once more, which is a matter of memory traffic
_FREE_SHARE = 8  # a pass may take one part in so many of a device's free memory: activations come and go beside it
# Blocks [C, V] of four bytes: logits of student and teacher, temporaries of the plain kernel, a half operand.
_LOGITS, TEMPORARIES, _OPERAND = 2, 3, 0.5


def padded(num_tokens: int) -> int:
    """The length of a row of scratch."""
    return math.ceil(num_tokens / _STRIDE) * _STRIDE


def chunk_size(asked: int, num_rows: int, num_tokens: int, width: int, free_bytes: int | None = None) -> int:
    """Positions in a chunk: as asked, or chosen (0).

    On a CPU (no free bytes given) the scratch may take 128 MB, or as much as the weight's FP32 gradient where that is
    more. On a device everything a pass holds (`pass_bytes`) may take an eighth of the free bytes. Chosen chunks are of
    equal size, so that no small one is left over.
    """
    if asked:
        return max(1, min(asked, num_rows))
    if free_bytes is None:
        budget, each, limit = max(_SCRATCH_BYTES, 4 * num_tokens * width), 2 * 4 * num_tokens, _MOST_CHUNK
    else:
        budget, each, limit = free_bytes // _FREE_SHARE, pass_bytes(1, num_tokens), _MOST_ON_DEVICE
    most = min(max(budget // each // _LEAST_CHUNK * _LEAST_CHUNK, _LEAST_CHUNK), limit)
    num_chunks = max(1, math.ceil(num_rows / most))
    return max(1, math.ceil(num_rows / num_chunks))


def pass_bytes(chunk_tokens: int, num_tokens: int) -> int:
    """What a pass on a device holds at most beside inputs, operands cast once, and gradients."""
    return int((_LOGITS + TEMPORARIES + _OPERAND) * 4 * chunk_tokens * padded(num_tokens))


def choose_chunk(asked: int, hidden: Tensor, num_tokens: int) -> int:
    """The chunk of a pass over hidden states [N, D]. A process chooses once for each device and vocabulary.

    Free memory changes from pass to pass. Sums in chunks of another size differ in their last digits, so what was free
    at the first pass decides for all of them, until `forget_free_memory`.
    """
    free_bytes = None
    if not asked and hidden.device.type == "cuda":
        free_bytes = _free_bytes(hidden.device, num_tokens)
    return chunk_size(asked, int(hidden.shape[0]), num_tokens, int(hidden.shape[-1]), free_bytes)


@functools.cache
def _free_bytes(device: torch.device, num_tokens: int) -> int:
    return int(torch.cuda.mem_get_info(device)[0])


def forget_free_memory() -> None:
    """Choose again at the next pass: for whoever ran out of memory."""
    _free_bytes.cache_clear()
