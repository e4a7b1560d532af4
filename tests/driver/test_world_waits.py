"""A wait for a world ends when the workers of the world have answered since it began."""

from __future__ import annotations

from pathlib import Path

from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.requests import WaitForWorld
from tests.driver.fakes import DriverWithFakes, run_story, training


def test_a_worker_that_was_just_killed_does_not_count(tmp_path: Path) -> None:
    """Right after a kill, before its host's agent has noticed, a wait does not end with the old world but with the next one."""

    async def story() -> None:
        async with training(tmp_path, "a:2,b:1", min=2) as fakes:
            fakes.train()
            del fakes.workers[WorkerId("a", 1, 1)]  # killed; the agent has not looked yet
            wait = fakes.driver.request(WaitForWorld(3))
            await fakes.settle()
            assert fakes.driver.status.world_size == 3
            assert not wait.done()
            fakes.kill("a/1#1")
            await fakes.advance_time(3.0)
            assert [worker.id for worker in wait.result().workers] == ["a/0#1", "a/1#2", "b/0#1"]

    run_story(story)


def test_a_smaller_world_is_waited_for_until_it_trains(tmp_path: Path) -> None:
    """A wait for the survivors' world ends when that world trains, and at once if it does already."""

    async def story() -> None:
        async with training(tmp_path, "a:2,b:1", min=2) as fakes:
            wait = fakes.driver.request(WaitForWorld(2))
            fakes.driver.post(ev.HostRemoved("b", now=True))
            await fakes.advance_time(3.0)
            assert wait.result().world_size == 2
            again = fakes.driver.request(WaitForWorld(2))
            await fakes.settle()
            assert again.done()

    run_story(story)


def test_without_a_job_ready_workers_are_waited_for(tmp_path: Path) -> None:
    """Between jobs a wait is for ready workers: one that was just killed is not ready, its replacement is."""

    async def story() -> None:
        async with DriverWithFakes(tmp_path, "a:2", min=1) as fakes:
            await fakes.advance_time(2.0)
            at_once = fakes.driver.request(WaitForWorld(2))
            await fakes.settle()
            assert at_once.done()
            del fakes.workers[WorkerId("a", 0, 1)]
            wait = fakes.driver.request(WaitForWorld(2))
            await fakes.settle()
            assert not wait.done()
            fakes.kill("a/0#1")
            await fakes.advance_time(3.0)
            assert [worker.id for worker in wait.result().workers] == ["a/0#2", "a/1#1"]

    run_story(story)
