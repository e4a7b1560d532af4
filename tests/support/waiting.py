"""Wait for what a test expects, and say what it waited for if that does not come."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOOK = 0.01  # seconds between two looks
REST = 3  # times what a look took: what is waited for needs the processors too


def until(true: Callable[[], Any], timeout: float = 20.0, what: str | Callable[[], str] = "") -> Any:
    """Return the first true answer of `true()`. AssertionError after `timeout` seconds, with `what` it waited for."""
    end = time.monotonic() + timeout
    while True:
        begun = time.monotonic()
        if answer := true():
            return answer
        assert time.monotonic() < end, f"not within {timeout:g} s: {(what() if callable(what) else what) or true}"
        time.sleep(max(LOOK, REST * (time.monotonic() - begun)))


def files_in(folder: Path) -> list[Path]:
    """All that lies in it or below; others may remove it meanwhile, at which `Path.rglob` raises."""
    return [Path(parent, name) for parent, folders, files in os.walk(folder) for name in (*folders, *files)]


def until_none(found: Callable[[], Any], timeout: float = 20.0) -> None:
    """Return when `found()` finds nothing more. AssertionError after `timeout` seconds, with what it still finds."""
    rest: list[Any] = []

    def is_empty() -> bool:
        rest[:] = found()
        return not rest

    try:
        until(is_empty, timeout)
    except AssertionError as error:
        raise AssertionError(f"after {timeout:g} s there is still: {rest}") from error


async def until_async(true: Callable[[], Any], timeout: float = 40.0, what: str = "") -> Any:  # noqa: ASYNC109  (as above)
    """Like `until`, in an event loop; `true` may be a coroutine function."""
    end = time.monotonic() + timeout
    while True:
        answer = true()
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer:
            return answer
        assert time.monotonic() < end, f"not within {timeout:g} s: {(what() if callable(what) else what) or true}"
        await asyncio.sleep(LOOK)
