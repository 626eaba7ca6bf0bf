"""llama.cpp's own server in a process of its own, where xllamacpp is installed: not a dependency.

python tests/support/real_llama.py MODEL.gguf PORT SLOTS CONTEXT EXACT
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IS_HERE = importlib.util.find_spec("xllamacpp") is not None
REASON = "xllamacpp, which brings llama.cpp's server, is not installed"
_START_SECONDS = 60.0


@contextmanager
def serving_file(
    file: Path, *, num_slots: int = 2, context: int = 1024, is_exact: bool = True, port: int = 0
) -> Iterator[str]:
    """The address of a server of this GGUF file while the body runs. `context` is that of all slots together.

    `is_exact`: keys and values in F32 and no flash attention, which computes in halves.
    """
    port = port or _free_port()
    command = [sys.executable, __file__, str(file), str(port), str(num_slots), str(context), str(int(is_exact))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as here:
        here.bind(("127.0.0.1", 0))
        return int(here.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"llama.cpp's server did not start: {process.poll()}")


def _serve(file: str, port: int, num_slots: int, context: int, is_exact: bool) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = file, {Path(file).parent.name}
    params.hostnames, params.port = ["127.0.0.1"], port
    params.n_parallel, params.n_ctx = num_slots, context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_ram_mib = 0  # prompts of finished rows are not kept
    params.warmup = False
    if is_exact:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    assert server.listening_address
    threading.Event().wait()


if __name__ == "__main__":
    _serve(sys.argv[1], *(int(word) for word in sys.argv[2:5]), bool(int(sys.argv[5])))
