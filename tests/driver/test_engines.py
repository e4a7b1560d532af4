"""Workers become ipyparallel's engines when a client first asks for them."""

from __future__ import annotations

import asyncio
import errno
from concurrent.futures import Future
from typing import Any

import pytest

from nbelastic.errors import HostError, UsageError
from nbelastic.protocol import agent_messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.requests import FindController
from nbelastic.system import open_files
from tests.driver.fakes import TURNS, DriverWithFakes, run_story


async def found(fakes: DriverWithFakes) -> Future[Any]:
    future = fakes.driver.request(FindController(30.0))
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
            assert (await found(fakes)).result().engines == {w: f"engine-{w}" for w in ("a/0#1", "a/1#1")}
            fakes.kill("a/0#1")
            await fakes.advance_time(1.0)
            assert set((await found(fakes)).result().engines.values()) == {"engine-a/0#2", "engine-a/1#1"}
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
            (text,) = [record.text for record in fakes.driver.event_log.kept()[0] if record.kind == "controller-failed"]
            assert text == "ipyparallel's controller cannot be started: no port is free; the next %px tries again"
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


def test_no_request_gets_the_error_of_an_earlier_one(tmp_path):
    """A start that failed when no client waited any more, as after Ctrl-C, is tried again by the next request."""

    async def story():
        async with DriverWithFakes(tmp_path, "a:1") as fakes:
            await fakes.advance_time(1.0)
            fakes.no_controller = "no port is free"
            fakes.driver.request(FindController(30.0)).cancel()
            await fakes.settle()
            assert (fakes.controllers, fakes.controller_stopped) == (1, True)
            fakes.no_controller = ""
            assert len((await found(fakes)).result().engines) == 1

    run_story(story)


def test_a_request_while_a_failed_controller_ends_starts_no_second_one(tmp_path):
    """Both requests get the error when the first controller has ended."""

    async def story():
        async with DriverWithFakes(tmp_path, "a:1") as fakes:
            await fakes.advance_time(1.0)
            fakes.no_controller = "no port is free"
            first = fakes.driver.request(FindController(30.0))
            for _ in range(TURNS):
                if not fakes.controllers:
                    await asyncio.sleep(0)
            assert not fakes.controller_stopped
            second = await found(fakes)
            assert all("no port is free" in str(future.exception()) for future in (first, second))
            assert fakes.controllers == 1

    run_story(story)


def test_the_next_driver_attaches_to_the_controller_of_its_engines(tmp_path):
    """Also if its predecessor could not save that it had started one, and if the first try fails: a new one has other keys."""

    async def story():
        async with DriverWithFakes(tmp_path, "a:1") as fakes:
            await fakes.advance_time(1.0)
            (w,) = fakes.workers
            fakes.deliver(f"worker/{w}", worker_messages.WorkerReport(w, 1000, is_ready=True, engine="an engine"))
            await fakes.settle()
            fakes.no_controller = "No space left on device"
            with pytest.raises(HostError, match="No space left on device"):
                (await found(fakes)).result()
            fakes.no_controller = ""
            assert (await found(fakes)).result().engines == {"a/0#1": "an engine"}
            assert (fakes.attached, fakes.controllers) == (2, 0)

    run_story(story)


def test_a_worker_that_cannot_connect_is_named(tmp_path):
    """The other workers are engines. It tries again at the next request. If none can connect, that is an error."""

    async def story():
        async with DriverWithFakes(tmp_path, "a:2", min=1) as fakes:
            await fakes.advance_time(1.0)
            _, second = fakes.workers.values()
            second.engine_error = "the tunnel has not answered"
            assert (await found(fakes)).result().failed == {"a/1#1": "the tunnel has not answered"}
            second.engine_error = ""
            answer = (await found(fakes)).result()
            assert (len(answer.engines), answer.failed) == (2, {})

    async def story_without_engines():
        async with DriverWithFakes(tmp_path, "a:1") as fakes:
            await fakes.advance_time(1.0)
            (worker,) = fakes.workers.values()
            worker.engine_error = "the tunnel has not answered"
            with pytest.raises(
                HostError, match=r"no worker can .* controller: a/0#1: the tunnel has not answered; the next"
            ):
                (await found(fakes)).result()

    run_story(story)
    run_story(story_without_engines)


def test_a_worker_that_does_not_answer_delays_one_request(tmp_path):
    """It is named, and later requests do not wait for it. When it answers, it is an engine."""

    async def story():
        async with DriverWithFakes(tmp_path, "a:2", min=1) as fakes:
            await fakes.advance_time(1.0)
            fakes.lost.add(("a/1#1", worker_messages.ConnectEngine))
            future = await found(fakes)
            await fakes.advance_time(29.0)
            assert not future.done()
            await fakes.advance_time(2.0)
            assert future.result().engines == {"a/0#1": "engine-a/0#1"}
            assert list(future.result().failed) == ["a/1#1"]
            assert (await found(fakes)).result() == future.result()
            worker = fakes.workers[WorkerId.parse("a/1#1")]
            worker.receive(worker_messages.ConnectEngine("{}"))
            await fakes.settle()
            assert len((await found(fakes)).result().engines) == 2

    run_story(story)


def test_an_empty_cluster_has_no_engines_yet(tmp_path):
    """The request waits for the first worker."""

    async def story():
        fakes = DriverWithFakes(tmp_path, "a:1")
        fakes.lost.add(("a~1", agent_messages.Spawn))
        async with fakes:
            future = await found(fakes)
            assert (fakes.controllers, future.done()) == (1, False)
            fakes.lost.clear()
            for peer, message in list(fakes.sent):
                if isinstance(message, agent_messages.Spawn):
                    fakes.arrive(peer, message)
            await fakes.settle()
            assert len(future.result().engines) == 1

    run_story(story)


def test_a_full_disk_fails_one_worker(tmp_path):
    """The file with the ports for other hosts cannot be written: the worker is named, and the next request tries again."""

    async def story():
        async with DriverWithFakes(tmp_path, "a:1,b:1", min=1) as fakes:
            await fakes.advance_time(1.0)
            agents = fakes.driver._components.agents
            before = agents.open_ports

            def open_ports(host, ports, engines):
                if host == "b":
                    raise OSError(errno.ENOSPC, "No space left on device")

            agents.open_ports = open_ports
            answer = (await found(fakes)).result()
            assert (list(answer.engines), list(answer.failed)) == (["a/0#1"], ["b/0#1"])
            agents.open_ports = before
            assert len((await found(fakes)).result().engines) == 2

    run_story(story)


def test_more_workers_than_the_controller_has_open_files_for(tmp_path, monkeypatch):
    """The request is refused with both numbers, and nothing starts; training has room."""

    async def story():
        async with DriverWithFakes(tmp_path, "a:3") as fakes:
            await fakes.advance_time(1.0)
            monkeypatch.setattr(open_files, "raise_limit", lambda: 140)
            with pytest.raises(HostError, match=r"^3 workers run, and .* can connect 2 with 140 open files: .*ulimit"):
                (await found(fakes)).result()
            assert fakes.controllers == 0

    run_story(story)
