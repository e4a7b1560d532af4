"""Set the result of a future that another thread may set at the same moment."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def resolve_if_pending(set_result: Callable[[T], None], value: T) -> None:
    """Call a future's `set_result` or `set_exception`; do nothing if the future is resolved already."""
    with suppress(InvalidStateError):
        set_result(value)
