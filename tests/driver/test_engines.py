"""Workers become ipyparallel's engines when a client first asks for them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from nbelastic.errors import HostError, UsageError
from nbelastic.protocol.requests import FindController
from tests.driver.fakes import DriverWithFakes, run_story


async def found(fakes: DriverWithFakes) -> Future[Any]:
    future = fakes.driver.request(FindController())
    await fakes.settle()
    return future


def test_a_cluster_that_only_trains_has_no_controller(tmp_path):
    """No controller runs before a client asks for it. Then all workers become engines, and so does each newcomer."""

    async def story():
        async with DriverWithFakes(tmp_path, "a:2", min=1) as fakes:
            await fakes.advance_time(1.0)
            run = fakes.submit()
            await fakes.advance_time(1.0)
            fakes.workers[min(fakes.workers)].end_program()
            fakes.workers[max(fakes.workers)].end_program()
            await fakes.settle()
            assert run.future.done()
            assert fakes.controllers == 0
            assert (await found(fakes)).result().engines == ("engine-a/0#1", "engine-a/1#1")
            fakes.kill("a/0#1")
            await fakes.advance_time(1.0)
            assert set((await found(fakes)).result().engines) == {"engine-a/0#2", "engine-a/1#1"}
            assert fakes.controllers == 1

    run_story(story)


def test_workers_become_engines_between_jobs(tmp_path):
    """During a job the request is refused, and says what to do. After it, the same workers become engines."""

    async def story():
        async with DriverWithFakes(tmp_path, "a:2", min=1) as fakes:
            await fakes.advance_time(1.0)
            fakes.submit()
            await fakes.advance_time(1.0)
            with pytest.raises(UsageError, match="job-1 is running, and workers connect to ipyparallel between jobs"):
                (await found(fakes)).result()
            for worker in fakes.workers.values():
                worker.end_program()
            await fakes.settle()
            assert len((await found(fakes)).result().engines) == 2

    run_story(story)


def test_a_client_may_ask_again_during_a_job(tmp_path):
    """Workers that are engines already are found while they train."""

    async def story():
        async with DriverWithFakes(tmp_path, "a:2", min=1) as fakes:
            await fakes.advance_time(1.0)
            before = (await found(fakes)).result().engines
            fakes.submit()
            await fakes.advance_time(1.0)
            assert (await found(fakes)).result().engines == before

    run_story(story)


def test_a_controller_that_cannot_start_ends_no_training(tmp_path):
    """The client gets the reason, the event log has it, and training goes on. The next request tries again."""

    async def story():
        async with DriverWithFakes(tmp_path, "a:2", min=1) as fakes:
            await fakes.advance_time(1.0)
            fakes.no_controller = "no port is free"
            with pytest.raises(HostError, match="ipyparallel's controller cannot be started: no port is free"):
                (await found(fakes)).result()
            assert "controller-failed" in fakes.kinds()
            assert fakes.controller_stopped  # it may hold ports
            fakes.submit()
            await fakes.advance_time(1.0)
            assert len(fakes.ranks) == 2
            for worker in fakes.workers.values():
                worker.end_program()
            await fakes.settle()
            fakes.no_controller = ""
            assert len((await found(fakes)).result().engines) == 2

    run_story(story)
