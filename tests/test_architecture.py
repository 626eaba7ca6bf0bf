"""Rules of the source tree: imports go down and form no cycle, source is ASCII, help loads no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "stillroom"

LAYERS = [
    {"core"},
    {"config"},
    {"builtin", "metrics.metrics", "metrics.lm_eval", "training.guard", "training.schedule"},
    {"losses", "precision", "data"},
    {"models"},
    {"parallel", "telemetry"},
    {"teachers"},
    {"doctor", "bench.predictions"},
    {"training"},
    {"report", "metrics", "export"}
    | {f"doctor.{name}" for name in ("examine", "plan", "resume", "selftest", "setup", "setup_rules")},
    {"bench"},
    {"api", "cli", "demo", "guard", "hf", "objectives", "__main__", "__init__"},
]
# A package, or a module of a package that has another level than the rest of it.
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

# Who may import what: the library on the left only in the rooms on the right.
ONLY_IN = {
    "transformers": {"models", "data", "teachers", "export", "hf"},
    "rich": {"telemetry", "cli"},
    "typer": {"cli"},
}


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def layer_of(parts: Sequence[str]) -> str:
    """The name in `LAYERS` of a module, given the parts of its name below `stillroom`: its own or its package's."""
    own = ".".join(parts[:2])
    return own if own in LEVEL else parts[0]


def runtime_tree(path: Path) -> ast.Module:
    """The syntax tree of a file without what is imported for type checkers only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    return tree


def imported(path: Path) -> list[str]:
    """Modules a file imports at run time, inside of functions too."""
    tree = runtime_tree(path)
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_imports_go_down_only() -> None:
    wrong = []
    for path in files():
        room, own = room_of(path), layer_of(path.relative_to(SOURCE).with_suffix("").parts)
        assert own in LEVEL, f"{own} has no layer: add it to the plan"
        for name in imported(path):
            parts = name.split(".")
            other = layer_of(parts[1:]) if parts[0] == "stillroom" and len(parts) > 1 else own
            is_inside = other.partition(".")[0] == room and LEVEL.get(other, 0) <= LEVEL[own]
            if other in LEVEL and not is_inside and LEVEL[other] >= LEVEL[own] and room not in LAYERS[-1]:
                wrong.append(f"{path.relative_to(SOURCE)} imports {other}, which is not below it")
            if parts[0] in ONLY_IN and room not in ONLY_IN[parts[0]]:
                wrong.append(f"{path.relative_to(SOURCE)} imports {parts[0]}")
    assert not wrong, "\n".join(wrong)


def test_commands_print_through_one_function_that_cleans() -> None:
    """Colours and screens of rich are in `side_by_side` and `telemetry`, which clean what they draw."""
    pattern = re.compile(r"typer\.s?echo\(|(?<![\w.])print\(")
    printing = [path.name for path in files() if room_of(path) == "cli" and pattern.search(path.read_text("utf-8"))]
    assert printing == ["main.py"]


def test_source_is_ascii() -> None:
    assert [str(path) for path in files() if not path.read_text(encoding="utf-8").isascii()] == []


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_at_load(path: Path, known: Collection[str]) -> set[str]:
    """Modules of ours that are run when this one is loaded: imports outside of functions, not of its own packages.

    `from package import name` loads the package, and the submodule where `name` is one.
    """
    own = module_name(path)
    names: set[str] = set()

    def collect(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                names.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                submodules = {f"{child.module}.{alias.name}" for alias in child.names} & set(known)
                others = [alias for alias in child.names if f"{child.module}.{alias.name}" not in submodules]
                names.update(submodules if not others else submodules | {child.module})
            elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                collect(child)

    collect(runtime_tree(path))
    return {name for name in names if name in known and name != own}


def cycles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            place = stack.index(node)
            components.append(sorted(stack[place:]))
            del stack[place:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return [component for component in components if len(component) > 1]


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = {module_name(path) for path in files()}
    found = cycles({module_name(path): imports_at_load(path, known) for path in files()})
    assert not found, "; ".join(", ".join(cycle) for cycle in found)


def test_a_circle_of_imports_would_be_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert cycles(graph) == [["b", "c"]]


def test_a_step_knows_no_kind_of_teacher_and_no_fault() -> None:
    """What a teacher or a fault does to a step is behind `Teacher` and `Hooks`, whose bases do nothing."""
    text = (SOURCE / "training" / "step.py").read_text(encoding="utf-8")
    for word in ("router", "inject", "isinstance", "teacher is"):
        assert word not in text, f"training/step.py mentions {word}"


def test_nothing_in_training_reaches_past_the_teacher() -> None:
    """A stored or served teacher has no model: what needs one asks `Teacher.as_model`, which may answer None."""
    for path in (SOURCE / "training").rglob("*.py"):
        found = re.search(
            r"teacher_model|RouterTeacher|LiveTeacher|run\.router|\.gates\b", path.read_text(encoding="utf-8")
        )
        assert not found, f"training/{path.name} mentions {found and found[0]}"


def test_maths_files_contain_maths() -> None:
    for path in (SOURCE / "losses").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        found = re.search(r"\.item\(\)|\bprint\(|^import logging", text, re.MULTILINE)
        assert not found, f"{path.name} contains {found and found[0]}"


def test_no_pickle_and_no_foreign_code() -> None:
    for path in files():
        text = path.read_text(encoding="utf-8")
        for word in ("import pickle", "torch.load(", "trust_remote_code=True", "shell=True"):
            assert word not in text, f"{path.name} contains {word}"


@pytest.mark.parametrize(
    "module",
    [
        "stillroom.cli",
        "stillroom.config",
        "stillroom.training.guard",
        "stillroom",
        "stillroom.api",
        "stillroom.doctor.diagnose",
    ],
)
def test_help_and_decisions_load_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_test_files_have_names_of_their_own() -> None:
    """Pytest imports them by their basename: a second file of the same name is an error of collection."""
    names = [path.name for path in (SOURCE.parents[1] / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


def test_a_module_may_have_another_layer_than_its_package() -> None:
    """Training asks the rules, and what examines a set-up is built of the parts of training."""
    assert layer_of(("doctor", "rules")) == "doctor" and layer_of(("doctor", "examine", "look")) == "doctor.examine"
    assert LEVEL["doctor"] < LEVEL["training"] < LEVEL["doctor.examine"]


@pytest.mark.parametrize("word", ["--help", "presets"])
def test_commands_that_only_print_load_no_library_of_numbers(word: str) -> None:
    """Importing is what a short command spends its time on."""
    heavy = ("torch", "transformers", "numpy", "safetensors", "tokenizers", "datasets", "pyarrow", "jinja2")
    code = f"""
import sys
from stillroom.cli import main
try:
    main([{word!r}])
except SystemExit:
    pass
sys.exit(", ".join(name for name in {heavy} if name in sys.modules) or None)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stderr == "" and done.returncode == 0
