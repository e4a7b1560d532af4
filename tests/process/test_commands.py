"""Commands in a terminal, on the cluster of a notebook that trains."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.process import programs
from tests.support.waiting import until


def nbelastic(*words: str) -> str:
    """Run the installed command, and return what it prints."""
    command = [Path(sys.executable).with_name("nbelastic"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def wait_for_output(process: subprocess.Popen[bytes], text: str, timeout: float = 30) -> None:
    """Wait until the process has printed this text."""
    output, end = b"", time.monotonic() + timeout
    while text.encode() not in output:
        left = end - time.monotonic()
        assert left > 0, f"no {text!r} within {timeout:g} s, but {output!r}"
        if select.select([process.stdout], [], [], left)[0]:
            data = os.read(process.stdout.fileno(), 1 << 16)
            assert data, f"it ended after {output!r}"
            output += data


@contextlib.contextmanager
def killed_at_the_end(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill the process at the end of the block, even after a failure: it would run without end."""
    try:
        yield
    finally:
        process.kill()


def test_a_terminal_follows_and_changes_a_cluster(make, tmp_path):
    """A terminal shows the events, adds a host and removes it; the events name the command, and the training goes on."""
    cluster = make("localhost:1", min=1, max=2)
    job = cluster.run(programs.train, str(tmp_path))
    command = [sys.executable, "-m", "nbelastic", "attach", cluster.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as terminal, killed_at_the_end(terminal):
        wait_for_output(terminal, "first step of generation 1")
        assert "127.0.0.2:1 is being added" in nbelastic("add", cluster.name, "127.0.0.2:1")
        cluster.wait(2, timeout=30)
        wait_for_output(terminal, "world of 2")
        assert "127.0.0.2/0" in nbelastic("status", cluster.name)
        os.kill(next(worker.pid for worker in cluster.workers if worker.host == "127.0.0.2"), signal.SIGKILL)
        wait_for_output(terminal, "SIGKILL")
        nbelastic("remove", cluster.name, "127.0.0.2")
        until(lambda: [host.name for host in cluster.hosts] == ["localhost"])
        assert any("by nbelastic remove (" in event.text for event in cluster.events)
        terminal.send_signal(signal.SIGINT)
        assert terminal.wait(10) == 130
    (tmp_path / "finish").touch()
    assert len(job.result(timeout=30)) == 1
    nbelastic("stop", cluster.name)
    until(lambda: cluster.status().reason.startswith("stopped: stopped by nbelastic stop ("))
