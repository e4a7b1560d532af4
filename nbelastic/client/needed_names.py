"""Finds the names that a notebook's function needs and that the notebook does not define."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

from nbelastic.client.certain_reads import certain_reads
from nbelastic.system.code_steps import code_steps

GUARDS = frozenset({"NameError", "globals", "exec"})


def needed_names(function: Any) -> dict[str, str]:
    """All names that the function, or a function that it uses, reads for certain and no code sets; each with its reader.

    Functions of modules are not searched, nor code that catches NameError, or that asks for its global names itself. A name
    that is read only under an `if` may never be read: `if HAS_WANDB: wandb.log(…)`. So may a function.
    """
    needed: dict[str, str] = {}
    for one in _functions(function, _certain_names):
        missing = _certain_names(one) - one.__globals__.keys() - set(one.__code__.co_freevars)
        needed |= dict.fromkeys(missing, one.__name__)
    sets = {name for one in _functions(function, _names) for name in _global_names(one, "STORE_GLOBAL")}
    return {name: reader for name, reader in needed.items() if name not in sets}


def _functions(function: Any, used_names: Callable[[FunctionType], set[str]]) -> Iterator[FunctionType]:
    """The functions of the notebook that run when this one is called, if each uses those names."""
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
        cells = zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
        values = inner.__globals__ | {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
        pending += [values[name] for name in used_names(inner) if name in values]


def _certain_names(function: FunctionType) -> set[str]:
    if GUARDS & _global_names(function):
        return set()
    return certain_reads(function.__code__) & _names(function)


def _names(function: FunctionType) -> set[str]:
    """The names of other scopes that the function may read."""
    return _global_names(function) | set(function.__code__.co_freevars)


def _global_names(function: FunctionType, instruction: str = "LOAD_GLOBAL") -> set[str]:
    return {step.argval for step in code_steps(function.__code__) if step.opname == instruction}


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
