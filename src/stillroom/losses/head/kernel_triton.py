"""The row kernel in Triton: one launch a chunk, the gradient written in half over the student's own logits.

`_rows_in_passes` gives a row to one block, which reads it once for its normalisers (and the value of forward KL), once
more for the sums of a divergence that needs a pull-back, and once to write the gradient. `_rows_at_once` cuts a row
among several blocks: each keeps its part in registers, the parts' sums meet in memory, and the row is read once.
`_sparse_rows` and `_sparse_rows_at_once` are the same for teachers that answer with a few tokens, with two passes in
the place of the first.

Blocks that wait for each other do so a bounded number of times: what did not meet is NaN, and never hangs.

Arithmetic is FP32. The gradient is multiplied by a power of two before it is rounded to FP16, and what rounding took
from the sum of each row is added up next to it (`products.py` says why). A row is read up to its padded length and
compared with the vocabulary afterwards: a mask at an odd length would split every access into single words.

Import this where Triton is installed; the kernels run on CUDA devices, and in Triton's interpreter.

Legend: C rows, V vocabulary, K kept ids, S blocks of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stillroom.core.launch import Launch
from stillroom.core.types import SampledSignal, TopKSignal
from stillroom.losses import divergences
from stillroom.losses.divergences import Divergence
from stillroom.losses.head.products import lifts_of
from stillroom.losses.head.rows import (
    GradientRows,
    Logits,
    RowKernel,
    RowPlan,
    RowRecord,
    TeacherRows,
    finish,
    give_rest_to_label,
    keep_top_k,
    power_of_two,
    without_empty_tail,
)

# -- arithmetic of one element -----------------------------------------------------------------------------

_LOG_ZERO = tl.constexpr(-1e30)  # numerics.LOG_ZERO
_FLOOR = tl.constexpr(-50.0)  # numerics.LOG_PROB_FLOOR
_TINY = tl.constexpr(1.1754943508222875e-38)
_LN2 = tl.constexpr(0.6931471805599453)
_GIVEN_UP = tl.constexpr(1 << 30)  # in a count of blocks
# Divergences by number; those with a larger one than FORWARD need the sum of their slopes.
_NONE, _FORWARD, _REVERSE, _JSD, _SKEW_FORWARD, _SKEW_REVERSE, _VARIATION, _ALPHA_BETA, _TODI = (
    tl.constexpr(number) for number in range(9)
)


@triton.jit
def _finish(raw, scale, cap, HAS_CAP: tl.constexpr):
    """Scale and softcap of a head; tanh by one exponential is exact to FP32's resolution of the cap."""
    x = raw * scale
    if HAS_CAP:
        x = cap - 2.0 * cap / (tl.exp(2.0 * (x / cap)) + 1.0)
    return x


@triton.jit
def _possible(x, is_inside):
    """-inf and padding become LOG_ZERO; NaN stays."""
    x = tl.where(is_inside, x, _LOG_ZERO)
    return tl.where(x < _LOG_ZERO, _LOG_ZERO, x)


@triton.jit
def _log_mixture(own, other, share):
    """log(m / own) for m = (1 - share) own + share other, with all digits where m is near own."""
    base = tl.maximum(own, _TINY)
    x = share * ((other - own) / base)
    z = x / (2.0 + x)
    square = z * z
    series = 2.0 * z * (1.0 + square * (1.0 / 3 + square * (0.2 + square * (1.0 / 7 + square * (1.0 / 9)))))
    whole = tl.log2((1.0 - share) + share * (other / base)) * _LN2
    return tl.where(tl.abs(x) < 0.3, series, whole)


@triton.jit
def _power_gap(log_x, log_y, power):
    """(x^c - y^c) / c from logarithms; log x - log y at c = 0. Exactly 0 where x = y."""
    gap = log_x - log_y
    y = tl.abs(gap) * power
    series = 1.0 - y * (0.5 - y * (1.0 / 6 - y * (1.0 / 24 - y * (1.0 / 120 - y * (1.0 / 720)))))
    share = tl.where(y < 0.25, series, (1.0 - tl.exp(-y)) / tl.maximum(y, _TINY))
    return tl.exp(tl.maximum(log_x, log_y) * power) * gap * share


@triton.jit
def _slopes(q, p, log_q, log_p, a, b, DIVERGENCE: tl.constexpr):
    """A token's share of D, and dD/dlog q up to a multiple of q: `divergences.py` has the formulas."""
    if DIVERGENCE == _FORWARD:
        value = p * (log_p - log_q)
        slope = -p
    elif DIVERGENCE == _REVERSE:
        value = q * (log_q - tl.maximum(log_p, _FLOOR))
        slope = value
    elif DIVERGENCE == _JSD:  # a: beta
        slope = -q * _log_mixture(q, p, a) / a
        value = slope - p * _log_mixture(p, q, 1.0 - a) / (1.0 - a)
    elif DIVERGENCE == _SKEW_FORWARD:  # a: alpha
        value = -p * _log_mixture(p, q, 1.0 - a)
        mixture = tl.maximum(a * p + (1.0 - a) * q, _TINY)
        slope = (1.0 - a) * (1.0 - a) * q * ((q - p) / mixture)
    elif DIVERGENCE == _SKEW_REVERSE:
        value = -q * _log_mixture(q, p, 1.0 - a)
        mixture = tl.maximum(a * q + (1.0 - a) * p, _TINY)
        slope = value + a * (1.0 - a) * q * ((p - q) / mixture)
    elif DIVERGENCE == _VARIATION:
        value = 0.5 * tl.abs(q - p)
        slope = tl.where(q > p, 0.5 * q, tl.where(q < p, -0.5 * q, 0.0))
    elif DIVERGENCE == _ALPHA_BETA:  # a: alpha, b: beta
        log_p = tl.maximum(log_p, tl.minimum(log_q, _FLOOR))
        slope = _power_gap(log_q, log_p, a) * tl.exp(log_q * b)
        value = (slope + _power_gap(log_p, log_q, b) * tl.exp(log_p * a)) / (a + b)
    else:  # todi
        share = p / tl.maximum(p + q, _TINY)
        forward = p * share
        reverse = q * (1.0 - share)
        log_ratio = log_q - tl.maximum(log_p, _FLOOR)
        value = forward * (log_p - log_q) + reverse * log_ratio
        slope = (log_ratio + 1.0) * reverse - forward
    return value, slope


