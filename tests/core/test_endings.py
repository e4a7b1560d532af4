"""Jobs end: ranks finish one after the other, or raise, while hosts and workers change."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.state import Stage, WorkerState
from nbelastic.protocol import events as ev
from tests.core.story import Story, wid, with_stage


def test_one_finishes_first_and_the_others_get_time():
    """After the first rank has finished, newcomers, removals and scaling wait until the job has ended."""
    story = Story("a:2", "b:1", min=1).run()
    story.returned("a/0#1")
    mark = story.mark()
    story.add("c:1").remove("b").quiet(20.0)
    assert story.commands(cmd.AskLeave, mark) + story.commands(cmd.AbortWorld, mark) == []
    assert story.commands(cmd.StopProgram, mark) == []
    assert story.reason == "1 of 3 ranks have finished"
    story.returned("a/1#1", "b/0#1").ended("a/0#1", "b/0#1", "a/1#1")
    assert (story.job.outcome, story.job.reason) == ("succeeded", "every rank finished")


@pytest.mark.parametrize("stage", [Stage.PREPARING, Stage.ASKED, Stage.LEAVING])
def test_finishing_cancels_a_reconfiguration(stage):
    """A rank finishes while the next world is prepared, or a leave point agreed on: the change is cancelled and all stay."""
    story = with_stage(stage)
    story.returned("a/0#1")
    assert wid("d/0#1") in story.last(cmd.DropWorld).members
    if stage is not Stage.PREPARING:
        assert story.last(cmd.CancelLeave).members == story.cluster.members
    assert story.cluster.stage is Stage.RUNNING
    story.returned("b/0#1", "c/0#1").ended(*story.names)
    assert story.job.outcome == "succeeded"


def test_one_that_has_left_for_a_change_cannot_come_back_to_a_finished_generation():
    """A rank has left at the leave point when another finishes: its program is stopped, and the job succeeds."""
    story = with_stage(Stage.LEAVING)
    story.hear(ev.WorkerReady, "b/0#1").returned("a/0#1")
    assert story.last(cmd.StopProgram).workers == (wid("b/0#1"),)
    story.returned("c/0#1").ended("a/0#1", "c/0#1").quiet(1.0)
    assert (story.job.outcome, story.job.reason) == ("succeeded", "1 of 3 ranks did not finish")


def test_a_death_after_others_have_finished_restarts_nothing():
    """A rank is lost after another has finished.

    The remaining ranks stop, and the job succeeds with the results there are.
    """
    story = Story("a:3", min=1).run()
    story.returned("a/0#1")
    mark = story.mark()
    story.kill("a/1#1")
    assert story.commands(cmd.AbortWorld, mark) + story.commands(cmd.FormWorld, mark) == []
    assert story.last(cmd.StopProgram).workers == (wid("a/2#1"),)
    story.ended("a/0#1").quiet(1.0)
    assert (story.job.outcome, story.job.reason) == ("succeeded", "2 of 3 ranks did not finish")
    assert story.job.ranks == (wid("a/0#1"), wid("a/1#1"), wid("a/2#1"))


def test_a_rank_that_does_not_stop_after_that_is_killed():
    """Remaining ranks that hang after that are killed after `stop` seconds, and the job ends."""
    story = Story("a:3", min=1).run()
    story.returned("a/0#1").silent.update({wid("a/2#1")})
    story.kill("a/1#1").ended("a/0#1")
    assert story.cluster.active
    story.wait(59.9)
    assert story.cluster.active
    story.wait(0.1)
    assert "a/2#1 did not stop within 60 s and is killed" in story.records("worker-killed")
    assert story.job.outcome == "succeeded"


def test_a_finished_program_may_die():
    """A worker whose program has ended is lost: the other ranks are not disturbed."""
    story = Story("a:2", min=1).run()
    story.returned("a/0#1").ended("a/0#1")
    mark = story.mark()
    story.kill("a/0#1")
    assert story.commands(cmd.StopProgram, mark) == []
    story.returned("a/1#1").ended("a/1#1")
    assert story.job.outcome == "succeeded"


def test_the_finished_ranks_die_before_their_programs_end():
    """All finished ranks are lost before they sent their results: the job fails once, and does not wait without end."""
    story = Story("a:2", min=1).run()
    story.returned("a/0#1").kill("a/0#1").quiet(6.0)
    assert [end.outcome for end in story.commands(cmd.EndJob)] == ["failed"]
    assert "lost before its program ended" in story.job.reason


@pytest.mark.parametrize("how", ["returned", "ended"])
def test_a_rank_finishes_just_as_the_world_breaks(how):
    """A rank reports success after a break has begun: it counts as finished, and the job does not wait for it."""
    story = Story("a:3", min=1).run()
    story.fakes[wid("a/0#1")].returned = True
    story.kill("a/1#1")
    assert story.cluster.stage is Stage.GATHERING
    getattr(story, how)("a/0#1")
    assert wid("a/2#1") in story.last(cmd.StopProgram).workers
    if how == "returned":
        story.ended("a/0#1")
    story.quiet(6.0)
    assert story.job.outcome == "succeeded"


def test_a_program_end_counts_as_success_before_the_report_of_success():
    """`ProgramEnded` arrives before `WorkerSucceeded`: the rank counts as finished once."""
    story = Story("a:2", min=1).run()
    story.fakes[wid("a/0#1")].returned = True
    generation = story.cluster.generation
    story.ended("a/0#1").send(ev.WorkerSucceeded(wid("a/0#1"), generation))
    assert story.cluster.workers[wid("a/0#1")].state is WorkerState.READY
    story.kill("a/1#1").quiet(6.0)
    assert story.job.outcome == "succeeded"


def test_the_users_error_on_one_rank_is_the_jobs():
    """A rank raises and no connection was lost: the job fails with that error, and no host has a failure."""
    story = Story("a:3", min=1).run()
    story.raised("a/1#1", "ValueError: NaN")
    end, stop = story.last(cmd.EndJob), story.last(cmd.StopProgram)
    assert (end.outcome, end.reason, end.culprit) == ("failed", "rank 1 (a/1#1) raised ValueError: NaN", wid("a/1#1"))
    (record,) = (one for one in story.commands(cmd.Record) if one.kind == "job-failed")
    assert record.worker == "a/1#1"
    assert (stop.culprit, len(stop.workers)) == (wid("a/1#1"), 3)
    story.quiet(6.0)
    assert len(story.alive()) == 3
    assert all(slot.failures == 0 for slot in story.cluster.hosts["a"].slots)


def test_errors_on_all_ranks_fail_the_job_once():
    """All ranks raise, in any order: the first is the culprit, and the job fails once."""
    story = Story("a:3", min=1).run()
    generation = story.cluster.generation
    for w in list(story.cluster.members)[::-1]:
        story.send(ev.WorkerRaised(w, generation, intact=True, error="KeyError: x"))
    assert [end.culprit for end in story.commands(cmd.EndJob)] == [wid("a/2#1")]


def test_an_error_before_the_first_world():
    """A program raises before its elastic function: the job fails with that error."""
    story = Story("a:2", min=2)
    story.answer()
    story.submit().ended("a/1#1", error="ImportError: no_such")
    assert story.last(cmd.EndJob).reason == "a/1#1 raised ImportError: no_such"
    story.quiet(6.0)
    assert [str(w) for w in story.cluster.workers] == ["a/0#1", "a/1#1"]


def test_a_newcomers_error_is_its_own():
    """A newcomer's program raises while a world runs: the world trains on, and the newcomer stays for inspection."""
    story = Story("a:1", min=1).run()
    story.add("b:1").hear(ev.AgentReady).hear(ev.WorkerStarted).hear(ev.WorkerRegistered)
    story.ended("b/0#1", error="OSError: disk full").quiet(5.0)
    assert story.names == ["a/0#1"]
    assert story.cluster.active
    assert story.cluster.workers[wid("b/0#1")].state is WorkerState.FAILED
    story.finish()
    story.run("second")
    assert story.names == ["a/0#1", "b/0#1"]


