"""Publish a run's student, or a model's folder, on the Hugging Face Hub: all files in one commit, with a model card."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from safetensors import SafetensorError, safe_open

from stillroom.core.errors import BrokenAtStart, CannotSave, ConfigError
from stillroom.core.files import TEMPORARY, FileSum, is_hidden, reason_of, sum_of_bytes, sum_of_file
from stillroom.core.hub import Contents, Repository
from stillroom.export.card import model_card
from stillroom.export.folder import read_table, run_records
from stillroom.models.load import model_name, run_of
from stillroom.telemetry.wording import section
from stillroom.training.finish import FINISHED

CARD = "README.md"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json")
_KINDS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Parcel:
    """What will be sent, and to where."""

    repository: Repository
    files: Mapping[str, tuple[Contents, FileSum]]
    removes: tuple[str, ...]  # weights of an earlier model there, which loaders might take for these
    is_new: bool
    is_private: bool | None  # None: as the account has it for new repositories
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(known.bytes for _contents, known in self.files.values())

    def send(self) -> str:
        """Send it as one commit. Return the commit."""
        if self.is_new:
            self.repository.create(private=self.is_private)
        has_bars = sys.stderr is not None and sys.stderr.isatty()
        try:
            return self.repository.send(self.files, "Stillroom: model", remove=self.removes, has_bars=has_bars)
        except CannotSave as error:
            retry = "give the same command again: a commit is whole or not there, and what arrived is not sent twice"
            raise CannotSave(error.what, where=error.where, advice=[*error.advice, retry]) from error


def pack(name: str, to: str, *, private: bool = False, gguf: Iterable[Path] = (), anyway: bool = False) -> Parcel:
    """Collect what `push` sends. Raise for what must not go; nothing is changed on the Hub.

    `name` is the folder or address of a run or a model; `gguf` are files to go with it. `anyway`: send the best student
    so far of a run that has not finished.
    """
    repository = Repository(to)
    folder, run = Path(model_name(name)).expanduser(), run_of(name)
    if not folder.is_dir():
        raise ConfigError(
            f"{name} is not a folder", advice=["give the folder of a run or a model; a GGUF file goes with --gguf FILE"]
        )
    if run is not None and not anyway:
        _refuse_unfinished(run, name)
    paths, notes = _collect(folder)
    for path in gguf:
        _refuse_other(path)
        if path.name in paths:
            raise ConfigError(f"{path.name} is in {folder}, too", where="--gguf", advice=["rename one of them"])
        paths[path.name] = path
    if not any(fnmatchcase(one, "*.safetensors") or one.endswith(".gguf") for one in paths):
        raise BrokenAtStart(f"{folder} holds no weights", advice=["give a folder with *.safetensors or *.gguf files"])
    try:
        files: dict[str, tuple[Contents, FileSum]] = {one: (path, sum_of_file(path)) for one, path in paths.items()}
        if CARD not in files:
            card = _card(to.partition("/")[2], folder, run, paths).encode("utf-8")
            files[CARD] = (card, sum_of_bytes(card))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {reason_of(error)}") from error
    repository.check_token()
    info = repository.info()
    if private and info is not None and not info.private:
        raise ConfigError(
            f"{to} is there and public",
            where="--private",
            advice=["make it private in its settings on the Hub, or choose another name with --to"],
        )
    there = repository.files(str(info.sha)) if info is not None and info.sha else {}
    has_weights = any(fnmatchcase(one, "*.safetensors") for one in files)
    removes = [one for one in there if has_weights and one not in files and _is_weights(one)]
    is_private = bool(info.private) if info is not None else (True if private else None)
    return Parcel(repository, files, tuple(removes), info is None, is_private, tuple(notes))


def _refuse_unfinished(run: Path, name: str) -> None:
    status = read_table(run / "summary.json").get("status")
    if status not in FINISHED:
        raise ConfigError(
            f"the run in {name} has not finished: {status or 'it has no summary'}",
            advice=[f"finish it: stillroom resume {name}", "or send the best student so far: --anyway"],
        )


def _collect(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """(the files below a folder by their names in the repository, notes on what is left out)."""
    paths, hidden, root = {}, [], folder.resolve()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if is_hidden(name) or path.name.startswith(TEMPORARY):
            hidden += [name] if path.is_file() else []
            continue
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise ConfigError(
                f"{name} in {folder} is a link to {path.resolve()}, outside of the folder",
                advice=["replace it by a copy of the file if it should be published"],
            )
        if path.is_file():
            paths[name] = path
    return paths, [f"left out: {len(hidden)} hidden files, {', '.join(hidden[:3])}"] if hidden else []


def _refuse_other(path: Path) -> None:
    """Raise unless a file is GGUF."""
    try:
        with path.open("rb") as file:
            if path.suffix == ".gguf" and file.read(4) == b"GGUF":
                return
        reason = "it is not a GGUF file"
    except OSError as error:
        reason = reason_of(error)
    raise ConfigError(f"{path} cannot be sent: {reason}", where="--gguf", advice=["stillroom export --format gguf"])


def _is_weights(name: str) -> bool:
    return "/" not in name and any(fnmatchcase(name, pattern) for pattern in _WEIGHTS)


def _card(title: str, folder: Path, run: Path | None, paths: Mapping[str, Path]) -> str:
    """The model card of a folder that has none, from its files and the records of its run."""
    config = read_table(folder / "config.json")
    text = section(config, "text_config") or config
    parameters, kinds = _weights(paths)
    records = run_records(run, num_layers=text.get("num_hidden_layers")) if run is not None else {}
    known = {key: records.get(key, {}) for key in ("config", "summary", "versions")}
    has_chat = "chat_template.jinja" in paths or "chat_template" in read_table(folder / "tokenizer_config.json")
    return model_card(
        title=title,
        **known,
        evaluated=records.get("evaluated"),
        origin=records.get("origin"),
        model={
            "format": "hf" if config else "gguf",
            "file": next((name for name in paths if name.endswith(".gguf")), None),
            "has_chat": has_chat,
            "family": config.get("model_type"),
            "parameters": parameters,
            "dtype": ", ".join(kinds) or None,
            "bytes": sum(
                path.stat().st_size for name, path in paths.items() if name.endswith((".safetensors", ".gguf"))
            ),
            "positions": text.get("max_position_embeddings"),
        },
        checked=["sent as the folder holds it, without another conversion"],
    )


def _weights(paths: Mapping[str, Path]) -> tuple[int, list[str]]:
    """(how many weights the safetensors files hold, their dtypes, the most frequent first), by their headers."""
    counts: Counter[str] = Counter()
    for name, path in paths.items():
        if name.endswith(".safetensors"):
            try:
                with safe_open(path, framework="numpy") as file:
                    for key in file.keys():  # noqa: SIM118 - not a dict
                        part = file.get_slice(key)
                        counts[str(part.get_dtype())] += math.prod(part.get_shape())
            except SafetensorError as error:
                raise BrokenAtStart(f"{path} is damaged: {reason_of(error)}", advice=["write it again"]) from error
    return sum(counts.values()), [_KINDS.get(kind, kind.lower()) for kind, _count in counts.most_common()]