# -- sums of a row -----------------------------------------------------------------------------------------
#
# A part of a row is described by, for each side, its maximum and the sum of exponentials relative to it, and by the
# teacher's mean of the difference of both sides' scores. A lane, a block's part and a single element (sums 1, mean 0)
# are such parts.


@triton.jit
def _merge(high, total, unit_total, t_high, t_total, gap, inverse, UNIT: tl.constexpr, DENSE: tl.constexpr):
    """The description of all parts together."""
    most = tl.max(high, 0)
    total = tl.sum(total * tl.exp((high - most) * inverse), 0)
    if UNIT:
        unit_total = total
    else:
        unit_total = tl.sum(unit_total * tl.exp(high - most), 0)
    t_most = most
    if DENSE:
        t_most = tl.max(t_high, 0)
        factor = tl.exp((t_high - t_most) * inverse)
        gap = tl.sum(factor * (gap + t_total * ((t_high - t_most) - (high - most))), 0)
        t_total = tl.sum(t_total * factor, 0)
    else:
        gap = total
        t_total = total
    return most, total, unit_total, t_most, t_total, gap


@triton.jit
def _is_usable(high, total):
    """Whether a row is a distribution: no NaN, no +inf, and not every entry -inf."""
    return (high > _LOG_ZERO) & (high < float("inf")) & (total > 0.0) & (total < float("inf"))


@triton.jit
def _gradient(x, q1, pull, label, kd_weight, ce_weight, power, scale, cap, HAS_CAP: tl.constexpr):
    """The weighted gradient with respect to the bare product, times the power."""
    g = kd_weight * pull + ce_weight * (q1 - label)
    if HAS_CAP:
        ratio = x / cap
        g = tl.where(g == 0.0, g, g * ((1.0 - ratio) * (1.0 + ratio)))
    return g * scale * power


# -- the kernels -------------------------------------------------------------------------------------------