def test_an_error_after_others_have_finished_still_fails_the_job():
    """A rank raises its own error after another has finished: the job fails."""
    story = Story("a:2", min=1).run()
    story.returned("a/0#1").ended("a/1#1", error="ZeroDivisionError")
    assert story.last(cmd.EndJob).reason == "rank 1 (a/1#1) raised ZeroDivisionError"


def test_connections_lost_after_others_have_finished_restart_nothing():
    """A rank with more steps loses its connections to finished ranks: nothing restarts."""
    story = Story("a:2", min=1).run()
    story.returned("a/0#1").raised("a/1#1", "RuntimeError", intact=False).quiet(2.0)
    assert story.cluster.generation == 1
    story.ended("a/0#1")
    assert story.job.outcome == "succeeded"


def test_newcomers_after_the_first_has_finished_begin_nothing():
    """A worker that becomes ready after a rank has finished is given no program."""
    story = Story("a:2", min=1).run()
    story.returned("a/0#1")
    mark = story.mark()
    story.add("b:1").answer()
    assert story.commands(cmd.RunProgram, mark) == []
    assert story.cluster.workers[wid("b/0#1")].state is WorkerState.READY
    story.returned("a/1#1").ended("a/0#1", "a/1#1").run("second")
    assert len(story.names) == 3


