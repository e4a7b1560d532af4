"""Run a program to its end, with limits on its time and output."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, NamedTuple

from nbelastic.errors import DiscoveryError
from nbelastic.system.processes import kill_group

MOST_OUTPUT = 1 << 20  # bytes that a program may write, if the caller does not allow more
LAST_OUTPUT_TIMEOUT = 0.5  # seconds to read the rest after the exit, if a process of the same group keeps the pipe open


class ProgramResult(NamedTuple):
    """A program's exit code (negative: a signal), standard output and standard error."""

    code: int
    out: str
    err: str


async def run_program(
    command: Sequence[str], seconds: float, *, name: str = "", folder: str | None = None, most: int = MOST_OUTPUT
) -> ProgramResult:
    """Run a program to its end, without input. Its process group is killed before this call returns.

    DiscoveryError if the program cannot be run, takes longer than `seconds`, or writes more than `most` bytes.
    Error texts name it `name`.
    """
    name = name or command[0]
    process, stdout, stderr = _start(command, name, folder)
    try:
        exit_watch = _ExitWatch(process.pid)
    except OSError as error:
        kill_group(process.pid)
        with process:  # closes the pipes and waits
            raise DiscoveryError(f"{name} cannot be watched: {error.strerror}.") from None
    out, err = _PipeReader(stdout, most), _PipeReader(stderr, most)
    try:
        async with asyncio.timeout(seconds):
            await _wait_for_any(exit_watch.exited, out.overflowed, err.overflowed)
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_OUTPUT_TIMEOUT):
                    await asyncio.gather(out.ended.wait(), err.ended.wait())
    except TimeoutError:
        raise DiscoveryError(f"{name} did not answer within {seconds:g} s.") from None
    finally:
        kill_group(process.pid)  # before poll(): until then no other process can have this pid
        with suppress(TimeoutError):  # SIGKILL does not end a process that waits for a broken disk
            await asyncio.wait_for(exit_watch.exited.wait(), 1.0)
        process.poll()
        for reader in (exit_watch, out, err):
            reader.close()
    if out.overflowed.is_set() or err.overflowed.is_set():
        raise DiscoveryError(f"{name} wrote more than {most >> 20} MiB: it must print one host per line only.")
    return ProgramResult(process.returncode or 0, out.text(), err.text())


def _start(
    command: Sequence[str], name: str, folder: str | None
) -> tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]:
    """Popen instead of asyncio's subprocess: asyncio waits for the pipes too, which a grandchild may keep open."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, stdin=null, stdout=pipe, stderr=pipe, cwd=folder, start_new_session=True)
    except OSError as error:
        if folder is not None and error.filename == folder:
            raise DiscoveryError(f"{name} cannot be run: its working folder {folder}: {error.strerror}.") from None
        raise DiscoveryError(f"{name} cannot be run: {error.strerror}; check its path and mode.") from None
    assert process.stdout is not None
    assert process.stderr is not None
    return process, process.stdout, process.stderr


class _ExitWatch:
    """`exited` is set when the child process `pid` has ended. The exit code is left for `poll()`."""

    def __init__(self, pid: int) -> None:
        self.exited = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._fd = os.pidfd_open(pid)
        self._loop.add_reader(self._fd, self._on_exit)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._fd)
        self.exited.set()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


class _PipeReader:
    """Reads a program's output as it is written, up to `most` bytes."""

    def __init__(self, pipe: IO[bytes], most: int) -> None:
        self.ended, self.overflowed = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._pipe, self._most, self._output = pipe, most, bytearray()
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe.fileno(), self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return
        self._output += data
        if len(self._output) > self._most:
            self.overflowed.set()
        if not data or self.overflowed.is_set():
            self.ended.set()
            self._loop.remove_reader(self._pipe.fileno())

    def text(self) -> str:
        return self._output.decode(errors="replace")

    def close(self) -> None:
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()


async def _wait_for_any(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
