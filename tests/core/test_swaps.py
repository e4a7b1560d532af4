"""New programs for a job that trains: all workers keep one, or all return to the old one."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.state import Stage
from nbelastic.protocol import events as ev
from nbelastic.protocol.program_events import SwapCancelled, SwapFailed, SwapSubmitted
from tests.core.story import Story, wid, with_stage

MEMBERS = ("a/0#1", "b/0#1", "c/0#1")


def submit(story: Story, program: int = 1) -> Story:
    story.send(SwapSubmitted(program, "you"))
    return story


def tried(**limits) -> Story:
    """Three members have left their generation, and run the new program."""
    story = submit(with_stage(Stage.RUNNING, **limits)).hear(ev.LeaveAcknowledged).hear(ev.WorkerHalted)
    assert story.cluster.job.trial == 1
    return story


def formed(**limits) -> Story:
    """They train in the next generation, up to their first commit there."""
    story = tried(**limits).hear(ev.WorkerReady).hear(ev.WorkerFormed)
    assert story.cluster.stage is Stage.HALTED, story.reason
    return story


def programs(story: Story) -> set[int]:
    return {fake.program for fake in story.fakes.values()}


def check_training(story: Story, program: int, resets: int = 0) -> Story:
    story.quiet(1.0)
    cluster = story.cluster
    assert (cluster.stage, cluster.job.program, cluster.job.trial) == (Stage.RUNNING, program, 0), story.reason
    assert cluster.resets == resets
    assert programs(story) == {program}
    return story


def test_all_members_change_at_one_commit_and_keep_the_program_at_its_first():
    """No member keeps it before all have made that commit. Then all train on, without a reset."""
    story = formed()
    story.hear(ev.WorkerHalted, *MEMBERS[:2])
    assert not story.commands(cmd.KeepProgram)
    story.hear(ev.WorkerHalted)
    (keep,) = story.commands(cmd.KeepProgram)
    assert (keep.program, set(map(str, keep.workers)), keep.rejected) == (1, {*MEMBERS}, 0)
    check_training(story, 1)


@pytest.mark.parametrize("begin", [tried, formed])
@pytest.mark.parametrize("who", MEMBERS)
def test_if_it_fails_on_one_worker_all_return_to_the_old_one(begin, who):
    """They go on from the commit at which they left it. The break does not count as a failure of the training."""
    story = begin(reset_limit=0)
    commit = max(fake.old[1] for fake in story.fakes.values())
    story.fail_program(wid(who))
    check_training(story, 0)
    assert {fake.commit for fake in story.fakes.values()} == {commit}
    assert "ValueError: no" in story.records("swap-failed")[-1]


@pytest.mark.parametrize("begin", [tried, formed])
def test_a_swap_that_nobody_waits_for_is_dropped(begin):
    """The old program goes on; so it does if the members have not stopped for it yet."""
    story = begin()
    story.send(SwapCancelled(1))
    check_training(story, 0)
    story = submit(with_stage(Stage.RUNNING))
    story.send(SwapCancelled(1))
    check_training(story, 0)
    assert not story.commands(cmd.TryProgram)


def test_the_error_of_a_program_that_is_not_tried_any_more_changes_nothing():
    """One worker's report of it comes after the swap was cancelled, and another one while the next program is tried."""
    story = tried()
    story.send(SwapCancelled(1))
    story.send(SwapFailed(wid("c/0#1"), 1, "ValueError: no"))
    check_training(story, 0)
    submit(story, 2).hear(ev.LeaveAcknowledged).hear(ev.WorkerHalted)
    story.send(SwapFailed(wid("c/0#1"), 1, "ValueError: no"))
    check_training(story, 2)


@pytest.mark.parametrize("begin", [tried, formed])
def test_a_member_that_dies_does_not_end_the_trial(begin):
    """The others form a world with the new program, and so does the worker that replaces the lost one."""
    story = begin(min=1)
    story.kill("b/0#1").quiet(60.0)
    resets = story.cluster.resets
    check_training(story, 1, resets=resets)
    assert len(story.cluster.members) == 3


