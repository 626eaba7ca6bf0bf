"""Commands for the time after a run: what went wrong in it, and how two runs differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stillroom.cli.app import AsJson, app, echo, print_json
from stillroom.errors import ConfigError

_DIAGNOSE = """Say what went wrong in a run, or what could be better, and which setting to change.

Reads events.jsonl, config.json and summary.json of a run that is finished, stopped or still going on. Each finding
names the steps, the numbers it rests on, and a setting; the most likely root cause is first. A problem has harmed the
result, a warning may have, a hint costs time. A .toml or .json file is searched for harmful settings alone.

Exit code 0, whether or not something is found; 2 where the run or the file cannot be read.
"""


@app.command(help=_DIAGNOSE, short_help="Say what went wrong in a run, and what to change.")
def diagnose(
    run: Annotated[Path, typer.Argument(help="folder or address of a run, or a configuration (.toml, .json)")],
    preset: Annotated[str | None, typer.Option(help="of a configuration: the preset it is based on")] = None,
    as_json: AsJson = False,
) -> None:
    from stillroom.doctor.diagnose import config_lines
    from stillroom.doctor.rules import Settings, judge_settings
    from stillroom.remote import is_in_store

    if is_in_store(run) or run.is_dir() or run.suffix not in (".toml", ".json"):
        _diagnose_run(run, as_json)
        return
    from stillroom.config import load

    findings = judge_settings(Settings(load(run, preset=preset).config.to_dict()))
    if as_json:
        print_json({"config": str(run), "findings": [finding.to_dict() for finding in findings]})
        return
    for line in config_lines(str(run), findings):
        echo(line)


def _diagnose_run(run: Path, as_json: bool) -> None:
    from stillroom.doctor.diagnose import as_dict, read_case, run_lines
    from stillroom.doctor.diagnose import diagnose as find_causes
    from stillroom.engine.run_folder.folder import LOCK
    from stillroom.locks import is_held
    from stillroom.remote import here, is_in_store, may_be_owned

    is_owned = may_be_owned(run) if is_in_store(run) else is_held(run / LOCK)
    case = read_case(here(run, needs="record"), is_owned=is_owned)
    findings = find_causes(case)
    if as_json:
        print_json(as_dict(case, findings))
        return
    for line in run_lines(case, findings):
        echo(line)


_COMPARE = """Say how two runs differ: settings, versions, course, and results with their intervals.

Only what differs is listed. Results have 95 % intervals over documents where the runs have them: `overlap` means that
the difference may be chance. Exit code 0; 2 where a run cannot be read.
"""


@app.command(help=_COMPARE, short_help="Say how two runs differ, in settings and results.")
def compare(
    first: Annotated[Path, typer.Argument(help="folder or address of a run")],
    second: Annotated[Path, typer.Argument(help="folder or address of another run")],
    as_json: AsJson = False,
) -> None:
    from stillroom.doctor.diagnose import compare as find_differences
    from stillroom.doctor.diagnose import compare_lines, read_case
    from stillroom.remote import here

    if first.resolve() == second.resolve():
        raise ConfigError(f"{first} is given twice", advice=["give the folders of two runs"])
    one, other = (read_case(here(run, needs="record")).record for run in (first, second))
    found = find_differences(one, other)
    if as_json:
        print_json(found)
        return
    for line in compare_lines(found):
        echo(line)
