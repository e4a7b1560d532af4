"""Agents and drivers that tests start are forks of two warm processes, but for those of tests that are marked `cold`.

See warm_process.py. The processes start with the first test of these folders, or that is marked `warm`. This pytest asks them
by itself, other hosts by the code that ssh runs, and what tests start (kernels, terminals) by the variable TESTS_WARM.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from nbelastic.client import driver_process
from nbelastic.provision import process_agent, ssh
from tests.support import startup, warm_process, warm_request
from tests.support.shown_process import ARGUMENT, VARIABLE

ROOT = Path(__file__).parents[2]
# Processes that must start fast know this text too, and import nothing of nbelastic's to compare. Were it another, all
# agents would start cold without a word.
assert ssh.AGENT == warm_request.AGENT
assert f'"{ssh.AGENT}"' in Path(startup.FOLDER, "sitecustomize.py").read_text()
CODE = driver_process.CODE
HOME = str(Path(driver_process.__file__).parents[2])  # so that a warm process imports the same nbelastic as this one
FOLDERS = ("browser", "gpu", "hosts", "kubernetes", "notebooks", "process", "slurm")


class WarmProcess:
    """Forks, once it was started."""

    pid = 0

    def __init__(self, modules: Sequence[str], *options: str) -> None:
        self._modules, self._options = modules, options

    def start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="warm-")
        self.address = f"{self._folder}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(128)
            code = f"import sys; sys.path[:0] = {[HOME, str(ROOT)]}; from tests.support.warm_process import serve; "
            code += f"del sys.path[1]; serve({listener.fileno()}, {self._modules})"
            self._process = subprocess.Popen(
                [sys.executable, *self._options, "-c", code, ARGUMENT],
                # OpenBLAS would start threads as it is loaded
                env={**os.environ, "OMP_NUM_THREADS": "1", **VARIABLE},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[listener.fileno()],
            )
        self.pid = self._process.pid

    def wait(self) -> None:
        """Until it can fork."""
        assert self._process.stdout.readline() == b"ready\n", "the warm process has ended; its error is above"

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()
        shutil.rmtree(self._folder)

    def family(self) -> set[int]:
        """This process, and the agents that it has forked for other hosts, with their workers."""
        if not self.pid:
            return set()
        try:
            return {self.pid, *(child.pid for child in psutil.Process(self.pid).children(recursive=True))}
        except psutil.NoSuchProcess:
            return set()


process, drivers = WarmProcess(warm_process.AGENTS), WarmProcess(warm_process.DRIVERS, "-P")
used = False


def start() -> None:
    startup.on_path()
    for one in (process, drivers):
        one.start()
    for one in (process, drivers):
        one.wait()
    process_agent.Popen = WarmPopen
    driver_process.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": WarmPopen})


def end() -> None:
    use(False)
    process_agent.Popen = subprocess.Popen
    driver_process.subprocess = subprocess
    for one in (process, drivers):
        one.end()


def use(warm: bool) -> None:
    """From now on agents and drivers are forks, or not."""
    global used
    used = warm
    ssh.AGENT = code_of_hosts() if used else warm_request.AGENT
    driver_process.CODE = code_of_drivers() if used else CODE
    if used:
        os.environ |= {"TESTS_WARM": process.address, "TESTS_DRIVER": driver_process.CODE}
    else:
        for name in ("TESTS_WARM", "TESTS_DRIVER"):
            os.environ.pop(name, None)


def code_of_hosts() -> str:
    """What a Python on another host runs to be an agent: it asks the warm process first.

    sshd gives it an environment of its own, and the warm process serves only its equals.
    """
    ours = warm_request.decisive(os.environ)
    if "TESTS_JITTER" in os.environ:
        ours["TESTS_JITTER"] = os.environ["TESTS_JITTER"]
    here = f"import os; os.environ.update({ours!r}); "
    here += (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support.warm_request import join; del sys.path[0]"
    )
    return f"{here}; join({process.address!r}); {warm_request.AGENT}"


def tunnelled() -> str:
    """What a host runs to be the host's end of a tunnel, and an agent."""
    return f"from nbelastic.tunnel.host import main; main(lambda: exec({ssh.AGENT!r}))"


def code_of_drivers() -> str:
    """What a driver's process runs: agents behind a tunnel, by ssh or a batch system, ask the warm process first."""
    start, end = CODE.rsplit("\n", 1)
    ours = f"ssh.TUNNELLED_AGENT = {tunnelled()!r}\nssh.command.__defaults__ = (ssh.TUNNELLED_AGENT,)"
    return f"{start}\nfrom nbelastic.provision import ssh\n{ours}\n{end}"


TORCHRUN = "import runpy, sys; sys.argv[1:] = {!r}; runpy.run_module('torch.distributed.run', run_name='__main__')"


def fork_of(command: Sequence[Any]) -> tuple[WarmProcess, str] | None:
    """Which warm process can fork what this command starts, and what the fork has to run."""
    match command:
        case [sys.executable, "-P", "-c", ssh.AGENT]:
            return process, warm_request.AGENT
        case [sys.executable, "-m", "torch.distributed.run", *arguments]:
            return process, TORCHRUN.format(arguments)
        case [sys.executable, "-P", "-c", code, _] if code == driver_process.CODE:
            return drivers, code
    return None


class WarmPopen(subprocess.Popen):
    """A process of this machine; an agent, a driver and a torchrun are forks of a warm process."""

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
        # *more: startupinfo, creationflags, shell, two descriptors for each of the three streams, and six others
        streams, session = more[3:9], more[14]
        fork = fork_of(list(args)) if used else None
        if fork is not None:
            ends = {
                number: end if end >= 0 else number for number, end in enumerate((streams[0], streams[3], streams[5]))
            }
            warm, code = fork
            try:
                self.pid = warm_request.ask(
                    warm.address,
                    code,
                    args,
                    ends | {fd: fd for fd in pass_fds},
                    cwd=os.fspath(cwd or os.getcwd()),
                    environment=dict(environment or os.environ),
                    session=session,
                )
            except ConnectionRefusedError:
                fork = None
            else:
                self._child_created = True
                self._close_pipe_fds(*streams)
        if fork is None:
            super()._execute_child(args, executable, preexec, close, pass_fds, cwd, environment, *more)


@pytest.hookimpl(tryfirst=True)  # kernels start while their notebooks are set up
def pytest_runtest_setup(item: pytest.Item) -> None:
    of_clusters = item.path.parent.name in FOLDERS or item.get_closest_marker("warm") is not None
    warm_here = of_clusters and item.get_closest_marker("cold") is None
    if warm_here and not process.pid:
        start()
    if warm_here != used:
        use(warm_here)


def pytest_unconfigure() -> None:
    if process.pid:
        end()
