"""Read datasets of the hub, and folders that `datasets.save_to_disk` wrote."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stillroom.data.sources.needed import needed
from stillroom.data.sources.readers import Item
from stillroom.errors import DataError

HUB_PREFIX = "hf:"
_FORM = "hf:NAME, hf:NAME:CONFIG, hf:NAME:CONFIG:SPLIT or hf:NAME::SPLIT"
# What a dataset that cannot be read raises: no network, no such name or config, no room, a damaged file.
_FAULTS = (OSError, ValueError, RuntimeError, LookupError, TypeError)


def read_hub(spec: str, *, is_evaluation: bool, streams: bool = False) -> Iterator[Item]:
    """The items of `hf:NAME[:CONFIG[:SPLIT]]`: of the named split, else of train, or for evaluation validation or test.

    With `streams` nothing is stored on disk: the items are read over the network, in order.
    """
    name, config, split, *rest = [*spec.removeprefix(HUB_PREFIX).split(":"), "", ""]
    if not name or any(rest):
        raise DataError(f"{spec!r} names no dataset", advice=[f"write {_FORM}"])
    datasets = needed("datasets", spec)
    options = {"streaming": True} if streams else {}
    try:
        splits = datasets.load_dataset(name, config or None, **options)
    except _FAULTS as error:
        advice = [
            "check the name, the config and the network (HF_HUB_OFFLINE forbids downloads)",
            "download it elsewhere, save it as .jsonl or .parquet, and name that file",
            "use the embedded text: builtin:stdlib",
        ]
        raise DataError(f"the dataset cannot be loaded: {error}", where=spec, advice=advice) from error
    split = split or _usual_split(splits, is_evaluation=is_evaluation)
    if split not in splits:
        raise _no_split(split, splits, spec, advice=f"name the split: {_FORM}")
    yield from _numbered(splits[split], f"{name}/{split}", spec)


def is_saved(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk`: of one dataset, or of several splits."""
    # os.path answers False for names that no file can have; pathlib raises.
    names = ("state.json", "dataset_info.json", "dataset_dict.json")
    has = {name: os.path.isfile(path / name) for name in names}  # noqa: PTH113
    return (has["state.json"] and has["dataset_info.json"]) or has["dataset_dict.json"]


def read_saved(path: Path, *, is_evaluation: bool) -> Iterator[Item]:
    """The items of a folder written by `save_to_disk`. The table stays on disk."""
    datasets = needed("datasets", str(path))
    try:
        saved = datasets.load_from_disk(str(path))
    except _FAULTS as error:
        advice = ["write it again with save_to_disk", "save it as .jsonl or .parquet, and name that file"]
        raise DataError(f"the saved dataset cannot be loaded: {error}", where=str(path), advice=advice) from error
    name = path.name
    if isinstance(saved, Mapping):
        split = _usual_split(saved, is_evaluation=is_evaluation)
        if split not in saved:
            raise _no_split(split, saved, str(path), advice=f"name the folder of a split: {path}/SPLIT")
        name, saved = f"{name}/{split}", saved[split]
    yield from _numbered(saved, name, str(path))


def _usual_split(splits: Mapping[str, Any], *, is_evaluation: bool) -> str:
    wanted = ("validation", "test", "train") if is_evaluation else ("train",)
    return next((name for name in wanted if name in splits), "train")


def _no_split(split: str, splits: Mapping[str, Any], where: str, *, advice: str) -> DataError:
    held = ", ".join(sorted(splits)) or "none"
    return DataError(
        f"the dataset has no split {split}, only {held}",
        where=where,
        advice=[advice, "save the split you want as .jsonl or .parquet, and name that file"],
    )


def _numbered(items: Iterable[object], name: str, where: str) -> Iterator[Item]:
    rows, number = iter(items), 0
    while True:
        number += 1
        try:
            item = next(rows, None)
        except _FAULTS as error:  # a connection that broke, a damaged file
            raise DataError(
                f"the dataset cannot be read at item {number:,}: {error}",
                where=where,
                advice=["try again", "save it as .jsonl or .parquet, and name that file"],
            ) from error
        if item is None:
            return
        yield f"{name}:{number}", item
