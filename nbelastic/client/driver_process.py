"""Starts the driver's process."""

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
from typing import IO, TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from nbelastic.client.connection import Connection, error_of
from nbelastic.errors import HostError, NbelasticError
from nbelastic.protocol.requests import Stop
from nbelastic.protocol.saved_cluster import sweep
from nbelastic.protocol.start import Refusal, Start
from nbelastic.protocol.updates import encoded

if TYPE_CHECKING:
    pass

CODE = """import json, sys
ours, *path = json.loads(sys.stdin.buffer.readline())
sys.path[:0] = [ours]
import nbelastic
sys.path[:1] = []
sys.path += [each for each in path if each and each not in sys.path]
from nbelastic.driver.process import main
main(path)"""
TAKEN_BACK = 5.0  # seconds to stop what has begun, when somebody interrupts a start
LAST_WORDS = 2000  # characters of what it wrote


def launch(
    start: Start, folder: Path, on_change: Callable[[], object], before: Connection | None = None
) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Start the driver's process for this run folder; returns when it can be asked. `before`: see `Connection`.

    It outlives this thread, this session and, if the cluster is kept, this process. Raises what is wrong: UsageError if there is
    such a cluster already, HostError if the driver cannot start.
    """
    ours, theirs = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, ours)
        words = stack.enter_context(tempfile.TemporaryFile())
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", CODE, f"nbelastic-driver {start.settings.name}"],  # for `ps`
                stdin=subprocess.PIPE,
                stdout=words,
                stderr=words,
                start_new_session=True,  # what interrupts or ends the kernel's process group is not for it
                pass_fds=[theirs],
            )
        finally:
            os.close(theirs)
        try:
            start = replace(start, ready=theirs, temporary=tempfile.gettempdir())
            home = str(Path(__file__).parents[2])  # where the driver finds the same nbelastic as this process
            path = [home, *(each for each in sys.path if isinstance(each, str))]
            data = json.dumps(path).encode() + b"\n" + bytes(encoded(start))
            with contextlib.suppress(BrokenPipeError):  # it has ended, and has said why
                _tell(child, data)
            _wait_for(ours, child, words, start.patience)
        except BaseException:
            _end(child, start)
            raise
        try:
            return Connection(folder, on_change, before), child
        except (OSError, TimeoutError):
            _take_back(child, start, folder)
            raise HostError("the driver's process does not answer at its start: try again.") from None
        except BaseException:
            _take_back(child, start, folder)
            raise


def _take_back(child: subprocess.Popen[bytes], start: Start, folder: Path) -> None:
    """End a driver that is there, and what it may have started by now; but not what it has taken over."""
    if child.poll() is None and not start.found:
        with contextlib.suppress(OSError, NbelasticError, subprocess.TimeoutExpired):
            Connection(folder).request(Stop("an interrupt", 0.0))
            child.wait(TAKEN_BACK)
    _end(child, start)


def _end(child: subprocess.Popen[bytes], start: Start) -> None:
    """At once, with what it may just have started; but not with what it has taken over."""
    child.kill()
    child.wait()
    if not start.found:
        sweep(start.settings.name, start.settings.number, kill=True)


def _tell(child: subprocess.Popen[bytes], data: bytes) -> None:
    assert child.stdin is not None
    with child.stdin:
        child.stdin.write(data)


def _wait_for(ready: int, child: subprocess.Popen[bytes], words: IO[bytes], patience: float) -> None:
    """Return when the driver says that it is there. NbelasticError if it is not."""
    end, said = time.monotonic() + patience, b""
    news = select.poll()
    news.register(ready, select.POLLIN)
    while not said.endswith(b"\n"):
        if not news.poll(max(0.0, end - time.monotonic()) * 1000):
            raise HostError(f"the driver's process did not start within {patience:g} s.")
        data = os.read(ready, 1 << 16)
        if not data:
            words.seek(0)
            last = words.read()[-LAST_WORDS:].decode(errors="replace").strip()
            raise HostError(f"the driver's process has ended at its start (exit code {child.wait()}): {last}")
        said += data
    refusal = msgspec.json.decode(said, type=Refusal)
    if refusal.error:
        raise error_of(refusal.error, refusal.text)
