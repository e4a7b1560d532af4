"""Finds names that a program uses and that it does not define, before it runs."""

from __future__ import annotations

import builtins
from collections.abc import Collection, Mapping
from types import CodeType

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


def borrowed_names(code: CodeType, names: Collection[str]) -> tuple[str, ...]:
    """The `names` that a cell, or a function in it, reads, though the cell does not set them."""
    steps = list(code_steps(code))
    reads = {step.argval for step in steps if step.opname in ("LOAD_NAME", "LOAD_GLOBAL")}
    sets = {step.argval for step in steps if step.opname in ("STORE_NAME", "STORE_GLOBAL")}
    return tuple(sorted((reads - sets).intersection(names)))