def test_a_surplus_worker_whose_program_is_stopped_leaves():
    """max is lowered after a rank has finished, and a rank is lost: the surplus worker is stopped."""
    story = Story("a:3", min=1).run()
    story.returned("a/0#1").scale(1, 1).kill("a/1#1").hear(ev.ProgramEnded)
    assert wid("a/2#1") in story.cluster.stopped
    story.ended("a/0#1").quiet(2.0)
    assert (story.alive(), story.job.outcome) == (["a/0#1"], "succeeded")


def test_the_missing_result_of_a_program_without_an_elastic_function_is_named():
    """One of two workers is lost while both run it. The job ends with one result, and says that another is missing."""
    story = Story("a:1", "b:1", min=1)
    story.answer().submit()
    story.send(ev.AgentLost("b", "its agent ended"))
    story.ended("a/0#1")
    assert (story.job.outcome, story.job.reason) == ("succeeded", "1 of 2 ranks did not finish")


def test_a_replacement_gives_the_missing_result():
    """The worker in the place of a lost one runs the program too, and the job ends with a result of each."""
    story = Story("a:2", min=2)
    story.answer().submit().kill("a/1#1").quiet(5.0)
    story.ended("a/0#1", "a/1#2")
    assert (story.job.outcome, story.job.reason) == ("succeeded", "every rank finished")


def test_a_free_slot_takes_the_place_of_a_newcomer_that_failed():
    """The program of a replacement fails on its host: another host replaces the lost worker, and the job goes on."""
    story = Story("a:2", "b:2", "c:1", min=4, max=4, cooldown=(0.0, 0.0)).run().commit(3)
    story.kill("b/1#1").answer(lambda e: not (isinstance(e, ev.WorkerReady) and e.worker == wid("b/1#2")))
    story.ended("b/1#2", error="OSError: disk full").quiet(5.0)
    assert story.names == ["a/0#1", "a/1#1", "b/0#1", "c/0#1"]
    assert story.cluster.failed == {wid("b/1#2")}
    story.finish().run("second").quiet(2.0)
    assert (len(story.names), len(story.alive())) == (4, 4)


def test_no_worker_is_started_in_place_of_a_failed_one_without_room_for_it():
    """A failed worker still uses the driver's open files."""
    story = Story("a:2", "b:2", min=1, max=2, room=2).run().commit(3)
    story.kill("a/1#1").answer(lambda e: not (isinstance(e, ev.WorkerReady) and e.worker == wid("a/1#2")))
    story.ended("a/1#2", error="OSError: disk full").quiet(5.0)
    assert story.alive() == ["a/0#1", "a/1#2"]


def test_an_error_of_a_program_whose_worker_was_told_to_end_fails_no_job():
    """A host is removed at once, and the program of its worker raises as it ends: the others train on."""
    story = Story("a:1", "b:1", "c:1", min=1).run().commit(1)
    story.remove("c", now=True)
    story.send(ev.ProgramEnded(wid("c/0#1"), "job", "ValueError: interrupted"))
    story.quiet(2.0)
    assert not story.commands(cmd.EndJob)
    assert story.names == ["a/0#1", "b/0#1"]
    story.finish()
