"""Agents that tests start are forks of one warm process, but for those of tests that are marked `cold`: see warm_process.py.

The process starts with the first test of these folders. This pytest asks it by itself, other hosts by the code that ssh runs,
and what tests start (kernels, terminals) by the variable TESTS_WARM.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbelastic.provision import process_agent, ssh
from tests.support import startup, warm_process

ROOT = Path(__file__).parents[2]
# Processes that must start fast know this text too, and import nothing of nbelastic's to compare. Were it another, all
# agents would start cold without a word.
assert ssh.AGENT == warm_process.AGENT
assert f'"{ssh.AGENT}"' in Path(startup.FOLDER, "sitecustomize.py").read_text()
FOLDERS = ("browser", "hosts", "kubernetes", "notebooks", "process")


class WarmProcess:
    """Forks agents while `used` is true, once it was started."""

    used = False
    pid = 0

    def start(self) -> None:
        startup.on_path()
        self._folder = tempfile.mkdtemp(prefix="warm-")
        self.address = f"{self._folder}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(128)
            code = f"from tests.support.warm_process import serve; serve({listener.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # OpenBLAS would start threads as it is loaded
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[listener.fileno()],
            )
        self.pid = self._process.pid
        assert self._process.stdout.readline() == b"ready\n", "the warm process has ended; its error is above"
        process_agent.Popen = WarmPopen

    def use(self, used: bool) -> None:
        """From now on agents are forks, or not."""
        self.used = used
        ssh.AGENT = self.code() if used else warm_process.AGENT
        if used:
            os.environ["TESTS_WARM"] = self.address
        else:
            os.environ.pop("TESTS_WARM", None)

    def end(self) -> None:
        self.use(False)
        process_agent.Popen = subprocess.Popen
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()
        shutil.rmtree(self._folder)

    def fork(self, code: str, cwd: str, environment: Mapping[str, str], fds: list[int]) -> int:
        """The pid of a new child of this process that runs the code and has these standard descriptors."""
        request = {"code": code, "cwd": cwd, "environment": dict(environment), "waits": False}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.address)
            return warm_process.ask(connection, request, fds)

    def family(self) -> set[int]:
        """This process, and the agents that it has forked for other hosts, with their workers."""
        if not self.pid:
            return set()
        try:
            return {self.pid, *(child.pid for child in psutil.Process(self.pid).children(recursive=True))}
        except psutil.NoSuchProcess:
            return set()

    def code(self) -> str:
        """What a Python on another host runs to be an agent: it asks the warm process first.

        sshd gives it an environment of its own, and the warm process serves only its equals.
        """
        ours = warm_process.decisive(os.environ)
        if "TESTS_JITTER" in os.environ:
            ours["TESTS_JITTER"] = os.environ["TESTS_JITTER"]
        here = f"import os; os.environ.update({ours!r}); "
        here += f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support.warm_process import join; del sys.path[0]"
        return f"{here}; join({self.address!r}); {warm_process.AGENT}"


process = WarmProcess()


TORCHRUN = "import runpy, sys; sys.argv[1:] = {!r}; runpy.run_module('torch.distributed.run', run_name='__main__')"


def warm_code(args: Sequence[str]) -> str | None:
    """What a fork of the warm process has to run in the place of this command, if it can."""
    match args:
        case [sys.executable, "-c", ssh.AGENT]:
            return warm_process.AGENT
        case [sys.executable, "-m", "torch.distributed.run", *arguments]:
            return TORCHRUN.format(arguments)
    return None


class WarmPopen(subprocess.Popen):
    """A process of this machine with streams of its own; an agent and a torchrun are forks of the warm process."""

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec: Any,
        close: Any,
        pass_fds: Any,
        cwd: Any,
        environment: Any,
        *more: Any,
    ) -> None:
        # *more: startupinfo, creationflags, shell, then two descriptors for each of the three streams
        code = warm_code(list(args)) if process.used else None
        if code is not None:
            streams = more[3:9]
            fds = [streams[0], streams[3], streams[5]]
            try:
                self.pid = process.fork(code, os.fspath(cwd or os.getcwd()), environment or os.environ, fds)
            except ConnectionRefusedError:
                code = None
            else:
                self._child_created = True
                self._close_pipe_fds(*streams)
        if code is None:
            super()._execute_child(args, executable, preexec, close, pass_fds, cwd, environment, *more)


@pytest.hookimpl(tryfirst=True)  # kernels start while their notebooks are set up
def pytest_runtest_setup(item: pytest.Item) -> None:
    warm_here = item.path.parent.name in FOLDERS and item.get_closest_marker("cold") is None
    if warm_here and not process.pid:
        process.start()
    if warm_here != process.used:
        process.use(warm_here)


def pytest_unconfigure() -> None:
    if process.pid:
        process.end()
