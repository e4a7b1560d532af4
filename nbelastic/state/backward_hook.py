"""Telling that a backward pass has run, on every rank alike: whichever parameters it reached on this one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_told: dict[int, Callable[[], object]] = {}  # by the number of their registration
_plain = torch.autograd.backward


class Registered:
    """`then()` is called after each backward pass of this process, until `remove()`."""

    _numbers = 0

    def __init__(self, then: Callable[[], object]) -> None:
        Registered._numbers += 1
        self._number = Registered._numbers
        _told[self._number] = then
        torch.autograd.backward = _watched

    def remove(self) -> None:
        _told.pop(self._number, None)
        if not _told:
            torch.autograd.backward = _plain


@functools.wraps(_plain)
def _watched(*args: Any, **kwargs: Any) -> None:
    try:
        _plain(*args, **kwargs)
    finally:
        for then in [*_told.values()]:
            then()
