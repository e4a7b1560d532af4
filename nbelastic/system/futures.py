"""Futures that two threads may resolve."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def settle(resolve: Callable[[T], None], value: T) -> None:
    """Resolve a future that another thread, or the driver's end, may have resolved at this moment."""
    with suppress(InvalidStateError):
        resolve(value)
