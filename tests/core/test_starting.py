"""Agents and workers that never start are replaced at a deadline."""

from __future__ import annotations

from nbelastic.core import commands as cmd
from nbelastic.core.state import HostPhase, Stage
from nbelastic.core.step import deadline
from nbelastic.protocol import events as ev
from nbelastic.protocol.timeouts import Timeouts
from tests.core.story import Story, wid


def test_an_agent_that_never_reports_is_lost():
    """An agent that does not report within two minutes: its host is lost, with the reason, and tried again."""
    story = Story("a:1", min=1)
    story.answers.clear()
    assert deadline(story.cluster, story.now) == story.now + 120.0
    story.wait(120.0)
    host = story.cluster.hosts["a"]
    assert (host.phase, host.reason) == (HostPhase.LOST, "its agent has sent nothing for 120 s")
    assert story.last(cmd.StopAgent) == cmd.StopAgent("a")
    story.wait(5.0)
    assert (story.cluster.hosts["a"].phase, len(story.commands(cmd.StartAgent))) == (HostPhase.STARTING, 2)
    story.answer()
    assert story.alive() == ["a/0#1"]


def test_a_host_that_is_probed_is_not_lost_as_one_whose_agent_does_not_report():
    """The probes take longer than an agent has to connect, and this one has connected."""
    story = Story(min=1, timeouts=Timeouts(agent=3.0, probe=10.0))
    story.add("gpu1:1", "10.0.0.1", "10.1.0.1").add("gpu2:1", "10.0.0.2", "10.1.0.2").hear(ev.AgentReady).wait(8.0)
    assert {*story.cluster.probing} == {"gpu2"}
    assert story.cluster.hosts["gpu2"].phase is HostPhase.STARTING
    story.answer()
    assert {host.phase for host in story.cluster.hosts.values()} == {HostPhase.UP}


def test_a_host_that_is_tried_again_has_its_time_again():
    """A host's second agent has the whole time again."""
    story = Story("a:1", min=1).lose_host("a")
    story.wait(100.0)
    story.answers.clear()
    story.wait(24.9)
    assert story.cluster.hosts["a"].phase is HostPhase.STARTING
    story.wait(0.2)
    assert story.cluster.hosts["a"].phase is HostPhase.LOST


def test_a_worker_whose_engine_never_comes_is_replaced():
    """A worker whose engine does not register within five minutes is killed, with a failure of its slot."""
    story = Story("a:2", min=2)
    story.hear(ev.AgentReady)
    story._unsay(wid("a/1#1"), ev.WorkerStarted, ev.WorkerRegistered)
    story.answer().submit().quiet(299.9)
    assert cmd.StopWorker(wid("a/1#1"), kill=True) not in story.said
    story.quiet(0.2)
    assert story.last(cmd.StopWorker) == cmd.StopWorker(wid("a/1#1"), kill=True)
    assert story.records("worker-lost") == ["a/1#1 did not start within 300 s"]
    assert (story.cluster.stage, story.names) == (Stage.RUNNING, ["a/0#1", "a/1#2"])


def test_workers_that_are_late_together_are_replaced_in_the_order_of_their_names():
    """Late workers of six hosts are replaced in the order of their names, not of a set."""
    hosts = ("gpu7", "gpu1", "gpu4", "gpu3", "gpu9", "gpu2")
    story = Story(*(f"{host}:1" for host in hosts)).hear(ev.AgentReady)
    story.wait(300.0)
    assert [stop.worker.host for stop in story.commands(cmd.StopWorker)] == sorted(hosts)


def test_a_program_may_take_its_time_to_begin():
    """A program may load data before its elastic function; elastic_timeout bounds that wait."""
    story = Story("a:1", min=1, elastic_timeout=None)
    story.answer()
    story.silent.add(wid("a/0#1"))
    story.submit().wait(5000.0)
    assert story.commands(cmd.StopWorker) == []


def test_a_newcomer_that_hangs_after_an_abort_is_replaced():
    """A newcomer hangs in a first world that is aborted: another worker replaces it after a minute."""
    story = Story("a:1", "b:1", "c:1", min=3, elastic_timeout=None, cooldown=(0.0, 0.0)).quiet(400.0)
    story.submit().answer(lambda e: not isinstance(e, ev.WorkerFormed))
    assert story.cluster.stage is Stage.FORMING
    story.hang("c/0#1").quiet(62.0)
    assert story.records("newcomer-held")
    assert "2 of min 3 workers ready; waiting for c/0#1" in story.reason
    story.quiet(65.0)
    assert story.records("worker-lost") == ["c/0#1 did not start within 60 s"]
    assert (story.cluster.stage, story.names) == (Stage.RUNNING, ["a/0#1", "b/0#1", "c/0#2"])
