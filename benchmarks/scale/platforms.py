"""Cards in nodes, with the published rates of what connects them, and the time of a collective by them. A model.

Cards are those of benchmarks/gpu. Rates of links are for one direction. `inside` is what one card has to its
neighbours, `between` what a whole node has to the others. The time of a collective has the form that NCCL itself
chooses algorithms by: a latency for the call and for each hop, and bytes over the rate of the slowest link of a ring;
an all-reduce takes a tree where that is faster.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from wire import Collective

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
from cards import CARDS, H100, Card

# What products, memory and links reach of their peaks: assumptions, the first two as in benchmarks/gpu.
PRODUCT_SHARE, MEMORY_SHARE, LINK_SHARE = 0.5, 0.8, 0.8
MICRO = 1e-6
# NCCL, src/graph/tuning.cc (NVIDIA/nccl 01afd20): baseLat and hwLat of the Simple protocol, in microseconds.
RING_BASE, TREE_BASE = 8.4 * MICRO, 0.0
RING_HOP = {"nvlink": 3.4 * MICRO, "pci": 5.7 * MICRO, "net": 9.6 * MICRO}
TREE_HOP = {"nvlink": 28 * MICRO, "pci": 28 * MICRO, "net": 50 * MICRO}
TREE_SHARE = 0.9  # of a ring's rate
LINKS_FROM = "NCCL src/graph/tuning.cc (github.com/NVIDIA/nccl at 01afd20): latencies and the form of the cost model"


@dataclass(frozen=True)
class Platform:
    card: Card
    node: int  # cards in one
    inside: float  # bytes a second and card, one direction, inside of a node
    between: float  # bytes a second and node, one direction
    kind: str  # of the links inside: a key of RING_HOP
    source: str

    @property
    def name(self) -> str:
        return self.card.name

    def rate(self, call: Collective) -> float:
        """Bytes a second of the slowest link. Groups that have one process in a node share its network."""
        if call.nodes == 1:
            return self.inside * LINK_SHARE
        members = call.across / call.nodes
        network = self.between * LINK_SHARE * min(1.0, members / self.node)
        return network if members == 1 else min(network, self.inside * LINK_SHARE)

    def latency(self, call: Collective) -> float:
        """Of a ring."""
        turns = 2 if call.kind == "all_reduce" else 1
        beyond = call.nodes - 1
        within = call.across - 1 - beyond
        return RING_BASE + turns * (within * RING_HOP[self.kind] + beyond * RING_HOP["net"])

    def seconds(self, call: Collective, *, latency: bool = True) -> float:
        if call.across == 1:
            return 0.0
        snapshots = call.sent / self.rate(call) + latency * self.latency(call)
        if call.kind != "all_reduce":
            return snapshots
        depth = (call.across // call.nodes - 1) * TREE_HOP[self.kind] + math.log2(call.nodes) * TREE_HOP["net"]
        tree = 2 * call.size / (TREE_SHARE * self.rate(call)) + latency * (TREE_BASE + 2 * depth)
        return min(snapshots, tree)


def reached(card: Card) -> Card:
    return replace(card, product_share=PRODUCT_SHARE, memory_share=MEMORY_SHARE)


_OF = {card.name: reached(card) for card in (*CARDS, H100)}
_PCIE_3 = 8e9 * 16 * 128 / 130 / 8

PLATFORMS = {
    one.name: one
    for one in (
        Platform(
            _OF["T4"], 8, _PCIE_3 / 2, 100e9 / 8, "pci",
            "PCIe 3.0 x16 (PCI-SIG: 8 GT/s a lane, 128b/130b), half of it because a T4 has no NVLink and traffic goes "
            "through main memory twice; nodes of 8 T4 with 100 Gb/s (AWS g4dn.metal). Two of them are Kaggle's 2x T4",
        ),
        Platform(
            _OF["V100"], 8, 150e9, 4 * 100e9 / 8, "nvlink",
            "V100 SXM2: NVLink 300 GB/s both ways (NVIDIA data sheet); DGX-1: 8 cards, four 100 Gb/s InfiniBand ports",
        ),
        Platform(
            _OF["A100"], 8, 300e9, 8 * 200e9 / 8, "nvlink",
            "A100 SXM 40 GB: NVLink 600 GB/s both ways (NVIDIA data sheet); DGX A100: 8 cards, eight 200 Gb/s ports",
        ),
        Platform(
            _OF["H100"], 8, 450e9, 8 * 400e9 / 8, "nvlink",
            "H100 SXM 80 GB: NVLink 900 GB/s both ways (NVIDIA data sheet); DGX H100: 8 cards, eight 400 Gb/s ports",
        ),
    )
}  # fmt: skip
