"""A job's checkpoints, as a person asks for them."""

from __future__ import annotations

import os

from nbelastic.errors import UsageError
from nbelastic.system.argument_types import PATH, check_kind

EVERY, KEEP = 100, 3  # commits between two checkpoints, and how many stay
Checkpoints = tuple[str, int, int] | None  # the folder, commits between two, how many are kept


def checkpoints(folder: str | os.PathLike[str] | None, every: int | None, keep: int | None) -> Checkpoints:
    """A job's checkpoints as the workers are told of them. UsageError if they cannot be as asked for."""
    if folder is None:
        if every is not None or keep is not None:
            given = "checkpoint_keep" if every is None else "checkpoint_every"
            raise UsageError(f"{given} says nothing without checkpoint: name a folder too.")
        return None
    check_kind("checkpoint", folder, PATH)
    for name, number in (("checkpoint_every", every), ("checkpoint_keep", keep)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise UsageError(f"{name}={number!r}: a whole number, at least 1.")
    path = os.path.abspath(os.path.expanduser(folder)) if os.fspath(folder) else ""
    if not path or (os.path.exists(path) and not os.path.isdir(path)):
        raise UsageError(f"checkpoint={os.fspath(folder)!r} is no folder.")
    return path, EVERY if every is None else every, KEEP if keep is None else keep
