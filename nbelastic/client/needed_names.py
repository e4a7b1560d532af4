"""Finds the names that a notebook's function needs and that the notebook does not define."""

from __future__ import annotations

import inspect
from collections import ChainMap
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any

from nbelastic.client.certain_reads import called_names, certain_reads
from nbelastic.system.code_steps import code_steps

GUARDS = frozenset({"NameError", "globals", "exec"})


def needed_names(function: Any) -> dict[str, str]:
    """All names that the function, or a function that it calls, reads for certain and no code sets; each with its reader.

    Functions of modules are not searched. Nothing is needed for certain if one of the functions catches NameError, or asks for
    its global names itself. A name that is read only under an `if` may never be read: `if HAS_WANDB: wandb.log(…)`. So may a
    function.
    """
    try:
        return _needed_names(function)
    except Exception:  # noqa: BLE001  (objects of the notebook may raise anything when they are looked at)
        return {}


def _needed_names(function: Any) -> dict[str, str]:
    needed: dict[str, str] = {}
    namespaces: dict[int, dict[str, Any]] = {}
    for one, certain in _functions(function):
        if GUARDS & _global_names(one):
            return {}
        missing = certain - one.__globals__.keys() - set(one.__code__.co_freevars)
        needed |= dict.fromkeys(missing, one.__name__)
        namespaces[id(one.__globals__)] = one.__globals__
    # Seldom is a name missing: only then is all code of the notebook searched for what sets it.
    sets = {name for namespace in namespaces.values() for name in _set_names(namespace)} if needed else set()
    return {name: reader for name, reader in needed.items() if name not in sets}


def _set_names(namespace: Mapping[str, Any]) -> set[str]:
    """The global names that a function or method of the notebook sets, whether it runs or not."""
    values = [value for value in namespace.values() if getattr(value, "__module__", "") == "__main__"]
    methods = [one for value in values if isinstance(value, type) for one in vars(value).values()]
    plain = [one for one in (*values, *methods) if isinstance(one, FunctionType)]
    wrapped = [inspect.unwrap(one) for one in plain]
    return {name for one in (*plain, *wrapped) for name in _global_names(one, "STORE_GLOBAL")}


def _functions(function: Any) -> Iterator[tuple[FunctionType, set[str]]]:
    """The functions of the notebook that surely run when this one is called, each with the names that it reads for certain."""
    pending, seen = [function], set[int]()
    while pending:
        one = pending.pop()
        while isinstance(one, partial):
            one = one.func
        inner = inspect.unwrap(one) if callable(one) else one
        if not isinstance(inner, FunctionType) or id(inner) in seen or inner.__globals__.get("__name__") != "__main__":
            continue
        seen.add(id(inner))
        certain = _certain_names(inner)
        yield inner, certain
        cells = zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
        values = ChainMap({name: cell.cell_contents for name, cell in cells if _is_filled(cell)}, inner.__globals__)
        called = certain & called_names(inner.__code__)
        pending += [values[name] for name in called if name in values]


def _certain_names(function: FunctionType) -> set[str]:
    names = _global_names(function) | set(function.__code__.co_freevars)  # of other scopes
    return certain_reads(function.__code__) & names


def _global_names(function: FunctionType, instruction: str = "LOAD_GLOBAL") -> set[str]:
    return {step.argval for step in code_steps(function.__code__) if step.opname == instruction}


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
