"""`-n 3 --dist loadfile` (pytest-xdist): each worker has a temporary folder of its own, and heavy files take turns.

Browser tests come last, with and without `-n`: playwright keeps an event loop running in its thread, and a browser, until
the end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

HEAVY = ("hosts", "process", "slurm")  # folders of tests that start clusters


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        # clusters are known by their names in this folder: workers are not to see one another's
        config.own_tmp = tempfile.mkdtemp(prefix=f"{config.workerinput['workerid']}-")
        os.environ["TMPDIR"] = tempfile.tempdir = config.own_tmp


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "own_tmp"):
        shutil.rmtree(config.own_tmp, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        turns = _turns(items)
        items.sort(key=lambda item: turns[item.path])
    items.sort(key=lambda item: item.get_closest_marker("browser") is not None)


def _turns(items: list[pytest.Item]) -> dict[Path, int]:
    """Heavy files first, one of each folder by turns: those that use the processors then run beside those that wait."""
    files: dict[str, list[Path]] = {}
    for path in dict.fromkeys(item.path for item in items):
        files.setdefault(path.parent.name, []).append(path)
    return {
        path: turn if folder in HEAVY else len(items)
        for folder, paths in files.items()
        for turn, path in enumerate(paths)
    }
