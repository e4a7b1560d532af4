"""The driver injects faults that a client requests, if the cluster was started for that."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import nbelastic as nbe
from nbelastic.errors import UsageError
from nbelastic.protocol.agent_messages import InjectFault
from nbelastic.protocol.requests import RequestFault
from tests.driver.fakes import DriverWithFakes, run_story

FAULT = RequestFault("a test", ("kill", "stop", "host"), seed=1, number=1)


def play(folder, story, *, chaos=True, **limits):
    """Play a story on a cluster of two hosts with two workers each, where a job trains."""

    async def begin():
        async with DriverWithFakes(
            folder, "a:2,b:2", **{"min": 1, "cooldown": (0.0, 0.0), "chaos": chaos} | limits
        ) as fakes:
            await fakes.advance_time(1.0)
            await story(fakes)

    run_story(begin)


def injected(fakes):
    return [message for _, message in fakes.sent if isinstance(message, InjectFault)]


def test_faults_are_refused_on_a_cluster_without_chaos(tmp_path):
    """The driver refuses in one line, which says how to start such a cluster; nothing is sent."""

    async def story(fakes):
        fakes.submit()
        await fakes.advance_time(3.0)
        why = str(fakes.driver.request(FAULT).exception())
        assert why.startswith("this cluster was started without chaos")
        assert "\n" not in why
        assert injected(fakes) == []

    play(tmp_path, story, chaos=False)


def test_faults_are_refused_without_a_job(tmp_path):
    """There is nothing that could survive them."""

    async def story(fakes):
        assert "no job is running" in str(fakes.driver.request(FAULT).exception())

    play(tmp_path, story)


def test_a_check_injects_nothing(tmp_path):
    """A client checks first whether faults are allowed."""

    async def story(fakes):
        fakes.submit()
        await fakes.advance_time(3.0)
        assert fakes.driver.request(replace(FAULT, is_check=True)).result() == ""
        assert injected(fakes) == []

    play(tmp_path, story)


def test_each_fault_is_recorded_and_survived(tmp_path):
    """Faults of all kinds, one after the other: each is in the event log before its consequence, and the training goes on."""

    async def story(fakes):
        fakes.submit()
        await fakes.advance_time(3.0)
        for number, kind in enumerate(("kill", "stop", "host"), 1):
            generation = fakes.driver.cluster.generation
            request = replace(FAULT, kinds=(kind,), number=number)
            assert fakes.driver.request(request).result() == ""
            await fakes.advance_time(5.0)
            assert fakes.driver.cluster.generation > generation
            assert len(fakes.ranks) == 4, "the lost ones were replaced"
        assert [message.kind for message in injected(fakes)] == ["kill", "stop", "host"]
        kinds = [kind for kind in fakes.kinds() if kind.startswith("fault-") or kind.endswith("-lost")]
        assert kinds == ["fault-kill", "worker-lost", "fault-stop", "worker-lost", "fault-host", "host-lost"]

    play(tmp_path, story)


def test_a_worker_that_was_hit_is_not_counted(tmp_path):
    """Two faults before the driver knows of the first loss: the second one is withheld, as `min` would not be kept."""

    async def story(fakes):
        fakes.submit()
        await fakes.advance_time(3.0)
        answers = [fakes.driver.request(replace(FAULT, kinds=("kill",), number=n)).result() for n in (1, 2)]
        assert answers[0] == ""
        assert "2 workers would be left, and min is 3" in answers[1]

    play(tmp_path, story, min=3)


def test_a_cluster_allows_chaos_only_if_it_was_started_so(start_hostless):
    """The driver has the setting, also for clients that attach later. A refusal is one line, and nothing waits."""
    for name, chaos, why in (("calm", False, "started without chaos"), ("wild", True, "no job is running")):
        start_hostless(name, keep=True, chaos=chaos)
        attached = nbe.Cluster.attach(name)
        with pytest.raises(UsageError, match=why):
            attached.chaos()
        attached.detach()
