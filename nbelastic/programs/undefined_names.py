"""Finds names that a notebook's function uses and that nothing defines, before it runs."""

from __future__ import annotations

import builtins
import dis
import inspect
from collections.abc import Collection, Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from nbelastic.programs.certain_reads import certain_reads

GUARDS = frozenset({"NameError", "globals", "exec"})


def refuse_undefined_names(function: Any) -> None:
    """NameError with all global names that the function, or a function that it uses, reads and no code sets.

    Functions of modules are not searched, nor code that catches NameError, or that asks for its global names itself. A name
    that is read only under an `if` may never be read: `if HAS_WANDB: wandb.log(…)`.
    """
    reads, sets = dict[str, str](), set[str]()
    for one in _functions(function):
        for code in _code_objects(one.__code__):
            sets |= {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"}
            if GUARDS.isdisjoint(code.co_names):
                reads |= dict.fromkeys(certain_reads(code) - one.__globals__.keys(), one.__name__)
    missing = {name: user for name, user in reads.items() if name not in sets and not hasattr(builtins, name)}
    if missing:
        used = ", ".join(f"{name!r} in {user}()" for name, user in sorted(missing.items()))
        raise NameError(
            f"neither the notebook nor the workers define what the function uses: {used}. Define it in the notebook, or with "
            "cluster.push or a setup cell on the workers"
        )


def borrowed_names(code: CodeType, names: Collection[str]) -> tuple[str, ...]:
    """The `names` that a cell, or a function in it, reads, though the cell does not set them."""
    steps = [step for one in _code_objects(code) for step in dis.get_instructions(one)]
    reads = {step.argval for step in steps if step.opname in ("LOAD_NAME", "LOAD_GLOBAL")}
    sets = {step.argval for step in steps if step.opname in ("STORE_NAME", "STORE_GLOBAL")}
    return tuple(sorted((reads - sets).intersection(names)))


def _functions(function: Any) -> Iterator[FunctionType]:
    """The functions of the notebook that run when this one is called."""
    pending, seen = [function], set[int]()
    while pending:
        one = pending.pop()
        while isinstance(one, partial):
            one = one.func
        inner = inspect.unwrap(one) if callable(one) else one
        if not isinstance(inner, FunctionType) or id(inner) in seen or inner.__globals__.get("__name__") != "__main__":
            continue
        seen.add(id(inner))
        yield inner
        used = {name for code in _code_objects(inner.__code__) for name in _read_names(code)}
        pending += [inner.__globals__[name] for name in used if name in inner.__globals__]
        pending += [cell.cell_contents for cell in inner.__closure__ or () if _is_filled(cell)]


def _read_names(code: CodeType) -> set[str]:
    """The global names that this code reads."""
    return {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}


def _code_objects(code: CodeType) -> Iterator[CodeType]:
    """The function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_objects(constant)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
