"""A terminal beside a notebook: real processes, and a real training."""

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
    """What the installed command prints."""
    command = [Path(sys.executable).with_name("nbelastic"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def reads(process: subprocess.Popen[bytes], text: str, timeout: float = 30) -> None:
    """Until it has printed this."""
    said, end = b"", time.monotonic() + timeout
    while text.encode() not in said:
        left = end - time.monotonic()
        assert left > 0, f"no {text!r} within {timeout:g} s, but {said!r}"
        if select.select([process.stdout], [], [], left)[0]:
            data = os.read(process.stdout.fileno(), 1 << 16)
            assert data, f"it ended after {said!r}"
            said += data


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whatever fails: nobody waits for a process that follows for ever."""
    try:
        yield
    finally:
        process.kill()


def test_a_terminal_looks_on_and_steers(make, tmp_path):
    """It adds a host, loses a worker and removes the host; the notebook sees who did it, and nobody's training ends."""
    cluster = make("localhost:1", min=1, max=2)
    job = cluster.run(programs.train, str(tmp_path))
    command = [sys.executable, "-m", "nbelastic", "attach", cluster.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as terminal, ended(terminal):
        reads(terminal, "first step of generation 1")
        assert "127.0.0.2:1 is being added" in nbelastic("add", cluster.name, "127.0.0.2:1")
        cluster.wait(2, timeout=30)
        reads(terminal, "world of 2")
        assert "127.0.0.2/0" in nbelastic("status", cluster.name)
        os.kill(next(worker.pid for worker in cluster.workers if worker.host == "127.0.0.2"), signal.SIGKILL)
        reads(terminal, "SIGKILL")
        nbelastic("remove", cluster.name, "127.0.0.2")
        until(lambda: [host.name for host in cluster.hosts] == ["localhost"])
        assert any("by nbelastic remove (" in event.text for event in cluster.events)
        terminal.send_signal(signal.SIGINT)
        assert terminal.wait(10) == 130
    (tmp_path / "finish").touch()
    assert len(job.result(timeout=30)) == 1
    nbelastic("stop", cluster.name)
    until(lambda: cluster.status().reason.startswith("stopped: stopped by nbelastic stop ("))
