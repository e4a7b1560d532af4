"""Hooks that run after each backward pass of this process, on every rank alike, whichever parameters the pass reached."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_hooks: dict[BackwardHook, Callable[[], object]] = {}
_original = torch.autograd.backward


class BackwardHook:
    """Calls `hook()` after each backward pass, until `remove()`."""

    def __init__(self, hook: Callable[[], object]) -> None:
        _hooks[self] = hook
        torch.autograd.backward = _with_hooks

    def remove(self) -> None:
        _hooks.pop(self, None)
        if not _hooks:
            torch.autograd.backward = _original


@functools.wraps(_original)
def _with_hooks(*args: Any, **kwargs: Any) -> None:
    try:
        _original(*args, **kwargs)
    finally:
        for hook in [*_hooks.values()]:
            hook()
