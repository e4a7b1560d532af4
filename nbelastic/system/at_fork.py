"""Functions that a forked child calls, mostly to close descriptors: `multiprocessing` forks a kernel with all its descriptors."""

from __future__ import annotations

import os
from collections.abc import Callable

_in_child: set[Callable[[], object]] = set()


def register(function: Callable[[], object]) -> None:
    """Call `function` in each child that is forked from now on, until `unregister(function)`."""
    _in_child.add(function)


def unregister(function: Callable[[], object]) -> None:
    _in_child.discard(function)


def _call_registered() -> None:
    for function in list(_in_child):
        function()


os.register_at_fork(after_in_child=_call_registered)
