"""One step of one process, event by event: what the card computes, what the links carry, and what waits for what.

A card works through its parts in order. A gathered layer is waited for; the gather of the next layer begins when the
work on this one begins; gradients are sent as soon as they are there. Links inside of a node and between nodes carry
one collective at a time each. What the links take while nothing computes is exposed.

A step is one of its micro-batches as many times as there are, the last of which also sends what waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from layer_time import Compute, Parts
from platforms import Platform
from wire import Collective, Mesh, Weights, window

from stillroom.training.trace import Sizes

HALF = 2  # bytes of a teacher's weight
INSIDE, BETWEEN, LATENCY = "network inside the node", "network between nodes", "latency of the network"
TEACHER, PRODUCTS, MEMORY, HOST = "teacher", "products", "memory bandwidth", "host"
# What may be the bottleneck, and what is then taken to cost no time.
RESOURCES: dict[str, frozenset[str]] = {
    PRODUCTS: frozenset({"products"}),
    MEMORY: frozenset({"memory"}),
    TEACHER: frozenset({"teacher"}),
    INSIDE: frozenset({"inside"}),
    BETWEEN: frozenset({"between"}),
    LATENCY: frozenset({"latency"}),
    HOST: frozenset({"host"}),
}


@dataclass(frozen=True)
class Work:
    """A part of a micro-batch: what has to be there before it, how long it takes, what it sends afterwards."""

    seconds: float
    gather: Collective | None = None
    sends: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Played:
    seconds: float  # until the last collective has ended
    computed: float
    carried: float  # seconds of all collectives

    def __add__(self, other: Played) -> Played:
        return Played(self.seconds + other.seconds, self.computed + other.computed, self.carried + other.carried)

    def times(self, number: int) -> Played:
        return Played(self.seconds * number, self.computed * number, self.carried * number)

    @property
    def exposed(self) -> float:
        return self.seconds - self.computed

    @property
    def overlap(self) -> float:
        """Share of the collectives' time in which the card computes."""
        return 1.0 - self.exposed / self.carried if self.carried else 1.0


def play(works: Sequence[Work], platform: Platform, free: frozenset[str] = frozenset()) -> Played:
    links = {"inside": 0.0, "between": 0.0}
    carried = 0.0

    def carry(call: Collective | None, ready: float) -> float:
        """When the collective has ended that may begin at `ready`."""
        nonlocal carried
        if call is None:
            return ready
        link = "inside" if call.nodes == 1 else "between"
        took = 0.0 if link in free else platform.seconds(call, latency="latency" not in free)
        carried += took
        links[link] = max(links[link], ready) + took
        return links[link]

    clock, there = 0.0, carry(works[0].gather, 0.0) if works else 0.0
    for place, work in enumerate(works):
        begin = max(clock, there)
        if place + 1 < len(works):
            there = carry(works[place + 1].gather, begin)
        clock = begin + work.seconds
        done = clock
        for call in work.sends:
            done = carry(call, done)
    return Played(max(clock, *links.values()), sum(work.seconds for work in works), carried)


@dataclass(frozen=True)
class Job:
    """A step of all processes."""

    student: Sizes
    teacher: Sizes | None  # that is at work on these processes
    mesh: Mesh
    strategy: str  # single, ddp, fsdp, hsdp
    shards_teacher: bool
    tokens: int  # of a step, of all processes
    rows: int  # of a micro-batch
    length: int

    @property
    def num_micro(self) -> int:
        """Micro-batches of the process that has most."""
        each = -(-self.tokens // (self.rows * self.length))
        return -(-each // self.mesh.size)


def weights_of(sizes: Sizes) -> Weights:
    layers = tuple(held // sizes.itemsize for held in sizes.layer_bytes)
    return Weights(sizes.parameters - sum(layers), layers)


def _teacher_gather(job: Job, layer: int) -> Collective | None:
    """A sharded teacher lies in all processes, with hsdp in those of a node."""
    if job.teacher is None or not job.shards_teacher or job.mesh.size == 1:
        return None
    size = HALF * job.teacher.layer_bytes[layer] / job.teacher.itemsize
    is_near = job.strategy == "hsdp"
    across = job.mesh.inside if is_near else job.mesh.size
    return Collective("all_gather", size, across, 1 if is_near else job.mesh.num_nodes, "forward", layer)


def micro_batch(job: Job, parts: Parts, calls: Iterable[Collective]) -> list[Work]:
    """Teacher, forward, head, backward; `calls` are the student's collectives of this micro-batch."""
    gathers: dict[tuple[str, int], Collective] = {}
    sends: dict[int, list[Collective]] = {}
    for call in calls:
        if call.kind == "all_gather":
            gathers[call.when, call.layer] = call
        else:
            sends.setdefault(call.layer, []).append(call)
    layers = range(job.student.layers)
    works = []
    if job.teacher is not None:
        works += [Work(parts.teacher_layer, _teacher_gather(job, layer)) for layer in range(job.teacher.layers)]
    works += [Work(parts.forward_layer, gathers.get(("forward", layer))) for layer in layers]
    works.append(Work(parts.head + parts.teacher_head))
    works += [
        Work(parts.backward_layer, gathers.get(("backward", layer)), tuple(sends.get(layer, ())))
        for layer in reversed(layers)
    ]
    return [*works, Work(0.0, None, tuple(sends.get(-1, ())))]


def step(job: Job, compute: Compute, platform: Platform, free: frozenset[str] = frozenset()) -> Played:
    """The step of a process."""
    tokens = job.rows * job.length
    parts = compute.parts(job.student, job.teacher, tokens, free)
    calls = list(window(job.strategy, weights_of(job.student), job.mesh, 1))
    whole = [call for call in calls if call.when == "window"]
    inner = [call for call in calls if call.when != "window"]
    # ddp sends in the last micro-batch alone, and so does hsdp between the nodes.
    early = [call for call in inner if call.kind != "all_reduce"]
    plain, last = (play(micro_batch(job, parts, one), platform, free) for one in (early, inner))
    ends = play([Work(0.0, call) for call in whole] or [Work(0.0)], platform, free)
    share = job.mesh.size if job.strategy == "fsdp" else job.mesh.inside if job.strategy == "hsdp" else 1
    update = Played(parts.optimizer / share, parts.optimizer / share, 0.0)
    played = plain.times(job.num_micro - 1) + last
    return played + ends + update


def bottleneck(job: Job, compute: Compute, platform: Platform) -> tuple[str, dict[str, float]]:
    """What would shorten the step most if it took no time, and by how much of the step each would."""
    whole = step(job, compute, platform).seconds
    saved = {name: 1.0 - step(job, compute, platform, free).seconds / whole for name, free in RESOURCES.items()}
    return max(saved, key=lambda name: saved[name]), saved


def sent(job: Job) -> tuple[float, float]:
    """Bytes that a process sends in a step: inside of its node, and in collectives that leave it."""
    calls = list(window(job.strategy, weights_of(job.student), job.mesh, job.num_micro))
    if job.teacher is not None:
        gathers = [_teacher_gather(job, layer) for layer in range(job.teacher.layers)]
        calls += [call for call in gathers if call is not None] * job.num_micro
    return sum(c.sent for c in calls if c.nodes == 1), sum(c.sent for c in calls if c.nodes > 1)
