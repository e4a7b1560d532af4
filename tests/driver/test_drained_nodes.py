"""Slurm drains the node of a job: the end of its host is announced once, also if a user adds the host again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from msgspec.structs import replace as with_fields

from nbelastic.driver import agents
from nbelastic.driver.driver_snapshot import SavedAgent
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import HostSpec
from nbelastic.provision.launchers import BatchJobAgent
from tests.driver.fakes import DriverWithFakes, FakeAgent, driver_for, run_story, settings_for
from tests.driver.test_snapshot import example


class JobOfSlurm(FakeAgent, BatchJobAgent):
    """An agent that runs as job 7 of Slurm."""

    job = slurm_job = "7"

    def adopt(self, job: str) -> None:
        self.start({})


class SlurmFakes(DriverWithFakes):
    """A driver whose hosts are jobs of Slurm."""

    def __init__(self, folder, hosts):
        super().__init__(folder, hosts)
        self.driver.event_log.close()
        settings = with_fields(settings_for(folder, hosts), launcher="slurm", launcher_options={})
        self.driver = driver_for(settings, replace(self._dependencies(), agent_for=self.job))

    def job(self, spec, _local, _settings, *, number, on_stop, **_):
        return JobOfSlurm(self, spec, on_stop, number)


@pytest.fixture
def asked(monkeypatch):
    """What Slurm was asked: each time the jobs by host. All of their nodes are drained."""
    found = []

    async def announced_ends(_, jobs):
        found.append(dict(jobs))
        return [ev.HostRemoved(host, by="the drain of its node n1", within=1e6, replaced=True) for host in jobs]

    monkeypatch.setattr(agents.DrainedNodes, "announced_ends", announced_ends)
    monkeypatch.setattr(agents, "BATCH_JOB_INTERVAL", 0.0)
    return found


def test_a_drain_is_announced_once(tmp_path, asked, monkeypatch):
    """A user may add the host again, which then stays, under the next driver too."""

    async def story():
        async with SlurmFakes(tmp_path / "first", "a:1") as fakes:
            await fakes.advance_time(1.0)
            assert asked[0] == {"a": "7"}
            fakes.driver.post(ev.HostAdded(HostSpec("a", 1), "me"))
            await fakes.advance_time(1.0)
            assert not any(asked[1:])
            saved = fakes.driver._components.agents.saved()["a"]
        monkeypatch.setattr(
            agents, "job_agent", lambda host, _, on_stop, number: JobOfSlurm(fakes, HostSpec(host, 1), on_stop, number)
        )
        for known, jobs in ((saved, []), (SavedAgent(1, "", job="7"), ["7"])):
            async with SlurmFakes(tmp_path / f"next-{known.drain_announced}", "") as fakes:
                asked.clear()
                fakes.driver._components.agents.adopt(with_fields(example(), agents={"a": known}))
                await fakes.advance_time(1.0)
                assert [each["a"] for each in asked if each] == jobs

    for folder in ("first", "next-True", "next-False"):
        (tmp_path / folder).mkdir()
    run_story(story)


class SlowJob(JobOfSlurm):
    """A job in the queue of a busy controller, which answers after 20 s."""

    asked = at_once = most = 0

    def start(self, config):
        """Its agent does not start."""

    async def state(self):
        SlowJob.at_once += 1
        SlowJob.most = max(SlowJob.most, SlowJob.at_once)
        await asyncio.sleep(20)
        SlowJob.at_once -= 1
        SlowJob.asked += 1
        return "queued"


def test_a_busy_controller_is_asked_for_several_jobs_at_a_time(tmp_path, monkeypatch):
    """One after the other, 64 jobs would take 21 minutes: so long no end would be announced, and no number of a job saved."""

    class SlowFakes(SlurmFakes):
        def job(self, spec, _local, _settings, *, number, on_stop, **_):
            return SlowJob(self, spec, on_stop, number)

    async def none(*_):
        return []

    # it would run squeue, which takes time that this clock does not measure
    monkeypatch.setattr(agents.DrainedNodes, "announced_ends", none)

    async def story():
        async with SlowFakes(tmp_path, ",".join(f"h{number}:1" for number in range(64))) as fakes:
            await fakes.advance_time(170)
            assert (SlowJob.asked, SlowJob.most) == (64, 8)

    run_story(story)
