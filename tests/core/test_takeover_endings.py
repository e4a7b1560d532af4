"""Jobs end, and hosts and limits change, around a takeover."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.state import HostPhase, Stage
from nbelastic.protocol import events as ev
from tests.core.away import Away, disturbed, three, trains
from tests.core.story import Story, wid, with_stage

# ---- endings ----


def test_the_users_own_error_ends_the_job():
    """An error that was raised without a driver ends the job with that rank's error."""
    story = three()
    Away(story).commit().raised("a/1#1", "ValueError: bad").new_driver()
    end = story.last(cmd.EndJob)
    assert (end.outcome, end.reason, end.culprit) == ("failed", "rank 1 (a/1#1) raised ValueError: bad", wid("a/1#1"))
    assert trains(story.quiet(6.0).run("next"))
    assert len(story.names) == 3


def test_an_error_comes_before_newcomers():
    """A member has raised and a newcomer waits: no change and no program starts."""
    story = three().add("c:1").add("d:1")
    story.hear(ev.AgentReady).hear(ev.WorkerRegistered, "c/0#1")
    away = Away(story).raised("a/1#1")
    mark = story.mark()
    away.new_driver()
    assert story.job.outcome == "failed"
    assert {type(command) for command in disturbed(story, mark)} == {cmd.AbortWorld, cmd.StopProgram}


@pytest.mark.parametrize("reached", range(8))
@pytest.mark.parametrize("written", [True, False])
def test_a_job_that_was_failing_fails(reached, written):
    """The driver ends while it fails a job: the job fails as soon as one program or the file has the error."""
    story = three()
    last = ev.WorkerRaised(wid("a/1#1"), 1, intact=True, error="its own error")
    Away(story, last, reached=reached, written=written).new_driver().quiet(6.0)
    if written or reached not in (1, 2, 3):
        assert "rank 1 (a/1#1) raised its own error" in story.job.reason
        assert story.job.outcome == ("stopped" if reached == 4 and not written else "failed")
        assert len(story.commands(cmd.EndJob)) == (not written)
        assert trains(story.run("next"))
    else:  # the error is lost with the driver, and the world was broken: the error may happen again
        assert trains(story)


@pytest.mark.parametrize("reached", range(8))
@pytest.mark.parametrize("written", [True, False])
def test_a_job_that_was_being_stopped_stops(reached, written):
    """The driver ends while it stops a job: all stop as soon as one program or the file has the stop."""
    story = three()
    Away(story, ev.JobStopRequested("job"), reached=reached, written=written).new_driver().quiet(6.0)
    if written or reached > 3:
        assert story.job.outcome == "stopped"
        assert not any(fake.job for fake in story.fakes.values())
        assert story.records("worker-killed") == []
        assert trains(story.run("next"))
    else:
        assert trains(story)


def test_some_have_succeeded():
    """One rank has succeeded: the others are waited for undisturbed, and the job succeeds."""
    story = three()
    mark = story.mark()
    Away(story).returned("a/1#1").new_driver()
    assert disturbed(story, mark) == []
    assert story.reason == "1 of 3 ranks have finished"
    story.returned("a/0#1", "b/0#1").ended("a/0#1", "a/1#1", "b/0#1")
    assert (story.job.outcome, story.job.reason) == ("succeeded", "every rank finished")


def test_all_have_succeeded_and_ended():
    """The job ended without a driver: it has succeeded with every rank's result."""
    story = three()
    names = story.names
    Away(story).returned(*names).ended(*names).new_driver().answer()
    end = story.last(cmd.EndJob)
    assert (end.outcome, [str(w) for w in end.members], end.reason) == ("succeeded", names, "every rank finished")


def test_some_programs_had_ended_before():
    """The old driver knew one program's end: the end is reported again, and the job ends after the others."""
    story = three()
    names = story.names
    story.returned(*names).ended("a/0#1")
    Away(story).ended("b/0#1").new_driver().answer()
    assert story.cluster.active
    story.ended("a/1#1")
    assert story.job.outcome == "succeeded"


def test_an_error_after_the_loop():
    """A program fails after its function returned: the job fails with the error that the worker kept."""
    story = three()
    names = story.names
    Away(story).returned(*names).ended(*names[:2]).ended(names[2], error="KeyError: x").new_driver().answer()
    assert story.job.outcome == "failed"
    assert "KeyError: x" in story.job.reason


def test_a_program_without_a_loop():
    """A program without an elastic loop that has ended is not started again; the job ends when all have."""
    story = Story("a:2", min=2).answer()
    story.submit()
    story._unsay(wid("a/0#1"), ev.WorkerReady)
    story._unsay(wid("a/1#1"), ev.WorkerReady)
    for fake in story.fakes.values():
        fake.word = None
    away = Away(story).ended("a/0#1")
    mark = story.mark()
    away.new_driver().answer()
    assert story.commands(cmd.RunProgram, mark) == []
    assert story.cluster.active
    assert story.ended("a/1#1").job.outcome == "succeeded"


