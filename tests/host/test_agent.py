"""An agent is heard for as long as its main thread carries out orders, and no longer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from nbelastic.core import wire
from nbelastic.host.agent import Config
from nbelastic.link import Hub, Keys
from tests.support.waiting import until_async as until

HANGING = """
import sys, time
from pathlib import Path
from nbelastic.host import agent
agent.SAMPLE, agent.LATE_TURN, agent.LAST_TURN = 0.2, 0.3, 5.0
file = Path(sys.argv[1])
def sample(self, now):
    while file.exists():
        time.sleep(0.02)
agent.Agent._sample = sample
agent.run(sys.stdin.buffer.readline(), -1)
"""


def test_an_agent_whose_main_thread_hangs_falls_silent_and_then_ends(tmp_path: Path) -> None:
    """Its link's thread goes on, and vouches for nothing: the driver must not wait for what nobody does."""
    hangs = tmp_path / "hangs"

    async def story() -> None:
        hub = Hub(Keys.make(), lambda _, message: heard.append(message), 0.1)
        await hub.start()
        config = Config(
            host="a",
            driver=hub.address,
            keys=hub._keys.for_clients(),
            number=1,
            owner="",
            lease=600.0,
            heartbeat=0.1,
            address="127.0.0.1",
            nics=(),
            run_dir=str(tmp_path),
            log_dir=str(tmp_path),
            settings={},
        )
        agent = subprocess.Popen([sys.executable, "-c", HANGING, hangs], stdin=subprocess.PIPE, stderr=subprocess.PIPE)  # noqa: ASYNC220
        try:
            agent.stdin.write(msgspec.json.encode(config) + b"\n")
            agent.stdin.flush()
            await until(lambda: heard)
            assert isinstance(heard[0], wire.AgentHello)
            hangs.touch()
            await until(lambda: time.monotonic() - hub.heard_at["agent/a~1"] > 0.5)
            assert agent.poll() is None
            hangs.unlink()
            await until(lambda: time.monotonic() - hub.heard_at["agent/a~1"] < 0.2)
            hangs.touch()
            await until(lambda: agent.poll() is not None)
            assert (agent.returncode, agent.stderr.read().decode()) == (1, "nbelastic: the agent hangs, and ends\n")
        finally:
            agent.kill()
            agent.communicate()
            await hub.stop()

    heard: list[object] = []
    asyncio.run(story())
