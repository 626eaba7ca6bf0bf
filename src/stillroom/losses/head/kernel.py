"""Which row kernel runs, and why.

`plain` is PyTorch, operation by operation. `compiled` is C++ built on this machine for a CPU; for a CUDA device it is
the Triton kernel (`kernel_triton.py`) in the faster of its two forms, or what torch.compile makes of the plain kernel.
`auto` takes the compiled one wherever it can be built and its numbers agree with the plain one's. The environment
variable STILLROOM_KERNEL overrules `auto`.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.core.launch import first_line, triton_doubt, triton_failures
from stillroom.core.types import SampledSignal, TopKSignal
from stillroom.losses import divergences
from stillroom.losses.divergences import Divergence
from stillroom.losses.head.rows import (
    GradientRows,
    HalfRequest,
    Logits,
    PlainKernel,
    RowKernel,
    RowPlan,
    RowRecord,
    TeacherRows,
    fill_values,
    finish,
    give_rest_to_label,
    keep_top_k,
    leave_gradient,
    outside_vocabulary,
    power_of_two,
    without_empty_tail,
)

# -- compiled --------------------------------------------------------------------------------------
# The row kernel in C++ (native/rows.cpp), called through ctypes: no torch headers, no build tools beyond a compiler.
#
# It serves FP32 rows on a CPU. Anything else (FP64, a GPU, a teacher that is being trained, a divergence registered
# by another package) is left to the plain kernel.


class _Head(ctypes.Structure):
    _fields_ = (
        ("raw", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class _Job(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("num_columns", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("student", _Head),
        ("teacher", _Head),
        ("ids", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("side", ctypes.c_void_p),
        ("num_kept", ctypes.c_int64),
        ("targets", ctypes.c_void_p),
        ("temperatures", ctypes.c_void_p),
        ("kd_weights", ctypes.c_void_p),
        ("ce_weights", ctypes.c_void_p),
        ("kd", ctypes.c_void_p),
        ("ce", ctypes.c_void_p),
        ("is_bad", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("divergence", ctypes.c_int32),
        ("place", ctypes.c_float),
        ("rest", ctypes.c_float),
        ("has_ce", ctypes.c_int32),
        ("wants_gradient", ctypes.c_int32),
    )


_DENSE, _TOP_K, _SAMPLED = 1, 2, 3


class _Operand(ctypes.Structure):
    _fields_ = (
        ("values", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("is_bf16", ctypes.c_int32),
        ("parts", ctypes.c_int32),
    )


class _ProductJob(ctypes.Structure):
    _fields_ = (
        ("hidden", _Operand),
        ("weight", _Operand),
        ("logits", ctypes.c_void_p),
        ("logits_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("form", ctypes.c_int32),
        ("adds", ctypes.c_int32),
    )


class Bf16Products:
    """The products of native/products.cpp: BF16 parts of FP32 or BF16 operands, FP32 sums and results.

    `parts` 2 splits an FP32 operand into its rounded value and the rest; a BF16 one is whole already. Rows are
    contiguous. An unused operand is left out.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.stillroom_product
        self._run.argtypes, self._run.restype = (ctypes.POINTER(_ProductJob),), ctypes.c_int32

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor, *, parts: int) -> None:
        """hidden [C, D] times weight [V, D] transposed, into `out` [C, V]."""
        self._call(0, hidden, weight, out, None, parts=parts)

    def to_hidden(self, gradient: Tensor, weight: Tensor, out: Tensor) -> None:
        """gradient [C, V] times weight [V, D], into `out` [C, D]."""
        self._call(1, None, weight, gradient, out)

    def to_weight(self, gradient: Tensor, hidden: Tensor, out: Tensor, *, adds: bool) -> None:
        """gradient [C, V] transposed times hidden [C, D], into `out` [V, D] or on top of it."""
        self._call(2, hidden, None, gradient, out, adds=adds)

    def _call(
        self,
        form: int,
        hidden: Tensor | None,
        weight: Tensor | None,
        logits: Tensor,
        out: Tensor | None,
        *,
        parts: int = 1,
        adds: bool = False,
    ) -> None:
        num_rows, num_tokens = logits.shape
        shapes = ((hidden, num_rows), (weight, num_tokens), (out, num_rows if form == 1 else num_tokens))
        given = [(tensor, rows) for tensor, rows in shapes if tensor is not None]
        width = given[0][0].shape[1]
        for tensor, rows in [*given, (logits, num_rows)]:
            is_result = tensor is out or tensor is logits
            dtypes = (torch.float32,) if is_result else (torch.float32, torch.bfloat16)
            fits = tensor.shape == (rows, num_tokens if tensor is logits else width)
            if not fits or tensor.stride(1) != 1 or tensor.dtype not in dtypes or tensor.device.type != "cpu":
                raise ValueError(
                    f"products of the head: {tensor.dtype} {list(tensor.shape)}, strides {tensor.stride()}, with "
                    f"logits {list(logits.shape)}"
                )
        if not num_rows:  # a row of text may have no scored token
            if out is not None and form == 2 and not adds:
                out.zero_()
            return
        job = _ProductJob(
            hidden=_operand(hidden, parts),
            weight=_operand(weight, parts),
            logits=logits.data_ptr(),
            logits_stride=logits.stride(0),
            out=None if out is None else out.data_ptr(),
            out_stride=0 if out is None else out.stride(0),
            num_rows=num_rows,
            num_tokens=num_tokens,
            width=width,
            num_threads=torch.get_num_threads(),
            form=form,
            adds=adds,
        )
        if self._run(ctypes.byref(job)) != 0:
            raise ValueError(f"products of the head: nothing to multiply in {list(logits.shape)} by {width}")


