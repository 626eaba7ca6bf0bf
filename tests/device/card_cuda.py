"""The card as `cuda:0` on a torch without CUDA. `load_guard` before torch is imported, then `install`.

torch asks a library for the guard of a device before autograd touches a tensor of it; `guard.cpp` is one that does
nothing, and needs a compiler once.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from collections import namedtuple
from pathlib import Path
from typing import Any

COMPILER = shutil.which("g++") or shutil.which("c++")
ARCHITECTURES = ("sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
_Properties = namedtuple("_Properties", "total_memory major minor name multi_processor_count")


def build_guard(library: Path) -> None:
    """Compile the guard against the installed torch."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None and COMPILER is not None
    root = Path(found.origin).parent
    words = [COMPILER, "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{root}/include", f"-L{root}/lib"]
    words += [str(Path(__file__).with_name("guard.cpp")), "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib"]
    subprocess.run([*words, "-o", str(library)], check=True)


def load_guard(library: Path) -> None:
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def install(capability: tuple[int, int], memory: int = 16 * 10**9) -> None:
    """`cuda:0` with a capability and a size, and the functions of `torch.cuda` that the product calls."""
    import card
    import card_patches
    import torch

    name = f"emulated card of main memory, sm_{capability[0]}{capability[1]}"
    ledger, cuda = card.LEDGER, torch.cuda
    card_patches.install(torch.device("cuda:0"))

    def seed(number: int) -> None:
        card.Card.random = torch.Generator().manual_seed(number).get_state()

    def set_state(state: Any, _device: Any = None) -> None:
        if isinstance(state, card.OnCard) or state.dtype != torch.uint8:
            raise TypeError("RNG state must be a torch.ByteTensor")
        card.Card.random = state.clone()

    def reset_peak(_device: Any = None) -> None:
        ledger.peak = ledger.live

    properties = _Properties(memory, *capability, name, 40)
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "is_initialized": True,
        "get_device_capability": capability,
        "get_device_name": name,
        "get_device_properties": properties,
        "get_arch_list": list(ARCHITECTURES),
        "_is_in_bad_fork": False,
        "_lazy_init": None,
        "init": None,
        "empty_cache": None,
        "set_device": None,
    }
    for function, answer in answers.items():
        setattr(cuda, function, lambda *_args, _answer=answer, **_options: _answer)
    cuda.memory_allocated = lambda _device=None: ledger.live
    cuda.memory_reserved = lambda _device=None: ledger.live
    cuda.max_memory_reserved = lambda _device=None: ledger.peak
    cuda.max_memory_allocated = lambda _device=None: ledger.peak
    cuda.reset_peak_memory_stats = reset_peak
    cuda.mem_get_info = lambda _device=None: (memory - ledger.live, memory)
    cuda.synchronize = lambda _device=None: ledger.reads.append(f"synchronize at {card.place()}")
    cuda.manual_seed = cuda.manual_seed_all = seed
    cuda.get_rng_state = lambda _device=None: card.Card.random.clone()
    cuda.set_rng_state = set_state
