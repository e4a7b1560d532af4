"""What costs the tests' processes time and proves nothing: collecting garbage among pytest's items, and spinning threads."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest


def pytest_configure() -> None:
    # Threads of OpenMP that wait spin for a while, on the processors that other processes need. Set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile. Later collections pass over the tests, and over all modules that are imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