def _operand(tensor: Tensor | None, parts: int) -> _Operand:
    if tensor is None:
        return _Operand()
    is_bf16 = tensor.dtype == torch.bfloat16
    return _Operand(tensor.data_ptr(), tensor.stride(0), is_bf16, 1 if is_bf16 else parts)


class CompiledKernel:
    """The row kernel of a library that `kernel_build` made, and its products where the machine has BF16 units."""

    name = "compiled"

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._run = loaded.stillroom_rows
        self._run.argtypes, self._run.restype = (ctypes.POINTER(_Job),), ctypes.c_int32
        self._plain = PlainKernel()
        products = Bf16Products(loaded) if loaded.stillroom_has_bf16_products() else None
        self.bf16_products = products if products is not None and _are_right(products) else None

    def run(self, student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan) -> None:
        code = _code_of(plan.divergence)
        raw = student.raw
        is_odd = code is None or plan.wants_teacher or student.clamp is not None or plan.label_margin is not None
        if is_odd or code is None or raw.dtype != torch.float32 or raw.device.type != "cpu":
            self._plain.run(student, teacher, rows, plan)
            return
        if isinstance(teacher, Logits) and plan.top_k:
            teacher = keep_top_k(finish(teacher), plan.top_k, rows.temperatures)
        if isinstance(teacher, TopKSignal):
            teacher = without_empty_tail(teacher, raw.shape[1])
            if plan.rest_to_label:
                teacher = give_rest_to_label(teacher, rows.targets)
        job, kept_alive = _job(student, teacher, rows, plan, code)
        status = self._run(ctypes.byref(job))
        del kept_alive  # the job holds addresses: the tensors must outlive the call
        if status != 0:
            raise outside_vocabulary(raw.shape[1])


