"""Jobs run one after the other, are refused or stopped, and end although a program does not."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.state import Stage, WorkerState
from nbelastic.protocol import events as ev
from tests.core.story import Story, wid


def test_two_jobs_in_a_row_use_the_same_workers():
    """The second job runs on the processes of the first, in a new generation, and all ranks receive its state."""
    story = Story("a:2", min=2).run("one").commit(9).finish()
    story.run("two")
    order = story.last(cmd.FormWorld)
    assert (story.names, order.generation, order.root, order.receivers) == (["a/0#1", "a/1#1"], 2, 0, (1,))


def test_the_next_job_waits_for_the_last_ones_programs():
    """A worker takes the next job after its last program has ended; the others wait for it if min needs it."""
    story = Story("a:2", min=2).run("one")
    story.raised("a/0#1").hear(ev.ProgramEnded, "a/0#1")
    story.submit("two").hear(ev.WorkerReady)
    assert "the last job's programs to stop" in story.reason
    story.hear(ev.ProgramEnded)
    assert "the last job" not in story.reason
    story.quiet(2.0)
    assert (story.cluster.stage, len(story.names)) == (Stage.RUNNING, 2)


def test_a_program_that_does_not_stop_is_killed():
    """A program with the training state is killed after `stop` seconds and replaced, without a failure."""
    story = Story("a:2", min=2).run("one")
    story.silent.add(wid("a/1#1"))
    story.stop_job("one").quiet(59.9)
    assert wid("a/1#1") in story.cluster.workers
    story.submit("two").quiet(2.0)
    assert story.records("worker-killed") == ["a/1#1 did not stop within 60 s and is killed"]
    assert story.names == ["a/0#1", "a/1#2"]
    assert story.cluster.hosts["a"].slots[1].failures == 0


def test_a_program_without_training_state_is_killed_sooner():
    """A program that has not reached the elastic loop has no checkpoint to write.

    It is killed after `leave` seconds.
    """
    story = Story("a:1", "b:1", min=1)
    story.answer()
    story.silent.add(wid("b/0#1"))
    story.submit().quiet(2.0)
    assert story.names == ["a/0#1"]
    story.silent.add(wid("a/0#1"))
    story.stop_job().quiet(5.0)
    assert story.records("worker-killed") == ["b/0#1 did not stop within 5 s and is killed"]
    story.quiet(55.0)
    assert story.records("worker-killed")[1:] == ["a/0#1 did not stop within 60 s and is killed"]


def test_a_worker_that_reaches_the_loop_of_an_ended_job_is_stopped():
    """A worker that reaches the elastic loop after its job has ended is asked to stop its program."""
    story = Story("a:1", "b:1", min=1).run()
    story.stop_job().answer()
    mark = story.mark()
    story.send(ev.WorkerReady(wid("b/0#1"), "job", 0, 0, clean=True, store="x"))
    assert story.commands(cmd.StopProgram, mark) == [cmd.StopProgram("job", (wid("b/0#1"),), "the job is over")]


def test_a_second_job_is_refused_while_one_runs():
    """A second job ends at once with the reason; the first is not touched."""
    story = Story("a:1", min=1).run("one")
    mark = story.mark()
    story.submit("two")
    assert story.commands(cmd.EndJob, mark)[0].job == "two"
    assert "one is still running" in story.commands(cmd.EndJob, mark)[0].reason
    assert story.job.name == "one"
    assert story.cluster.stage is Stage.RUNNING


def test_a_job_submitted_to_a_stopping_cluster_ends():
    """A job that is submitted to a stopping cluster ends at once with a reason."""
    story = Story("a:1", min=1).answer()
    story.send(ev.StopRequested("done"))
    story.submit("late")
    assert (story.last(cmd.EndJob).job, story.last(cmd.EndJob).outcome) == ("late", "stopped")


def test_a_job_stopped_twice_or_by_another_name_ends_once():
    """A second stop, or a stop of another job's name, has no effect."""
    story = Story("a:1", min=1).run("two")
    story.send(ev.JobStopRequested("one"))
    assert story.cluster.active
    story.send(ev.JobStopRequested("two"), ev.JobStopRequested("two"))
    assert len(story.commands(cmd.EndJob)) == 1


