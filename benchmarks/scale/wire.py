"""What the strategies send: bytes and collectives of a step, by the algorithms that torch and NCCL use.

Legend: n processes in all, g of them in a node, m micro-batches of a process in a step. Bytes are those that one
process sends. A ring all-gather sends (n-1)/n of what is gathered from each process, a reduce-scatter the same, an
all-reduce both (Patarasuk and Yuan 2009). No algorithm sends less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

WEIGHT = 4  # bytes: gradients are sent and weights gathered in FP32
BUCKET, FIRST_BUCKET = 25 << 20, 1 << 20  # of torch's DistributedDataParallel

SHARES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}


@dataclass(frozen=True)
class Collective:
    kind: str  # a key of SHARES
    size: float  # bytes of the whole tensor
    across: int  # processes that take part
    nodes: int = 1  # that they are in, as many of them in each
    when: str = ""  # forward, backward or window
    layer: int = -1  # -1: the root (embeddings, last norm, head)

    @property
    def sent(self) -> float:
        """Bytes that one process sends."""
        return SHARES[self.kind] * (self.across - 1) / self.across * self.size


@dataclass(frozen=True)
class Mesh:
    """n processes in nodes of at most g."""

    size: int
    node: int = 8

    @property
    def inside(self) -> int:
        return min(self.size, self.node)

    @property
    def num_nodes(self) -> int:
        return -(-self.size // self.node)


@dataclass(frozen=True)
class Weights:
    """Numbers of a network: the root, and each layer."""

    root: int
    layers: tuple[int, ...]

    @property
    def whole(self) -> int:
        return self.root + sum(self.layers)


def buckets(weights: Weights) -> list[tuple[float, int]]:
    """(bytes, last layer in it) of DDP's buckets, in the order in which a backward fills them.

    Gradients come from the head down. The first bucket is small, so that sending begins early. A parameter is not cut,
    and here a layer is not either.
    """
    found: list[tuple[float, int]] = []
    held, bound = 0.0, float(FIRST_BUCKET)
    for layer, count in [*reversed(list(enumerate(weights.layers))), (-1, weights.root)]:
        held += WEIGHT * count
        if held >= bound:
            found.append((held, layer))
            held, bound = 0.0, float(BUCKET)
    return [*found, (held, -1)] if held else found


def window(strategy: str, weights: Weights, mesh: Mesh, num_micro: int = 1) -> Iterator[Collective]:
    """The collectives of a step's student, in their order within each part of the step.

    ddp: one all-reduce of each bucket, in the last backward. fsdp: a layer is gathered for each forward and each
    backward and its gradient reduce-scattered after each backward; the root is gathered and reduced once a step.
    hsdp: the same inside of a node, and one all-reduce of each process's parts between the nodes in the last backward.
    """
    size = mesh.size
    if size == 1 or strategy == "single":
        return
    if strategy == "ddp":
        for held, layer in buckets(weights):
            yield Collective("all_reduce", held, size, mesh.num_nodes, "backward", layer)
        return
    across = mesh.inside if strategy == "hsdp" else size
    nodes = mesh.num_nodes if strategy == "fsdp" else 1
    root = WEIGHT * weights.root
    yield Collective("all_gather", root, across, nodes, "window")
    for _ in range(num_micro):
        for layer, count in enumerate(weights.layers):
            yield Collective("all_gather", WEIGHT * count, across, nodes, "forward", layer)
        for layer, count in reversed(list(enumerate(weights.layers))):
            yield Collective("all_gather", WEIGHT * count, across, nodes, "backward", layer)
            yield Collective("reduce_scatter", WEIGHT * count, across, nodes, "backward", layer)
    yield Collective("reduce_scatter", root, across, nodes, "window")
    if strategy == "hsdp" and mesh.num_nodes > 1:
        for layer, count in [*reversed(list(enumerate(weights.layers))), (-1, weights.root)]:
            yield Collective("all_reduce", WEIGHT * count / across, mesh.num_nodes, mesh.num_nodes, "backward", layer)


def sent(strategy: str, weights: Weights, mesh: Mesh, num_micro: int = 1) -> float:
    """Bytes that one process sends in a step for the student."""
    return sum(one.sent for one in window(strategy, weights, mesh, num_micro))
