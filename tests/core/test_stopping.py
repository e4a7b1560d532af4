"""Clients stop a job or a cluster, at every point of a generation's life."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.step import deadline
from nbelastic.protocol import events as ev
from tests.core.story import LIVE, Story, wid, with_stage


@pytest.mark.parametrize("stage", LIVE)
def test_a_job_can_be_stopped_at_any_point(stage):
    """A job is stopped in any stage: every program is asked to stop, the job ends once, and the next one runs."""
    story = with_stage(stage)
    story.send(ev.JobStopRequested("job"))
    assert story.last(cmd.EndJob).outcome == "stopped"
    assert story.cluster.members == ()
    story.quiet(6.0)
    assert story.commands(cmd.EndJob) == [story.last(cmd.EndJob)]
    assert not story.records("worker-killed")
    story.run("second").finish()
    assert story.job.outcome == "succeeded"


@pytest.mark.parametrize("stage", LIVE)
def test_a_cluster_can_be_stopped_at_any_point(stage):
    """A cluster is stopped twice, in any stage: the job ends, each agent is stopped once, and nothing starts."""
    story = with_stage(stage)
    mark, began = story.mark(), story.now
    hosts = sorted(story.cluster.hosts)
    story.send(ev.StopRequested("done"), ev.StopRequested("again"))
    assert story.reason.startswith("stopping: done; programs may write a last checkpoint: a/0#1")
    assert story.commands(cmd.StopAgent, mark) == []
    story.answer()
    assert sorted(c.host for c in story.commands(cmd.StopAgent, mark)) == hosts
    assert story.commands(cmd.StartWorker, mark) + story.commands(cmd.StartAgent, mark) == []
    assert (story.cluster.phase, story.cluster.workers, story.now) == ("finished", {}, began)


def test_a_stop_without_a_program_ends_the_agents_at_once():
    """Without a running program, a stop ends the agents at once."""
    story = Story("a:1", "b:1").answer()
    story.send(ev.StopRequested("done"))
    assert [c.host for c in story.commands(cmd.StopAgent)] == ["a", "b"]
    assert story.reason == "stopping: done"


def test_a_stop_lets_a_program_write_its_last_checkpoint():
    """A stop ends agents without programs at once, and the others after their programs' end, or after a minute."""
    story = Story("a:1", "b:1", "c:1", min=1).run().commit(3)
    story.send(ev.StopRequested("done"))
    story.hear(ev.ProgramEnded, "b/0#1")
    assert [c.host for c in story.commands(cmd.StopAgent)] == ["b"]
    story.hang("c/0#1")._unsay(wid("c/0#1"), ev.ProgramEnded)
    story.wait(50.0).hear(ev.ProgramEnded, "a/0#1")
    assert [c.host for c in story.commands(cmd.StopAgent)] == ["b", "a"]
    story.wait(10.0)
    assert story.last(cmd.StopAgent).host == "c"
    story.answer()
    assert story.cluster.phase == "finished"


def test_a_worker_that_still_starts_does_not_cut_the_last_checkpoint_short():
    """A stop ends the agent of a starting worker at once; agents of running programs wait."""
    story = Story("a:1", min=1).run().commit(3)
    story.add("b:1").hear(ev.AgentReady)
    story.send(ev.StopRequested("done"))
    assert [c.host for c in story.commands(cmd.StopAgent)] == ["b"]


def test_a_stop_can_be_hastened():
    """A client may ask to stop at once, with the stop or later: then the programs are killed."""
    story = Story("a:1", min=1).run().commit(3)
    story.silent.add(wid("a/0#1"))
    story.send(ev.StopRequested("done"))
    story.wait(4.0).send(ev.StopRequested("now", within=1.0))
    assert deadline(story.cluster, story.now) == story.now + 1.0
    story.wait(1.0)
    assert story.last(cmd.StopAgent).host == "a"
    assert story.cluster.stopping == "done"


def test_an_agent_that_does_not_end_is_not_waited_for():
    """The cluster has ended five seconds after its agents were stopped, whether or not they report it."""
    story = Story("a:1", "b:1").answer()
    story.send(ev.StopRequested("done"))
    story.answers.clear()
    story.wait(5.0)
    assert (story.cluster.phase, story.cluster.workers) == ("finished", {})
    assert story.records("host-gone") == [f"{name} has left (it did not end in time)" for name in ("a", "b")]


def test_a_stop_does_not_wait_for_hosts_that_are_lost():
    """A stop asks and awaits only the hosts that are up; without one, the cluster has ended."""
    story = Story("a:1", "b:1").run()
    story.lose_host("b")
    mark = story.mark()
    story.send(ev.StopRequested("done"))
    story.hear(ev.ProgramEnded)
    assert [c.host for c in story.commands(cmd.StopAgent, mark)] == ["a"]
    assert (story.cluster.phase, list(story.cluster.hosts)) == ("stopping", ["a"])
    story.answer()
    assert story.cluster.phase == "finished"
    nowhere = Story("a:1").lose_host("a")
    nowhere.send(ev.StopRequested("done"))
    assert nowhere.cluster.phase == "finished"


def test_a_lost_host_is_not_tried_again_while_the_cluster_stops():
    """A lost host is not started while a program writes its last checkpoint, and no deadline repeats."""
    story = Story("a:1", "b:1", min=1).run()
    story.lose_host("b").hang("a/0#1")
    mark = story.mark()
    story.send(ev.StopRequested("done"))
    story.wait(59.0)
    assert story.commands(cmd.StartAgent, mark) == []
