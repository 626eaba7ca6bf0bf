"""What compiling the bodies of the models would leave of a recorded stream. A model of a compiler, not one.

Elementwise ops and reductions along a row that hand values to each other become one kernel, which runs when a product
or an attention needs what it makes: what is made and used up inside is never written, what comes from outside is read
once. A row too long for registers is read again after each reduction along it that something of the whole row waits
for. A reduction across rows (the gradient of a norm's gain) is a kernel of its own, which makes its inputs again. A
compiler also makes cheap values again in the backward instead of keeping them; that is not modelled, so bytes are
rather too many than too few.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from recorder import SCATTERS, SELECTS, Kernel

_WIDE = 8_192  # a longer row does not stay in registers: after each reduction along it, it is read again
_ALONE = {
    "attention",
    "attention backward",
    "attention_backward",
    "host read",
    "embedding_dense_backward",
    *SELECTS,
    *SCATTERS,
} - {"gather"}


@dataclass
class _Group:
    """Kernels that will be one, by position in the stream, and the memory they write."""

    members: list[int]
    made: set[int]


def compiled(kernels: Sequence[Kernel], phases: Collection[str]) -> list[Kernel]:
    """The stream with the kernels of these phases fused where values pass between them."""
    readers = _readers(kernels)
    out: list[Kernel] = []
    groups: list[_Group] = []
    for position, kernel in enumerate(kernels):
        if _goes_across_rows(kernel, phases):
            out.append(kernel)
        elif _is_fusable(kernel, phases):
            inputs = {*kernel.reads, *kernel.writes}
            joined = [group for group in groups if group.made & inputs]
            groups = [group for group in groups if not group.made & inputs]
            members = [member for group in joined for member in group.members]
            made = {block for group in joined for block in group.made}
            groups.append(_Group([*members, position], made | set(kernel.writes)))
        else:
            due = [group for group in groups if kernel.waits or group.made & {*kernel.reads, *kernel.writes}]
            groups = [group for group in groups if all(group is not other for other in due)]
            out += [_merged(group, kernels, readers) for group in due]
            out.append(kernel)
    return out + [_merged(group, kernels, readers) for group in groups]


def _readers(kernels: Sequence[Kernel]) -> dict[int, set[int]]:
    """Which kernels read each block; those across rows make what they read themselves."""
    found: dict[int, set[int]] = {}
    for position, kernel in enumerate(kernels):
        for block in kernel.reads:
            found.setdefault(block, set())
            if not _reduces_across_rows(kernel):
                found[block].add(position)
    return found


def _is_fusable(kernel: Kernel, phases: Collection[str]) -> bool:
    is_multi = kernel.name.startswith(("_foreach", "_fused", "_amp"))
    return kernel.phase in phases and not kernel.is_product and kernel.name not in _ALONE and not is_multi


def _reduces_across_rows(kernel: Kernel) -> bool:
    return kernel.reduces == "across"


def _num_passes(part: Sequence[Kernel]) -> int:
    """How often a kernel goes over its rows: once more after each reduction that something of a whole row waits for."""
    if max(kernel.row_length for kernel in part) < _WIDE:
        return 1
    level: dict[int, int] = {}
    passes = 1
    for kernel in part:
        before = max((level.get(block, 0) for block in kernel.reads), default=0)
        if kernel.row_length >= _WIDE:
            passes = max(passes, before + 1)
        for block in kernel.writes:
            level[block] = before + (1 if kernel.reduces else 0)
    return passes


def _goes_across_rows(kernel: Kernel, phases: Collection[str]) -> bool:
    return _is_fusable(kernel, phases) and _reduces_across_rows(kernel)


def _merged(group: _Group, kernels: Sequence[Kernel], readers: dict[int, set[int]]) -> Kernel:
    part = [kernels[position] for position in group.members]
    inside = set(group.members)
    sizes: dict[int, int] = {}
    first_use: dict[int, str] = {}
    for kernel in part:
        for block, size in kernel.sizes.items():
            sizes[block] = max(sizes.get(block, 0), size)
        for block in kernel.reads:
            first_use.setdefault(block, "read")
        for block in kernel.writes:
            first_use.setdefault(block, "written")
    outside = [block for block, use in first_use.items() if use == "read"]
    # What only this kernel reads is never written; what nobody reads is a result.
    kept = [block for block in group.made if not readers.get(block) or readers[block] - inside]
    return replace(
        part[-1],
        name="fused",
        bytes_read=_num_passes(part) * sum(sizes[block] for block in outside),
        bytes_written=sum(sizes[block] for block in kept),
        launches=1,
        reads=tuple(outside),
        writes=tuple(kept),
        sizes=sizes,
    )
