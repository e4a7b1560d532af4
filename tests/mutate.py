"""Mutation testing: change the code in one small place, run the tests, and see whether they notice.

    python -m tests.mutate --seed 7 --count 60
    python -m tests.mutate --seed 7 --count 10 --files nbelastic/core/script_rounds.py

Each mutant is run in a temporary copy: tests of the mutated module first, then all of tests/core, tests/sharded or tests/state. The diff
of each survivor is printed, and a summary as JSON at the end. Exits with 1 if fewer than 95 % of the mutants
that are not known to be equivalent were killed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import difflib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.equivalent_mutants import KNOWN

ROOT = Path(__file__).parents[1]
NO_DECISIONS = {"__init__.py"}
MODULES = sorted(
    path
    for package in ("core", "sharded", "state")
    for path in (ROOT / "nbelastic" / package).glob("*.py")
    if path.name not in NO_DECISIONS
)
OTHERS = ("test_messages", "test_imports")  # of tests/core: they test no decisions
SLOW = ("test_transfer", "test_damaged_checkpoints", "test_determinism", "test_script_properties", "test_properties")
SLOWDOWN = 10  # how many times longer than its processor time a run may take, on a busy machine
ENOUGH = 0.95

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}


class Mutant(NamedTuple):
    """`node` is the place of what is replaced in `ast.walk`; `variant` counts what it can be replaced by."""

    path: Path
    line: int
    category: str
    node: int
    variant: int


def variants(node: ast.AST, attributes: dict[str, list[str]]) -> Iterator[tuple[str, ast.AST]]:
    """The mutations of a node: each is one small mistake that a programmer could make."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[op, *_]) if type(op) in COMPARED:
            changed.ops[0] = COMPARED[type(op)]()
            yield "comparison", changed
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.BoolOp(op=op, values=values):
            yield "and/or", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            for index in range(len(values)):
                rest = [value for place, value in enumerate(values) if place != index]
                yield "operand dropped", rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", operand
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "branches swapped", ast.IfExp(test, orelse, body)
        case ast.If():
            for value in (True, False):
                yield "guard", ast.If(ast.Constant(value), changed.body, changed.orelse)
        case ast.match_case(guard=ast.expr()):
            changed.guard = None
            yield "guard", changed
        case ast.Expr(value=ast.Call()) | ast.Assign() | ast.AugAssign():
            yield "statement dropped", ast.Pass()
        case ast.Call(func=ast.Name(id="replace"), keywords=[_, _, *_] as keywords):
            for index in range(len(keywords)):
                rest = [each for place, each in enumerate(keywords) if place != index]
                yield "field dropped", ast.Call(changed.func, changed.args, rest)
        case ast.Call(func=ast.Name(id=name)) if name in CALLED:
            changed.func, changed.keywords = ast.Name(CALLED[name]), changed.keywords if name != "sorted" else []
            yield "call", changed
        case ast.BinOp(op=op) if type(op) in COMPUTED:
            changed.op = COMPUTED[type(op)]()
            yield "operator", changed
        case ast.Slice(lower=lower, upper=upper) if lower or upper:
            yield "slice", ast.Slice()
        case ast.Attribute(value=ast.Name(id=name), attr=attr, ctx=ast.Load()):
            others = attributes.get(name, [])
            if len(others) > 1:
                changed.attr = others[(others.index(attr) + 1) % len(others)]
                yield "attribute", changed


