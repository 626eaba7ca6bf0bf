"""Read a command line: the flags of a guide, and those that every recipe has. `--a_b` and `--a-b` are the same."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stillroom.cli.exit import with_dashes


@dataclass(frozen=True)
class Flag:
    """A flag of a guide that is one setting."""

    name: str  # as the guide writes it
    key: str  # our setting
    kind: type
    help: str


def make_parser(description: str, flags: Sequence[Flag] = ()) -> argparse.ArgumentParser:
    """A parser of the guide's flags and of the common ones."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    for flag in flags:
        parser.add_argument(
            _option(flag.name), type=flag.kind, metavar=flag.kind.__name__.upper(), help=f"{flag.help}: {flag.key}"
        )
    common = parser.add_argument_group("of every recipe")
    common.add_argument("--output-dir", metavar="DIR", help="folder of the run; an unfinished run there is continued")
    common.add_argument("--device", default="auto", help="cpu, cuda, cuda:1; auto takes a GPU where there is one")
    common.add_argument("--seed", type=int, help="random seed")
    common.add_argument("--dry-run", action="store_true", help="five real steps with evaluation, save and report")
    common.add_argument(
        "--letter-of-the-seed", action="store_true", help="do what the guide does, also where that is harmful"
    )
    common.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting, repeatable")
    common.add_argument("--inject", default="", help="faults on purpose, see `stillroom distill --help`")
    return parser


def read(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line. Ends the program with exit code 2 and the usage where it is not understood."""
    return parser.parse_args(with_dashes(list(sys.argv[1:] if arguments is None else arguments)))


def settings_of(options: argparse.Namespace, flags: Sequence[Flag]) -> dict[str, Any]:
    """The settings of the flags that were given."""
    given = {flag.key: getattr(options, flag.name.replace("-", "_")) for flag in flags}
    given["train.seed"] = options.seed
    return {key: value for key, value in given.items() if value is not None}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
