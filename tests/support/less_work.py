"""What costs the tests' processes time and proves nothing: collecting garbage among pytest's items, and spinning threads."""

from __future__ import annotations

import gc
import os

import pytest


def pytest_configure() -> None:
    gc.disable()  # until the tests are collected: none of that is garbage
    # Threads of OpenMP that wait spin for a while, on the processors that other processes need. Set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()  # collections pass over the tests, and over all modules that are imported
