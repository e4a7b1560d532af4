"""An agent's process, as the driver holds it."""

import asyncio
import os
import select
from subprocess import Popen

import pytest

import nbelastic as nbe
from nbelastic.driver import connection_files
from nbelastic.driver.request_answers import has_ready_workers
from nbelastic.provision import launchers
from nbelastic.provision.launchers import ProcessAgent
from tests.driver.fakes import DriverWithFakes, run_story


def gone_at_once(*args, **kwargs):
    """A process that has ended before anything is said to it, and waits to be noticed."""
    process = Popen(*args, **kwargs)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process


@pytest.mark.parametrize("size", [1, 200_000])
def test_one_that_ends_before_it_has_been_told_anything(tmp_path, monkeypatch, size):
    """As ssh does where a connection is refused: its end is noticed, once, with what it said; it can still be killed."""
    monkeypatch.setattr(launchers, "Popen", gone_at_once)

    async def story():
        ends = asyncio.Queue()
        command = ["sh", "-c", "echo refused; exit 255"]
        agent = ProcessAgent(command, tmp_path / "log", lambda code, said: f"{code}: {said}", ends.put_nowait)
        agent.start({"host": "h1" * size})  # more than a pipe takes: nobody reads it
        assert await asyncio.wait_for(ends.get(), 10) == "255: refused\n"
        agent.kill()
        assert ends.empty()

    asyncio.run(story())


def test_an_agent_can_read_its_configuration_from_its_start_on(tmp_path, monkeypatch):
    """A driver that is killed at any moment leaves no agent that waits for it."""
    readable = []

    def begun(*args, stdin, **kwargs):
        readable.extend(select.select([stdin], [], [], 0)[0])
        return Popen(*args, stdin=stdin, **kwargs)

    monkeypatch.setattr(launchers, "Popen", begun)

    async def story():
        ends = asyncio.Queue()
        agent = ProcessAgent(["head", "-n", "1"], tmp_path / "log", lambda code, said: said, ends.put_nowait)
        agent.start({"host": "h1"})
        assert await asyncio.wait_for(ends.get(), 10) == '{"host": "h1"}\n'

    asyncio.run(story())
    assert readable


async def broken(spec, *_):
    raise ValueError(f"{spec.name} is odd")


class Nowhere(DriverWithFakes):
    """No host can be found."""

    async def locate(self, spec, launcher):
        return await broken(spec)


def test_a_host_that_cannot_be_launched_is_lost_with_the_reason(tmp_path):
    """Whatever the launch raised: the host does not stay "starting" without a word."""

    async def story():
        async with Nowhere(tmp_path, "gpu9") as fakes:
            with pytest.raises(nbe.HostError, match=r"gpu9: its agent cannot be started: gpu9 is odd"):
                has_ready_workers(fakes.driver.cluster, 1)

    run_story(story)


def test_a_connection_file_that_cannot_be_made_says_so(start_hostless, monkeypatch):
    """Whatever was raised on the way is the caller's error, and nobody waits for ever."""
    monkeypatch.setattr(connection_files, "driver_address_towards", broken)
    with pytest.raises(nbe.HostError, match="the connection file cannot be made: gpu9 is odd"):
        start_hostless().connection_file("gpu9")
