"""Starts a driver in its own process, and reports why it does not start."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec
from msgspec.structs import replace

from nbelastic.client.connection import Connection
from nbelastic.client.job_copy import create_error
from nbelastic.errors import HostError, NbelasticError
from nbelastic.protocol.client_messages import encoded
from nbelastic.protocol.driver_start import Start, StartReport
from nbelastic.protocol.local_clusters import remove_dead_cluster
from nbelastic.protocol.requests import Stop

CODE = """import json, sys
ours, *path = json.loads(sys.stdin.buffer.readline())
sys.path[:0] = [ours]
import nbelastic
sys.path[:1] = []
sys.path += [each for each in path if each and each not in sys.path]
from nbelastic.driver.process import main
main(path)"""
UNDO_TIMEOUT = 5.0  # seconds in which an interrupted start is undone
MAX_OUTPUT = 2000  # characters of the process's output in an error


def start_driver_process(
    start: Start, folder: Path, on_change: Callable[[], object], predecessor: Connection | None = None
) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Start the driver's process for this run folder, and connect to it. `predecessor`: see `Connection`.

    The process outlives this thread, this terminal session and, if the cluster is kept, this process. UsageError if the cluster
    has a driver already, HostError if the driver cannot start.
    """
    read_end, write_end = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, read_end)
        output = stack.enter_context(tempfile.TemporaryFile())
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", CODE, f"nbelastic-driver {start.settings.name}"],  # for `ps`
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a signal to the kernel's process group must not reach the driver
                pass_fds=[write_end],
            )
        finally:
            os.close(write_end)
        try:
            start = replace(start, ready_fd=write_end, temporary_folder=tempfile.gettempdir())
            home = str(Path(__file__).parents[2])  # so that the driver imports the same nbelastic as this process
            path = [home, *(each for each in sys.path if isinstance(each, str))]
            data = json.dumps(path).encode() + b"\n" + bytes(encoded(start))
            with contextlib.suppress(BrokenPipeError):  # the process has ended; its output says why
                _write_input(child, data)
            _wait_for(read_end, child, output, start.timeout)
        except BaseException:
            _kill(child, start)
            raise
        try:
            return Connection(folder, on_change, predecessor), child
        except (OSError, TimeoutError):
            _undo(child, start, folder)
            raise HostError("the driver's process does not answer at its start: try again.") from None
        except BaseException:
            _undo(child, start, folder)
            raise


def _undo(child: subprocess.Popen[bytes], start: Start, folder: Path) -> None:
    """End the driver and what it may have started; leave alone what it has taken over."""
    if child.poll() is None and not start.takes_over:
        with contextlib.suppress(OSError, NbelasticError, subprocess.TimeoutExpired):
            Connection(folder).request(Stop("an interrupt", 0.0))
            child.wait(UNDO_TIMEOUT)
    _kill(child, start)


def _kill(child: subprocess.Popen[bytes], start: Start) -> None:
    """Kill the driver and what it may have started; leave alone what it has taken over."""
    child.kill()
    child.wait()
    if not start.takes_over:
        remove_dead_cluster(start.settings.name, start.settings.number, kill=True)


def _write_input(child: subprocess.Popen[bytes], data: bytes) -> None:
    assert child.stdin is not None
    with child.stdin:
        child.stdin.write(data)


def _wait_for(ready: int, child: subprocess.Popen[bytes], output: IO[bytes], timeout: float) -> None:
    """Return when the driver reports that it is ready. NbelasticError if it refuses or ends."""
    end, report = time.monotonic() + timeout, b""
    poll = select.poll()
    poll.register(ready, select.POLLIN)
    while not report.endswith(b"\n"):
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            raise HostError(f"the driver's process did not start within {timeout:g} s.")
        data = os.read(ready, 1 << 16)
        if not data:
            output.seek(0)
            last = output.read()[-MAX_OUTPUT:].decode(errors="replace").strip()
            raise HostError(f"the driver's process has ended at its start (exit code {child.wait()}): {last}")
        report += data
    start_report = msgspec.json.decode(report, type=StartReport)
    if start_report.error:
        raise create_error(start_report.error, start_report.text)
