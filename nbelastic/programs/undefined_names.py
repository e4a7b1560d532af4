"""Finds names that a program uses and that it does not define, before it runs."""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Collection, Mapping
from types import CodeType
from typing import Any

from nbelastic.system.code_steps import code_steps


def refuse_undefined_names(needed: Mapping[str, str], defined: Collection[str]) -> None:
    """NameError with all names that the notebook's functions need and that are not defined. `needed` has their readers."""
    missing = {name: user for name, user in needed.items() if name not in defined and not hasattr(builtins, name)}
    if missing:
        used = ", ".join(f"{name!r} in {user}()" for name, user in sorted(missing.items()))
        raise NameError(
            f"neither the notebook nor the workers define what the function uses: {used}. Define it in the notebook, or with "
            "cluster.push or a setup cell on the workers"
        )


def explain_undefined_name(error: BaseException, names: Mapping[str, Any]) -> None:
    """Add a note to a NameError that the user's cells raise: a name of the notebook is not one of this worker's `names`.

    A function inside another one may read a name of that one, which is not the notebook's.
    """
    if type(error) is not NameError or not error.name or error.name in names:
        return
    raised = list(traceback.walk_tb(error.__traceback__))[-1:]
    if any(frame.f_globals is names and error.name not in frame.f_code.co_freevars for frame, _ in raised):
        error.add_note(
            f"Workers have only the names that you give them: %elastic_push {error.name} sends a value of the notebook, and a "
            "%%elastic_setup cell imports or defines a name on every worker."
        )


def borrowed_names(code: CodeType, names: Collection[str]) -> tuple[str, ...]:
    """The `names` that a cell, or a function in it, reads, though the cell does not set them."""
    steps = list(code_steps(code))
    reads = {step.argval for step in steps if step.opname in ("LOAD_NAME", "LOAD_GLOBAL")}
    sets = {step.argval for step in steps if step.opname in ("STORE_NAME", "STORE_GLOBAL")}
    return tuple(sorted((reads - sets).intersection(names)))
