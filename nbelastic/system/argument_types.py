"""Check the types of arguments: the first wrong one raises a UsageError of one line."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

from nbelastic.errors import UsageError


class Kind(NamedTuple):
    """What an argument must be: a type or a union of types, and its name in errors. `names`: each item must be text."""

    types: Any
    words: str
    names: bool = False


WHOLE = Kind(Integral, "a whole number")
SECONDS = Kind(Real, "a number of seconds")
RANGE = Kind(Sequence, "two numbers of seconds")
TEXT = Kind(str, "text")
NAMES = Kind(Sequence, "a list of names", names=True)
PATH = Kind(str | os.PathLike, "a path")
TABLE = Kind(Mapping, "a dict")


def check_kind(name: str, value: object, kind: Kind) -> None:
    """UsageError if `value` of the argument `name` is not of this kind."""
    fits = isinstance(value, kind.types)
    if fits and kind.names:
        fits = not isinstance(value, str | bytes) and all(isinstance(item, str) for item in value)  # type: ignore[attr-defined]
    if not fits:
        raise UsageError(f"{name} must be {kind.words}, not {_article(type(value).__name__)}.")


def check_optional(name: str, value: object, kind: Kind) -> None:
    """Check as `check_kind` does, and allow None."""
    if value is not None:
        check_kind(name, value, kind)


def check_time_left(name: str, seconds: float) -> None:
    """UsageError if nothing can end in so many seconds."""
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{name}={seconds:g}: give a number of seconds greater than 0.")


def check_timeout(timeout: float | None) -> None:
    """UsageError if it is neither a number of seconds nor None."""
    check_optional("timeout", timeout, SECONDS)
    if timeout is not None and math.isnan(timeout):  # no time is later
        raise UsageError(f"timeout={timeout}: give a number of seconds.")


def user_path(path: str | os.PathLike[str]) -> Path:
    """The path, with the home folder in place of `~` or `~user`. UsageError if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"{os.fspath(path)}: this machine has no such home folder.") from None


def check_tail(tail: int) -> None:
    """UsageError if it is not the number of newest lines to show, from 0 on."""
    check_kind("tail", tail, WHOLE)
    if tail < 0:
        raise UsageError(f"tail={tail}: give the number of newest lines to show.")


def seconds(text: str) -> float:
    """`90`, `90s`, `10m` or `2h` in seconds. ValueError for another text."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    return float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text)


def _article(kind: str) -> str:
    return "None" if kind == "NoneType" else f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