@triton.jit
def _rows_in_passes(
    student, teacher, out, targets, temperatures, kd_weights, ce_weights, powers, kd, ce, is_bad, lost,
    stride, t_stride, out_stride, num_tokens, padded, scale, cap, t_scale, t_cap, a, b,
    DIVERGENCE: tl.constexpr, UNIT: tl.constexpr, GRADIENT: tl.constexpr, HAS_CAP: tl.constexpr, T_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A block for each row."""
    DENSE: tl.constexpr = DIVERGENCE != _NONE
    row = tl.program_id(0).to(tl.int64)
    student += row * stride
    teacher += row * t_stride
    out += row * out_stride
    temperature = tl.load(temperatures + row)
    inverse = 1.0 / temperature
    target = tl.load(targets + row)
    label_raw = tl.load(student + target)
    lanes = tl.arange(0, BLOCK)

    high = tl.full((BLOCK,), _LOG_ZERO, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    unit_total = tl.zeros((BLOCK,), tl.float32)
    t_high = tl.full((BLOCK,), _LOG_ZERO, tl.float32)
    t_total = tl.zeros((BLOCK,), tl.float32)
    gap = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, padded, BLOCK):
        cols = start + lanes
        x = tl.load(student + cols, mask=cols < padded, other=0.0)
        x = _possible(_finish(x, scale, cap, HAS_CAP), cols < num_tokens)
        rise = x - high
        is_up = rise > 0.0
        e = tl.exp(-tl.abs(rise) * inverse)
        total = tl.where(is_up, total * e + 1.0, total + e)
        if not UNIT:
            e = tl.exp(-tl.abs(rise))
            unit_total = tl.where(is_up, unit_total * e + 1.0, unit_total + e)
        rise = tl.where(is_up, rise, 0.0)
        high = tl.where(is_up, x, high)
        if DENSE:
            t = tl.load(teacher + cols, mask=cols < padded, other=0.0)
            t = _possible(_finish(t, t_scale, t_cap, T_CAP), cols < num_tokens)
            t_rise = t - t_high
            is_up = t_rise > 0.0
            e = tl.exp(-tl.abs(t_rise) * inverse)
            old = tl.where(is_up, e, 1.0)
            new = tl.where(is_up, 1.0, e)
            t_high = tl.where(is_up, t, t_high)
            if DIVERGENCE == _FORWARD:
                gap = old * (gap + t_total * (rise - tl.where(is_up, t_rise, 0.0)))
                gap += new * ((t - t_high) - (x - high))
            t_total = old * t_total + new

    high, total, unit_total, t_high, t_total, gap = _merge(
        high, total, unit_total, t_high, t_total, gap, inverse, UNIT, DENSE
    )
    is_student = _is_usable(high, total)
    total = tl.where(is_student, total, float("nan"))
    unit_total = tl.where(is_student, unit_total, float("nan"))
    label_x = _finish(label_raw, scale, cap, HAS_CAP)
    tl.store(ce + row, tl.log(unit_total) - (label_x - high))
    kd_weight = tl.load(kd_weights + row) * temperature
    ce_weight = tl.load(ce_weights + row)
    over = 1.0 / total
    unit_over = 1.0 / unit_total
    log_norm = tl.log(total)
    t_over = over
    t_log_norm = log_norm
    pulled = 0.0
    if DENSE:
        is_teacher = _is_usable(t_high, t_total)
        tl.store(is_bad + row, (is_teacher == 0).to(tl.int8))
        t_total = tl.where(is_teacher, t_total, 1.0)
        t_high = tl.where(is_teacher, t_high, 0.0)
        ce_weight += tl.where(is_teacher, 0.0, tl.load(kd_weights + row))
        kd_weight = tl.where(is_teacher, kd_weight, 0.0)
        t_over = 1.0 / t_total
        t_log_norm = tl.log(t_total)
        value = gap * inverse * t_over + (log_norm - t_log_norm)
        if DIVERGENCE != _FORWARD:
            values = tl.zeros((BLOCK,), tl.float32)
            sums = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, padded, BLOCK):
                cols = start + lanes
                x = tl.load(student + cols, mask=cols < padded, other=0.0)
                t = tl.load(teacher + cols, mask=cols < padded, other=0.0)
                x = _possible(_finish(x, scale, cap, HAS_CAP), cols < num_tokens)
                t = _possible(_finish(t, t_scale, t_cap, T_CAP), cols < num_tokens)
                x = (x - high) * inverse
                t = (t - t_high) * inverse
                one, slope = _slopes(
                    tl.exp(x) * over, tl.exp(t) * t_over, x - log_norm, t - t_log_norm, a, b, DIVERGENCE
                )
                values += tl.where(cols < num_tokens, one, 0.0)
                sums += tl.where(cols < num_tokens, slope, 0.0)
            value = tl.sum(values, 0)
            pulled = tl.sum(sums, 0)
        tl.store(kd + row, tl.where(is_teacher, value * temperature * temperature, 0.0))

    if GRADIENT:
        power = tl.load(powers + row)
        loss = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, padded, BLOCK):
            cols = start + lanes
            raw = tl.load(student + cols, mask=cols < padded, other=0.0)
            x = _possible(_finish(raw, scale, cap, HAS_CAP), cols < num_tokens)
            q1 = tl.exp(x - high) * unit_over
            pull = tl.zeros((BLOCK,), tl.float32)
            if DENSE:
                t = tl.load(teacher + cols, mask=cols < padded, other=0.0)
                t = _possible(_finish(t, t_scale, t_cap, T_CAP), cols < num_tokens)
                score = (x - high) * inverse
                t = (t - t_high) * inverse
                q = tl.exp(score) * over
                p = tl.exp(t) * t_over
                if DIVERGENCE == _FORWARD:
                    pull = q - p
                else:
                    one, slope = _slopes(q, p, score - log_norm, t - t_log_norm, a, b, DIVERGENCE)
                    pull = slope - q * pulled
                pull = tl.where(is_teacher, pull, 0.0)
            label = tl.where(cols == target, 1.0, 0.0)
            v = _gradient(x, q1, pull, label, kd_weight, ce_weight, power, scale, cap, HAS_CAP)
            v = tl.where(cols < num_tokens, v, 0.0)
            half = v.to(out.dtype.element_ty)
            loss += v - half.to(tl.float32)
            tl.debug_barrier()  # a warp may be a round behind, and its logits are where the gradient goes
            tl.store(out + cols, half, mask=cols < padded)
        tl.store(lost + row, tl.sum(loss, 0))


@triton.jit
def _part_of(tickets, num_parts, patience):
    """Row and part of a block, and how often it may look for the others.

    A ticket decides, so that the parts of a row start together: with as many blocks at once on the device as a row has
    parts, the earliest unfinished row has all of its blocks running. Where a block gave up, those that start later do
    not wait.
    """
    ticket = tl.atomic_add(tickets, 1, sem="relaxed")
    patience = tl.where(ticket < _GIVEN_UP, patience, 0)
    ticket = ticket & (_GIVEN_UP - 1)
    return (ticket // num_parts).to(tl.int64), ticket % num_parts, patience


@triton.jit
def _meet(arrived, tickets, num_parts, patience):
    """Wait until every block of the row has published its sums. False, and for all of them: one has given up."""
    tl.debug_barrier()
    count = tl.atomic_add(arrived, 1, sem="acq_rel") + 1
    while count < num_parts:
        patience -= 1
        if patience < 0:
            # Only if nobody came since it was read: a row has met for all of its blocks or for none.
            tl.atomic_cas(arrived, count, _GIVEN_UP, sem="relaxed")
            tl.atomic_or(tickets, _GIVEN_UP, sem="relaxed")
        count = tl.atomic_add(arrived, 0, sem="acquire")
    tl.debug_barrier()
    return count < _GIVEN_UP


@triton.jit
def _rows_at_once(
    student, teacher, out, targets, temperatures, kd_weights, ce_weights, powers, kd, ce, is_bad, lost,
    notes, arrived, stride, t_stride, out_stride, num_tokens, padded, num_rows, num_parts, patience,
    scale, cap, t_scale, t_cap, a, b,
    DIVERGENCE: tl.constexpr, UNIT: tl.constexpr, GRADIENT: tl.constexpr, HAS_CAP: tl.constexpr, T_CAP: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """`num_parts` blocks for each row. `arrived` [1 + 2 C] is 0, `notes` [C, 8, S] is scratch, `lost` is [C, S]."""
    DENSE: tl.constexpr = DIVERGENCE != _NONE
    row, part, patience = _part_of(arrived, num_parts, patience)
    student += row * stride
    teacher += row * t_stride
    out += row * out_stride
    notes += row * num_parts * 8
    temperature = tl.load(temperatures + row)
    inverse = 1.0 / temperature
    target = tl.load(targets + row)
    label_x = _finish(tl.load(student + target), scale, cap, HAS_CAP)
    cols = part * BLOCK + tl.arange(0, BLOCK)
    ones = tl.full((BLOCK,), 1.0, tl.float32)
    zeros = tl.zeros((BLOCK,), tl.float32)
    x = tl.load(student + cols, mask=cols < padded, other=0.0)
    x = _possible(_finish(x, scale, cap, HAS_CAP), cols < num_tokens)
    t = x
    if DENSE:
        t = tl.load(teacher + cols, mask=cols < padded, other=0.0)
        t = _possible(_finish(t, t_scale, t_cap, T_CAP), cols < num_tokens)
    high, total, unit_total, t_high, t_total, gap = _merge(x, ones, ones, t, ones, zeros, inverse, UNIT, DENSE)
    mine = notes + part
    tl.store(mine, high)
    tl.store(mine + num_parts, total)
    if not UNIT:
        tl.store(mine + 2 * num_parts, unit_total)
    if DENSE:
        tl.store(mine + 3 * num_parts, t_high)
        tl.store(mine + 4 * num_parts, t_total)
        if DIVERGENCE == _FORWARD:
            tl.store(mine + 5 * num_parts, gap)
    is_met = _meet(arrived + 1 + row, arrived, num_parts, patience)
    parts = tl.arange(0, PARTS)
    is_part = parts < num_parts
    theirs = notes + parts
    high = tl.load(theirs, mask=is_part, other=_LOG_ZERO, volatile=True)
    total = tl.load(theirs + num_parts, mask=is_part, other=0.0, volatile=True)
    unit_total = total
    if not UNIT:
        unit_total = tl.load(theirs + 2 * num_parts, mask=is_part, other=0.0, volatile=True)
    t_high = high
    t_total = total
    gap = total
    if DENSE:
        t_high = tl.load(theirs + 3 * num_parts, mask=is_part, other=_LOG_ZERO, volatile=True)
        t_total = tl.load(theirs + 4 * num_parts, mask=is_part, other=0.0, volatile=True)
        if DIVERGENCE == _FORWARD:
            gap = tl.load(theirs + 5 * num_parts, mask=is_part, other=0.0, volatile=True)
    high, total, unit_total, t_high, t_total, gap = _merge(
        high, total, unit_total, t_high, t_total, gap, inverse, UNIT, DENSE
    )

    is_student = _is_usable(high, total) & is_met
    total = tl.where(is_student, total, float("nan"))
    unit_total = tl.where(is_student, unit_total, float("nan"))
    is_first = part == 0
    tl.store(ce + row, tl.log(unit_total) - (label_x - high), mask=is_first)
    kd_weight = tl.load(kd_weights + row) * temperature
    ce_weight = tl.load(ce_weights + row)
    log_norm = tl.log(total)
    score = (x - high) * inverse
    q = tl.exp(score) * (1.0 / total)
    pull = zeros
    if DENSE:
        is_teacher = _is_usable(t_high, t_total) | (is_met == 0)
        tl.store(is_bad + row, (is_teacher == 0).to(tl.int8), mask=is_first)
        t_total = tl.where(is_teacher, t_total, 1.0)
        t_high = tl.where(is_teacher, t_high, 0.0)
        ce_weight += tl.where(is_teacher, 0.0, tl.load(kd_weights + row))
        kd_weight = tl.where(is_teacher, kd_weight, 0.0)
        t_log_norm = tl.log(t_total)
        t = (t - t_high) * inverse
        p = tl.exp(t) * (1.0 / t_total)
        if DIVERGENCE == _FORWARD:
            value = gap * inverse * (1.0 / t_total) + (log_norm - t_log_norm)
            pull = q - p
        else:
            one, slope = _slopes(q, p, score - log_norm, t - t_log_norm, a, b, DIVERGENCE)
            tl.store(mine + 6 * num_parts, tl.sum(tl.where(cols < num_tokens, one, 0.0), 0))
            tl.store(mine + 7 * num_parts, tl.sum(tl.where(cols < num_tokens, slope, 0.0), 0))
            patience = tl.where(is_met, patience, 0)
            is_met = _meet(arrived + 1 + num_rows + row, arrived, num_parts, patience)
            value = tl.sum(tl.load(theirs + 6 * num_parts, mask=is_part, other=0.0, volatile=True), 0)
            value = tl.where(is_met, value, float("nan"))
            pull = slope - q * tl.sum(tl.load(theirs + 7 * num_parts, mask=is_part, other=0.0, volatile=True), 0)
            pull = tl.where(is_met, pull, float("nan"))
        tl.store(kd + row, tl.where(is_teacher, value * temperature * temperature, 0.0), mask=is_first)
        pull = tl.where(is_teacher, pull, 0.0)
    if GRADIENT:
        q1 = q
        if not UNIT:
            q1 = tl.exp(x - high) * (1.0 / unit_total)
        label = tl.where(cols == target, 1.0, 0.0)
        power = tl.load(powers + row)
        v = _gradient(x, q1, pull, label, kd_weight, ce_weight, power, scale, cap, HAS_CAP)
        v = tl.where(cols < num_tokens, v, 0.0)
        half = v.to(out.dtype.element_ty)
        # Four neighbours a thread, as the FP32 loads have them: eight halves would make each load touch half sectors.
        tl.store(out + tl.max_contiguous(cols, 4), half, mask=cols < padded)
        tl.store(lost + row * num_parts + part, tl.sum(v - half.to(tl.float32), 0))


@triton.jit
def _kept_of(ids, values, places, num_kept, KEPT: tl.constexpr, SAMPLED: tl.constexpr):
    """Ids and values that a teacher names, which of equal ids come first, and what all equal ones weigh together."""
    is_kept = places < num_kept
    kept = tl.load(ids + places, mask=is_kept, other=-1)
    stored = tl.load(values + places, mask=is_kept, other=0.0).to(tl.float32)
    is_first = is_kept
    weights = stored
    if SAMPLED:
        weights = tl.zeros((KEPT,), tl.float32)
        for place in range(0, num_kept):
            is_same = kept == tl.load(ids + place)
            weights += tl.where(is_same, tl.load(values + place).to(tl.float32), 0.0)
            is_first = is_first & ((is_same == 0) | (places <= place))
    return kept, stored, is_first, weights


@triton.jit
def _kept_and_rest(
    kept_x, stored, weights, extra, is_first, places, num_kept, rest_high, rest, unit_rest, inverse, a, b,
    DIVERGENCE: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """The row's maximum and sum at T = 1, whether the teacher is usable, D, its pull on the kept tokens and the rest's.

    The pull on a token of the rest is the last of these times its exponential.
    """
    is_kept = places < num_kept
    counted = tl.where(is_first, 1.0, 0.0)
    high = tl.maximum(rest_high, tl.max(kept_x, 0))
    shift = tl.exp((rest_high - high) * inverse)
    total = rest * shift + tl.sum(counted * tl.exp((kept_x - high) * inverse), 0)
    unit_total = unit_rest * tl.exp(rest_high - high) + tl.sum(counted * tl.exp(kept_x - high), 0)
    is_student = _is_usable(high, total)
    total = tl.where(is_student, total, float("nan"))
    unit_total = tl.where(is_student, unit_total, float("nan"))
    log_norm = tl.log(total)
    log_q = (kept_x - high) * inverse - log_norm
    q = tl.exp(log_q)
    if SAMPLED:
        mass = tl.sum(tl.where(is_kept, stored, 0.0), 0)
        is_teacher = (mass + extra) - (mass + extra) == 0.0
        value = -tl.sum(tl.where(is_kept, stored * log_q, 0.0), 0) - extra
        pull = q * mass - weights
        rest_pull = mass * shift / total
    else:
        # The tail is the entry after the kept ones.
        is_tail = places == num_kept
        tail = tl.log(rest) + (rest_high - high) * inverse - log_norm
        log_q = tl.where(is_tail, tl.where(rest > 0.0, tail, _LOG_ZERO), log_q)
        log_q = tl.where(log_q < _LOG_ZERO, _LOG_ZERO, log_q)
        q = tl.where(is_kept | is_tail, tl.exp(log_q), 0.0)
        log_p = tl.where(is_kept, stored, tl.where(is_tail, extra, float("-inf")))
        most = tl.max(log_p, 0)
        sums = tl.sum(tl.where(is_kept | is_tail, tl.exp(log_p - most), 0.0), 0)
        is_teacher = (most > float("-inf")) & (most < float("inf")) & (sums > 0.0) & (sums < float("inf"))
        log_p = tl.where(log_p >= _LOG_ZERO, log_p, _LOG_ZERO)
        log_p = tl.where(is_teacher, log_p, _LOG_ZERO)
        p = tl.exp(log_p)
        one, slope = _slopes(q, p, log_q, log_p, a, b, DIVERGENCE)
        one = tl.where(is_kept | is_tail, one, 0.0)
        slope = tl.where(is_kept | is_tail, slope, 0.0)
        value = tl.sum(one, 0)
        pull = slope - q * tl.sum(slope, 0)
        rest_pull = tl.sum(tl.where(is_tail, pull, 0.0), 0) * tl.where(rest > 0.0, 1.0 / rest, 0.0)
    pull = tl.where(is_teacher, pull, 0.0)
    rest_pull = tl.where(is_teacher, rest_pull, 0.0)
    value = tl.where(is_teacher, value, 0.0)
    return high, unit_total, is_teacher, value, pull, rest_pull


@triton.jit
def _sparse_rows(
    student, ids, values, side, out, targets, temperatures, kd_weights, ce_weights, powers, kd, ce, is_bad, lost,
    stride, out_stride, num_tokens, padded, num_kept, scale, cap, a, b,
    DIVERGENCE: tl.constexpr, SAMPLED: tl.constexpr, GRADIENT: tl.constexpr, HAS_CAP: tl.constexpr,
    KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block for each row, whose teacher names `num_kept` tokens; KEPT holds them and one more, the tail.

    The kept logits are taken out of the row, so the rest is summed directly and a tail of 1e-12 keeps its digits. Ids
    of a sample may repeat: the first of equal ones stands for all.
    """
    row = tl.program_id(0).to(tl.int64)
    student += row * stride
    out += row * out_stride
    temperature = tl.load(temperatures + row)
    inverse = 1.0 / temperature
    target = tl.load(targets + row)
    label_x = _finish(tl.load(student + target), scale, cap, HAS_CAP)
    places = tl.arange(0, KEPT)
    is_kept = places < num_kept
    kept, stored, is_first, weights = _kept_of(
        ids + row * num_kept, values + row * num_kept, places, num_kept, KEPT, SAMPLED
    )
    kept_x = tl.load(student + kept, mask=is_kept, other=0.0)
    kept_x = _possible(_finish(kept_x, scale, cap, HAS_CAP), is_kept)
    tl.debug_barrier()  # every kept logit and the label's is read
    tl.store(student + kept, float("-inf"), mask=is_first)
    tl.debug_barrier()  # and every thread sees the row without them

    lanes = tl.arange(0, BLOCK)
    high = tl.full((BLOCK,), _LOG_ZERO, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    unit_total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, padded, BLOCK):
        cols = start + lanes
        raw = tl.load(student + cols, mask=cols < padded, other=0.0)
        is_rest = (cols < num_tokens) & (raw != float("-inf"))
        x = _possible(_finish(raw, scale, cap, HAS_CAP), is_rest)
        rise = x - high
        is_up = rise > 0.0
        one = tl.where(is_rest, 1.0, 0.0)
        e = tl.exp(-tl.abs(rise) * inverse)
        total = tl.where(is_up, total * e + one, total + e * one)
        e = tl.exp(-tl.abs(rise))
        unit_total = tl.where(is_up, unit_total * e + one, unit_total + e * one)
        high = tl.where(is_up, x, high)
    rest_high, rest, unit_rest, t_high, t_total, gap = _merge(
        high, total, unit_total, high, total, total, inverse, False, False
    )
    high, unit_total, is_teacher, value, pull, rest_pull = _kept_and_rest(
        kept_x, stored, weights, tl.load(side + row).to(tl.float32), is_first, places, num_kept,
        rest_high, rest, unit_rest, inverse, a, b, DIVERGENCE, SAMPLED,
    )  # fmt: skip
    tl.store(ce + row, tl.log(unit_total) - (label_x - high))
    tl.store(is_bad + row, (is_teacher == 0).to(tl.int8))
    tl.store(kd + row, value * temperature * temperature)
    kd_weight = tl.load(kd_weights + row)
    ce_weight = tl.load(ce_weights + row) + tl.where(is_teacher, 0.0, kd_weight)
    kd_weight = tl.where(is_teacher, kd_weight * temperature, 0.0)

    if GRADIENT:
        power = tl.load(powers + row)
        unit_over = 1.0 / unit_total
        loss = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, padded, BLOCK):
            cols = start + lanes
            raw = tl.load(student + cols, mask=cols < padded, other=0.0)
            is_rest = (cols < num_tokens) & (raw != float("-inf"))
            x = _possible(_finish(raw, scale, cap, HAS_CAP), is_rest)
            own = tl.exp((x - rest_high) * inverse) * rest_pull
            label = tl.where(cols == target, 1.0, 0.0)
            v = _gradient(x, tl.exp(x - high) * unit_over, own, label, kd_weight, ce_weight, power, scale, cap, HAS_CAP)
            v = tl.where(is_rest, v, 0.0)
            half = v.to(out.dtype.element_ty)
            loss += v - half.to(tl.float32)
            tl.debug_barrier()  # a warp may be a round behind, and its logits are where the gradient goes
            tl.store(out + cols, half, mask=cols < padded)
        label = tl.where(kept == target, 1.0, 0.0)
        q1 = tl.exp(kept_x - high) * unit_over
        v = _gradient(kept_x, q1, pull, label, kd_weight, ce_weight, power, scale, cap, HAS_CAP)
        half = v.to(out.dtype.element_ty)
        tl.debug_barrier()
        tl.store(out + kept, half, mask=is_first)
        tl.store(lost + row, tl.sum(loss, 0) + tl.sum(tl.where(is_first, v - half.to(tl.float32), 0.0), 0))


