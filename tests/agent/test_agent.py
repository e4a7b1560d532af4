"""An agent's process: when its link becomes silent, and when it ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from nbelastic.agent.agent import Agent, Config
from nbelastic.agent.environment import Environment
from nbelastic.agent.fork import ForkRefusedError
from nbelastic.protocol import agent_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.transport.keys import Keys
from nbelastic.transport.server import Server
from tests.support.driver_lease import named
from tests.support.waiting import until, until_async

HANGING = """
import sys, time
from pathlib import Path
from typing import Any
from nbelastic.agent import agent
agent.SAMPLE, agent.SILENT_AFTER, agent.EXIT_AFTER = 0.2, 0.3, 5.0
file = Path(sys.argv[1])
def sample(self, now):
    while file.exists():
        time.sleep(0.02)
agent.Agent._sample = sample
agent.run(sys.stdin.buffer.readline(), -1)
"""


def configured(folder: Path, **given: Any) -> Config:
    """The configuration of an agent on the driver's machine."""
    return Config(
        host="a",
        number=1,
        heartbeat=0.1,
        lease=600.0,
        notice=30.0,
        address="127.0.0.1",
        nics=(),
        run_folder=str(folder),
        log_dir=str(folder),
        settings={},
        **{"driver_lease": None, **given},
    )


@pytest.mark.soak(share=0.2)
def test_an_agent_whose_main_thread_hangs_becomes_silent_and_ends(tmp_path: Path) -> None:
    """An agent whose main thread hangs sends nothing, although its link's thread runs, and ends."""
    hangs = tmp_path / "hangs"

    async def story() -> None:
        server = Server(Keys.make(), lambda _, message: received.append(message), 0.1)
        await server.start()
        config = configured(tmp_path, driver=server.address, keys=server._keys.for_clients())
        agent = subprocess.Popen([sys.executable, "-c", HANGING, hangs], stdin=subprocess.PIPE, stderr=subprocess.PIPE)  # noqa: ASYNC220
        try:
            agent.stdin.write(msgspec.json.encode(config) + b"\n")
            agent.stdin.flush()
            await until_async(lambda: received)
            assert isinstance(received[0], agent_messages.AgentHello)
            hangs.touch()
            await until_async(lambda: time.monotonic() - server.heard_at["agent/a~1"] > 0.5)
            assert agent.poll() is None
            hangs.unlink()
            await until_async(lambda: time.monotonic() - server.heard_at["agent/a~1"] < 0.2)
            hangs.touch()
            await until_async(lambda: agent.poll() is not None)
            assert (agent.returncode, agent.stderr.read().decode()) == (1, "nbelastic: the agent hangs, and ends\n")
        finally:
            agent.kill()
            agent.communicate()
            await server.stop()

    received: list[object] = []
    asyncio.run(story())


def test_workers_that_wait_for_modules_and_cannot_be_forked_do_not_silence_the_agent(tmp_path, monkeypatch):
    """Each fork that the template refuses takes seconds: with several in a row, the host and its other workers would count as lost."""
    given = configured(tmp_path, driver="tcp://127.0.0.1:1", keys=Keys.make().for_clients())
    agent, late = Agent(given, -1, Environment(())), []
    agent._home, agent._addresses, agent._folder, agent._profile = ("127.0.0.1", "lo"), (), tmp_path, tmp_path
    agent._code = SimpleNamespace(is_fetching=False)
    for slot in range(2):
        order = agent_messages.Spawn(WorkerId("a", slot, 1), str(tmp_path))
        agent._waiting[order.worker] = order, 0.0

    def refuse(_make):
        late.append(time.monotonic() > agent._turn_by)
        agent._turn_by -= 1000.0  # as if this had taken long
        raise ForkRefusedError

    monkeypatch.setattr("nbelastic.agent.agent.fork", refuse)
    agent._turn_by = time.monotonic()
    agent._fork_waiting(0.0)
    assert late == [False, False]


ALONE = "import sys; from nbelastic.agent import agent; agent.run(sys.stdin.buffer.readline(), -1)"


@pytest.mark.parametrize("other", [None, "1@1 another"])
def test_an_agent_that_no_driver_knows_ends_with_the_cluster(tmp_path: Path, other: str | None) -> None:
    """An agent ends with the cluster if its driver was killed at its start and no other driver knows it."""
    driver_lease = named(tmp_path, 600.0)
    keys = Keys.make().for_clients()
    config = configured(tmp_path, driver="tcp://127.0.0.1:1", keys=keys, driver_lease=driver_lease)
    with subprocess.Popen([sys.executable, "-c", ALONE], stdin=subprocess.PIPE) as agent:
        try:
            agent.stdin.write(msgspec.json.encode(config) + b"\n")
            agent.stdin.flush()
            until(lambda: list(tmp_path.glob("agent-1-*")), what="the agent to be up")
            with pytest.raises(subprocess.TimeoutExpired):
                agent.wait(1.5)
            Path(driver_lease.file).unlink()
            if other is not None:
                Path(driver_lease.file).write_text(other)
            assert agent.wait(20.0) == 0
            assert not list(tmp_path.glob("agent-1-*"))
        finally:
            agent.kill()