def left_alone(tree: ast.AST) -> set[int]:
    """Places in `ast.walk` of what is not mutated: strings, asserts, annotations, options of classes, and a module's top but functions."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        match node:
            case ast.Assert() | ast.JoinedStr() | ast.Raise() | ast.Import() | ast.ImportFrom():
                parts = [node]
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                arguments = node.args
                every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                parts = [*node.decorator_list, node.returns, *(argument.annotation for argument in every)]
            case ast.ClassDef():
                parts = [*node.decorator_list, *node.keywords]
            case ast.AnnAssign():
                parts = [node.annotation]
            case ast.Module():
                parts = [each for each in node.body if not isinstance(each, ast.FunctionDef | ast.ClassDef)]
        for part in parts:
            skipped |= set(ast.walk(part)) if part is not None else set()
    return {place for place, node in enumerate(ast.walk(tree)) if node in skipped}


def mutants(path: Path) -> list[Mutant]:
    tree = ast.parse(path.read_text("utf-8"))
    skipped, names = left_alone(tree), _attributes(tree)
    return [
        Mutant(path, getattr(node, "lineno", getattr(node, "pattern", node).lineno), category, place, number)
        for place, node in enumerate(ast.walk(tree))
        if place not in skipped and (hasattr(node, "lineno") or isinstance(node, ast.match_case))
        for number, (category, _) in enumerate(variants(node, names))
    ]


def _attributes(tree: ast.AST) -> dict[str, list[str]]:
    """Those that the module reads of each name, such as `world`."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and isinstance(node.ctx, ast.Load):
            found.setdefault(node.value.id, set()).add(node.attr)
    return {name: sorted(attributes) for name, attributes in found.items()}