def _are_right(products: Bf16Products) -> bool:
    """Whether the products of a small problem are those of FP32: a miscompiled library is not used."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 50, generator=generator) for rows in (11, 101))
    logits, to_hidden, to_weight = torch.empty(11, 101), torch.empty(11, 50), torch.ones(101, 50)
    products.logits(hidden, weight, logits, parts=2)
    gradient = torch.softmax(hidden @ weight.t(), -1)
    products.to_hidden(gradient, weight, to_hidden)
    products.to_weight(gradient, hidden, to_weight, adds=True)
    pairs = (
        (logits, hidden @ weight.t(), 1e-4),
        (to_hidden, gradient @ weight, 1e-2),
        (to_weight, 1 + gradient.t() @ hidden, 1e-2),
    )
    return all(bool((found - plain).norm() <= bar * plain.norm()) for found, plain, bar in pairs)


def _job(
    student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan, code: tuple[int, float]
) -> tuple[_Job, list[Tensor]]:
    """The call's arguments, and the tensors they point into. Each has the length that the loops will read."""
    kept_alive: list[Tensor] = []
    num_rows, num_columns = student.raw.shape

    def address(tensor: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> int:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"rows of the head: a tensor of shape {list(tensor.shape)} instead of {list(shape)}")
        tensor = tensor.to(dtype).contiguous()
        kept_alive.append(tensor)
        return tensor.data_ptr()

    def head(logits: Logits) -> _Head:
        if tuple(logits.raw.shape) != (num_rows, num_columns) or logits.raw.stride(1) != 1:
            raise ValueError(
                f"rows of the head: logits of shape {list(logits.raw.shape)} next to {list(student.raw.shape)}"
            )
        bias = None if logits.bias is None else address(logits.bias, num_columns)
        return _Head(logits.raw.data_ptr(), logits.raw.stride(0), bias, logits.scale, logits.softcap or 0.0)

    job = _Job(
        num_rows=num_rows,
        num_columns=num_columns,
        num_threads=torch.get_num_threads(),
        student=head(student),
        targets=address(rows.targets, num_rows, dtype=torch.int64),
        temperatures=address(rows.temperatures, num_rows),
        kd_weights=address(rows.kd_weights, num_rows),
        ce_weights=address(rows.ce_weights, num_rows),
        kd=rows.kd.data_ptr(),
        ce=rows.ce.data_ptr(),
        is_bad=rows.is_bad.data_ptr(),
        divergence=code[0],
        place=code[1],
        rest=1.0 - code[1],
        has_ce=plan.has_ce,
        wants_gradient=plan.wants_student,
    )
    if isinstance(teacher, Logits):
        job.kind, job.teacher = _DENSE, head(teacher)
    elif teacher is not None:
        job.kind = _TOP_K if isinstance(teacher, TopKSignal) else _SAMPLED
        kept = num_rows, teacher.ids.shape[-1]
        job.num_kept, job.ids = kept[1], address(teacher.ids, *kept, dtype=torch.int64)
        job.values = address(teacher.weights if isinstance(teacher, SampledSignal) else teacher.log_probs, *kept)
        job.side = address(teacher.entropy if isinstance(teacher, SampledSignal) else teacher.tail_log_mass, num_rows)
    return job, kept_alive


def knows(divergence: Divergence) -> bool:
    """Whether rows.cpp has that divergence; any other goes through the plain kernel."""
    return _code_of(divergence) is not None


def _code_of(divergence: Divergence | None) -> tuple[int, float] | None:
    """The number of a divergence in rows.cpp and its beta or alpha; None where rows.cpp does not have it."""
    match divergence:
        case None | divergences.ForwardKL():
            return 0, 0.0
        case divergences.ReverseKL():
            return 1, 0.0
        case divergences.JensenShannon(beta):
            return 2 if beta <= 0.5 else 3, beta
        case divergences.SkewForwardKL(alpha):
            return 4, alpha
        case divergences.SkewReverseKL(alpha):
            return 5 if alpha <= divergences.STEEP else 6, alpha
        case divergences.TotalVariation():
            return 7, 0.0
        case _:
            return None


# -- kernel inductor -------------------------------------------------------------------------------
# The row kernel as torch.compile makes it: the plain kernel's formulas, fused into a few passes over the logits.
#
# On a GPU the plain kernel reads and writes a chunk 25 to 60 times, and every trip is one to main memory. Inductor
# joins these operations into loops over a row. It needs Triton there, which comes with torch for Linux and serves
# GPUs from compute capability 7.0 on.
#
# A compiled function belongs to one kind of pass: a divergence with its settings, a vocabulary, which gradients are
# wanted. The number of rows may vary. Compiling takes half a minute on a GPU, so a process compiles a few kinds and
# no more: a setting that moves with every step is left to the plain kernel, and so are kinds that come late.
#
# Legend: C rows, V vocabulary.


LEAST_CAPABILITY = (7, 0)  # of a GPU, for inductor
LEAST_FOR_TRITON = (6, 0)  # for a kernel without matrix products
_MOST_KINDS = 6  # dynamo gives a function up after eight
_LEAST_ROWS = 2  # dynamo compiles sizes of 0 and 1 apart

Run = Callable[[Logits, TeacherRows | None, RowRecord, RowPlan], None]


