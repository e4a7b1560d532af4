"""Start and stop an agent: on this machine as a process, on another one over ssh or as a batch job."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from subprocess import STDOUT, Popen
from typing import IO, Any, Protocol

from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.settings import SSH, Settings
from nbelastic.provision import ssh
from nbelastic.system.folder_paths import batch_folder
from nbelastic.system.process_identity import identity, is_alive, pid_of, pidfd_of
from nbelastic.system.processes import kill_group, last_output


class Agent(Protocol):
    """How the driver starts and kills one agent. `on_stop(why)` is called once, in the loop's thread.

    `process`: the agent's process on this machine, or its ssh client's (`pid@start`); empty if there is none. `job`: the
    number of its batch job; empty if there is none.
    """

    @property
    def process(self) -> str: ...

    @property
    def job(self) -> str: ...

    def start(self, config: Mapping[str, Any]) -> None:
        """Return at once."""

    def kill(self) -> None:
        """Kill the agent, and with it its workers. Return at once."""


PIPE_BUFFER = 1 << 16  # bytes that a pipe of Linux holds; a user may set up to 1 MiB


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
    """An agent that runs as a process of this machine, or on another machine behind an ssh client."""

    job = ""

    def __init__(
        self,
        command: list[str],
        log: Path,
        explain: Callable[[int | None, str], str],
        on_stop: Callable[[str], None],
    ) -> None:
        self._command, self._log, self._explain, self._on_stop = command, log, explain, on_stop
        self.process = ""

    def start(self, config: Mapping[str, Any]) -> None:
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        line = json.dumps(config).encode() + b"\n"
        with open(self._log, "ab") as out, _self_held_pipe() as stdin:
            if len(line) > PIPE_BUFFER:  # else write() would block: the reader is not started yet
                fcntl.fcntl(stdin, fcntl.F_SETPIPE_SZ, len(line))
            stdin.write(line)  # before the start: if the driver is killed now, the agent does not wait for its config
            self._child = Popen(self._command, stdin=stdin, stdout=out, stderr=STDOUT, start_new_session=True)
        self.process = identity(self._child.pid)
        _call_at_exit(os.pidfd_open(self._child.pid), self._on_exit)

    def _on_exit(self) -> None:
        code = self._child.wait()
        self._on_stop(self._explain(code, last_output(self._log, self._log_start)))

    def kill(self) -> None:
        if self._child.returncode is None:  # before wait() no other process can have this pid
            kill_group(self._child.pid)


class AdoptedAgent:
    """An agent that another driver has started. `process`: its process (`pid@start`) on this machine, or empty."""

    job = ""

    def __init__(self, process: str, on_stop: Callable[[str], None]) -> None:
        self.process, self._on_stop = process, on_stop

    def start(self, config: Mapping[str, Any]) -> None:  # noqa: ARG002  (the other driver has sent it)
        if not self.process:  # a batch job without a number yet: only the agent's connection shows that it runs
            return
        try:
            _call_at_exit(pidfd_of(self.process), partial(self._on_stop, "its process has ended"))
        except OSError:
            asyncio.get_running_loop().call_soon(self._on_stop, "its process had ended")

    def kill(self) -> None:
        if is_alive(self.process):
            kill_group(pid_of(self.process))


class BatchJobAgent:
    """An agent that runs as a batch job. `number`: unique among the cluster's agents."""

    process = ""

    def __init__(self, host: str, settings: Settings, on_stop: Callable[[str], None], number: int) -> None:
        from nbelastic.provision.batch import BatchAgent  # importing ipyparallel is slow

        self._python, self._on_stop = settings.python, on_stop
        folder = batch_folder(settings.name, settings.number)
        self._batch = BatchAgent(
            settings.launcher, host, folder, settings.launcher_options, self._stopped, number=number
        )

    @property
    def job(self) -> str:
        return self._batch.job

    def start(self, config: Mapping[str, Any]) -> None:
        self._batch.start(config, {}, self._python, None)

    def adopt(self, job: str) -> None:
        """Take over a job that another driver has submitted, instead of `start`."""
        self._batch.adopt(job)

    def _stopped(self, code: int | None) -> None:
        self._on_stop(_explain_exit("batch job", code, self._batch.output()))

    def kill(self) -> None:
        self._batch.kill()

    async def state(self) -> str:
        """The job's state for people: see `BatchAgent.state`."""
        return await self._batch.state()


def agent_for(spec: HostSpec, local: str, settings: Settings, on_stop: Callable[[str], None], number: int) -> Agent:
    """The launcher of a host's agent. `local`: the host's loopback address if it is this machine, else empty."""
    stem = "".join(c if c.isalnum() or c in ".-_" else "_" for c in spec.name)
    log, python = settings.run_folder / f"agent-{stem}.log", settings.python
    if local:
        return ProcessAgent([sys.executable, "-c", ssh.AGENT], log, partial(_explain_exit, "agent"), on_stop)
    if settings.launcher != SSH:
        return BatchJobAgent(spec.name, settings, on_stop, number)
    return ProcessAgent(
        ssh.command(spec, python), log, lambda code, output: ssh.explain_exit(spec, code, output, python), on_stop
    )


def _explain_exit(what: str, code: int | None, output: str) -> str:
    """Why the agent ended, in one line."""
    last = "; ".join(output.strip().splitlines()[-5:])
    return f"its {what} ended with exit code {code}" + (f": {last}" if code and last else "")
