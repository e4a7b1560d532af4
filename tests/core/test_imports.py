"""Imports between folders, sizes of files and functions, and the cost of `import nbelastic` in a kernel."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import nbelastic

ROOT = Path(nbelastic.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MAY = {  # folder: the folders that it may import, beside `errors`; from the lowest layer to the highest
    "system": {},
    "protocol": {"system"},
    "transport": {"protocol", "system"},
    "core": {"protocol", "system"},
    "tunnel": {"protocol", "system"},
    "provision": {"tunnel", "protocol", "system"},
    "ipp": {"protocol", "system"},
    "agent": {"transport", "protocol", "system"},
    "worker": {"transport", "protocol", "system"},
    "state": {"worker", "protocol", "system"},
    "sharded": {"state", "worker", "protocol", "system"},
    "programs": {"state", "worker", "ipp", "protocol", "system"},
    "integrations": {"programs", "sharded", "state", "worker", "protocol", "system"},
    "torchrun": {"transport", "protocol", "system"},
    "driver": {"core", "provision", "ipp", "transport", "protocol", "system"},
    "client": {"provision", "ipp", "protocol", "system"},
    "notebook": {"client", "protocol", "system"},
    "cli": {"notebook", "client", "core", "protocol", "system"},
    "__main__": {"cli"},
}
PURE = [
    *sorted((ROOT / "core").glob("*.py")),
    *(
        ROOT / "agent" / "protocol.py",
        *(ROOT / "worker" / f"{name}.py" for name in ("protocol", "worker_report", "formation", "telemetry")),
    ),
    *(
        ROOT / "protocol" / f"{name}.py"
        for name in (
            "ids",
            "events",
            "script_events",
            "program_events",
            "connection_events",
            "cluster_limits",
            "timeouts",
            "chaos",
        )
    ),
    *(
        ROOT / "protocol" / f"{name}.py"
        for name in (
            "exit_codes",
            "rank_layout",
            "messages",
            "agent_messages",
            "cell_messages",
            "code_messages",
            "node_messages",
            "rank_reports",
            "status",
            "worker_messages",
        )
    ),
    *(ROOT / "system" / "addresses.py", ROOT / "errors.py"),
]
IMPURE_MODULES = {
    *("time", "datetime", "random", "secrets", "uuid", "threading", "_thread", "asyncio", "multiprocessing"),
    *("concurrent", "socket", "select", "selectors", "ssl", "subprocess", "os", "io", "pathlib", "shutil", "tempfile"),
    *("pickle", "marshal", "shelve", "importlib", "logging", "sys", "ctypes", "queue", "sched", "contextvars"),
}
IMPURE_BUILTINS = {"open", "input", "print", "exec", "eval", "compile", "__import__", "globals", "breakpoint"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in FILES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


@cache
def imports(path: Path) -> frozenset[str]:
    """Full names of the modules that a file imports.

    `from x import y` gives x.y if that is a module of nbelastic, else x.
    """
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what is imported"
            assert node.module
            whole = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names |= {full if full in MODULES else node.module for full in whole.values()}
    return frozenset(names)


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] == "nbelastic"}


def part(name: str) -> str:
    """The second part of a module's name: core, driver, …"""
    return [*name.split("."), ""][1]


@pytest.mark.parametrize("folder", sorted({part(name) for name in MODULES} - {""}))
def test_imports_go_down_only(folder):
    """Each folder imports only the folders that `MAY` lists for it."""
    may = {*MAY[folder], folder, "errors"} if folder != "errors" else set()
    for name, file in MODULES.items():
        if part(name) == folder:
            wrong = {each for each in ours(file) if part(each) not in may}
            wrong -= {"nbelastic"} if folder == "notebook" else set()
            assert not wrong, f"{name} imports {', '.join(sorted(wrong))}"


def test_imports_have_no_cycles():
    """No module imports itself through others: not at import time, not in a function, not for types."""
    graph = {name: ours(file) - {"nbelastic", name} for name, file in MODULES.items()}
    order = list(TopologicalSorter(graph).static_order())
    assert len(order) >= len(FILES) - 1


@pytest.mark.parametrize("file", PURE, ids=name_of)
def test_decisions_are_pure(file):
    """Modules that decide import only the standard library and msgspec.

    No clock, chance, thread, socket, file or log.
    """
    outside = {name.split(".")[0] for name in imports(file)} - {"nbelastic"}
    assert outside <= (sys.stdlib_module_names - IMPURE_MODULES) | {"msgspec"}
    called = {node.id for node in ast.walk(tree_of(file)) if isinstance(node, ast.Name)}
    assert not called & IMPURE_BUILTINS
    assert ours(file) <= {name_of(pure) for pure in PURE}, "what it imports is pure as well"


def test_the_core_keeps_nothing_between_steps():
    """Core modules have no `global` and nothing mutable at their top: all state is in `ClusterState`."""
    for file in sorted((ROOT / "core").glob("*.py")):
        tree = tree_of(file)
        assert not [node for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal))]
        values = [node.value for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
        names = [node for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
        kept = [v for v in values if isinstance(v, (ast.List, ast.Dict, ast.Set)) and v not in [n.value for n in names]]
        assert not kept, f"{file.name} keeps something mutable"


MOST_LINES = 400  # of a file
MOST_LINES_OF_A_FUNCTION = 60
LONG_FILES: set[str] = set()  # this list only shrinks
LONG_FUNCTIONS: set[str] = set()  # this list only shrinks


def test_files_are_short():
    """No file of nbelastic/, tests/ or widgets/ has more than 400 lines, except those listed, which are longer."""
    root = ROOT.parent
    suffixes = {".py", ".js", ".css"}
    files = [
        f for folder in ("nbelastic", "tests", "widgets") for f in (root / folder).rglob("*") if f.suffix in suffixes
    ]
    files = [f for f in files if not {"node_modules", "dist"} & set(f.parts)]
    long = {f.relative_to(root).as_posix() for f in files if len(f.read_text("utf-8").splitlines()) > MOST_LINES}
    assert long == LONG_FILES


def test_functions_are_short():
    """No function of nbelastic/ has more than 60 lines, except those listed, which are longer."""
    functions = [
        (f"{name_of(file)}.{node.name}", node.end_lineno - node.lineno + 1)
        for file in FILES
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert {name for name, lines in functions if lines > MOST_LINES_OF_A_FUNCTION} == LONG_FUNCTIONS


@pytest.mark.parametrize("module", ["nbelastic", "nbelastic.core.step", "nbelastic.transport"])
def test_import_is_cheap(module):
    """`import nbelastic`, the core and the transport never import torch."""
    code = (
        f"import sys, {module}; sys.exit(', '.join(sorted(m for m in sys.modules if m.split('.')[0] == 'torch')) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
