"""An agent's process, as the driver holds it."""

import asyncio
import os
from subprocess import Popen

from nbelastic.driver import launchers
from nbelastic.driver.launchers import ProcessAgent


def gone_at_once(*args, **kwargs):
    """A process that has ended before anything is said to it, and waits to be noticed."""
    process = Popen(*args, **kwargs)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process


def test_one_that_ends_before_it_has_been_told_anything(tmp_path, monkeypatch):
    """As ssh does where a connection is refused: its end is noticed, once, with what it said; it can still be killed."""
    monkeypatch.setattr(launchers, "Popen", gone_at_once)

    async def story():
        ends = asyncio.Queue()
        command = ["sh", "-c", "echo refused; exit 255"]
        agent = ProcessAgent(command, tmp_path / "log", lambda code, said: f"{code}: {said}", ends.put_nowait)
        agent.start({"host": "h1"})
        assert await asyncio.wait_for(ends.get(), 10) == "255: refused\n"
        agent.kill()
        assert ends.empty()

    asyncio.run(story())
