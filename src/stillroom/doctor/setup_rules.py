"""What the doctor alone looks at: machine, installation, configuration, tokenizers, data, models, and one real step.

A rule is a generator over a `Setup`: what it raises is a red finding. The order is that of looking, cheap
parts first.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from stillroom.config import Config
from stillroom.config.load import unread_notes
from stillroom.core.errors import BrokenAtStart, StillroomError
from stillroom.data.chat import turn_end_ids
from stillroom.data.packing import Rows
from stillroom.doctor.log_rules import FEW_SCORED, TOO_MANY_PASSES
from stillroom.doctor.rules import Finding, Severity, found, judge_settings, rule, rules_for
from stillroom.doctor.setup import Setup
from stillroom.losses.head.kernel import choose_kernel
from stillroom.losses.mix import Clamps
from stillroom.models import agree_on_vocabulary, find, vocabulary_hash
from stillroom.models.files import Source, check_adapter_files, check_weight_files
from stillroom.models.routers import describe, find_gates
from stillroom.models.student import num_positions
from stillroom.precision.device import CU126, check_device, teacher_dtype, unused_gpu
from stillroom.telemetry import EventLog
from stillroom.training.build import build_run
from stillroom.training.memory import AIM, Shapes, Target, chosen_mode, lay_out
from stillroom.training.models import Models, load_models
from stillroom.training.preflight import find_loss_scale, first_forward
from stillroom.training.run import RunState
from stillroom.training.schedule import steps_of_run
from stillroom.training.step import attempt

SUBJECTS = ("machine", "installation", "configuration", "models", "tokenizers", "data", "real step")  # of the report


def green(evidence: str) -> Finding:
    return found("fine", evidence)


def amber(cause: str, evidence: str, to_try: str) -> Finding:
    return found("warning", evidence, to_try, cause=cause)


def red(cause: str, evidence: str, to_try: str) -> Finding:
    return found("problem", evidence, to_try, cause=cause)


# -- machine ---------------------------------------------------------------------------------------------

LEAST_DISK = LEAST_MEMORY = 1_000_000_000
LEAST_SHARED_MEMORY = 256_000_000  # NCCL takes some ten MB for each pair of GPUs; docker's default is 64 MB
BUSY = 1.5  # waiting processes for each core


@rule("setup", subject="machine", needs_config=False)
def device(setup: Setup) -> Iterator[Finding]:
    machine = setup.machine
    facts = machine.device
    check_device(facts)  # raises for a GPU that torch was not built for
    if facts.kind == "cuda":
        half = "native bf16" if facts.has_native_bf16 else "no native bf16"
        cores = "tensor cores" if facts.has_tensor_cores else "no tensor cores"
        yield green(f"{facts.name} ({facts.architecture}), {half}, {cores}")
        return
    yield green(f"{machine.num_cores} CPU cores, {machine.total_memory / 1e9:.1f} GB of memory")
    why = "" if machine.num_gpus else unused_gpu(machine.driver, machine.torch_cuda)
    if why and not machine.torch_cuda:
        yield amber("cpu_build", why, f"pip install --force-reinstall torch; for a driver before 580: {CU126}")
    elif why:  # a run would be on the CPU, and nobody asked for that
        yield red("driver_too_old", why, f"nvidia-smi shows the CUDA of the driver; for one before 13: {CU126}")


@rule("setup", subject="machine", needs_config=False)
def several_gpus(setup: Setup) -> Iterator[Finding]:
    """GPUs without a direct link exchange gradients through /dev/shm; docker gives it 64 MB."""
    machine = setup.machine
    if machine.num_gpus > 1 and machine.shared_memory is not None and machine.shared_memory < LEAST_SHARED_MEMORY:
        what = (
            f"{machine.num_gpus} GPUs, and /dev/shm has {machine.shared_memory / 1e6:.0f} MB: NCCL may fail to create "
            "its shared memory when several processes train"
        )
        yield amber("small_shared_memory", what, "docker run --shm-size=1g, or NCCL_SHM_DISABLE=1 (slower)")


@rule("setup", subject="machine", needs_config=False)
def room(setup: Setup) -> Iterator[Finding]:
    machine = setup.machine
    if machine.free_disk < LEAST_DISK:
        what = f"{machine.free_disk / 1e9:.2f} GB are free on the disk of {setup.disk_folder}"
        yield red("disk_full", what, "free some space, or give --out a folder on another disk")
    if machine.free_memory < LEAST_MEMORY:
        what = f"{machine.free_memory / 1e9:.2f} GB of memory are free, and torch alone takes half a GB"
        yield red("memory_full", what, "end other programs, or use another machine")


@rule("setup", subject="machine", needs_config=False)
def kernel(setup: Setup) -> Iterator[Finding]:
    asked = setup.config.objectives.kernel if setup.has_config else "auto"
    choice = choose_kernel(asked, setup.device)
    if choice.name != "plain" or asked == "plain":
        yield green(f"rows of the head: {choice.name} kernel")
    elif "differ" in choice.reason:
        yield red("kernel_differs", f"a built kernel is not used: {choice.reason}", "stillroom selftest")
    else:
        to_try = "install g++ (apt install g++)" if setup.device.type == "cpu" else "pip install triton"
        what = f"rows of the head in plain PyTorch, which is slower: {choice.reason}"
        yield amber("plain_kernel", what, to_try)


@rule("setup", subject="machine", needs_config=False)
def threads(setup: Setup) -> Iterator[Finding]:
    machine = setup.machine
    if machine.device.kind != "cpu":
        return
    if machine.num_threads > machine.num_cores:
        what = f"torch has {machine.num_threads} threads on {machine.num_cores} cores: they wait for each other"
        yield amber("too_many_threads", what, f"OMP_NUM_THREADS={machine.num_cores}")
    elif machine.asked_threads and machine.num_threads * 2 <= machine.num_cores:
        what = f"OMP_NUM_THREADS={machine.asked_threads} uses {machine.num_threads} of {machine.num_cores} cores"
        yield amber("idle_cores", what, "unset OMP_NUM_THREADS")
    if machine.load > BUSY * machine.num_cores:
        what = f"{machine.load:.1f} processes want {machine.num_cores} cores: steps will take several times as long"
        to_try = "wait for the others, or end them (top shows them)"
        if os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
            to_try += ", or OMP_WAIT_POLICY=passive"
        yield amber("busy_machine", what, to_try)


# -- installation ----------------------------------------------------------------------------------------

_REQUIREMENT = re.compile(r"^([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)\s*$")
_SHOWN = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


@rule("setup", subject="installation", needs_config=False)
def versions(_setup: Setup) -> Iterator[Finding]:
    try:
        lines = metadata.requires("stillroom") or []
    except metadata.PackageNotFoundError:  # run from its source, not installed
        lines = []
    matches = [match for line in lines if ";" not in line and (match := _REQUIREMENT.match(line))]  # ; begins an extra
    for name, least in (match.groups() for match in matches):
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield red("missing_package", f"{name} is not installed", f"pip install '{name}>={least}'")
            continue
        if _numbers(here) < _numbers(least):
            what = f"{name} {here} is installed, and {least} or later is needed"
            yield red("old_package", what, f"pip install -U '{name}>={least}'")
    yield green(", ".join(f"{name} {metadata.version(name)}" for name in _SHOWN if importlib.util.find_spec(name)))


def _numbers(version: str) -> tuple[int, ...]:
    """A version as numbers: 2.13.0+cpu -> (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


@rule("setup", subject="installation", needs_config=False)
def attention(_setup: Setup) -> Iterator[Finding]:
    """Builds that answer zeros where a query is NaN (pytorch/pytorch 141128): a broken student's loss looks sound."""
    query, rest = torch.full((1, 1, 4, 8), float("nan")), torch.ones(1, 1, 4, 8)
    if not bool(F.scaled_dot_product_attention(query, rest, rest, is_causal=True).isnan().any()):
        what = f"attention of torch {torch.__version__} answers NaN with zeros on this CPU: the guard looks at weights"
        yield green(what)


@rule("setup", subject="installation")
def extras(setup: Setup) -> Iterator[Finding]:
    for role, section in (("teacher", setup.config.teacher), ("student", setup.config.student)):
        try:
            source = find(section.model)
        except StillroomError:
            continue  # told of with the models
        kinds = (("peft", "a LoRA adapter", source.is_adapter), ("gguf", "a GGUF file", source.is_gguf))
        for extra, kind, is_needed in kinds:
            if is_needed and importlib.util.find_spec(extra) is None:
                what = f"the {role} {source.name} is {kind}, and {extra} is not installed"
                yield red("missing_extra", what, f"pip install 'stillroom[{extra}]'")


# -- configuration ---------------------------------------------------------------------------------------


@rule("setup", subject="configuration")
def translated(setup: Setup) -> Iterator[Finding]:
    for note in setup.notes:
        yield green(note)
    for note in unread_notes(setup.config):
        yield amber("unread_setting", note, "leave it out")


@rule("setup", subject="configuration")
def precision(setup: Setup) -> Iterator[Finding]:
    mode, reason = setup.precision
    yield green(f"precision {mode}: {reason}")


@rule("setup", subject="configuration")
def settings(setup: Setup) -> Iterator[Finding]:
    """What the table says of settings. One beyond its bound may be right: amber, unless it is certain to fail."""
    is_red = {rule.name for rule in rules_for("settings") if rule.is_red}
    for finding in judge_settings(setup.settings):
        yield replace(finding, severity="problem" if finding.cause in is_red else "warning")


# -- tokenizers ------------------------------------------------------------------------------------------

MOST_UNKNOWN = 0.01  # of the tokens
LEAST_BYTES = 1.5  # of text in a token; common ones hold 3 to 5


@rule("setup", subject="tokenizers")
def identity(setup: Setup) -> Iterator[Finding]:
    """Raises where teacher and student read text as different tokens."""
    tokenizers = setup.part("tokenizers")
    if len(tokenizers) == 2:
        size = len(tokenizers["student"].get_vocab()) + 1_000_000  # heads are compared where the models are loaded
        agree_on_vocabulary(tokenizers["teacher"], tokenizers["student"], size, size)
        said = f"teacher and student share {len(tokenizers['student'].get_vocab()):,} tokens"
    else:
        said = f"one tokenizer for both, {len(setup.tokenizer.get_vocab()):,} tokens"
    yield green(f"{said} (hash {vocabulary_hash(setup.tokenizer)})")


@rule("setup", subject="tokenizers")
def marks(setup: Setup) -> Iterator[Finding]:
    tokenizer = setup.tokenizer
    if tokenizer.eos_token_id is None:
        what = "the tokenizer has no end-of-text token: the student will not learn where a text ends"
        yield amber("no_end_of_text", what, "set eos_token in tokenizer_config.json of the student")
    elif tokenizer.pad_token_id is None:
        yield green("there is no padding token: rows are padded with another one and not scored")


@rule("setup", subject="tokenizers")
def end_marks(setup: Setup) -> Iterator[Finding]:
    """Answers are printed and ended as the student's tokenizer does, and the teacher must mean the same by that.

    With rollouts an answer that the teacher does not end has no end at all.
    """
    tokenizers = setup.part("tokenizers")
    if len(tokenizers) < 2 or setup.config.objectives.span_weights or not _has_answers(setup):
        return
    is_worse = setup.config.rollouts is not None
    teacher, student = tokenizers["teacher"], tokenizers["student"]
    own, other = ({one.eos_token_id} | turn_end_ids(one) for one in (student, teacher))
    if own != other:
        what = f"the student ends an answer with token {_ids(own)}, the teacher with {_ids(other)}: it " + (
            "would never end one" if is_worse else "teaches not to end where the data ends"
        )
        to_try = "give both the same eos_token and chat template" + (", or leave [rollouts] out" if is_worse else "")
        yield (red if is_worse else amber)("end_marks_differ", what, to_try)
    if student.chat_template != teacher.chat_template and (student.chat_template or teacher.chat_template):
        how = "the chat templates of student and teacher differ"
        if not student.chat_template:
            how = "the teacher has a chat template and the student's tokenizer has none"
        elif not teacher.chat_template:
            how = "the student has a chat template and the teacher's tokenizer has none"
        what = f"{how}: the teacher answers prompts in a form it was not taught"
        to_try = "copy the teacher's chat_template into the student's tokenizer"
        if not teacher.chat_template:
            to_try = "use the instruct model of the teacher's family, or --set data.chat=off for prompts with answers"
        yield (red if is_worse else amber)("templates_differ", what, to_try)


def _has_answers(setup: Setup) -> bool:
    """Whether the run is about answers: chats, prompts with answers, or rollouts."""
    shapes = [shape for shape in setup.part("preview")["shapes"] if not shape.startswith("template: ")]
    return setup.config.rollouts is not None or bool(set(shapes) - {"text", "embedded"})


def _ids(numbers: set[int | None]) -> str:
    return " and ".join(map(str, sorted(number for number in numbers if number is not None))) or "none"


@rule("setup", subject="tokenizers")
def coverage(setup: Setup) -> Iterator[Finding]:
    tokenizer: Any = setup.tokenizer
    ids, size = [], 0
    for row in setup.part("preview")["rows"]:
        text = "".join(piece for piece, _is_scored in row["pieces"])
        size += len(text.encode("utf-8", errors="replace"))
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        return
    mark = tokenizer.unk_token_id
    unknown = sum(index == mark for index in ids) / len(ids) if mark is not None else 0.0
    if unknown > MOST_UNKNOWN:
        what = (
            f"{unknown:.1%} of the tokens of the text are the unknown one, {tokenizer.unk_token}: what it stands for "
            "cannot be learned"
        )
        yield red("unknown_tokens", what, "use models whose tokenizer knows this script, or clean the text")
    held = f"a token holds {size / len(ids):.2f} bytes of this text"
    if size / len(ids) < LEAST_BYTES:
        what = f"{held}, where 3 to 5 are usual: the tokenizer was made for other text"
        to_try = "use models of a family that knows this language, or check that the text is not garbled"
        yield amber("short_tokens", what, to_try)
    else:
        yield green(held)


# -- data; the share that is scored and the passes have the bounds of a finished run -----------------------

MANY_CUT = 0.05  # of the records
MANY_COPIES = 0.25
MUCH_PADDING = 0.6  # of the places of rows that are padded
LEAST_HELD_OUT = 5
FEW_STEPS = 20
_LOST = {
    "empty_answers": "answers are empty and not scored",
    "unscored_turns": "answers are not scored: the chat template does not print them as they stand",
    "turns_not_marked_generated": "answers are not scored: the chat template does not mark them as generated",
    "invalid_utf8": "texts hold half a character (a lone surrogate), which is replaced by U+FFFD",
    "rows_without_targets": "rows are left out: no target in them is scored",
}


@rule("setup", subject="data")
def records(setup: Setup) -> Iterator[Finding]:
    """Raises where the data cannot be read, or too many of its records cannot be used."""
    seen = setup.part("preview")
    shapes = ", ".join(f"{count:,} {shape}" for shape, count in seen["shapes"].items())
    share = seen["scored_share"]
    yield green(f"{seen['documents']:,} documents ({shapes}), {seen['tokens']:,} tokens, {share:.0%} of them scored")
    if seen["bad_records"]:
        first = seen["bad_records"][0]
        count = seen["left_out"].get("bad_records", len(seen["bad_records"]))
        source = setup.config.data.sources[0].path
        yield amber(
            "bad_lines",
            f"{count:,} records cannot be used, the first is {first['where']}: {first['why']}",
            f"fix them; stillroom data {source} --model {setup.config.student.model} lists them",
        )
    if share < FEW_SCORED:
        what = f"{share:.1%} of the tokens are scored: most of the work is spent on text that is not learned"
        yield amber("masked_out_data", what, "--set data.train_on_prompt=true, or shorten the prompts")
    if any("no chat template" in note for note in seen["notes"]):
        yield amber(
            "no_chat_template",
            "the data holds chats, and the tokenizer has no chat template: they are written as 'role: content' lines",
            "put the chat_template of the model's family into tokenizer_config.json of the student",
        )
    for name, said in _LOST.items():
        if count := seen["left_out"].get(name, 0):
            yield amber(name, f"{count:,} {said}", "stillroom data shows what is scored; fix the records")


@rule("setup", subject="data")
def copies(setup: Setup) -> Iterator[Finding]:
    seen = setup.part("preview")
    inside, between = seen["duplicates"]["inside"], seen["duplicates"]["between"]
    if between:
        yield red(
            "leaking_data",
            f"{between:,} held-out records are also in the training data: the student is judged by what it has seen",
            "take them out of one side, or leave data.eval out: copies then fall on one side",
        )
    if inside > MANY_COPIES * max(seen["documents"], 1):
        what = f"{inside:,} of {seen['documents']:,} training records are copies of earlier ones"
        yield amber("many_copies", what, "keep one of each (sort -u on a file of lines)")


@rule("setup", subject="data")
def lengths(setup: Setup) -> Iterator[Finding]:
    seen = setup.part("preview")
    cut, longest = seen["left_out"].get("truncated_records", 0), seen.get("lengths", {}).get("ninth_decile", 0)
    if cut > MANY_CUT * max(seen["documents"], 1):
        yield amber(
            "records_cut",
            f"{cut:,} of {seen['documents']:,} records are longer than data.max_length {seen['max_length']:,}: their "
            "ends are not learned",
            f"--set data.max_length={max(longest, seen['max_length'])}",
        )
    rows = setup.part("corpus").train
    if len(rows) and not getattr(rows, "is_packed", False):
        padding = 1 - float(rows.lengths.mean()) / max(int(rows.lengths.max()), 1)
        if padding > MUCH_PADDING:
            what = f"{padding:.0%} of the places of training rows would be padding if all were as long as the longest"
            yield amber("much_padding", what, "--set data.packing=packed, or --set data.group_by_length=true")


@rule("setup", subject="data")
def steps(setup: Setup) -> Iterator[Finding]:
    """How many steps the data makes, and whether the schedule fits them."""
    corpus, train = setup.part("corpus"), setup.config.train
    rows, held_out = len(corpus.train), len(corpus.evaluation)
    num_batches = -(-rows // train.rows_per_batch)
    num_steps = steps_of_run(num_batches, train.gradient_accumulation_steps, train.epochs, train.max_steps)
    window = train.rows_per_batch * train.gradient_accumulation_steps
    passes = num_steps * window / max(rows, 1)
    yield green(f"{rows:,} training rows: {num_steps:,} steps, {passes:.1f} passes over the data")
    if window > rows:
        what = f"a step takes {window:,} rows, and there are {rows:,}: every step sees all of them"
        to_try = f"--set train.batch_size={max(1, rows // 4)} --set train.gradient_accumulation_steps=1, or more data"
        yield amber("step_of_all_rows", what, to_try)
    if train.max_warmup_share == 1.0 and train.warmup_steps >= num_steps:
        yield red(
            "never_out_of_warmup",
            f"train.warmup_steps {train.warmup_steps:,} is as long as the run of {num_steps:,} optimizer steps: the "
            "learning rate never arrives",
            "--set train.warmup_steps=0 --set train.warmup_ratio=0.1",
        )
    if num_steps < FEW_STEPS:
        what = f"the run has {num_steps} optimizer steps, which teach little"
        yield amber("few_steps", what, "--set train.max_steps=200, or --set train.gradient_accumulation_steps=1")
    if passes > TOO_MANY_PASSES:
        what = f"every row is seen {passes:.0f} times: the student will know this text by heart and little else"
        yield amber("data_exhausted", what, "more data, or --set train.early_stopping=3")
    if held_out < LEAST_HELD_OUT:
        what = f"{held_out} held-out rows judge the student: its results are mostly chance"
        yield amber("few_held_out", what, "--set data.eval_share=0.1, or name held-out data with --eval-data")


# -- models ----------------------------------------------------------------------------------------------


@rule("setup", subject="models")
def files(setup: Setup) -> Iterator[Finding]:
    """Raises for a folder whose weights are not there or not ours to read."""
    config = setup.config
    for role, source in setup.part("sources").items():
        init = config.student.init
        reads_weights = init == "pretrained" or (init == "auto" and source.has_weights)
        if role == "student" and not reads_weights:
            continue
        if role == "teacher" and config.teacher.server:
            continue  # its folder is there for the tokenizer
        if source.is_adapter:
            check_adapter_files(source)
        if source.is_adapter or source.is_gguf:
            continue
        is_here = find(source.name).is_local  # the weights of a hub model are fetched when it is loaded
        names = check_weight_files(source) if is_here else []
        kinds = {kind for name in names for kind in _dtypes(source, name)}
        if role == "teacher" and "BF16" in kinds and teacher_dtype(config.teacher.dtype, setup.device) == torch.float16:
            yield amber(
                "bf16_read_as_fp16",
                f"the teacher {source.name} was saved in bfloat16 and is read in float16, where large activations "
                "overflow",
                "--set teacher.dtype=float32, or --set teacher.dtype=bfloat16",
            )


def _dtypes(source: Source, name: str) -> set[str]:
    try:
        with safe_open(source.folder / name, framework="pt") as tensors:
            return {str(tensors.get_slice(key).get_dtype()) for key in tensors.keys()}  # noqa: SIM118 - not a dict
    except Exception as error:  # safetensors raises its own class, and OSError
        raise BrokenAtStart(
            f"{source.folder / name} is damaged: {error}", advice=["copy or download the file again"]
        ) from error


@rule("setup", subject="models")
def tried(setup: Setup) -> Iterator[Finding]:
    """Load both and run each on a few tokens; raises for one that is not finite, not causal or too small."""
    models: Models = setup.part("models")
    guard = setup.config.guard
    if models.source.is_student:
        kinds = {"self": "the student without its adapter", "ema": "an average of the student's weights"}
        yield green(f"teacher: {kinds[setup.config.teacher.model]}, no other model is loaded")
    for role, loaded in (("teacher", models.loaded_teacher), ("student", models.loaded_student)):
        if loaded is None:
            continue
        facts = loaded.anatomy
        size = f"{facts.num_parameters:,} parameters, {facts.num_layers} layers, {facts.vocab_rows:,} tokens"
        yield green(f"{role}: {type(loaded.network).__name__}, {size}")
        if not loaded.is_described:
            what = f"the {role}'s head is none that can be described: its own logits are kept, [tokens, vocabulary]"
            to_try = "--set train.batch_size=1 if memory runs out, or a model of a common family"
            yield amber("head_not_described", what, to_try)
        limit, asked = num_positions(loaded.network), setup.config.data.max_length
        if limit is not None and asked > limit:
            what = f"data.max_length {asked:,} is more than the {limit:,} positions of the {role}"
            yield red("rows_too_long", what, f"--set data.max_length={limit}")
    yield from _gates(setup, models)
    for note in Clamps(guard.logit_clamp, guard.loss_clamp).check(models.vocab_size):
        yield amber("clamped", note, "--set guard.logit_clamp=0 --set guard.loss_clamp=0")
    if models.loaded_teacher is not None:
        large, small = (one.anatomy.num_parameters for one in (models.loaded_teacher, models.loaded_student))
        if small > large:
            what = (
                f"the student has {small:,} parameters and the teacher {large:,}: the larger one learns from the "
                "smaller"
            )
            yield amber("student_is_larger", what, "exchange --teacher and --student, if that is not meant")


LEAST_END = 1e-3  # probability of the end mark where an answer really ends
_ENDS_TRIED = 16


@rule("setup", subject="models")
def teacher_ends(setup: Setup) -> Iterator[Finding]:
    """The teacher must end answers with the student's end mark, or the student learns not to."""
    if setup.config.objectives.span_weights or not _has_answers(setup):
        return
    models: Models = setup.part("models")
    corpus = setup.part("corpus")
    if models.teacher is None:
        return
    marks = {setup.tokenizer.eos_token_id} | turn_end_ids(setup.tokenizer)
    probs = _end_probabilities(models.teacher, corpus.train, marks)
    if not probs:
        return
    middle = statistics.median(probs)
    if middle < LEAST_END:
        is_worse = setup.config.rollouts is not None
        what = f"where answers of the data end, the teacher gives the end mark {middle:.2g}: " + (
            "rollouts would not end" if is_worse else "the student learns not to end there"
        )
        to_try = "use the teacher that the data's template is made for, or its own template"
        yield (red if is_worse else amber)("teacher_does_not_end", what, to_try)
    else:
        yield green(f"the teacher gives the end mark {middle:.2g} where answers of the data end")


@torch.no_grad()
def _end_probabilities(network: Any, rows: Rows, marks: set[int | None]) -> list[float]:
    """What a network gives the end of some answers that end."""
    found: list[float] = []
    device = next(network.parameters()).device
    for index in range(len(rows)):
        if len(found) == _ENDS_TRIED:
            break
        prompt, answer = rows.question(index)
        if len(answer) > 1 and prompt and answer[-1] in marks:
            ids = torch.tensor([[*prompt, *answer[:-1]]], device=device)
            probs = torch.softmax(network(input_ids=ids, use_cache=False).logits[0, -1].float(), -1)
            found.append(float(probs[answer[-1]]))
    return found


def _gates(setup: Setup, models: Models) -> Iterator[Finding]:
    router = setup.config.teacher.router
    if models.teacher is None:
        return
    try:
        gates = find_gates(models.teacher, router.patterns)
    except StillroomError:
        if router.mode != "frozen":
            raise
        return  # a dense teacher
    yield green(f"gates of the teacher: {describe(gates)}; teacher.router.mode is {router.mode}")


@rule("setup", subject="models")
def memory(setup: Setup) -> Iterator[Finding]:
    """Compare the model of memory, which `plan` prints, with the machine."""
    config, machine = setup.config, setup.machine
    shapes = Shapes(Target(setup.device, machine.device, machine.free_device_memory, machine.free_memory))
    layout = lay_out(config, shapes, chosen_mode(config, shapes)[0])
    needed, free = layout.total, machine.free_device_memory
    room = f"{free / 1e9:.2f} GB that are free on {machine.device.name}"
    what = f"the run takes {needed / 1e9:.2f} GB of {room} ({layout.moment})"
    severity: Severity = "problem" if needed > free else "warning" if needed > AIM * free else "fine"
    what += ": predictions are off by a few per cent" if severity == "warning" else ""
    to_try = "stillroom plan says what makes it fit" if severity != "fine" else ""
    yield found(severity, what, to_try, cause="memory_short", needed_bytes=needed)
    on_disk = sum(layout.disk.values())
    if on_disk > machine.free_disk:
        what = (
            f"checkpoints take {on_disk / 1e9:.1f} GB, and {machine.free_disk / 1e9:.1f} GB are free on the disk of "
            f"{setup.disk_folder}"
        )
        yield red("disk_short", what, "--set checkpoint.keep=1, or give --out a folder on another disk")


# -- one real step in its precision, compared with the same step in FP32 -----------------------------------

# What the loss and the gradient of a step may differ from FP32's: FP16 and BF16 products carry 11 and 8 bits.
LOSS_APART = {"bf16-mixed": 3e-2}
HALF_LOSS_APART, GRADIENT_APART = 1e-2, 0.2
LOSS_FAR, GRADIENT_FAR = 0.1, 0.5
LARGE_NORM = 1e4


@dataclass(frozen=True)
class Taken:
    """What a step came to."""

    mode: str
    loss: float
    norm: float
    gradient: Tensor
    bad_teacher_rows: int


@rule("setup", subject="real step", is_slow=True)
def real_step(setup: Setup) -> Iterator[Finding]:
    setup.part("models")
    setup.part("corpus")
    own = take(setup.config, setup.device)
    if not (math.isfinite(own.loss) and math.isfinite(own.norm)):
        what = f"in {own.mode} the loss of the first step is {own.loss:g} and its gradient norm {own.norm:g}"
        yield red("step_not_finite", what, _wider(own.mode, setup))
    if own.bad_teacher_rows:
        what = f"the teacher's answer is not a distribution at {own.bad_teacher_rows:,} positions of the first batch"
        yield red("teacher_degraded", what, _wider("fp32", setup))
    if own.norm == 0.0:
        yield red(
            "zero_gradients",
            "the gradient of the first step is zero: nothing will be learned",
            "--set guard.loss_clamp=0 --set guard.logit_clamp=0, and check the weights of the objectives",
        )
    if own.mode == "fp32":
        yield green(f"fp32: loss {own.loss:.6g}, gradient norm {own.norm:.4g}")
    else:
        in_fp32 = setup.config.precision.model_copy(update={"mode": "fp32"})
        yield _compared(own, take(setup.config.model_copy(update={"precision": in_fp32}), setup.device))
    if own.norm > LARGE_NORM:
        yield amber(
            "large_gradient",
            f"the gradient norm of the first step is {own.norm:.3g}, and steps are clipped to "
            f"{setup.config.train.max_grad_norm:g}",
            "check that student and data belong together, or lower the weights of the objectives",
        )


def _wider(mode: str, setup: Setup) -> str:
    """Which of both models can be computed in more digits."""
    tries = [] if mode == "fp32" else ["--set precision.mode=fp32"]
    is_whole = teacher_dtype(setup.config.teacher.dtype, setup.device) == torch.float32
    tries += [] if is_whole or not setup.uses_teacher else ["--set teacher.dtype=float32"]
    return ", and ".join(tries) or "check the models' folders: both are computed in FP32"


def _compared(own: Taken, exact: Taken) -> Finding:
    gap = abs(own.loss - exact.loss) / max(abs(exact.loss), 1e-12)
    apart = float((own.gradient - exact.gradient).norm() / exact.gradient.norm().clamp_min(1e-300))
    what = (
        f"{own.mode} against fp32: loss {own.loss:.6g} and {exact.loss:.6g}, apart by {gap:.1e} of it; gradients apart "
        f"by {apart:.1e} of their norm"
    )
    if gap <= LOSS_APART.get(own.mode, HALF_LOSS_APART) and apart <= GRADIENT_APART:
        return found("fine", what, loss_apart=gap, gradient_apart=apart)
    is_far = not math.isfinite(gap + apart) or gap > LOSS_FAR or apart > GRADIENT_FAR
    return (red if is_far else amber)("step_far_from_fp32", what, "--set precision.mode=fp32, or fp16-mixed")


def take(config: Config, device: torch.device) -> Taken:
    """Build the run again and attempt its first step; nothing is applied, and nothing is left on the disk."""
    short = config.model_copy(update={"train": config.train.model_copy(update={"compile": "off"})})
    with tempfile.TemporaryDirectory(prefix="stillroom-doctor-") as name, EventLog(Path(name) / "events.jsonl") as log:
        run = build_run(short, Path(name), log, device=device, models=load_models(short, device))
        state = RunState()
        first_forward(run, state)
        find_loss_scale(run, state)
        run.student.train()
        evidence, _lesson = attempt(run, state, run.loader.first_window())
        parts = [gradient.double().flatten().cpu() for _name, gradient in run.optimizer.named_gradients()]
        gradient = torch.cat(parts) / run.precision.loss_scale if parts else torch.zeros(1, dtype=torch.float64)
        return Taken(run.precision.mode, evidence.loss, evidence.grad_norm, gradient, evidence.bad_teacher_rows)
