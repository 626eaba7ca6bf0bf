"""Laws of what other libraries log: nothing while they are imported for us, everything afterwards."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from process_jobs import environment

NOISY = """
import logging
for name in ("torchao", "torch.utils._pytree", "another"):
    logging.getLogger(name).warning("%s warns", name)
logging.getLogger("torchao").error("torchao fails")
"""


def test_what_torchao_logs_while_it_is_imported_is_dropped_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "torchao.py").write_text(NOISY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchao", raising=False)
    import torchao  # noqa: F401

    import stillroom  # noqa: F401

    assert caplog.messages == ["another warns", "torchao fails"]
    logging.getLogger("torchao").warning("of a user's own")
    assert caplog.messages[2:] == ["of a user's own"]


def test_the_python_api_imports_models_in_silence(tmp_path: Path) -> None:
    """As a notebook does: what is on stderr there is red."""
    code = "import stillroom; stillroom.distill; import stillroom.models.load, transformers.modeling_utils, torchao"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment()
    )
    assert done.returncode == 0 and done.stderr == ""