class InductorKernel:
    """Serves everything the plain kernel does, on the device of its tensors."""

    name = "inductor"

    def __init__(self) -> None:
        self._is_fused: dict[Hashable, bool] = {}  # by kind of pass
        self._plain = PlainKernel()
        self._fused: Run = torch.compile(_run_fused, fullgraph=True)

    def run(self, student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan) -> None:
        student = replace(student, half=None)  # its numbers differ from step to step, and it leaves FP32
        kind = _kind(student, teacher, rows, plan)
        if student.raw.shape[0] < _LEAST_ROWS or not self._admits(kind):
            self._plain.run(student, teacher, rows, plan)
            return
        # Imported where a first pass needs it: dynamo takes longer to import than torch itself.
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        for tensor in _tensors(student, teacher, rows):
            torch._dynamo.mark_dynamic(tensor, 0)
        try:
            self._fused(student, teacher, rows, plan)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # before anything ran: the rows are untouched
            first = str(error).strip().partition("\n")[0]
            warnings.warn(f"rows of the head: plain PyTorch (torch.compile failed: {first})", stacklevel=2)
            self._is_fused[kind] = False
            self._plain.run(student, teacher, rows, plan)

    def _admits(self, kind: Hashable) -> bool:
        try:
            hash(kind)
        except TypeError:  # a divergence of another package that has no hash
            return False
        if len(self._is_fused) < _MOST_KINDS:
            self._is_fused.setdefault(kind, True)
        return self._is_fused.get(kind, False)


def _run_fused(student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan) -> None:
    """The plain kernel's block, its gradient written as one expression: a scatter would end the fusion."""
    logits, own, gradient, ce_weights = fill_values(student, teacher, rows, plan)
    if plan.wants_student:
        column = ce_weights[:, None]
        tokens = torch.arange(logits.shape[-1], device=logits.device)
        is_label = tokens[None, :] == rows.targets[:, None]
        pull = own.probs * column - torch.where(is_label, column, torch.zeros_like(column))
        leave_gradient(student, logits, pull if gradient is None else pull + gradient)


def _kind(student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan) -> Hashable:
    """What a compiled function is bound to."""
    form: Hashable = None
    if isinstance(teacher, Logits):
        form = _layout(teacher)
    elif teacher is not None:
        form = type(teacher).__name__, teacher.ids.shape[1]
    return plan, _layout(student), form, rows.clamped is None, rows.corrected is None


def _layout(logits: Logits) -> Hashable:
    raw = logits.raw
    head = logits.bias is None, logits.scale, logits.softcap, logits.clamp
    return raw.device, raw.dtype, raw.shape[1], raw.stride(), head


def _tensors(student: Logits, teacher: TeacherRows | None, rows: RowRecord) -> list[Tensor]:
    """Those whose first axis is the chunk's rows."""
    found: list[Tensor | None] = [student.raw, rows.targets, rows.temperatures, rows.kd_weights, rows.ce_weights]
    found += [rows.kd, rows.ce, rows.is_bad, rows.clamped, rows.corrected]
    match teacher:
        case Logits():
            found.append(teacher.raw)
        case TopKSignal():
            found += [teacher.ids, teacher.log_probs, teacher.tail_log_mass]
        case SampledSignal():
            found += [teacher.ids, teacher.weights, teacher.entropy]
    return [tensor for tensor in found if tensor is not None]


