"""A kernel that tests can kill, the processes and files that it leaves, and the next kernel that attaches to them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

import nbelastic as nbe
from nbelastic.driver.driver_snapshot import DriverSnapshot
from nbelastic.protocol.run_folder import RunFolder
from nbelastic.system.folder_paths import runs_folder
from nbelastic.system.process_identity import pid_of
from tests.process.script_training import ScriptTraining
from tests.process.training import Training
from tests.support.processes import alive, descendants
from tests.support.waiting import until, until_none

MARK = "NBELASTIC_TEST_KERNEL"  # an environment variable of the kernel and of all processes that it starts
ROOT = Path(__file__).parents[2]
PAUSE = 0.06  # seconds between two steps of a kernel's training: the next kernel needs the processors too
_numbers = itertools.count()


class Kernel:
    """A kernel that starts a kept cluster and trains on it."""

    def __init__(
        self,
        name: str,
        folder: Path,
        hosts: str | None = "localhost:3",
        program: str = "train",
        arguments: dict[str, Any] | None = None,
        *,
        engines: bool = False,
        **options: Any,
    ) -> None:
        self.name, self.folder = name, folder
        folder.mkdir(exist_ok=True)
        settings = {
            "name": name,
            "folder": str(folder),
            "hosts": hosts,
            "program": program,
            "arguments": arguments or {},
            "engines": engines,
            "options": {"log_dir": str(folder.parent / "logs"), "lease": 60.0, **options},
        }
        self.process = self._start(settings)

    def _start(self, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.process.kernel_program", json.dumps(settings)],
            cwd=ROOT,
            env={**os.environ, MARK: self.name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ready(self) -> Kernel:
        """Wait until the kernel has a cluster, and a job if it runs one."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        return self

    def take_over(self, world: int) -> tuple[float, float, float]:
        """Start another kernel after this one was killed.

        Returns the seconds until its imports were done, until it had the cluster, and until `world` workers trained.
        """
        self.process = self._start({"name": self.name, "attach": world})
        assert self.process.stdout is not None
        imported, attached, whole = json.loads(self.process.stdout.readline())
        return imported, attached, whole

    def pid_of(self, part: str) -> int:
        """The process of the controller, or of the agent, template or worker on the last host."""
        if part == "controller":
            controller = self.snapshot.controller
            assert controller, "start the kernel with `engines=True`"
            return pid_of(controller)
        newest = [line for line in self.steps() if line.get("generation") == self.steps()[-1]["generation"]]
        worker = psutil.Process(
            max(newest, key=lambda line: line["rank"])["pid"]
        )  # ranks are in the order of the hosts
        template = worker.parent()
        return {"worker": worker, "template": template, "agent": template.parent()}[part].pid

    def kill(self) -> None:
        """Kill the kernel alone; the driver of a kept cluster goes on."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def kill_with_driver(self) -> None:
        """Kill the kernel and its driver."""
        driver = self.driver
        self.kill()
        if driver:
            os.kill(driver, signal.SIGKILL)
            until(lambda: not alive(driver), what="the driver to end")

    @property
    def driver(self) -> int:
        """The process of the cluster's driver; 0 if there is none."""
        return RunFolder(self.name).driver

    def end(self) -> None:
        """Exit normally, as a kernel that is restarted does."""
        self.process.communicate(timeout=20)

    @property
    def snapshot(self) -> DriverSnapshot:
        return DriverSnapshot.read(runs_folder() / self.name)

    def processes(self) -> dict[int, str]:
        """Pid and command line of each live process that the kernel has started, also through other processes."""
        return {pid: command for pid, command in marked(self.name).items() if pid != self.process.pid}

    def steps(self) -> list[dict[str, Any]]:
        return AttachedTraining(None, None, self.folder).lines()

    def wait_for_steps(self, world: int) -> int:
        """Wait until `world` processes have made steps together; return their generation."""

        def found() -> int | None:
            newest = [line for line in self.steps() if line["world"] == world]
            generation: int = max((line["generation"] for line in newest), default=0)
            return (
                generation
                if len({line["pid"] for line in newest if line["generation"] == generation}) == world
                else None
            )

        generation: int = until(found, 30, f"steps of {world}")
        return generation

    def leftovers(self) -> list[str]:
        """The processes, folders and locks of the cluster that still exist."""
        found = self.processes() | dict.fromkeys(descendants(), "started by this process")
        files = [str(path) for path in runs_folder().glob(f"{self.name}*")]
        return [*(f"{pid} {command}" for pid, command in found.items()), *files]


def marked(mark: str) -> dict[int, str]:
    """Pid and command line of each live process that has this mark: a kernel, and all that it has started."""
    found = {}
    wanted = f"{MARK}={mark}".encode()
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes()
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        if wanted in environment.split(b"\0") and alive(int(entry)):
            found[int(entry)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


class AttachedTraining(Training):
    """A training that one kernel has started, seen through the cluster object of another."""

    def __init__(self, cluster: nbe.Cluster | None, job: nbe.Job | None, folder: Path) -> None:
        self.cluster, self.job, self.folder = cluster, job, folder  # type: ignore[assignment]
        self._earlier = 0


def end(kernel: Kernel) -> None:
    """Kill the kernel, and stop its cluster if that still runs."""
    kernel.kill()
    if any(info.name == kernel.name for info in nbe.Cluster.all()):
        with suppress(nbe.UsageError):  # it has ended just now, with its kernel
            nbe.Cluster.attach(kernel.name).stop()


@contextmanager
def start_kernels(name: str, folder: Path, timeout: float, **defaults: Any) -> Iterator[Callable[..., Kernel]]:
    """Start kernels with kept clusters; at the end stop the clusters, and check that nothing of them is left."""
    started: list[Kernel] = []

    def start(**options: Any) -> Kernel:
        options = {**defaults, **options}
        if options.get("program", "train") == "train":
            options["arguments"] = {"pause": PAUSE, **options.get("arguments", {})}
        kernel = Kernel(f"{name}-{os.getpid()}-{next(_numbers)}", folder / f"steps{len(started)}", **options)
        started.append(kernel)
        return kernel.ready()

    yield start
    for kernel in started:
        end(kernel)
        until_none(kernel.leftovers, timeout)


class AttachedScript(ScriptTraining):
    """A script that one kernel has started, seen through the cluster object of another."""

    def __init__(self, cluster: nbe.Cluster, job: nbe.Job, folder: Path) -> None:
        self.cluster, self.job, self.folder = cluster, job, folder


def attached(kernel: Kernel) -> AttachedTraining:
    """Attach this process to the kernel's cluster and job."""
    cluster = nbe.Cluster.attach(kernel.name)
    return AttachedTraining(cluster, cluster.job, kernel.folder)
