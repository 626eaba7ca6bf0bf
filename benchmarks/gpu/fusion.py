"""What compiling the bodies of the models would leave of a recorded stream. A model of a compiler, not one.

Runs of elementwise ops and reductions between two products become one kernel for each connected part: what is made and
used up inside is never written, what comes from outside is read once. A reduction across rows (the gradient of a norm's
gain) is a kernel of its own. A compiler also makes cheap values again in the backward instead of keeping them; that is
not modelled, so bytes are rather too many than too few.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from recorder import SCATTERS, SELECTS, Kernel

_REDUCTIONS = {"sum", "mean", "amax", "amin", "linalg_vector_norm"}
_ALONE = {"attention", "attention backward", "host read", "embedding_dense_backward", *SELECTS, *SCATTERS}


def compiled(kernels: Sequence[Kernel], phases: Collection[str]) -> list[Kernel]:
    """The stream with the runs of these phases fused."""
    last_read: dict[int, int] = {}
    for position, kernel in enumerate(kernels):
        for block in kernel.reads:
            last_read[block] = position
    out: list[Kernel] = []
    for start, stop in _runs(kernels, phases):
        if stop - start == 1:
            out.append(kernels[start])
        else:
            out += _fused(kernels[start:stop], {block for block, at in last_read.items() if at >= stop})
    return out


def _runs(kernels: Sequence[Kernel], phases: Collection[str]) -> Iterator[tuple[int, int]]:
    """Borders of runs that can be fused; every other kernel is a run of one."""
    start = 0
    while start < len(kernels):
        stop = start + 1
        if _is_fusable(kernels[start], phases):
            while stop < len(kernels) and _is_fusable(kernels[stop], phases) and _alike(kernels[start], kernels[stop]):
                stop += 1
        yield start, stop
        start = stop


def _alike(first: Kernel, other: Kernel) -> bool:
    return first.phase == other.phase


def _is_fusable(kernel: Kernel, phases: Collection[str]) -> bool:
    is_multi = kernel.name.startswith(("_foreach", "_fused", "_amp"))
    return kernel.phase in phases and not kernel.is_product and kernel.name not in _ALONE and not is_multi


def _goes_across_rows(kernel: Kernel) -> bool:
    return kernel.name in _REDUCTIONS and len(kernel.shape) > 0 and kernel.shape[-1] != 1


def _fused(run: Sequence[Kernel], needed: Collection[int]) -> list[Kernel]:
    across = [kernel for kernel in run if _goes_across_rows(kernel)]
    parts = _connected([kernel for kernel in run if not _goes_across_rows(kernel)])
    read_across = {block for kernel in across for block in kernel.reads}
    found = [_merged(part, {*needed, *read_across}) for part in parts]
    return [*found, *across]


def _connected(run: Sequence[Kernel]) -> list[list[Kernel]]:
    """Kernels that hand memory to each other, in the order of their first."""
    parts: list[tuple[set[int], list[Kernel]]] = []
    for kernel in run:
        blocks = {*kernel.reads, *kernel.writes}
        joined = [part for part in parts if part[0] & blocks]
        members = [member for _, part in joined for member in part] + [kernel]
        kept = [part for part in parts if not part[0] & blocks]
        # Inputs that two kernels only read do not tie them together: then each reads for itself.
        made = {block for member in members for block in member.writes}
        parts = [*kept, (made, members)]
    return [part for _, part in parts]


def _merged(part: Sequence[Kernel], needed: Collection[int]) -> Kernel:
    sizes: dict[int, int] = {}
    for kernel in part:
        for block, size in kernel.sizes.items():
            sizes[block] = max(sizes.get(block, 0), size)
    made = {block for kernel in part for block in kernel.writes}
    first_use: dict[int, str] = {}
    for kernel in part:
        for block in kernel.reads:
            first_use.setdefault(block, "read")
        for block in kernel.writes:
            first_use.setdefault(block, "written")
    outside = [block for block, use in first_use.items() if use == "read"]
    kept = [block for block in made if block in needed]
    return replace(
        part[-1],
        name="fused",
        bytes_read=sum(sizes[block] for block in outside),
        bytes_written=sum(sizes[block] for block in kept),
        launches=1,
        reads=tuple(outside),
        writes=tuple(kept),
        sizes=sizes,
    )
