"""Slurm for the tests, where it is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbelastic.provision import batch
from tests.slurm.running import Slurm, programs, running_slurm, until


@pytest.fixture(scope="package")  # other tests look at what this process has started
def slurm_daemons() -> Iterator[Slurm]:
    found = programs()
    missing = [name for name, path in found.items() if path is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (apt-get install munge slurmctld slurmd slurm-client)")
    with running_slurm(found) as slurm:
        yield slurm


@pytest.fixture
def slurm(slurm_daemons: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """Every test finds it idle, and leaves no job."""
    monkeypatch.setenv("SLURM_CONF", slurm_daemons.environment["SLURM_CONF"])
    yield slurm_daemons
    for job in slurm_daemons.jobs():
        slurm_daemons("scancel", job)
    for node, state in slurm_daemons.states().items():
        if state.startswith("drain"):
            slurm_daemons("scontrol", "update", f"nodename={node}", "state=resume")
    until(slurm_daemons.idle, 30, "all jobs to end")


@pytest.fixture(autouse=True)
def ask_often(monkeypatch):
    """Tests have no time for a second look after 2 s."""
    monkeypatch.setattr(batch, "POLL", 0.05)


@pytest.fixture
def stand_in(tmp_path):
    """`stand_in("exit 3")` is a program in the place of Python, that runs these shell commands."""

    def make(commands, name="stand-in"):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{commands}\n")
        path.chmod(0o755)
        return str(path)

    return make
