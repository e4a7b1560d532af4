"""The driver's process of `tests.benchmarks.scale`: a real driver, whose agents are simulated."""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState
from nbelastic.core.step import step
from nbelastic.driver import decisions
from nbelastic.driver.dependencies import Dependencies
from nbelastic.driver.driver_snapshot import SavedJob
from nbelastic.driver.job_run import JobRun
from nbelastic.driver.request_answers import ready_workers
from nbelastic.protocol import events as ev
from nbelastic.protocol import worker_messages
from nbelastic.protocol.ids import HostSpec
from nbelastic.system import open_files
from nbelastic.transport.keys import Keys
from tests.driver.fakes import driver_for, settings_for
from tests.support import driver_thread

SLOTS = 8


class SimulatedAgent:
    """A replacement for an agent's process."""

    process = job = ""

    def __init__(self, send: Callable[..., None], host: str, number: int) -> None:
        self._send, self._host, self._number = send, host, number

    def start(self, config: Mapping[str, Any]) -> None:
        self._send("agent", self._host, self._number, config["driver"], msgspec.convert(config["keys"], Keys))

    def kill(self) -> None:
        """Do nothing: the simulated agent ends with the benchmark."""


class NoController:
    """A replacement for the controller: the benchmark needs no engines."""

    connection, process = "{}", ""

    async def start(self) -> None:
        """Do nothing: there is no process to start."""

    async def stop(self) -> None:
        """Do nothing: there is no process to stop."""


async def here(_spec: HostSpec, _launcher: str) -> tuple[str, str]:
    """Report each host as this machine."""
    return "127.0.0.1", ""


def drive(hosts: int, parent: Connection, players: list[Connection]) -> None:
    """Run the driver, pass agents' starts to the players, and answer the parent's questions."""

    def send(*order: Any) -> None:
        players[hash_of(order[1]) % len(players)].send(order)

    taken: deque[tuple[float, float]] = deque()

    def timed(
        cluster: ClusterState, event: ev.Event, now: float, *, more: bool
    ) -> tuple[ClusterState, tuple[cmd.Command, ...]]:
        if isinstance(
            event, ev.StoreOffered
        ):  # reading these clocks for each event would be a fifth of the driver's time
            taken.append((time.monotonic(), time.thread_time()))
        return step(cluster, event, now, more=more)

    open_files.raise_limit()
    decisions.step = timed
    dependencies = Dependencies(
        locate=here,
        agent_for=lambda spec, _local, _settings, *, number, **_: SimulatedAgent(send, spec.name, number),
        controller=lambda *_, **__: NoController(),
    )
    with tempfile.TemporaryDirectory() as folder:
        names = ",".join(f"host{number:04}:{SLOTS}" for number in range(hosts))
        settings = settings_for(Path(folder), names, SLOTS, min=1, max=hosts * SLOTS, cooldown=(0, 0))
        driver = driver_for(settings, dependencies)
        thread = driver_thread.DriverThread(driver)

        while True:
            match parent.recv():
                case "submit":
                    job = JobRun("job-1", worker_messages.Program("job-1", "", source="a cell"))
                    thread.call(driver.jobs.submit, job, SavedJob("job-1"))
                case "look":
                    cluster = driver.cluster
                    ready = ready_workers(cluster) if cluster.job is None else 0  # counting takes the driver's time
                    cpu = (time.process_time(), time.clock_gettime(time.pthread_getcpuclockid(thread.ident)))
                    newest = [taken.popleft() for _ in range(len(taken))]  # the driver's thread may add one meanwhile
                    parent.send((cluster.phase, ready, len(cluster.members), cluster.generation, *cpu, newest))
                case "events":
                    newest = list(driver.event_log.records)[-30:]
                    parent.send([f"{each.time:.2f} {each.kind}: {each.text}" for each in newest])
                case "members":
                    parent.send(list(map(str, driver.cluster.members)))


def hash_of(name: str) -> int:
    """Return the same number for a host and all of its workers."""
    return int(name.partition("/")[0].removeprefix("host"))