@triton.jit
def _sparse_rows_at_once(
    student, ids, values, side, out, targets, temperatures, kd_weights, ce_weights, powers, kd, ce, is_bad, lost,
    notes, arrived, stride, out_stride, num_tokens, padded, num_kept, num_parts, patience, scale, cap, a, b,
    DIVERGENCE: tl.constexpr, SAMPLED: tl.constexpr, GRADIENT: tl.constexpr, HAS_CAP: tl.constexpr,
    KEPT: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """`num_parts` blocks for each row. `arrived` [1 + C] is 0, `notes` [C, 3 S + KEPT] is scratch, `lost` is [C, S].

    A block takes the kept logits in its part out of the row, and hands them to the others with its sums.
    """
    row, part, patience = _part_of(arrived, num_parts, patience)
    student += row * stride
    out += row * out_stride
    notes += row * (3 * num_parts + KEPT)
    temperature = tl.load(temperatures + row)
    inverse = 1.0 / temperature
    target = tl.load(targets + row)
    has_label = target // BLOCK == part
    label_x = _finish(tl.load(student + target, mask=has_label, other=0.0), scale, cap, HAS_CAP)
    places = tl.arange(0, KEPT)
    kept, stored, is_first, weights = _kept_of(
        ids + row * num_kept, values + row * num_kept, places, num_kept, KEPT, SAMPLED
    )
    is_own = (kept >= part * BLOCK) & (kept < (part + 1) * BLOCK)  # places without an id have -1
    kept_x = tl.load(student + kept, mask=is_own, other=0.0)
    tl.store(notes + 3 * num_parts + places, _finish(kept_x, scale, cap, HAS_CAP), mask=is_own)
    tl.debug_barrier()  # every kept logit of the part and the label's is read
    tl.store(student + kept, float("-inf"), mask=is_own & is_first)
    tl.debug_barrier()  # and every thread sees the part without them
    cols = part * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(student + cols, mask=cols < padded, other=0.0)
    is_rest = (cols < num_tokens) & (raw != float("-inf"))
    x = _possible(_finish(raw, scale, cap, HAS_CAP), is_rest)
    one = tl.where(is_rest, 1.0, 0.0)
    rest_high, rest, unit_rest, t_high, t_total, gap = _merge(x, one, one, x, one, one, inverse, False, False)
    tl.store(notes + part, rest_high)
    tl.store(notes + num_parts + part, rest)
    tl.store(notes + 2 * num_parts + part, unit_rest)
    is_met = _meet(arrived + 1 + row, arrived, num_parts, patience)
    parts = tl.arange(0, PARTS)
    is_part = parts < num_parts
    rest_high = tl.load(notes + parts, mask=is_part, other=_LOG_ZERO, volatile=True)
    rest = tl.load(notes + num_parts + parts, mask=is_part, other=0.0, volatile=True)
    unit_rest = tl.load(notes + 2 * num_parts + parts, mask=is_part, other=0.0, volatile=True)
    rest_high, rest, unit_rest, t_high, t_total, gap = _merge(
        rest_high, rest, unit_rest, rest_high, rest, rest, inverse, False, False
    )
    rest = tl.where(is_met, rest, float("nan"))
    is_kept = places < num_kept
    kept_x = tl.load(notes + 3 * num_parts + places, mask=is_kept, other=0.0, volatile=True)
    kept_x = _possible(kept_x, is_kept)
    high, unit_total, is_teacher, value, pull, rest_pull = _kept_and_rest(
        kept_x, stored, weights, tl.load(side + row).to(tl.float32), is_first, places, num_kept,
        rest_high, rest, unit_rest, inverse, a, b, DIVERGENCE, SAMPLED,
    )  # fmt: skip
    tl.store(ce + row, tl.log(unit_total) - (label_x - high), mask=has_label)
    tl.store(is_bad + row, (is_teacher == 0).to(tl.int8), mask=part == 0)
    tl.store(kd + row, value * temperature * temperature, mask=part == 0)
    if GRADIENT:
        kd_weight = tl.load(kd_weights + row)
        ce_weight = tl.load(ce_weights + row) + tl.where(is_teacher, 0.0, kd_weight)
        kd_weight = tl.where(is_teacher, kd_weight * temperature, 0.0)
        power = tl.load(powers + row)
        unit_over = 1.0 / unit_total
        own = tl.exp((x - rest_high) * inverse) * rest_pull
        label = tl.where(cols == target, 1.0, 0.0)
        v = _gradient(x, tl.exp(x - high) * unit_over, own, label, kd_weight, ce_weight, power, scale, cap, HAS_CAP)
        v = tl.where(is_rest, v, 0.0)
        half = v.to(out.dtype.element_ty)
        loss = tl.sum(v - half.to(tl.float32), 0)
        tl.store(out + tl.max_contiguous(cols, 4), half, mask=cols < padded)
        label = tl.where(kept == target, 1.0, 0.0)
        q1 = tl.exp(kept_x - high) * unit_over
        v = _gradient(kept_x, q1, pull, label, kd_weight, ce_weight, power, scale, cap, HAS_CAP)
        half = v.to(out.dtype.element_ty)
        tl.debug_barrier()
        tl.store(out + kept, half, mask=is_own & is_first)
        loss += tl.sum(tl.where(is_own & is_first, v - half.to(tl.float32), 0.0), 0)
        tl.store(lost + row * num_parts + part, loss)


# -- launching ---------------------------------------------------------------------------------------------

_BLOCK, _OPTIONS = (
    1024,
    {"num_warps": 8},
)  # four neighbours a thread: with eight, each FP32 load would touch half of every sector
_PART = 4096
# ptxas would rather spill a few bytes of these than give up a block a multiprocessor.
_REGISTERS_AT_ONCE = {_FORWARD.value: 128, _JSD.value: 224, _TODI.value: 224, _VARIATION.value: 128}
_REGISTERS_IN_PASSES = {_TODI.value: 96}
_MOST_KEPT = 1023
# How often a block looks for the others of its row, at some hundred nanoseconds a time: about a second, where
# microseconds are usual. A context that the driver sets aside does not look.
_PATIENCE = 1 << 21
_TOP = 14  # exponent of the largest possible entry after scaling: FP16 ends at 65,504


@dataclass(frozen=True)
class Member:
    """A divergence as the kernels know it, and a bound on the magnitude of its gradient."""

    number: int
    a: float = 0.0
    b: float = 0.0
    most: float = 1.0


def member_of(divergence: Divergence | None) -> Member | None:
    """None where the kernels do not have it: targets or weights that need a separate pass, settings near an end."""
    match divergence:
        case None:
            return Member(_NONE.value)
        case divergences.ForwardKL():
            return Member(_FORWARD.value)
        case divergences.ReverseKL():
            return Member(_REVERSE.value, most=128.0)
        case divergences.JensenShannon(beta):
            return Member(_JSD.value, beta, most=2.0 * max(1.0, -math.log1p(-beta) / beta))
        case divergences.SkewForwardKL(alpha):
            return Member(_SKEW_FORWARD.value, alpha, most=2.0)
        case divergences.SkewReverseKL(alpha) if alpha <= divergences.STEEP:
            return Member(_SKEW_REVERSE.value, alpha, most=2.0 * (1.0 + max(1.0, -math.log(alpha))))
        case divergences.TotalVariation():
            return Member(_VARIATION.value)
        case divergences.AlphaBeta(alpha, beta) if alpha + beta >= divergences.SMALL_POWER:
            return Member(_ALPHA_BETA.value, alpha, beta, most=128.0 if alpha < 1 / 64 else 2.0 / alpha)
        case divergences.TokenWise():
            return Member(_TODI.value, most=128.0)
        case _:
            return None


class TritonKernel:
    """Serves FP32 logits of heads without bias or clamp, for a teacher that is not trained; leaves the rest to another.

    `num_blocks` is how many blocks the device surely runs at once: a row is cut in no more parts. 0 reads rows in
    passes only, which is the form for devices below compute capability 7.0.
    """

    def __init__(self, other: RowKernel, num_blocks: int = 0) -> None:
        self.name = "triton" if num_blocks else "triton-passes"
        self._other, self._num_blocks = other, num_blocks

    def run(self, student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan) -> GradientRows | None:
        if not self.serves(student, teacher, plan):
            return self._other.run(student, teacher, rows, plan)
        launch, gradient = prepare(student, teacher, rows, plan, self._num_blocks)
        launch.start()
        return gradient.summed() if gradient is not None else None

    @staticmethod
    def serves(student: Logits, teacher: TeacherRows | None, plan: RowPlan) -> bool:
        heads = [student, teacher] if isinstance(teacher, Logits) else [student]
        is_odd = plan.wants_teacher or plan.label_margin is not None or not all(map(_is_plain, heads))
        num_kept = plan.top_k if isinstance(teacher, Logits) else 0
        if isinstance(teacher, TopKSignal | SampledSignal):
            num_kept = int(teacher.ids.shape[1])
        return (
            not is_odd and student.raw.numel() > 0 and num_kept <= _MOST_KEPT and member_of(plan.divergence) is not None
        )


def _is_plain(head: Logits) -> bool:
    is_bare = head.bias is None and head.clamp is None
    return is_bare and head.raw.dtype == torch.float32 and head.raw.stride(1) == 1


def prepare(
    student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan, num_blocks: int = 0
) -> tuple[Launch, GradientRows | None]:
    """The launch for a chunk, and the half gradient it will leave; None: FP32, over the logits."""
    raw = student.raw
    member = member_of(plan.divergence)
    assert member is not None, "see TritonKernel.serves"
    if isinstance(teacher, Logits) and plan.top_k:
        teacher = keep_top_k(finish(teacher), plan.top_k, rows.temperatures)
    out, gradient = raw, None
    if plan.wants_student and student.half is not None:
        out = raw.view(student.half.dtype)[:, : raw.shape[1]]  # the same memory: rows start where the logits' do
        gradient = _half_rows(out, student, rows, member)
    num_rows, num_tokens = raw.shape
    width = min([_padded(raw), *([_padded(teacher.raw)] if isinstance(teacher, Logits) else [])])
    num_parts = triton.cdiv(width, _PART)
    is_cut = 1 <= num_parts <= num_blocks
    lost = torch.empty((num_rows, num_parts if is_cut else 1), device=raw.device)
    if gradient is not None:
        gradient = replace(gradient, lost=lost)
    arguments: dict[str, Any] = {
        "student": raw, "out": out, "targets": rows.targets, "temperatures": rows.temperatures,
        "kd_weights": rows.kd_weights, "ce_weights": rows.ce_weights, "powers": _powers(gradient, raw), "kd": rows.kd,
        "ce": rows.ce, "is_bad": rows.is_bad.view(torch.int8), "lost": lost, "stride": raw.stride(0),
        "out_stride": out.stride(0), "num_tokens": num_tokens, "padded": width, "scale": float(student.scale),
        "cap": float(student.softcap or 0.0), "a": member.a, "b": member.b,
    }  # fmt: skip
    constants: dict[str, Any] = {
        "DIVERGENCE": member.number,
        "GRADIENT": plan.wants_student,
        "HAS_CAP": student.softcap is not None,
    }
    if is_cut:
        arguments |= {"num_parts": num_parts, "patience": _PATIENCE,
                      "arrived": torch.zeros(1 + 2 * num_rows, dtype=torch.int32, device=raw.device)}  # fmt: skip
        constants["PARTS"] = triton.next_power_of_2(num_parts)
    grid = num_rows * num_parts if is_cut else num_rows
    constants["BLOCK"] = _PART if is_cut else _BLOCK
    if isinstance(teacher, TopKSignal | SampledSignal):
        arguments |= _kept(teacher, rows, plan, num_tokens)
        room = max(16, triton.next_power_of_2(int(arguments["num_kept"]) + 1))
        constants |= {"SAMPLED": isinstance(teacher, SampledSignal), "KEPT": room}
        if not is_cut:
            return Launch(_sparse_rows, arguments, constants, grid, {**_OPTIONS, "maxnreg": 64}), gradient
        arguments["notes"] = torch.empty((num_rows, 3 * num_parts + room), device=raw.device)
        options = _OPTIONS if constants["SAMPLED"] else {**_OPTIONS, "maxnreg": 120}
        return Launch(_sparse_rows_at_once, arguments, constants, grid, options), gradient
    other = teacher if isinstance(teacher, Logits) else student
    arguments |= {"teacher": other.raw, "t_stride": other.raw.stride(0), "t_scale": float(other.scale),
                  "t_cap": float(other.softcap or 0.0)}  # fmt: skip
    constants |= {"UNIT": plan.is_unit_temperature, "T_CAP": other.softcap is not None}
    if not isinstance(teacher, Logits):
        constants["DIVERGENCE"] = _NONE.value
    if not is_cut:
        options = _options(_REGISTERS_IN_PASSES, constants)
        return Launch(_rows_in_passes, arguments, constants, grid, options), gradient
    arguments |= {"notes": torch.empty((num_rows, 8, num_parts), device=raw.device), "num_rows": num_rows}
    return Launch(_rows_at_once, arguments, constants, grid, _options(_REGISTERS_AT_ONCE, constants)), gradient


def _options(registers: dict[int, int], constants: dict[str, Any]) -> dict[str, int]:
    most = registers.get(constants["DIVERGENCE"])
    return _OPTIONS if most is None else {**_OPTIONS, "maxnreg": most}


def _kept(signal: TopKSignal | SampledSignal, rows: RowRecord, plan: RowPlan, num_tokens: int) -> dict[str, Any]:
    if isinstance(signal, TopKSignal):
        signal = without_empty_tail(signal, num_tokens)
        if plan.rest_to_label:
            signal = give_rest_to_label(signal, rows.targets)
        values, side = signal.log_probs, signal.tail_log_mass
    else:
        values, side = signal.weights, signal.entropy
    return {"ids": signal.ids.contiguous(), "values": values.contiguous(), "side": side.contiguous(),
            "num_kept": int(signal.ids.shape[1])}  # fmt: skip


def _padded(raw: Tensor) -> int:
    """How far a row may be read: to the start of the next one, where the memory of the last row reaches as far."""
    stride = raw.stride(0)
    room = raw.untyped_storage().nbytes() // raw.element_size() - raw.storage_offset()
    return stride if raw.shape[1] <= stride < raw.shape[1] + 64 and room >= raw.shape[0] * stride else raw.shape[1]


def _half_rows(out: Tensor, student: Logits, rows: RowRecord, member: Member) -> GradientRows:
    """The operand, with the power that keeps it in range: one for all rows if the host knows what they weigh.

    A power comes from a bound on the gradient and not from the gradient, which is not known before it is written.
    """
    request = student.half
    assert request is not None
    if request.dtype != torch.float16:
        return GradientRows(out)
    most = abs(student.scale)
    if request.heaviest is None:
        bound = rows.kd_weights.abs() * (rows.temperatures * member.most).clamp_min(1.0) + rows.ce_weights.abs()
        return GradientRows(out, lifts=lifts_of((bound * most)[:, None]))
    kd_weight, ce_weight, temperature = map(abs, request.heaviest)
    size = (kd_weight * max(1.0, temperature * member.most) + ce_weight) * most
    return GradientRows(out, lift=_TOP + 1 - math.frexp(size)[1] if 0.0 < size < math.inf else 0)


def _powers(gradient: GradientRows | None, raw: Tensor) -> Tensor:
    if gradient is not None and gradient.lifts is not None:
        return power_of_two(gradient.lifts)
    return torch.full((raw.shape[0],), 2.0 ** (0 if gradient is None else gradient.lift), device=raw.device)