def source(mutant: Mutant) -> tuple[str, str]:
    """The module without comments, before and after."""
    tree = ast.parse(mutant.path.read_text("utf-8"))
    before = ast.unparse(tree)
    target = list(ast.walk(tree))[mutant.node]
    _, new = list(variants(target, _attributes(tree)))[mutant.variant]

    class Replacing(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return new if node is target else self.generic_visit(node)

    return before + "\n", ast.unparse(ast.fix_missing_locations(Replacing().visit(tree))) + "\n"


def draw(path: Path, count: int, chance: random.Random) -> list[Mutant]:
    """Categories in turn, one mutant a line, so that frequent kinds of code do not crowd out the others."""
    by_category: dict[str, list[Mutant]] = {}
    for mutant in mutants(path):
        by_category.setdefault(mutant.category, []).append(mutant)
    drawn: dict[int, Mutant] = {}
    while by_category and len(drawn) < count:
        for category in chance.sample(sorted(by_category), len(by_category)):
            found = [mutant for mutant in by_category[category] if mutant.line not in drawn]
            if not found:
                del by_category[category]
            elif len(drawn) < count:
                mutant = chance.choice(found)
                drawn[mutant.line] = mutant
    return list(drawn.values())


def tests_of(path: Path) -> list[list[str]]:
    """The runs of pytest that a mutant of this module has to pass: its own tests first, the slow ones last."""
    root, package = path.parents[2], path.parent.name
    every = sorted(file for file in (root / "tests" / package).glob("test_*.py") if file.stem not in OTHERS)
    named = re.compile(rf"\b{package}(\.| import .*){path.stem}\b")
    slow = [file for file in every if file.stem in SLOW and path.stem not in file.stem]
    quick = [file for file in every if file not in slow]
    own = [file for file in quick if path.stem in file.stem or named.search(file.read_text("utf-8"))]
    rest = [file for file in quick if file not in own] + slow
    return [[str(file.relative_to(root)) for file in files] for files in (own, rest) if files]


def passes(root: Path, files: list[str], seed: int, limit: float) -> tuple[bool | None, str]:
    """Whether the tests do, or None if their time ran out; and the first test that failed."""
    options = ["-qx", "-p", "no:cacheprovider", "-o", "addopts=", "--soak-seed", str(seed)]
    options += ["-p", "pytest_timeout", "--timeout", str(SLOWDOWN * limit // 2)]
    options += ["-p", "_hypothesis_pytestplugin", "--hypothesis-profile", "unshrunk"]
    same = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": str(seed)}
    with tempfile.TemporaryFile("w+") as output:  # a pipe would stay open while a process that a test started lives
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *files],
            cwd=root,
            env={**os.environ, **same},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (limit, limit))
            code = process.wait(SLOWDOWN * limit)
        except subprocess.TimeoutExpired:
            return None, f"not done within {SLOWDOWN * limit} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        printed = output.read()
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
    slow = re.search(r"^E +Failed: Timeout|\+ Timeout \+", printed, re.MULTILINE)
    return None if slow or code < 0 else code == 0, failed[1] if failed else printed[-200:] if code else ""


def judge(mutant: Mutant, root: Path, seed: int, limit: float) -> dict[str, object]:
    before, after = source(mutant)
    name = str(mutant.path.relative_to(root))
    diff = list(difflib.unified_diff(before.splitlines(), after.splitlines(), name, name, lineterm="", n=2))
    was, now = ("\n".join(line[1:] for line in diff[2:] if line[0] == sign) for sign in "-+")
    found = {"file": name, "line": mutant.line, "category": mutant.category}
    for module, old, new, reason in KNOWN:
        if mutant.path.as_posix().endswith(f"/{module}") and old in was and was.replace(old, new) == now:
            return {**found, "result": "equivalent", "why": reason}
    original = mutant.path.read_text("utf-8")
    mutant.path.write_text(after, "utf-8")
    try:
        for files in tests_of(mutant.path):
            passed, test = passes(root, files, seed, limit)
            if not passed:
                return {**found, "result": "killed" if passed is False else "timeout", "by": test}
    finally:
        mutant.path.write_text(original, "utf-8")
    return {**found, "result": "survived", "diff": diff}


def outdated() -> list[str]:
    """A line for each entry of KNOWN whose code has changed since."""
    lines = []
    for module, old, _, _ in KNOWN:
        named = [path for path in MODULES if path.as_posix().endswith(f"/{module}")]
        if not any(old in ast.unparse(ast.parse(path.read_text("utf-8"))) for path in named):
            lines.append(f"{module} has no {old!r} any more.")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="chooses the mutants, and what hypothesis generates")
    parser.add_argument("--count", type=int, default=60, help="how many mutants, over all files (60)")
    parser.add_argument("--files", nargs="+", type=Path, default=MODULES, help="modules (core, sharded and state)")
    parser.add_argument("--limit", type=int, default=60, help="seconds of processor time for each run of pytest (60)")
    options = parser.parse_args()
    for line in outdated():
        print(f"KNOWN is out of date: {line}", file=sys.stderr)
    if outdated():
        return 2
    os.nice(10)
    chance = random.Random(options.seed)
    results = []
    with tempfile.TemporaryDirectory(prefix="mutate.") as folder:
        root = Path(folder)
        for part in ("nbelastic", "tests"):
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        files = [root / path.resolve().relative_to(ROOT) for path in options.files]
        files = chance.sample(files, len(files))  # those that come last may get no mutant
        drawn = [draw(path, -(-options.count // len(files)), chance) for path in files]
        turns = itertools.zip_longest(*drawn)
        chosen = [mutant for turn in turns for mutant in turn if mutant][: options.count]
        for tests in {tuple(sorted(itertools.chain(*tests_of(mutant.path)))) for mutant in chosen}:
            passed, test = passes(root, [*tests], options.seed, options.limit)
            if not passed:
                print(f"The tests fail without any mutant: {test}.", file=sys.stderr)
                return 2
        for mutant in chosen:
            found = judge(mutant, root, options.seed, options.limit)
            results.append(found)
            print(
                f"{found['result']:10} {found['file']}:{found['line']} {found['category']} {found.get('by', '')}",
                flush=True,
            )
            print(*found.get("diff", []), sep="\n", end="\n" if "diff" in found else "", flush=True)
    counts = {
        name: sum(found["result"] == name for found in results)
        for name in ("killed", "timeout", "survived", "equivalent")
    }
    judged = len(results) - counts["equivalent"]
    score = (judged - counts["survived"]) / judged if judged else 1.0
    print(json.dumps({"seed": options.seed, **counts, "score": round(score, 3), "mutants": results}))
    return 0 if score >= ENOUGH else 1


if __name__ == "__main__":
    raise SystemExit(main())
