"""The fixture `warm_agents`: agents that tests start are forked from one warm process; see tests/support/warm.py."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from nbelastic.driver import launchers, ssh
from tests.support import warm

ROOT = Path(__file__).parents[2]
DEADLINE = 120  # seconds that the warm process has for its imports


class WarmProcess:
    """`with WarmProcess() as process:` forks agents while `process.used` is true."""

    used = False
    pid = 0

    def __enter__(self) -> Self:
        self._folder = tempfile.mkdtemp(prefix="warm-")
        self.address = f"{self._folder}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(128)
            code = f"from tests.support.warm import serve; serve({listener.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # OpenBLAS would start threads as it is loaded
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[listener.fileno()],
            )
        self.pid, self.used = self._process.pid, True
        assert self._process.stdout.readline() == b"ready\n", "the warm process has ended; its error is above"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()
        shutil.rmtree(self._folder)

    def fork(self, cwd: str, environment: dict[str, str], fds: list[int]) -> int:
        """The pid of a new agent, a child of this process, that has these standard descriptors."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.address)
            return warm.ask(connection, {"cwd": cwd, "environment": environment, "waits": False}, fds)

    def family(self) -> set[int]:
        """This process, and the agents that it has forked for other hosts, with their workers."""
        if not self.pid:
            return set()
        try:
            return {self.pid, *(child.pid for child in psutil.Process(self.pid).children(recursive=True))}
        except psutil.NoSuchProcess:
            return set()

    def code(self) -> str:
        """What a Python on another host runs to be an agent: it asks the warm process first."""
        jitter = {name: os.environ[name] for name in ("TESTS_JITTER", "PYTHONPATH") if "TESTS_JITTER" in os.environ}
        here = f"import os; os.environ.update({jitter!r}); " if jitter else ""
        here += f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support.warm import join; del sys.path[0]"
        return f"{here}; join({self.address!r})"


process = WarmProcess()


class WarmPopen(subprocess.Popen):
    """A process of this machine; if it is to be an agent, a fork of the warm process."""

    def _execute_child(
        self, args: Any, executable: Any, preexec: Any, close: Any, pass_fds: Any, cwd: Any, *more: Any
    ) -> None:
        # *more: environment, startupinfo, creationflags, shell, then two descriptors for each of the three streams
        agent = process.used and list(args) == [sys.executable, "-c", ssh.AGENT]
        if agent:
            streams = more[4:10]
            try:
                self.pid = process.fork(os.fspath(cwd), dict(os.environ), [streams[0], streams[3], streams[5]])
            except EOFError:
                agent = False
            else:
                self._child_created = True
                self._close_pipe_fds(*streams)
        if not agent:
            super()._execute_child(args, executable, preexec, close, pass_fds, cwd, *more)


@pytest.fixture(scope="session")
def warm_agents() -> Iterator[WarmProcess]:
    """From now on tests that are not marked `cold` start warm agents."""
    with process, pytest.MonkeyPatch.context() as patch:
        patch.setattr(launchers, "Popen", WarmPopen)
        patch.setattr(ssh, "AGENT", process.code())  # each test that is marked `cold` sets it back
        yield process


@pytest.fixture(autouse=True)
def _warm_or_cold(request: pytest.FixtureRequest) -> None:
    process.used = process.pid != 0 and request.node.get_closest_marker("cold") is None
    ssh.AGENT = process.code() if process.used else warm.AGENT