def test_the_missing_result_of_a_program_without_a_loop_is_named_by_the_next_driver():
    """A worker was lost while both ran such a program, then the driver was. The job still says that a result is missing."""
    story = Story("a:1", "b:1", min=1).answer()
    story.submit().send(ev.AgentLost("b", "its agent ended"))
    story._unsay(wid("a/0#1"), ev.WorkerReady)
    story.fakes[wid("a/0#1")].word = None
    story = Away(story).ended("a/0#1").new_driver().answer()
    assert (story.job.outcome, story.job.reason) == ("succeeded", "1 of 2 ranks did not finish")


def test_a_rank_that_was_asked_to_stop_causes_no_error():
    """A rank that was asked to stop after another finished causes no error, and the job succeeds."""
    story = three()
    story.returned("a/0#1").ended("a/0#1").kill("b/0#1")
    assert story.job.asked_to_stop == {wid("a/1#1")}
    Away(story).new_driver().answer()
    assert (story.job.outcome, story.job.reason) == ("succeeded", "2 of 3 ranks did not finish")


def test_a_death_after_others_have_finished():
    """One rank finished and another was lost without a driver: the third stops, and the job succeeds."""
    story = three()
    Away(story).returned("a/0#1").ended("a/0#1").kill("b/0#1").new_driver().quiet(6.0)
    assert (story.job.outcome, story.job.reason) == ("succeeded", "2 of 3 ranks did not finish")
    assert [c.generation for c in story.commands(cmd.FormWorld)] == [1]


def test_programs_linger_after_the_job_is_over():
    """A program of an ended job is asked to stop again, then killed, and the next job runs."""
    story = three()
    story.silent.add(wid("b/0#1"))
    story.stop_job().answer()
    story.fakes[wid("b/0#1")] = type(story.fakes[wid("b/0#1")])("job", generation=1, numbered=1)
    story.silent.clear()
    away = Away(story)
    mark = story.mark()
    away.new_driver()
    assert [c.workers for c in story.commands(cmd.StopProgram, mark)] == [(wid("b/0#1"),)]
    story.answers.clear()
    story.quiet(6.0)
    assert story.records("worker-killed") == ["b/0#1 did not stop within 5 s and is killed"]
    assert trains(story.run("next"))


def test_the_lease_has_run_out_on_some():
    """Workers whose lease has expired stop by themselves: the job ends as stopped, with that reason."""
    story = three()
    away = Away(story)
    fake = story.fakes[wid("a/1#1")]
    fake.stopped, fake.formed = "no driver has come for 60 s (lease)", False
    away.new_driver().quiet(6.0)
    assert (story.job.outcome, story.job.reason) == ("stopped", "no driver has come for 60 s (lease)")
    assert not any(fake.job for fake in story.fakes.values())


# ---- hosts and limits ----


def test_a_host_that_was_to_leave_leaves():
    """The members of a draining host leave without an abort, and discovery may add the host again."""
    story = three().commit(3)
    story.discover("a:2", "b:1")
    story.remove("b")
    assert story.cluster.hosts["b"].phase is HostPhase.DRAINING
    mark = story.mark()
    Away(story).new_driver()
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1")
    assert list(story.cluster.hosts) == ["a"]
    assert story.commands(cmd.AbortWorld, mark) == []
    story.discover("a:2", "b:1")
    assert list(story.cluster.hosts) == ["a"], "it was removed by hand"


def test_a_host_that_discovery_has_let_go_may_come_back():
    """A host that discovery drained may be discovered again."""
    story = Story(min=1)
    story.discover("a:1", "b:1")
    story.run().commit(3).discover("a:1")
    Away(story).new_driver().quiet(3.0)
    assert list(story.cluster.hosts) == ["a"]
    assert story.cluster.removed_hosts == frozenset()
    story.discover("a:1", "b:1")
    assert trains(story.quiet(3.0), "a/0#1", "b/0#2")


def test_a_draining_host_whose_agent_is_gone_has_left():
    """A draining host whose agent was lost is removed and not started again."""
    story = three().commit(3).remove("b")
    mark = story.mark()
    Away(story).lose_host("b").new_driver().quiet(3.0)
    assert list(story.cluster.hosts) == ["a"]
    assert story.commands(cmd.StartAgent, mark) == []
    assert trains(story, "a/0#1", "a/1#1")


def test_a_host_that_has_ended_as_announced_has_left():
    """A batch job that was to have a successor ended without a driver: it is not submitted again beside its successor."""
    story = Story("a:1", "b:1", min=1).run().commit(3)
    story.send(ev.HostRemoved("b", by="its time limit", within=300.0, replaced=True))
    mark = story.mark()
    story = Away(story).lose_host("b").new_driver().quiet(5.0)
    assert [command.host.name for command in story.commands(cmd.StartAgent, mark)] == ["b.2"]
    assert (sorted(story.cluster.hosts), story.cluster.ending) == (["a", "b.2"], {})
    assert story.names == ["a/0#1", "b.2/0#2"]