def test_a_job_can_be_submitted_before_any_worker_is_ready():
    """The job waits for min with a reason, and its program starts on each worker that becomes ready."""
    story = Story("a:2", min=2).submit()
    assert "0 of min 2 workers ready; waiting for a to start" in story.reason
    story.quiet(2.0)
    assert len(story.commands(cmd.RunProgram)) == 2
    assert story.cluster.stage is Stage.RUNNING


def test_a_job_stopped_before_any_worker_is_ready():
    """A job is stopped before any worker is ready: later workers run no program."""
    story = Story("a:2", min=2).hear(ev.AgentReady).submit()
    story.send(ev.JobStopRequested("job"))
    assert story.reason == "0 of min 2 workers ready; waiting for a/0#1 (0 s), a/1#1 (0 s)"
    story.answer()
    assert story.commands(cmd.RunProgram) == []
    assert story.reason == "2 workers ready; no job is running"


def test_the_reason_names_the_job_that_has_failed():
    """A program raises an error: as long as no other job runs, the reason says which job failed, and why."""
    story = Story("a:2", min=2)
    story.answer()
    story.submit().ended("a/1#1", error="ImportError: no_such")
    story.quiet(6.0)
    assert story.reason == "2 workers ready; no job is running; job failed: a/1#1 raised ImportError: no_such"
    story.submit("second")
    assert "failed" not in story.reason


def test_a_program_without_an_elastic_function():
    """A program that never asks for a world succeeds when it has ended on every worker."""
    story = Story("a:2", min=2).answer()
    story.submit().ended("a/0#1")
    assert story.cluster.active
    story.ended("a/1#1")
    assert (story.job.outcome, story.last(cmd.EndJob).members) == ("succeeded", (wid("a/0#1"), wid("a/1#1")))


def test_a_death_in_a_program_without_a_world():
    """One of two workers is lost after the other's program has ended.

    Nothing restarts, and the job keeps that result.
    """
    story = Story("a:2", min=2).answer()
    story.submit().ended("a/0#1").kill("a/1#1")
    assert story.job.outcome == "succeeded"
    story.answer()
    assert story.alive() == ["a/0#1", "a/1#2"]


def test_a_newcomer_whose_program_ends_without_training_ends_nothing():
    """A newcomer's program ends well without training: the world trains on and still takes newcomers."""
    story = Story("a:1", min=1).run()
    story.add("b:1").hear(ev.AgentReady).hear(ev.WorkerRegistered).ended("b/0#1")
    story.add("c:1").quiet(2.0)
    assert story.names == ["a/0#1", "c/0#1"]


def test_a_late_ready_message_of_an_ended_program_is_dropped():
    """`WorkerReady` arrives after the program's end: the worker is not taken into a world."""
    story = Story("a:1", min=1).run()
    story.add("b:1").hear(ev.AgentReady).hear(ev.WorkerRegistered)
    late = next(e for e in story.answers if isinstance(e, ev.WorkerReady))
    story.ended("b/0#1").send(late)
    story.quiet(2.0)
    assert story.names == ["a/0#1"]


def test_a_failed_setup_cell_is_named():
    """A setup cell fails on one worker: it stays for inspection, and the job's reason names the cell."""
    story = Story("a:2", min=2)
    story.broken.add(("a/1#1", "torhc"))
    story.set_up("imports", "torhc").submit().answer()
    assert story.cluster.workers[wid("a/1#1")].state is WorkerState.FAILED
    failed = "waiting for a/1#1 (failed: setup cell imports failed: NameError: torhc)"
    assert story.reason == f"1 of min 2 workers ready; {failed}"


def test_results_are_by_the_rank_of_the_last_world():
    """The end of a job names the last world's members by rank."""
    story = Story("a:2", min=1).run()
    story.kill("a/0#1").quiet(2.0).finish()
    assert [str(w) for w in story.last(cmd.EndJob).members] == ["a/1#1", "a/0#2"]


@pytest.mark.parametrize("event", [ev.StopRequested(), ev.JobStopRequested("job"), ev.JobSubmitted("job")])
def test_requests_to_an_empty_cluster_break_nothing(event):
    """A cluster without hosts, workers or a job takes every request."""
    story = Story()
    story.send(event, ev.Ticked(), event)
    assert story.reason


def test_a_message_that_is_not_an_event_is_an_error():
    """A message that is not an event raises an error that says so."""
    with pytest.raises(TypeError, match="FormWorld is not an event"):
        Story().send(cmd.FormWorld(1, (), "", 0, ()))


