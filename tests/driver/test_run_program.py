"""Programs that the driver runs to their end: discovery scripts, and those of batch systems."""

import asyncio
import errno
import os

import pytest

from nbelastic.errors import DiscoveryError
from nbelastic.provision.run_program import run_program
from tests.support.processes import alive


def test_a_program_that_cannot_be_watched_is_ended(monkeypatch):
    """No descriptor is left for the watch of a program that has started: it is killed, and the error says why."""
    started = []

    def refuse(pid):
        started.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(DiscoveryError, match=r"sleep cannot be watched: Too many open files\."):
        asyncio.run(run_program(["sleep", "1000"], 5.0))
    assert not alive(started[0])


def test_a_working_folder_that_was_removed_is_named(tmp_path):
    """A notebook's folder may go while its discovery script runs: the script's own path is right."""
    gone = str(tmp_path / "gone")
    with pytest.raises(DiscoveryError, match=f"sh cannot be run: its working folder {gone}: No such file or directory"):
        asyncio.run(run_program(["/bin/sh"], 5.0, name="sh", folder=gone))
