"""Starts a system that is compared, and ends it with everything that it started."""

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
MARK = "NBELASTIC_BENCHMARK"  # in the environment of everything that is started: what is left over is found by it
# torchrun's stores and torchft's servers listen on every interface. Here loopback is the only one, and this
# machine's name is that of loopback, whatever it is outside.
ALONE = ("unshare", "--user", "--map-root-user", "--net", "--uts", "sh", "-c")
ALONE_SCRIPT = 'ip link set lo up && hostname localhost && exec "$@"'


@cache
def private_network() -> tuple[str, ...]:
    """What to put before a command so that it sees no interface but loopback; nothing where that cannot be had."""
    before = (*ALONE, ALONE_SCRIPT, "sh")
    try:
        done = subprocess.run([*before, "true"], capture_output=True, timeout=10, check=False)
    except FileNotFoundError:
        return ()
    return before if done.returncode == 0 else ()


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The same for every system: one thread a worker (torchrun's own default), gloo over loopback."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **extra}


@contextmanager
def started(command: Sequence[str], extra: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a session of its own; at the end SIGTERM, then a look for what is left: it is killed and said."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*private_network(), *command],
            cwd=ROOT,
            env={**environment(extra), MARK: mark},
            stdin=subprocess.DEVNULL,
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
    # What dies in a moment, such as a child that watches its parent, is no leftover.
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
        except psutil.Error:  # gone meanwhile, or another user's
            continue
    return found


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
