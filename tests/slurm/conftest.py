"""Fixtures: a real Slurm, if it is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbelastic.provision import batch
from tests.slurm.local_slurm import Slurm, find_programs, running_slurm, until


@pytest.fixture(scope="package")  # other tests check the children of this process
def slurm_daemons() -> Iterator[Slurm]:
    found = find_programs()
    missing = [name for name, path in found.items() if path is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (apt-get install munge slurmctld slurmd slurm-client)")
    with running_slurm(found) as slurm:
        yield slurm


@pytest.fixture
def slurm(slurm_daemons: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """Slurm is idle at the start of each test; all jobs are cancelled at its end."""
    monkeypatch.setenv("SLURM_CONF", slurm_daemons.environment["SLURM_CONF"])
    yield slurm_daemons
    for job in slurm_daemons.jobs():
        slurm_daemons("scancel", job)
    for node, state in slurm_daemons.states().items():
        if state.startswith("drain"):
            slurm_daemons("scontrol", "update", f"nodename={node}", "state=resume")
    until(slurm_daemons.idle, 30, "all jobs to end")


@pytest.fixture(autouse=True)
def query_often(monkeypatch):
    """Query a job's state without the pause of 2 s."""
    monkeypatch.setattr(batch, "POLL", 0.05)


@pytest.fixture
def fake_program(tmp_path):
    """`fake_program("exit 3")` is the path of a program that runs these shell commands, for instance instead of Python."""

    def make(commands, name="fake-program"):
        path = tmp_path / name
        path.unlink(
            missing_ok=True
        )  # an earlier one of this name may run: the file of a program that runs cannot be written
        path.write_text(f"#!/bin/sh\n{commands}\n")
        path.chmod(0o755)
        return str(path)

    return make
