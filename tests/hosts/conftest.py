"""Machines for the tests, of which nothing is left afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.hosts.network import Network, missing


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """Three machines, h1, h2 and h3, that `ssh` reaches by these names; `network.add` starts more."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    with Network(3) as started:
        monkeypatch.setenv("PATH", started.path, prepend=os.pathsep)
        yield started
