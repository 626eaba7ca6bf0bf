"""Laws of ONNX files: run by onnxruntime they give the logits of the model, for any number and length of rows."""

from __future__ import annotations

from pathlib import Path

import begun
import families
import pytest
import torch
from refusals import refused

from stillroom.core.errors import ConfigError
from stillroom.export import onnx as module
from stillroom.export.folder import export


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_an_onnx_file_gives_the_logits_of_the_model(family: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = families.build(family)
    model.save_pretrained(tmp_path / "model")
    begun.byte_tokenizer().save_pretrained(tmp_path / "model")
    done = export(str(tmp_path / "model"), tmp_path / "out", format="onnx")
    assert done.largest < 1e-3 and done.form == "float32"
    session = runtime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    ids = torch.arange(3, 36).reshape(3, 11)
    with torch.no_grad():
        wanted = model(ids).logits
    given = torch.from_numpy(session.run(None, {"input_ids": ids.numpy()})[0])
    assert given.shape == wanted.shape and torch.allclose(given, wanted, atol=1e-3)


def test_what_the_exporter_cannot_follow_is_refused_in_a_line() -> None:
    with refused(ConfigError, "--format onnx", "the reason") as caught, module._explained("odd"):
        raise torch.onnx.errors.OnnxExporterError("page one") from ValueError("first\nthe reason\n")
    assert caught.value.advice


def test_half_precision_is_not_written_as_onnx(tmp_path: Path) -> None:
    with refused(ConfigError, "--dtype"):
        export("builtin:teacher", tmp_path / "out", format="onnx", form="float16")
