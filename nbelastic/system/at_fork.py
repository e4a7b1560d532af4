"""What a forked child of this process must not keep open: `multiprocessing` forks a kernel with all its descriptors."""

from __future__ import annotations

import os
from collections.abc import Callable

_in_child: set[Callable[[], object]] = set()


def in_child(function: Callable[[], object]) -> None:
    """Call `function` in each child that is forked from now on, until `no_longer(function)`."""
    _in_child.add(function)


def no_longer(function: Callable[[], object]) -> None:
    _in_child.discard(function)


def _forked() -> None:
    for function in list(_in_child):
        function()


os.register_at_fork(after_in_child=_forked)
