"""Pickles a job's function and arguments once, in the caller's thread, for all workers and later drivers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

from nbelastic.client.needed_names import needed_names
from nbelastic.errors import UsageError
from nbelastic.system import pickling

SEARCH_DEPTH = 3  # levels of functions that use one another, in which to search for what cannot be pickled


def pickle_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[memoryview]:
    """Pickle the call and the names that it needs, as `pickling.pack` does. UsageError names what cannot be pickled.

    A notebook's function is sent with the notebook's names that it uses. The workers import a function of a module.
    """
    needed = needed_names(function)
    try:
        return pickling.pack((function, tuple(args), dict(kwargs), needed))
    except Exception as error:  # noqa: BLE001  (pickling fails in many ways)
        name = repr(getattr(function, "__name__", function))
        parts = {f"argument {number}": value for number, value in enumerate(args, 1)}
        parts |= {f"argument {name}": value for name, value in kwargs.items()}
        culprit = next((text for text, value in parts.items() if not _can_be_pickled(value)), "")
        culprit = culprit or next(_find_culprits(function, SEARCH_DEPTH), "")
        text = f"{culprit}: {type(error).__name__}: {error}" if culprit else f"{type(error).__name__}: {error}"
        raise UsageError(f"{name} cannot be sent to the workers: {text}") from None


def pickle_values(values: Mapping[str, Any]) -> list[memoryview]:
    """Pickle values by name. UsageError names those that cannot be pickled."""
    try:
        return pickling.pack(dict(values))
    except Exception as error:  # noqa: BLE001  (pickling fails in many ways)
        names = [name for name, value in values.items() if not _can_be_pickled(value)]
        text = f"{', '.join(names)} cannot be sent to the workers: {type(error).__name__}: {error}"
        raise UsageError(text) from None


def _find_culprits(function: object, depth: int) -> Iterator[str]:
    """Describe the values that a function uses and that cannot be pickled."""
    inner = inspect.unwrap(function) if callable(function) else function
    if not isinstance(inner, FunctionType) or not depth:
        return
    try:
        used = inspect.getclosurevars(inner)
    except ValueError:  # a variable of an outer function has no value yet
        return
    for name, value in {**used.globals, **used.nonlocals}.items():
        if not _can_be_pickled(value):
            yield from _find_culprits(value, depth - 1)
            yield f"it uses {name!r}, a {type(value).__name__}"


def _can_be_pickled(value: object) -> bool:
    try:
        pickling.pack(value)
    except Exception:  # noqa: BLE001  (pickling fails in many ways)
        return False
    return True
