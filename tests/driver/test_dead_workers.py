"""The driver keeps a connection to the workers of its world, and to no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nbelastic.core import step as core_step
from nbelastic.driver import decisions
from nbelastic.driver.dependencies import Dependencies
from nbelastic.protocol import events as ev
from nbelastic.protocol import messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.system import pickling
from nbelastic.transport.client import Client
from nbelastic.transport.server import Server
from tests.driver.fakes import driver_for, run_story, settings_for, training
from tests.support import driver_thread
from tests.support.waiting import until


def test_a_late_message_of_a_lost_worker_does_not_bring_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver reads a late message of a lost worker, but keeps nothing for the worker and sends no heartbeat."""
    taken: list[ev.Event] = []
    servers: list[Server] = []

    def step(cluster: Any, event: ev.Event, now: float, **options: bool) -> Any:
        taken.append(event)
        return core_step.step(cluster, event, now, **options)

    def make(*arguments: Any) -> Server:
        servers.append(Server(*arguments))
        return servers[-1]

    monkeypatch.setattr(decisions, "step", step)
    driver = driver_for(settings_for(tmp_path, ""), Dependencies(server=make))
    thread = driver_thread.DriverThread(driver)
    message = ev.WorkerFormed(WorkerId("a", 0, 1), 1)
    for name in (str(message.worker), "no worker's name"):
        one = Client(
            driver._server.address,
            driver._keys.for_clients(),
            f"worker/{name}",
            worker_messages.ToWorker,
            lambda _: None,
        )
        one.start()
        one.send(message)
        if name == str(message.worker):
            until(lambda: message in taken)
        one.close()
    assert [(server.heard_at, server._deliveries) for server in servers] == [({}, {})]
    thread.ask(ev.StopRequested("that is all"))
    thread.wait(20)


def test_a_host_cannot_fill_the_disk_with_values_of_workers_that_never_were(tmp_path: Path) -> None:
    """The driver fetches a long value from a worker of the cluster, and from no other name that a host uses."""

    async def story() -> None:
        async with training(tmp_path, "a:1,b:1", min=1) as fakes:
            real, size = next(iter(fakes.driver.cluster.workers)), pickling.INLINE + 1
            for w in (WorkerId(real.host, 7, 1), WorkerId(real.host, real.slot, 99), real):
                peer = f"worker/{w}"
                fakes.deliver(peer, worker_messages.ProgramResult(w, "job-1", value=messages.Blob(size)))
                fakes.deliver(peer, worker_messages.ResultPiece(w, "job-1", 0, bytes(size)))
                await fakes.settle()
            files = fakes.driver.jobs.results.folder("job-1").iterdir()
            assert [file.name for file in files] == [str(real).replace("/", "-")]

    run_story(story)
