"""Start a system that is compared, and end it with all processes that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[3]
MARK = "NBELASTIC_BENCHMARK"  # in the environment of each started process, to find leftovers
# torchrun's stores and torchft's servers listen on every interface. Inside, loopback is the only one, and this
# machine's name is loopback's, whatever it is outside.
ALONE = ("unshare", "--user", "--map-root-user", "--net", "--uts", "sh", "-c")
ALONE_SCRIPT = 'ip link set lo up && hostname localhost && exec "$@"'


@cache
def private_network() -> tuple[str, ...]:
    """Return the command prefix that hides all interfaces but loopback; empty where that is not possible."""
    before = (*ALONE, ALONE_SCRIPT, "sh")
    try:
        done = subprocess.run([*before, "true"], capture_output=True, timeout=10, check=False)
    except FileNotFoundError:
        return ()
    return before if done.returncode == 0 else ()


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the same environment for every system: one thread per worker (torchrun's default), gloo over loopback."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **extra}


@contextmanager
def started(
    command: Sequence[str], extra: Mapping[str, str], stdin: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command in its own session; at the end send SIGTERM, then kill and report the processes that are left.

    The end is also a SIGTERM of this process.
    """
    mark = uuid.uuid4().hex
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by default, no `finally` would run
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*private_network(), *command],
            cwd=ROOT,
            env={**environment(extra), MARK: mark},
            stdin=stdin,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            yield process
        except Exception:
            output.seek(max(0, output.seek(0, os.SEEK_END) - 4000))
            sys.stderr.write(output.read().decode(errors="replace"))
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            end(process, mark)


def end(process: subprocess.Popen[bytes], mark: str) -> None:
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} did not end within 30 s of SIGTERM: it is killed", flush=True)
    # A process that ends in a moment, such as a child that watches its parent, is not a leftover.
    _, alive = psutil.wait_procs(marked(mark), timeout=2)
    for left in alive:
        print(f"left over and killed: {left.pid} {' '.join(cmdline(left))[:100]}", flush=True)
        left.kill()
    psutil.wait_procs(alive, timeout=5)
    process.wait(timeout=5)


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:  # it has ended, or is another user's
            continue
    return found


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
