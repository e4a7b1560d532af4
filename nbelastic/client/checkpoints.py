"""Checks the checkpoint arguments of a job."""

from __future__ import annotations

import os
from numbers import Integral

from nbelastic.errors import UsageError
from nbelastic.system.argument_types import PATH, check_kind, user_path

EVERY, KEEP = 100, 3  # defaults: commits between two checkpoints, and how many checkpoints are kept
CheckpointPlan = tuple[str, int, int] | None  # the folder, commits between two checkpoints, how many are kept


def checkpoint_plan(folder: str | os.PathLike[str] | None, every: int | None, keep: int | None) -> CheckpointPlan:
    """Return a job's checkpoints in the form in which workers get them. UsageError for wrong arguments."""
    if folder is None:
        if every is not None or keep is not None:
            given = "checkpoint_keep" if every is None else "checkpoint_every"
            raise UsageError(f"{given} has no effect without checkpoint: name a folder too.")
        return None
    check_kind("checkpoint", folder, PATH)
    for name, number in (("checkpoint_every", every), ("checkpoint_keep", keep)):
        if number is not None and (not isinstance(number, Integral) or number < 1):
            raise UsageError(f"{name}={number!r}: a whole number, at least 1.")
    path = os.path.abspath(user_path(folder)) if os.fspath(folder) else ""
    if not path or (os.path.exists(path) and not os.path.isdir(path)):
        raise UsageError(f"checkpoint={os.fspath(folder)!r} is not a folder.")
    return path, EVERY if every is None else int(every), KEEP if keep is None else int(keep)
