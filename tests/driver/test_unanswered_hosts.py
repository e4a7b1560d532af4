"""Hosts that do not answer the stop of their cluster: their agents end by themselves, some time later."""

import asyncio
import math

import pytest
from msgspec.structs import replace

from nbelastic.driver.driver_snapshot import SavedAgent
from nbelastic.driver.unanswered_hosts import UnansweredHosts
from nbelastic.protocol import agent_messages
from nbelastic.protocol import events as ev
from tests.driver.fakes import DriverWithFakes, FakeAgent, run_story
from tests.driver.test_snapshot import example


class ElsewhereFakes(DriverWithFakes):
    """A driver whose hosts are all other machines, which ssh reaches."""

    async def locate(self, spec, launcher):
        return "", "10.0.0.1"


def unanswered(fakes):
    return [record.text for record in fakes.driver.event_log.kept()[0] if record.kind == "hosts-unanswered"]


@pytest.mark.parametrize("cut", [0.0, 30.0], ids=["at the stop", "before, so that it was lost"])
def test_the_stop_names_hosts_that_do_not_answer(tmp_path, cut):
    """One line has their names, and the time after which their agents end. The other hosts have answered."""

    async def story():
        async with ElsewhereFakes(tmp_path, "a:1,b:1,c:1", min=1) as fakes:
            await fakes.advance_time(1.0)
            fakes.submit()
            await fakes.advance_time(1.0)
            fakes.silent |= {"b", "c"}
            await fakes.advance_time(cut)
        assert fakes.ended
        text = "b, c did not answer the stop: an agent that still runs there ends by itself within 15 minutes"
        assert unanswered(fakes) == [text]

    run_story(story)


def test_a_host_that_was_lost_long_ago_is_not_named(tmp_path):
    """Its agent has ended by itself. In a training of days, each spot instance that was lost would be named."""

    async def story():
        async with ElsewhereFakes(tmp_path, "a:1,b:1,c:1", min=1) as fakes:
            await fakes.advance_time(1.0)
            for lost in "b", "c":
                fakes.silent.add(lost)
                await fakes.advance_time(30.0)
                fakes.driver.post(ev.HostRemoved(lost, now=True))
                await fakes.advance_time(600.0)
        assert [text.partition(" did not answer")[0] for text in unanswered(fakes)] == ["c"]

    run_story(story)


@pytest.mark.parametrize(
    ("lease", "text"), [(60.0, "60 s"), (85.0, "85 s"), (200.0, "4 minutes"), (900.0, "15 minutes")]
)
def test_an_agent_does_not_outlive_the_time_that_is_named(lease, text):
    """The time is rounded up."""
    hosts = UnansweredHosts(lease, heartbeat=1.0)
    hosts.note_end("gpu1", math.inf, now=0.0)
    assert hosts.record(now=0.0).text.endswith(f" ends by itself within {text}")


def test_a_host_that_has_not_reported_to_the_next_driver_is_named(tmp_path):
    """The network was cut when the next driver came."""

    async def story():
        async with ElsewhereFakes(tmp_path, "") as fakes:
            agents = fakes.driver._components.agents
            agents.adopt(replace(example(), agents={"a": SavedAgent(1, "1@1", driver_address="10.0.0.2")}))
            agents.give_up("a")
        assert [text.partition(" did not answer")[0] for text in unanswered(fakes)] == ["a"]

    run_story(story)


def test_a_host_that_answers_again_is_not_named(tmp_path):
    """Its next agent has ended the earlier one."""

    async def story():
        async with ElsewhereFakes(tmp_path, "a:1,b:1", min=1) as fakes:
            await fakes.advance_time(1.0)
            fakes.silent.add("b")
            while "host-lost" not in fakes.kinds():
                await fakes.advance_time(0.25)
            fakes.silent.clear()
            await fakes.advance_time(60.0)
            assert len(fakes.workers) == 2
        assert unanswered(fakes) == []

    run_story(story)


@pytest.mark.parametrize("seconds", [2.9, 10.0], ids=["in time", "so slowly that the driver kills it"])
def test_an_agent_that_takes_its_time_to_end_has_answered(tmp_path, seconds):
    """It has received the stop, and sends no heartbeats while it ends."""

    class SlowAgent(FakeAgent):
        def receive(self, message):
            if isinstance(message, agent_messages.StopAgent):
                self._fakes.busy.add("a")
                asyncio.get_running_loop().call_later(seconds, self.kill)
            else:
                super().receive(message)

    class SlowFakes(ElsewhereFakes):
        agent = SlowAgent

    async def story():
        async with SlowFakes(tmp_path, "a:1", min=1) as fakes:
            await fakes.advance_time(1.0)
        assert fakes.busy
        assert unanswered(fakes) == []

    run_story(story)


def test_a_host_of_this_machine_is_not_named(tmp_path):
    """Its agent is a process that the driver has killed."""

    async def story():
        async with DriverWithFakes(tmp_path, "a:1", min=1) as fakes:
            await fakes.advance_time(1.0)
            fakes.silent.add("a")
            await fakes.advance_time(30.0)
        assert unanswered(fakes) == []

    run_story(story)
