"""The benchmark's cache: the model, the texts, what the teacher wrote, and the folders of the runs."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from arms import SHARED, WRITE, WRITE_ROWS, Arm, Scale
from model_file import find_model
from text_files import Texts, write_held_out, write_texts

from stillroom.config import Config, load_config
from stillroom.config.schema import TeacherConfig
from stillroom.models import load_tokenizer, open_teacher
from stillroom.training.write import write_text

Record = dict[str, Any]
PARTS = 1_000  # of a kind of written text, at most


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one process at a time make what a path names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def unpack(file: Path, folder: Path) -> None:
    """Write the GGUF file as a folder, once: reading it takes half a minute, and every arm would again."""
    with alone(folder):
        if folder.exists():
            return
        loaded = open_teacher(TeacherConfig(model=str(file)), torch.float32)
        partial = folder.with_name(f"{folder.name}.partial")
        loaded.network.save_pretrained(partial)
        loaded.tokenizer.save_pretrained(partial)
        partial.rename(folder)


@dataclass(frozen=True)
class Place:
    folder: Path
    scale: Scale

    @property
    def work(self) -> Path:
        """Runs and what is made of them; model and texts are shared by all scales."""
        return self.folder / self.scale.name

    @cached_property
    def file(self) -> Path:
        """The GGUF file."""
        with alone(self.folder / "model"):
            return find_model(self.folder)

    @cached_property
    def model(self) -> Path:
        """The folder that was written from it."""
        folder = self.folder / "teacher"
        if not folder.exists():
            unpack(self.file, folder)
        return folder

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(TeacherConfig(model=str(self.model)), str(self.model))

    @cached_property
    def texts(self) -> Texts:
        folder, scale = self.folder / "texts", self.scale
        dev_tokens = 2 * scale.dev_batches * SHARED["train.batch_size"] * SHARED["data.max_length"]
        with alone(folder):
            return write_texts(folder, self.tokenizer, docs_tokens=scale.docs_tokens, dev_tokens=dev_tokens)

    def held_out(self) -> dict[str, Path]:
        """The files that are reported on: for the judge."""
        folder = self.folder / "held_out"
        with alone(folder):
            return write_held_out(folder, self.tokenizer, dict(self.scale.held_out_tokens))

    # -- what the teacher writes -------------------------------------------------------------------------

    def written(self, kind: str) -> Path:
        """What the teacher wrote. A cache of another machine than the results has none yet: it is written again."""
        path = self._written(kind)
        if not path.exists():
            self.write(kind)
        return path

    def _written(self, kind: str) -> Path:
        return self.folder / "texts" / f"written-{kind}-{self.scale.written_tokens[kind]}.jsonl"

    def write(self, kind: str) -> Record:
        """Let the teacher write parts until there are enough tokens, then join them. Continues what was begun."""
        with alone(self._written(kind)):
            return self._write(kind)

    def _write(self, kind: str) -> Record:
        wanted, parts, done = self.scale.written_tokens[kind], list[Path](), list[Record]()
        for number in range(PARTS):
            if sum(about["tokens"] for about in done) >= wanted:
                break
            parts.append(self.folder / "written" / f"{kind}-{number:03}.jsonl")
            done.append(self._write_part(kind, number, parts[-1]))
        out = self._written(kind)
        lines = [json.loads(line) for part in parts for line in part.read_text(encoding="utf-8").splitlines()]
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_suffix(".partial")
        partial.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        partial.replace(out)
        read = sum(len(line["prompt_ids"]) for line in lines)
        return {
            "kind": kind, "tokens": sum(about["tokens"] for about in done), "prompt_tokens": read, "rows": len(lines),
            "cpu_seconds": round(sum(about["cpu_seconds"] for about in done), 1),
            "settings": WRITE[kind], "examples": [line.get("messages") or line["prompt"] + line["completion"]
                                                  for line in lines[:3]],
        }  # fmt: skip

    def _write_part(self, kind: str, number: int, out: Path) -> Record:
        """One part, and the CPU seconds that it took over all starts."""
        about = out.with_suffix(".json")
        if about.exists():
            return dict(json.loads(about.read_text(encoding="utf-8")))
        clock = out.with_suffix(".clock")
        before = float(clock.read_text()) if clock.exists() else 0.0
        began = time.process_time()

        def tick(_known: Mapping[str, Any]) -> None:
            clock.write_text(str(before + time.process_time() - began))

        settings: Record = {"write.seed": number, "write.max_prompts": WRITE_ROWS, "write.batch_size": WRITE_ROWS}
        if kind == "plain":
            settings["write.prompts"] = str(self._starts(number))
        config = {"teacher.model": str(self.model), "teacher.dtype": "float32", **WRITE[kind], **settings}
        out.parent.mkdir(parents=True, exist_ok=True)
        made = write_text(load_config(overrides=config), out, device="cpu", on_progress=tick)
        tick({})
        found = {"tokens": made["tokens"], "rows": made["rows"], "cpu_seconds": float(clock.read_text())}
        about.write_text(json.dumps(found), encoding="utf-8")
        print(f"{out.name}: {found['tokens']:,} tokens, {found['cpu_seconds']:.0f} CPU seconds", flush=True)
        return found

    def _starts(self, number: int) -> Path:
        """The paragraphs that a part begins with; none serves twice."""
        path = self.folder / "written" / f"starts-{number:03}.jsonl"
        lines = self.texts.starts.read_text(encoding="utf-8").splitlines()
        chosen = lines[number * WRITE_ROWS : (number + 1) * WRITE_ROWS]
        if not chosen:
            raise SystemExit(f"there are no more than {len(lines):,} paragraphs to begin with: ask for fewer tokens")
        path.write_text("\n".join(chosen) + "\n", encoding="utf-8")
        return path

    # -- configurations ----------------------------------------------------------------------------------

    def config(self, arm: Arm, **over: Any) -> Config:
        """The configuration of a run of an arm."""
        docs = [self.texts.docs] if arm.text != "written" else []
        written = [self.written(kind) for kind in self.scale.written_tokens] if arm.text != "docs" else []
        given: Record = {
            "teacher.model": str(self.model),
            "data.train": [{"path": str(path)} for path in (*docs, *written)],
            "data.eval": str(self.texts.dev),
            "eval.max_batches": self.scale.dev_batches,
            "checkpoint.keep": 1,
            "checkpoint.background": "off",  # a thread that saves would be counted in the steps
        }
        if any(name.startswith("rollouts.") for name in arm.settings):
            given["rollouts.prompts"] = str(self.written("chat"))
        shared = {name: value for name, value in SHARED.items() if not (arm.base and name.startswith("student."))}
        return load_config(overrides={**given, **shared, **arm.settings, **over})
