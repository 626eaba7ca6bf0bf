"""A run on a server that speaks S3 (moto): begun, killed, gone on with elsewhere and read by the commands."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cache_cases as cases
import pytest
import tiny
from commands import output
from commands import run as command

from stillroom.config import load_config
from stillroom.core.errors import ConfigError
from stillroom.core.remote import Owner, Store
from stillroom.teachers.cache.in_store import folder_of
from stillroom.teachers.cache.reader import Cache
from stillroom.teachers.cache.writer import open_store, write_missing
from stillroom.training.distill import distill
from stillroom.training.run_folder import opened

moto = pytest.importorskip("moto.server")
pytest.importorskip("s3fs")

SETTINGS = {
    "train__max_steps": 6,
    "train__eval_steps": 3,
    "train__save_steps": 2,
    "eval__samples": 0,
    "checkpoint__background": "off",
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A bucket of this test's own."""
    import boto3

    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    name = f"b{abs(hash(str(tmp_path)))}"
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}"


def test_a_run_is_killed_here_and_finished_elsewhere_and_read_by_the_commands(
    world: Path, tmp_path: Path, bucket: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bucket}/runs/one"
    config = load_config(overrides=tiny.settings(world, **SETTINGS))

    def killed() -> None:
        with opened(url) as place:
            assert place.sender is not None
            sender = place.sender

            def wait(event: dict[str, Any]) -> None:
                if event["event"] == "step":
                    sender.wait()

            distill(config, url, device="cpu", inject="kill_before_rename@6", listeners=(wait,))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    assert tiny.in_child(killed) == -9
    there = Store(url)
    held = [name for name in there.entries() if name.endswith("/manifest.json")]
    assert held == ["checkpoints/step-000002/manifest.json", "checkpoints/step-000004/manifest.json"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    summary = json.loads(output(capsys, "resume", url, "--device", "cpu", "--json"))
    assert summary["folder"] == url and summary["steps"] == 6
    whole = distill(config, tmp_path / "whole", device="cpu").folder
    assert there.read("student/model.safetensors") == (whole / "student" / "model.safetensors").read_bytes()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "reader"))
    assert output(capsys, "report", url).strip() == f"{url}/report.html" and there.size("report.html")
    assert "one" in output(capsys, "diagnose", url)
    assert not list((tmp_path / "reader").rglob("*.safetensors")), "a record is read without its weights"
    assert output(capsys, "compare", url, str(whole))
    data = str(world / "train.jsonl")
    output(capsys, "eval", url, "--data", data, "--device", "cpu", "--max-batches", "1")
    assert there.size("eval.json"), "the figures are kept beside the run"
    assert "still" in output(capsys, "generate", url, "--prompt", "the still", "--max-new-tokens", "2")
    output(capsys, "export", url, "--out", str(tmp_path / "exported"), "--data", data)
    assert (tmp_path / "exported" / "model.safetensors").exists()
    there.write("student/model.safetensors", b"of another commit")
    code, _out, err = command(capsys, "generate", url, "--prompt", "the still")
    assert code == 2 and "model.safetensors" in err


def test_one_process_owns_an_address_by_a_conditional_put(bucket: str) -> None:
    store = Store(f"{bucket}/owned")
    owner = Owner(store).take()
    assert owner.is_exclusive, "the server answers 412 to If-None-Match"
    with pytest.raises(ConfigError):
        Owner(store).take()
    owner.check()
    owner.release()
    assert store.entries() == {}


def test_a_bucket_that_is_not_there_is_named_before_anything_is_loaded(
    bucket: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = load_config(overrides=tiny.settings(world, **SETTINGS))
    with pytest.raises(ConfigError):
        distill(config, "s3://no-such-bucket/run", device="cpu")


def test_a_cache_is_written_to_s3_and_read_from_it_shard_by_shard(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, url = cases.rows_of([5, 9, 14, 20, 25, 31]), f"{bucket}/caches/a"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "writer"))
    place = folder_of(url)
    open_store(place, cases.manifest())
    assert write_missing(place, cases.needed(rows), cases.Matrices())
    assert not [name for name in Store(url).entries() if name.startswith(".")], "no claim is left"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "reader"))
    read, sound = Cache(folder_of(url)), cases.write(tmp_path / "sound", rows)
    keys = [row.key for row in cases.needed(rows)]
    assert read.has(keys).all() and cases.same(read.answer(keys[0]), sound.answer(keys[0]))
    heads = [path for path in (read.folder / ".notes").iterdir() if path.read_text().startswith("head")]
    assert len(heads) == len(read.shards) - 1 > 0, "one shard was brought"
    assert not list(read.faults())