@pytest.mark.parametrize("written", [True, False])
def test_a_host_that_was_removed_stays_removed(written):
    """The agent of a removed host is asked again to end, and discovery does not add the host."""
    story = Story("a:1", "b:1", min=1).answer()
    story.remove("b")
    (last,) = [e for e in story.answers if isinstance(e, ev.WorkerExited)]
    away = Away(story, last, reached=0, written=written)
    assert "b" in story.agents
    mark = story.mark()
    away.new_driver().quiet(3.0)
    assert "b" in [c.host for c in story.commands(cmd.StopAgent, mark)]
    assert (list(story.cluster.hosts), "b" in story.agents) == (["a"], False)
    story.discover("a:1", "b:1")
    assert list(story.cluster.hosts) == ["a"]


def test_a_lost_host_whose_agent_lives_gets_another_agent():
    """The agent of a lost host is still alive: it ends with its workers, and another one starts."""
    story = three()
    last = ev.AgentLost("b", "it was silent")
    Away(story, last).new_driver().quiet(3.0)
    assert trains(story)
    assert "b/0#1" not in story.names
    assert "b/0#1" not in story.alive()


def test_slots_that_were_taken_away_stay_away():
    """A host has fewer slots now: its surplus member leaves without an abort."""
    story = three().commit(3).add("a:1")
    mark = story.mark()
    Away(story).new_driver().quiet(3.0)
    assert trains(story, "a/0#1", "b/0#1")
    assert story.commands(cmd.AbortWorld, mark) == []


def test_the_limits_are_those_of_the_last_request():
    """A scaling that was saved and not carried out is carried out now."""
    story = three().commit(3)
    Away(story, ev.Scaled(1, 2, "a test"), reached=0).new_driver()
    assert (story.cluster.limits.min, story.cluster.limits.max) == (1, 2)
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1")
    assert story.cluster.resets == 0


def test_no_incarnation_is_used_twice():
    """Incarnations of workers that were never saved, or that ended with their agent, are not used again."""
    story = three()
    story._forget(wid("b/0#1"))
    Away(story, ev.WorkerExited(wid("b/0#1"), -9), written=False).lose_host("b").new_driver().quiet(3.0)
    assert "b/0#3" in story.alive()
    assert trains(story)


def test_a_host_that_was_admitted_unsaved():
    """A host's first worker was started unsaved and lost: the next one has another incarnation."""
    story = Story("a:1", min=1)
    (last,) = story.answers
    Away(story, last, written=False).kill("a/0#1").new_driver().answer()
    assert story.alive() == ["a/0#2"]


def test_slots_that_come_back_have_new_workers():
    """A host regains slots: earlier incarnations are not used again, although its agent is new."""
    story = Story("a:3", min=1).answer()
    story.add("a:1").answer()
    story.lose_host("a").add("a:1").answer()
    Away(story).new_driver().answer()
    Away(story).new_driver().answer()
    story.remove("a").answer()
    story.add("a:3").answer()
    assert story.alive() == ["a/0#3", "a/1#3", "a/2#3"]


def test_resets_count_on():
    """Breaks before, during and after the takeover are one count."""
    story = three(reset_limit=3)
    story.kill("a/0#1").quiet(3.0)
    Away(story).kill("a/1#1").new_driver().quiet(3.0)
    assert story.cluster.resets == 2
    story.kill("b/0#1").quiet(3.0)
    assert trains(story)
    story.kill(story.alive()[0])
    assert "4 resets exceed reset_limit=3" in story.job.reason


@pytest.mark.parametrize("stage", [Stage.GATHERING, Stage.RUNNING, Stage.ASKED, Stage.LEAVING])
def test_a_cluster_that_was_being_stopped_stops(stage):
    """The driver ends while it stops the cluster: the next one completes the stop and starts nothing."""
    story = with_stage(stage)
    story.send(ev.StopRequested("enough"))
    mark = story.mark()
    Away(story).new_driver()
    story.quiet(100.0)
    assert (story.cluster.phase, story.alive(), story.agents) == ("finished", [], {})
    assert not [command for command in story.said[mark:] if isinstance(command, cmd.StartWorker | cmd.StartAgent)]


def test_a_last_checkpoint_is_waited_for_by_the_next_driver():
    """A program still writes its checkpoint: the next driver waits for it, then ends the cluster."""
    story = with_stage(Stage.RUNNING)
    busy = story.names[0]
    story.silent.add(wid(busy))
    story.send(ev.StopRequested("enough"))
    story.fakes[wid(busy)].job = "job"
    story.silent.clear()
    Away(story).new_driver()
    story._unsay(wid(busy), ev.ProgramEnded)
    story.quiet(1.0)
    assert wid(busy) in story.fakes
    story.quiet(200.0)
    assert (story.cluster.phase, story.fakes) == ("finished", {})