def test_a_waiting_newcomer_whose_program_ends_is_not_counted_on():
    """A newcomer's program ends with an error while it waits: the next world forms without it."""
    story = Story("b:1", min=1).run()
    story.add("a:1").add("c:1").hear(ev.AgentReady)
    story.answer(lambda e: getattr(e, "worker", wid("c/0#1")).host == "a")
    assert story.cluster.newcomers == {wid("a/0#1")}
    story.ended("a/0#1", error="KeyboardInterrupt")
    assert not story.cluster.newcomers
    assert story.quiet(3.0).names == ["b/0#1", "c/0#1"]


def test_a_job_that_is_submitted_twice_runs_once():
    """A repeated submission, during the job or after its end, starts no second run and causes no second end."""
    story = Story("b:1", "a:1").run()
    mark = story.mark()
    story.submit()
    assert not story.said[mark:]
    story.finish().answer()
    mark = story.mark()
    story.submit()
    assert not story.said[mark:]
    assert story.job.outcome == "succeeded"


def test_a_worker_that_comes_late_does_not_run_what_others_have_finished():
    """A program without a world has ended on one worker: a newcomer does not start it."""
    story = Story("a:2", min=1).answer().submit().ended("a/0#1")
    mark = story.mark()
    story.add("b:1").hear(ev.AgentReady).hear(ev.WorkerRegistered)
    assert not story.commands(cmd.RunProgram, mark)
    story.ended("a/1#1")
    assert (story.job.outcome, len(story.last(cmd.EndJob).members)) == ("succeeded", 2)


def test_a_program_of_an_older_job_is_killed_after_the_next_job_has_ended():
    """A program that does not stop is killed at its deadline, although the next job is over before."""
    story = Story("a:1", "b:1", min=1).run("one")
    story.silent.add(wid("b/0#1"))
    story.stop_job("one").answer()
    story.submit("two").quiet(2.0)
    assert story.names == ["a/0#1"]
    story.finish()
    assert story.job.outcome == "succeeded"
    story.quiet(60.0)
    assert story.records("worker-killed") == ["b/0#1 did not stop within 60 s and is killed"]


@pytest.mark.parametrize(("lost", "writer"), [("", "a/0#1"), ("a", "b/0#1")], ids=["stopped by hand", "rank 0 is lost"])
def test_the_first_rank_that_is_left_writes_the_last_checkpoint(lost, writer):
    """Rank 0 does, as long as it is there; else one of the survivors, which all hold the state."""
    story = Story("a:2", "b:2", min=1, reset_limit=0).run().commit(9)
    if lost:
        story.lose_host(lost)
    else:
        story.stop_job()
    assert story.last(cmd.StopProgram).writer == wid(writer)


def test_a_rank_that_ends_with_its_own_error_writes_no_last_checkpoint():
    """The next rank does."""
    story = Story("a:2", min=2).run("one")
    story.raised("a/0#1").answer()
    assert (story.last(cmd.StopProgram).culprit, story.last(cmd.StopProgram).writer) == (wid("a/0#1"), wid("a/1#1"))


def test_between_worlds_a_rank_with_the_newest_commit_writes_the_last_checkpoint():
    """After a break some ranks are a commit behind."""
    story = Story("a:4", min=4).run().commit(9)
    story.kill("a/3#1")
    for w, commit in (("a/0#1", 8), ("a/1#1", 9), ("a/2#1", 9)):
        story.send(ev.WorkerReady(wid(w), "job", 1, commit, clean=True, store="x", holds_state=True))
    assert story.cluster.stage is Stage.GATHERING
    story.stop_job()
    assert story.last(cmd.StopProgram).writer == wid("a/1#1")


@pytest.mark.parametrize("when", ["before", "after"])
def test_workers_that_may_write_a_last_checkpoint_are_stopped_when_their_programs_have_ended(when):
    """max is lowered just before or after the job is stopped: the youngest workers end, but not before their programs."""
    story = Story("a:2", "b:2", min=1).run().commit(3)
    if when == "before":
        story.scale(1, 2).stop_job()
    else:
        story.stop_job().scale(1, 2)
    assert story.commands(cmd.StopWorker) == []
    story.hear(ev.ProgramEnded, "a/0#1", "b/1#1")
    assert [command.worker for command in story.commands(cmd.StopWorker)] == [wid("b/1#1")]
    story.quiet(1.0)
    assert story.alive() == ["a/0#1", "a/1#1"]
    assert len(story.run("second").names) == 2
