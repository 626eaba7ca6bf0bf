"""The machine: device, memory, disk, the compiler of the row kernel, load and threads."""

from __future__ import annotations

from collections.abc import Iterator

from stillroom.checks.doctor.facts import Machine
from stillroom.checks.doctor.finding import Finding, check
from stillroom.checks.doctor.setup import Setup
from stillroom.objectives.head.kernel import choose_kernel
from stillroom.precision.device import check_device

SUBJECT = "machine"
_LEAST_DISK = 1_000_000_000
_LEAST_MEMORY = 1_000_000_000
_BUSY = 1.5  # waiting processes for each core


@check(SUBJECT, needs_config=False)
def device(setup: Setup) -> Iterator[Finding]:
    machine = setup.machine
    facts = machine.device
    check_device(facts)  # raises for a card that torch was not built for
    if facts.kind == "cuda":
        half = "native bf16" if facts.has_native_bf16 else "no native bf16"
        cores = "tensor cores" if facts.has_tensor_cores else "no tensor cores"
        yield Finding("green", SUBJECT, f"{facts.name} ({facts.architecture}), {half}, {cores}")
        return
    yield Finding("green", SUBJECT, f"{machine.num_cores} CPU cores, {machine.total_memory / 1e9:.1f} GB of memory")
    if machine.driver and not machine.torch_cuda:
        yield Finding(
            "amber",
            SUBJECT,
            "there is the driver of an NVIDIA card, and this torch is built for CPUs alone",
            "pip install torch --index-url https://download.pytorch.org/whl/cu126",
        )


@check(SUBJECT, needs_config=False)
def room(setup: Setup) -> Iterator[Finding]:
    machine = setup.machine
    if machine.free_disk < _LEAST_DISK:
        yield Finding(
            "red",
            SUBJECT,
            f"{machine.free_disk / 1e9:.2f} GB are free on the disk of {setup.disk_folder}",
            "free some space, or give --out a folder on another disk",
        )
    if machine.free_memory < _LEAST_MEMORY:
        yield Finding(
            "red",
            SUBJECT,
            f"{machine.free_memory / 1e9:.2f} GB of memory are free, and torch alone takes half a GB",
            "end other programs, or use another machine",
        )


@check(SUBJECT, needs_config=False)
def kernel(setup: Setup) -> Iterator[Finding]:
    asked = setup.config.objectives.kernel if setup.has_config else "auto"
    choice = choose_kernel(asked, setup.device)
    if choice.name != "plain" or asked == "plain":
        yield Finding("green", SUBJECT, f"rows of the head: {choice.name} kernel")
    elif "differ" in choice.reason:
        yield Finding("red", SUBJECT, f"a built kernel is not used: {choice.reason}", "stillroom selftest")
    else:
        to_try = "install g++ (apt install g++)" if setup.device.type == "cpu" else "pip install triton"
        yield Finding("amber", SUBJECT, f"rows of the head in plain PyTorch, which is slower: {choice.reason}", to_try)


@check(SUBJECT, needs_config=False)
def threads(setup: Setup) -> Iterator[Finding]:
    machine = setup.machine
    if machine.device.kind != "cpu":
        return
    if machine.num_threads > machine.num_cores:
        yield Finding(
            "amber",
            SUBJECT,
            f"torch has {machine.num_threads} threads on {machine.num_cores} cores: they wait for each other",
            f"OMP_NUM_THREADS={machine.num_cores}",
        )
    elif machine.asked_threads and machine.num_threads * 2 <= machine.num_cores:
        yield Finding(
            "amber",
            SUBJECT,
            f"OMP_NUM_THREADS={machine.asked_threads} uses {machine.num_threads} of {machine.num_cores} cores",
            "unset OMP_NUM_THREADS",
        )
    yield from _load(machine)


def _load(machine: Machine) -> Iterator[Finding]:
    if machine.load > _BUSY * machine.num_cores:
        yield Finding(
            "amber",
            SUBJECT,
            f"{machine.load:.1f} processes want {machine.num_cores} cores: steps will take several times as long",
            "wait for the others (top shows them), or OMP_WAIT_POLICY=passive",
        )