# -- kernel cache ----------------------------------------------------------------------------------
# Where built kernels are kept, and which of them may be loaded.
#
# A library that is loaded runs with all the user's rights, and a truncated one ends the process with SIGBUS. So
# nothing is loaded but a regular file of this user that nobody else can write to, in a folder of which the same is
# true, and whose SHA-256 is the one in its name. The sum is part of the name because one rename then puts both in
# place: processes that build at the same time cannot mix them up.


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def choose_folder() -> tuple[Path, str]:
    """A folder that only this user can write to, and why it is not the usual one where it is not."""
    doubts: list[str] = []
    for folder in _candidates():
        doubt = _prepare(folder)
        if not doubt:
            return folder, "; ".join(doubts)
        doubts.append(doubt)
    folder = Path(tempfile.mkdtemp(prefix="stillroom-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder, "; ".join(doubts or ["there is no home folder"])


def find(folder: Path, stem: str) -> tuple[Path | None, str]:
    """A kept library that may be loaded, and what was wrong with one that may not: that one is removed."""
    doubt = ""
    for path in sorted(folder.glob(f"{stem}-*.so")):
        found = fault_of(path)
        if not found:
            return path, doubt
        doubt = f"{path} {found} and was removed"
        path.unlink(missing_ok=True)
    return None, doubt


def keep(made: Path, folder: Path, stem: str) -> Path:
    """Put a library into the folder, whole or not at all."""
    made.chmod(stat.S_IRUSR | stat.S_IWUSR)
    path = folder / f"{stem}-{hashlib.sha256(made.read_bytes()).hexdigest()}.so"
    made.replace(path)
    return path


def fault_of(path: Path) -> str:
    """Why a library may not be loaded; empty where it may."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
            details = os.fstat(file.fileno())
            if not stat.S_ISREG(details.st_mode):
                return "is not a regular file"
            doubt = _foreign(details)
            if doubt:
                return doubt
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if path.stem.endswith(f"-{digest}") else "does not have the checksum in its name"


def _candidates() -> Iterator[Path]:
    home = os.environ.get("STILLROOM_CACHE") or _absolute(os.environ.get("XDG_CACHE_HOME")) or _home_cache()
    if home:
        yield Path(home).absolute() / "stillroom" / "kernels"
    user = _user()
    if user is not None:
        yield Path(tempfile.gettempdir()) / f"stillroom-kernels-{user}"


def _absolute(path: str | None) -> str | None:
    """The XDG specification has relative paths ignored."""
    return path if path and Path(path).is_absolute() else None


def _home_cache() -> Path | None:
    try:
        home = Path.home()
    except RuntimeError:  # HOME is not set, and the user is not in the password file
        return None
    return home / ".cache" if home.is_absolute() else None


def _user() -> int | None:
    """None on systems without user numbers: there a folder in the user's profile is the user's own."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def _prepare(folder: Path) -> str:
    """Make the folder where it does not exist. Why it cannot be used; empty where it can."""
    try:
        for path in (*reversed(folder.parents), folder):  # one by one: `parents=True` would not pass on the mode
            path.mkdir(exist_ok=True, mode=stat.S_IRWXU)
        details = folder.lstat()
        doubt = "is not a folder" if not stat.S_ISDIR(details.st_mode) else _foreign(details)
        if not doubt and not os.access(folder, os.W_OK | os.X_OK):
            doubt = "cannot be written to"
        if doubt:
            return f"{folder} {doubt}"
        open_parent = next((path for path in folder.resolve().parents if _can_be_renamed_in(path.stat())), None)
    except OSError as error:
        return f"{folder} cannot be made ({error.strerror})"
    return f"{folder} can be replaced by others, who may write to {open_parent}" if open_parent else ""


def _foreign(details: os.stat_result) -> str:
    user = _user()
    if user is None:
        return ""
    if details.st_uid != user:
        return "belongs to another user"
    return "can be written to by other users" if details.st_mode & _OTHERS_WRITE else ""


def _can_be_renamed_in(details: os.stat_result) -> bool:
    """Whether anyone but this user and root may rename entries of a folder above ours: /tmp is sticky, so no."""
    user = _user()
    if user is None:
        return False
    is_open = details.st_mode & stat.S_IWOTH and not details.st_mode & stat.S_ISVTX
    return bool(is_open) or details.st_uid not in (0, user)


# -- kernel build ----------------------------------------------------------------------------------
# Building the C++ row kernel: once for each machine, into the user's cache.
#
# The build takes about two seconds. It is done when first asked for and not in the background, so that which kernel a
# run uses depends on the machine and not on timing: a resumed run must repeat its numbers to the last bit.
#
# The library's name holds a hash of everything it was made from (source, flags, compiler, processor, torch), so a
# stale one is never loaded, and its own checksum, without which none is (`kernel_cache.py`). OpenMP calls are left
# unresolved on purpose: they bind to the runtime that torch has loaded, and the two share one pool of threads.


_SOURCE = Path(__file__).with_name("native")
_COMMON = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
# From best to most modest; the first that compiles is taken.
_ATTEMPTS = (
    (*_COMMON, "-fopenmp", "-march=native", "-mprefer-vector-width=512"),
    (*_COMMON, "-fopenmp", "-march=native"),
    (*_COMMON, "-fopenmp"),
)
_TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Built:
    """A library, or None with the reason why there is none."""

    path: Path | None
    reason: str


@functools.cache
def build() -> Built:
    """The kernel's library for this machine, from the cache or made now."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "c++", "clang++"))), None)
    if compiler is None:
        return Built(None, "no C++ compiler found (g++, c++, clang++)")
    try:
        folder, doubt = choose_folder()
    except OSError as error:
        return Built(None, f"no folder to build in: {error}")
    try:
        stem = f"rows-{_fingerprint(compiler)}"
        path, damage = find(folder, stem)
        built = Built(path, f"built earlier: {path}") if path else _compile(compiler, folder, stem)
    except (OSError, subprocess.SubprocessError) as error:
        return Built(None, f"cannot build into {folder}: {error}")
    place = f"kept in {folder}, because {doubt}" if doubt else ""
    return Built(built.path, "; ".join(filter(None, (built.reason, damage, place))))


def _compile(compiler: str, folder: Path, stem: str) -> Built:
    complaint = ""
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        library = Path(scratch) / "rows.so"
        objects = {source: str(Path(scratch) / f"{source.stem}.o") for source in sorted(_SOURCE.glob("*.cpp"))}
        for flags in _ATTEMPTS:
            # Linked without -fopenmp, so that no second OpenMP runtime comes in.
            for command in (
                *([compiler, *flags, "-c", str(source), "-o", made] for source, made in objects.items()),
                [compiler, "-shared", *objects.values(), "-o", str(library)],
            ):
                done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
                if done.returncode != 0:
                    complaint = done.stderr.strip().partition("\n")[0]
                    break
            else:
                path = keep(library, folder, stem)
                fault = fault_of(path)  # a full disk may say nothing
                return Built(None, f"{path} {fault}") if fault else Built(path, f"built with {Path(compiler).name}")
    return Built(None, f"{Path(compiler).name} failed: {complaint}")


def _fingerprint(compiler: str) -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCE.iterdir()):
        digest.update(source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    for part in (version, repr(_ATTEMPTS), _processor(), torch.__version__):
        digest.update(part.encode())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """What `-march=native` looks at: the cache may be shared by different machines."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {flags}"


KernelName = Literal["auto", "plain", "compiled"]


@dataclass(frozen=True)
class KernelChoice:
    """A row kernel and the reason it was chosen, as a sentence for log and doctor."""

    kernel: RowKernel
    reason: str

    @property
    def name(self) -> str:
        return self.kernel.name


def choose_kernel(name: str = "auto", device: torch.device | None = None) -> KernelChoice:
    """The row kernel of a pass on a device (None: a CPU).

    The same on every call of a process, and after a resume on the same machine.
    """
    asked = os.environ.get("STILLROOM_KERNEL", name) if name == "auto" else name
    if asked == "plain":
        return KernelChoice(PlainKernel(), "asked for")
    if asked not in ("auto", "compiled"):
        raise ConfigError(f"no kernel is called {asked!r}", advice=["one of auto, plain, compiled"])
    is_card = device is not None and device.type == "cuda"
    choice = _fused(device) if is_card and device is not None else _compiled()
    if asked == "compiled" and choice.name == "plain":
        needed = "a torch with Triton, and a GPU of compute capability 6.0 or more" if is_card else "g++"
        raise ConfigError(
            f"the compiled kernel cannot be had: {choice.reason}",
            advice=[f"install {needed}", "set the kernel to plain"],
        )
    return choice


def describe_kernel(name: str, divergence: Divergence, device_type: str) -> str:
    """Which kernel a run's rows go through and why, as a sentence for its log."""
    choice = choose_kernel(name, torch.device(device_type))
    if choice.name == "plain":
        return f"rows of the head: plain PyTorch ({choice.reason})"
    if choice.name == "inductor" or choice.name.startswith("triton"):
        return f"rows of the head: {choice.reason}; objectives.kernel = 'plain' turns it off"
    if device_type != "cpu":
        return "rows of the head: plain PyTorch (the compiled kernel serves CPUs)"
    if not knows(divergence):
        return f"rows of the head: plain PyTorch (the compiled kernel does not have {divergence.name})"
    return f"rows of the head: compiled ({choice.reason}); objectives.kernel = 'plain' turns it off"


def bf16_products() -> Bf16Products | None:
    """The compiled BF16 products of this CPU; None where it has no such units or the kernel is not compiled."""
    kernel = choose_kernel().kernel
    return kernel.bf16_products if isinstance(kernel, CompiledKernel) else None


@functools.cache
def _fused(device: torch.device) -> KernelChoice:
    """The Triton kernel, else what torch.compile makes of the plain one, else that one; each tried on the device."""
    doubt = _doubt_of(device)
    if doubt:
        return KernelChoice(PlainKernel(), doubt)
    choice = try_triton(device)
    if choice.name != "plain":
        return choice
    other = _inductor(device)
    return KernelChoice(other.kernel, f"{other.reason}; Triton kernel: {choice.reason}")


@functools.cache
def _inductor(device: torch.device) -> KernelChoice:
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, own = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
        return KernelChoice(
            PlainKernel(), f"the GPU has compute capability {own}, and inductor serves {least} and more"
        )
    return try_fused(device)


def _doubt_of(device: torch.device) -> str:
    """Why Triton cannot serve a GPU, as far as that is known without trying."""
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_FOR_TRITON:
        least, own = (".".join(map(str, pair)) for pair in (LEAST_FOR_TRITON, capability))
        return f"the GPU has compute capability {own}, and Triton serves from {least} on"
    return triton_doubt()


class _Later:
    """The kernel for what the Triton kernel does not serve, tried when it is first needed: inductor takes long."""

    name = "later"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(self, student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan) -> GradientRows | None:
        return _inductor(self._device).kernel.run(student, teacher, rows, plan)


def try_triton(device: torch.device) -> KernelChoice:
    """Compare both forms of the Triton kernel with the plain kernel on a device, and take the faster right one."""
    from stillroom.losses.head.kernel_triton import TritonKernel

    num_blocks = 0  # the form in one pass orders its blocks by acquiring loads, which older GPUs do not have
    if torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY:
        num_blocks = torch.cuda.get_device_properties(device).multi_processor_count
    right: list[RowKernel] = []
    doubts: list[str] = []
    for kernel in [TritonKernel(_Later(device), count) for count in sorted({0, num_blocks})]:
        try:
            agrees = all(_agree(_OnTrial(kernel), PlainKernel(), device, *size) for size in _TRIALS)
        except torch.OutOfMemoryError:
            raise
        except triton_failures() as error:
            doubts.append(f"{kernel.name}: {type(error).__name__}: {first_line(error)}")
            continue
        if agrees:
            right.append(kernel)
        else:
            doubts.append(f"{kernel.name}: its numbers differ from the plain one's")
    said = "; ".join(doubts)
    if not right:
        return KernelChoice(PlainKernel(), said)
    times = {kernel: _milliseconds(kernel, device) for kernel in right} if len(right) > 1 else {right[0]: 0.0}
    fastest = min(times, key=lambda kernel: times[kernel])
    forms = ", ".join(f"{kernel.name} {time:.2f} ms" for kernel, time in times.items()) if len(times) > 1 else ""
    return KernelChoice(fastest, "; ".join(filter(None, ("Triton", forms, said))))


class _OnTrial:
    """A kernel whose work on the device has to end in time."""

    def __init__(self, kernel: RowKernel) -> None:
        self._kernel, self.name = kernel, kernel.name

    def run(self, student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan) -> GradientRows | None:
        answer = self._kernel.run(student, teacher, rows, plan)
        if student.raw.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            _wait(done, self.name)
        return answer


_TRIAL_SECONDS = 60.0  # on the device, compilation not counted: a trial takes milliseconds


def _wait(done: torch.cuda.Event, name: str) -> None:
    """Wait for a mark on the device. What does not end cannot be stopped from here: the run ends with advice."""
    limit = time.monotonic() + _TRIAL_SECONDS
    while not done.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > limit:
            raise BrokenAtStart(
                f"the GPU has not finished the trial of the kernel {name!r} after {_TRIAL_SECONDS:g} seconds",
                advice=["set the environment variable STILLROOM_KERNEL=plain", "`nvidia-smi`: is the GPU in use?"],
            )
        time.sleep(1e-3)


_TRIALS = ((97, None), (9_001, torch.float16))  # vocabulary and dtype of the gradient: the second is cut in parts
_TIMED = 128, 49_152  # rows and vocabulary of the timed block: 25 MB a side, more than the caches of most GPUs


def _milliseconds(kernel: RowKernel, device: torch.device) -> float:
    """Of forward KL over a block of rows on a CUDA device, the least of three; the first run compiles."""
    num_rows, num_tokens = _TIMED
    student, teacher = (torch.zeros(num_rows, num_tokens, device=device) for _ in range(2))
    rows = _record(num_rows, num_tokens, device)
    plan = RowPlan(divergences.make("forward_kl"), True, True, True, False)
    found = []
    for _ in range(4):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        marks[0].record()
        kernel.run(Logits(student, half=HalfRequest(torch.float16)), Logits(teacher), rows, plan)
        marks[1].record()
        _wait(marks[1], kernel.name)
        found.append(marks[0].elapsed_time(marks[1]))
    return float(min(found[1:]))


def try_fused(device: torch.device) -> KernelChoice:
    """Compile a small problem on a device and compare it with the plain kernel's answer."""
    kernel = InductorKernel()
    try:
        agrees = _agree(kernel, PlainKernel(), device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, OSError, ImportError) as error:  # whatever Triton, its compiler or the driver cannot do
        first = str(error).strip().partition("\n")[0]
        return KernelChoice(PlainKernel(), f"torch.compile failed: {type(error).__name__}: {first}")
    if not agrees:
        return KernelChoice(PlainKernel(), "the numbers of torch.compile's kernel differ from the plain one's")
    return KernelChoice(InductorKernel(), "fused by torch.compile")


@functools.cache
def _compiled() -> KernelChoice:
    built = build()
    if built.path is None:
        return KernelChoice(PlainKernel(), built.reason)
    try:
        kernel = CompiledKernel(built.path)
    except (OSError, AttributeError) as error:
        return KernelChoice(PlainKernel(), f"the compiled kernel does not load: {error}")
    if not _agree(kernel, PlainKernel(), torch.device("cpu")):
        return KernelChoice(PlainKernel(), "the compiled kernel's numbers differ from the plain one's")
    return KernelChoice(kernel, built.reason)


def _agree(
    one: RowKernel, other: RowKernel, device: torch.device, num_tokens: int = 97, half: torch.dtype | None = None
) -> bool:
    """Whether two kernels give the same values and gradients on a small problem: a miscompiled one is not used."""
    answers = []
    for kernel in (one, other):
        generator = torch.Generator().manual_seed(0)
        student, teacher = ((torch.randn(3, num_tokens, generator=generator) * 4).to(device) for _ in range(2))
        rows = _record(3, num_tokens, device)
        plan = RowPlan(
            divergences.make("jsd"), has_ce=True, is_unit_temperature=False, wants_student=True, wants_teacher=False
        )
        request = None if half is None else HalfRequest(half)
        left = kernel.run(Logits(student, softcap=20.0, half=request), Logits(teacher), rows, plan)
        gradient = student
        if left is not None and left.lifts is not None:
            gradient = left.values.float() * power_of_two(-left.lifts)[:, None]
        answers.append(torch.cat((rows.kd, rows.ce, gradient.flatten())).cpu())
    tolerance = 1e-4 if half is None else 2.0**-10
    return torch.allclose(answers[0], answers[1], rtol=tolerance, atol=1e-6)


def _record(num_rows: int, num_tokens: int, device: torch.device) -> RowRecord:
    third = torch.full((num_rows,), 1 / 3, device=device)
    return RowRecord(
        targets=torch.linspace(0, num_tokens - 1, num_rows, device=device).long(),
        temperatures=torch.tensor([1.0, 2.0, 0.7], device=device).repeat(num_rows)[:num_rows],
        kd_weights=third,
        ce_weights=third,
        kd=torch.zeros_like(third),
        ce=torch.zeros_like(third),
        is_bad=torch.zeros(num_rows, dtype=torch.bool, device=device),
    )