def test_a_newcomer_runs_the_program_that_the_others_run():
    """It has begun with the old one, and reports when the others have changed."""
    story = with_stage(Stage.RUNNING)
    story.add("d:1").answer(lambda event: not (isinstance(event, ev.WorkerReady) and event.worker.host == "d"))
    submit(story).answer(lambda event: not (isinstance(event, ev.WorkerReady) and event.worker.host == "d"))
    assert story.cluster.job.program == 1
    story.quiet(60.0)
    check_training(story, 1)
    assert len(story.cluster.members) == 4


def test_a_newcomer_that_waits_tries_the_program_too_and_may_reject_it():
    """A program that needs names of an earlier cell fails on a new worker, which is better known before all depend on it."""
    story = with_stage(Stage.RUNNING, max=3, spares=1)
    story.add("d:1").quiet(1.0)
    (newcomer,) = story.cluster.newcomers
    submit(story).hear(ev.LeaveAcknowledged).hear(ev.WorkerHalted)
    assert story.fakes[newcomer].program == 1
    story.fail_program(newcomer)
    check_training(story, 0)
    assert story.cluster.newcomers == {newcomer}


def test_members_try_a_program_first_then_newcomers_by_name():
    """In the order of the ranks, whichever newcomer came first."""
    story = with_stage(Stage.RUNNING, max=3, spares=2)
    story.add("e:1").quiet(1.0).add("d:1").quiet(1.0)
    assert [*map(str, story.cluster.newcomers)] == ["e/0#1", "d/0#1"]
    submit(story).hear(ev.LeaveAcknowledged).hear(ev.WorkerHalted)
    assert [*map(str, story.last(cmd.TryProgram).workers)] == [*MEMBERS, "d/0#1", "e/0#1"]


def test_a_paused_training_is_paused_again_with_the_new_program():
    """It makes one commit: the one at which the new program is kept."""
    story = with_stage(Stage.RUNNING)
    story.send(ev.PauseRequested("you"))
    story.answer()
    before = {fake.commit for fake in story.fakes.values()}
    submit(story).answer()
    assert story.cluster.phase == "paused"
    assert story.cluster.job.program == 1
    assert {fake.commit for fake in story.fakes.values()} == {commit + 1 for commit in before}


def test_a_second_program_is_not_tried_beside_the_first():
    """Its request is dropped, which the driver notices; after the first has been kept it may come."""
    story = submit(tried(), 2)
    check_training(story, 1)
    check_training(submit(story, 3), 3)


def test_errors_without_a_cause_reject_the_new_program_and_not_the_job():
    """Three breaks at one commit, which no lost worker explains, are the fault of what is new."""
    story = formed()
    for _ in range(3):
        for fake in story.fakes.values():  # none has come to the first commit
            fake.commit, fake.steps = fake.old[1], 0
        story.raised("a/0#1", "RuntimeError: sizes differ", intact=False)
        for _ in range(4):
            story.answer(lambda event: not isinstance(event, ev.WorkerHalted)).wait(0.5)
    story.quiet(2.0)
    check_training(story, 0, resets=2)
    assert "sizes differ" in story.records("swap-failed")[-1]
    keep = story.last(cmd.KeepProgram)
    assert (keep.program, keep.rejected) == (0, 1)
    assert story.records("swap-failed")[-1].endswith(keep.why)


def test_the_old_program_ends_a_job_that_is_stopped_during_a_trial():
    """Workers return to it before they stop, so that the last checkpoint is of its last step."""
    story = tried()
    commands = story.send(ev.JobStopRequested(story.job.name))
    kinds = [type(command) for command in commands if isinstance(command, cmd.KeepProgram | cmd.StopProgram)]
    assert kinds == [cmd.KeepProgram, cmd.StopProgram]


def test_a_program_may_take_long_to_begin_on_one_worker():
    """It may fetch its data there: the others wait, and the worker is not replaced."""
    story = tried().hear(ev.WorkerReady, *MEMBERS[:2])
    story.wait(1000.0)
    assert {*map(str, story.cluster.members)} == {*MEMBERS}
    assert not story.commands(cmd.StopWorker)
    check_training(story, 1)
