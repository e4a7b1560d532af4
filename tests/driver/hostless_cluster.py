"""Clusters without hosts: their drivers run in threads and start no process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import nbelastic as nbe
from tests.support import driver_thread


class NoHosts:
    """A discovery that lists no host."""

    async def hosts(self) -> tuple[()]:
        return ()


@pytest.fixture
def clusters_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the folder of this user's clusters into the test's own folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


@pytest.fixture
def start_hostless(clusters_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start clusters without hosts, as in `start_hostless(keep=True)`; all are stopped at the end."""
    driver_thread.use_driver_threads(monkeypatch)
    with ExitStack() as stack:

        def start(name: str = "quiet", **options: Any) -> nbe.Cluster:
            options = {"log_dir": clusters_folder / "logs", "discovery": NoHosts(), **options}
            return stack.enter_context(nbe.Cluster(name=name, **options).start(wait=False))

        yield start
