"""Agents that are processes of this machine, or behind one: started by this driver, or adopted from an earlier one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from subprocess import STDOUT, Popen
from typing import IO, Any

from nbelastic.system.first_line import write_first_line
from nbelastic.system.private_files import append_private
from nbelastic.system.process_identity import identity, is_alive, pid_of, pidfd_of
from nbelastic.system.processes import kill_group, last_output


def _self_held_pipe() -> IO[bytes]:
    """A pipe whose read end is also its write end: the child that inherits it never reads the end of the file."""
    reader, writer = os.pipe()
    try:
        return os.fdopen(os.open(f"/proc/self/fd/{reader}", os.O_RDWR | os.O_CLOEXEC), "r+b", buffering=0)
    finally:
        os.close(reader)
        os.close(writer)


def _call_at_exit(pidfd: int, call: Callable[[], object]) -> None:
    """Call `call` in the running loop when the process ends. Closes `pidfd` then."""
    loop = asyncio.get_running_loop()

    def on_exit() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        call()

    loop.add_reader(pidfd, on_exit)


class ProcessAgent:
    """An agent that runs as a process of this machine, or on another one behind a tunnel's process."""

    job = ""

    def __init__(
        self,
        command: list[str],
        log: Path,
        on_exit: Callable[[int | None, str], None],
        end: int = signal.SIGKILL,
    ) -> None:
        """`on_exit(exit code, last output)` is called once. `end`: the signal that makes the process end the agent."""
        self._command, self._log, self._report_exit, self._end = command, log, on_exit, end
        self.process = ""

    def start(self, config: Mapping[str, Any]) -> None:
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        line = json.dumps(config).encode() + b"\n"
        with os.fdopen(append_private(self._log), "ab") as out, _self_held_pipe() as stdin:
            # Before the start: if the driver is killed now, the agent does not wait for its configuration.
            inherited = write_first_line(stdin, line)
            try:
                self._child = Popen(
                    self._command,
                    stdin=stdin,
                    stdout=out,
                    stderr=STDOUT,
                    start_new_session=True,
                    pass_fds=inherited,
                )
            finally:
                for fd in inherited:
                    os.close(fd)
        self.process = identity(self._child.pid)
        try:
            _call_at_exit(os.pidfd_open(self._child.pid), self._on_exit)
        except OSError:  # no descriptor is left
            self._child.kill()
            self._child.wait()
            raise

    def _on_exit(self) -> None:
        code = self._child.wait()
        self._report_exit(code, last_output(self._log, self._log_start))

    def kill(self) -> None:
        if self._child.returncode is None:  # before wait() no other process can have this pid
            kill_group(self._child.pid, self._end)


class AdoptedAgent:
    """An agent that another driver has started. `process`: its process (`pid@start`) on this machine, or empty.

    `end`: the signal that makes the process end the agent.
    """

    job = ""

    def __init__(self, process: str, on_stop: Callable[[str], None], end: int = signal.SIGKILL) -> None:
        self.process, self._on_stop, self._end = process, on_stop, end

    def start(self, config: Mapping[str, Any]) -> None:  # noqa: ARG002  (the other driver has sent it)
        if not self.process:  # a batch job without a number yet: only the agent's connection shows that it runs
            return
        try:
            _call_at_exit(pidfd_of(self.process), partial(self._on_stop, "its process has ended"))
        except OSError:
            asyncio.get_running_loop().call_soon(self._on_stop, "its process had ended")

    def kill(self) -> None:
        if is_alive(self.process):
            kill_group(pid_of(self.process), self._end)
