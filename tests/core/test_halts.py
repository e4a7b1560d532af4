"""Cells at a commit, and pauses: the members stop together, and go on together."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.state import Stage
from nbelastic.protocol import events as ev
from tests.core.away import Away
from tests.core.story import Story, wid, with_stage

MEMBERS = ("a/0#1", "b/0#1", "c/0#1")


def cell(story: Story, number: int = 1, *ranks: int, limit: float = 30.0) -> Story:
    story.send(ev.CommitCellSubmitted(number, ranks, limit))
    return story


def halted(**limits) -> Story:
    """Three members stand still, for a pause."""
    story = with_stage(Stage.RUNNING, **limits)
    story.send(ev.PauseRequested("you"))
    story.answer()
    assert story.cluster.phase == "paused", story.reason
    return story


def end(story: Story, name: str, number: int = 1, *, begun: int = 0, changed: str = "") -> None:
    story._unsay(wid(name), ev.CommitCellEnded)
    story.send(ev.CommitCellEnded(wid(name), number, begun, changed))


def running(story: Story) -> list[str]:
    return sorted(map(str, story.cluster.halt.running))


def check_training(story: Story, resets: int = 0) -> None:
    story.quiet(1.0)
    assert (story.cluster.stage, story.cluster.resets) == (Stage.RUNNING, resets), story.reason
    assert not any(fake.bound for fake in story.fakes.values())


def test_a_cell_runs_on_all_ranks_after_the_same_commit():
    """It runs when all have come to the commit after the newest one. Then all train on, without a reset."""
    story = with_stage(Stage.RUNNING)
    story.fakes[wid("b/0#1")].steps += 1  # this one is a commit ahead
    cell(story).hear(ev.LeaveAcknowledged)
    (halt,) = story.commands(cmd.HaltAt)
    assert halt.commit == 5
    story.hear(ev.WorkerHalted, *MEMBERS[:2])
    assert not story.commands(cmd.RunCommitCell)
    story.hear(ev.WorkerHalted)
    assert running(story) == [*MEMBERS]
    story.hear(ev.CommitCellEnded, *MEMBERS[:2])
    assert story.cluster.stage is Stage.HALTED
    story.hear(ev.CommitCellEnded)
    check_training(story)


def test_a_cell_runs_on_the_chosen_ranks_while_the_others_wait():
    """A rank that this world does not have is left out; a cell for such ranks only is dropped."""
    story = cell(with_stage(Stage.RUNNING), 1, 1, 7)
    story.hear(ev.LeaveAcknowledged).hear(ev.WorkerHalted)
    assert running(story) == ["b/0#1"]
    story.hear(ev.CommitCellEnded)
    check_training(story)
    mark = story.mark()
    check_training(cell(story, 2, 7))
    assert not story.commands(cmd.RunCommitCell, mark)


def test_cells_run_one_after_the_other_in_one_halt():
    """Cells of several clients wait for one another."""
    story = cell(cell(cell(with_stage(Stage.RUNNING), 1), 2, 0), 3)
    story.answer()
    assert [command.number for command in story.commands(cmd.RunCommitCell)] == [1, 2, 3]
    assert len(story.commands(cmd.HaltAt)) == 1
    check_training(story)


def test_without_a_job_no_cell_waits():
    """Neither cells nor pauses are kept for a later job."""
    story = cell(Story("a:1").answer())
    story.send(ev.PauseRequested("you"))
    story.run()
    check_training(story)


@pytest.mark.parametrize("stage", [Stage.GATHERING, Stage.FORMING, Stage.PREPARING, Stage.ASKED, Stage.LEAVING])
def test_a_cell_waits_until_a_world_trains(stage):
    """A change of the world comes first; then the cell runs in the new world."""
    story = cell(with_stage(stage, min=1))
    story.quiet(30.0)
    assert len(story.commands(cmd.RunCommitCell)) == 1
    check_training(story, resets=stage is Stage.GATHERING)


@pytest.mark.parametrize("moment", ["asked", "halting", "in the cell"])
def test_a_member_that_dies_ends_the_cell_only_if_it_runs(moment):
    """A cell that has not begun runs in the next world. One that runs is not repeated: it may have printed already."""
    story = cell(cell(with_stage(Stage.RUNNING), 1), 2)
    if moment != "asked":
        story.hear(ev.LeaveAcknowledged)
    if moment == "in the cell":
        story.hear(ev.WorkerHalted).hear(ev.CommitCellEnded, "a/0#1")
    story.kill("c/0#1").quiet(60.0)
    begun = [command.number for command in story.commands(cmd.RunCommitCell)]
    assert begun == [1, 2]
    check_training(story, resets=1)


def test_a_cell_that_does_not_end_breaks_the_world_after_its_limit():
    """The worker interrupts it at the limit. If that has no effect, the abort ends the collective in which it hangs."""
    story = cell(with_stage(Stage.RUNNING), limit=7.0).hear(ev.LeaveAcknowledged).hear(ev.WorkerHalted)
    story.hear(ev.CommitCellEnded, *MEMBERS[:2]).hang("c/0#1").wait(11.9)
    assert story.cluster.stage is Stage.HALTED
    story.silent.clear()
    story.wait(0.2)
    assert "did not end within 7 s on 1 of 3 ranks" in story.records("world-broken")[-1]
    check_training(story, resets=1)


@pytest.mark.parametrize(
    ("ranks", "begun", "breaks"), [((), (2, 2, 2), 0), ((), (2, 2, 1), 1), ((0,), (0,), 0), ((0,), (1,), 1)]
)
def test_collectives_that_not_all_ranks_begin_break_the_world(ranks, begun, breaks):
    """Else a later collective of the training would receive what another one has sent."""
    story = cell(with_stage(Stage.RUNNING), 1, *ranks).hear(ev.LeaveAcknowledged).hear(ev.WorkerHalted)
    for name, count in zip(MEMBERS, begun, strict=False):
        end(story, name, begun=count)
    check_training(story, resets=breaks)


@pytest.mark.parametrize(
    ("ranks", "changed", "breaks"),
    [((), "aaa", 0), ((), "aab", 1), ((), ("", "a", ""), 1), ((0,), ("",), 0), ((0,), "a", 1)],
)
def test_a_state_that_differs_after_a_cell_is_received_again(ranks, changed, breaks):
    """A cell may change the state on all ranks. If it has changed it on some, the world breaks, so that all are equal."""
    story = cell(with_stage(Stage.RUNNING), 1, *ranks).hear(ev.LeaveAcknowledged).hear(ev.WorkerHalted)
    for name, value in zip(MEMBERS, changed, strict=False):
        end(story, name, changed=value)
    check_training(story, resets=breaks)


def test_a_cell_that_nobody_waits_for_is_dropped_or_interrupted():
    """It is interrupted on the ranks on which it still runs."""
    story = cell(cell(with_stage(Stage.RUNNING), 1), 2).hear(ev.LeaveAcknowledged).hear(ev.WorkerHalted)
    story.hear(ev.CommitCellEnded, "b/0#1")
    story.send(ev.CommitCellCancelled(2))
    story.send(ev.CommitCellCancelled(1))
    assert story.commands(cmd.InterruptCell) == [cmd.InterruptCell(1, (wid("a/0#1"), wid("c/0#1")))]
    story.answer()
    assert [command.number for command in story.commands(cmd.RunCommitCell)] == [1]
    check_training(story)


def test_a_cancelled_cell_does_not_stop_the_members():
    """Its last client has left before all members had answered."""
    story = cell(with_stage(Stage.RUNNING))
    story.send(ev.CommitCellCancelled(1))
    check_training(story)
    assert not story.commands(cmd.HaltAt)


def test_a_pause_lasts_until_somebody_resumes():
    """While it lasts no member is late, and nothing is a stall; cells run."""
    story = halted()
    assert story.reason == "paused by you at commit 4 of generation 1"
    story.quiet(100_000.0)
    cell(story).answer()
    assert story.cluster.phase == "paused"
    story.send(ev.ResumeRequested("you"))
    check_training(story)


@pytest.mark.parametrize("stage", [Stage.GATHERING, Stage.FORMING, Stage.RUNNING, Stage.LEAVING, Stage.HALTED])
def test_a_new_driver_pauses_again(stage):
    """The driver of a paused training dies: under the next one the members stand still at a commit, until a client resumes."""
    story = with_stage(stage)
    story.send(ev.PauseRequested("you"))
    Away(story).new_driver().quiet(1.0)
    assert story.reason.startswith("paused by you at commit ")
    story.quiet(1000.0)
    assert story.cluster.phase == "paused"
    story.send(ev.ResumeRequested("you"))
    story.quiet(1.0)
    assert story.cluster.stage is Stage.RUNNING, story.reason


def test_steps_run_before_the_next_pause():
    """A paused job makes so many commits, and stands still again."""
    story = halted()
    story.send(ev.StepsRequested(3, "you"))
    assert story.cluster.phase == "running"
    story.answer()
    assert (story.cluster.phase, story.cluster.halt.commit) == ("paused", 7)


def stepping(steps: int = 1000) -> Story:
    """Three members that were paused make many steps, and come to no commit meanwhile."""
    story = halted()
    story.send(ev.StepsRequested(steps, "you"))
    for name in MEMBERS:
        story.fakes[wid(name)].steps = 5  # the fake made them all at once
    return story


def test_many_steps_take_as_long_as_they_take():
    """No deadline ends them: each member trains. The reason says up to where."""
    story = stepping()
    story.wait(100_000.0)
    assert story.reason == "3 workers train on to commit 1004 of generation 1"
    assert story.cluster.resets == 0


@pytest.mark.parametrize("request_", [ev.PauseRequested("you"), ev.ResumeRequested("you")])
def test_a_pause_and_a_resume_end_steps_that_are_being_made(request_):
    """They act at the next commit, and not after all the steps."""
    story = stepping()
    mark = story.mark()
    story.send(request_)
    story.answer()
    assert story.commands(cmd.CancelLeave, mark)
    assert [halt.commit < 100 for halt in story.commands(cmd.HaltAt, mark)] == [True] * story.cluster.stands_still
    assert story.cluster.stands_still is isinstance(request_, ev.PauseRequested)


def test_a_cell_during_steps_runs_at_the_next_commit():
    """Then the steps go on, up to the same commit."""
    story = stepping()
    mark = story.mark()
    cell(story)
    story.answer()
    assert [halt.commit for halt in story.commands(cmd.HaltAt, mark)] == [6, 1004]
    assert len(story.commands(cmd.RunCommitCell, mark)) == 1
    assert (story.cluster.phase, story.cluster.halt.commit) == ("paused", 1004)


def test_steps_wait_for_the_cell_that_runs():
    """They were not made when the request came: its client waits for them."""
    story = cell(halted())
    story.send(ev.StepsRequested(3, "you"))
    assert story.cluster.halt.steps == 3
    story.answer()
    assert (story.cluster.phase, story.cluster.halt.commit, story.cluster.halt.steps_to) == ("paused", 7, 0)


def test_steps_wait_for_the_halt_of_the_next_world():
    """A worker of a paused job dies. Steps that are requested before the next world stands still are made after that."""
    story = halted(min=2)
    story.kill("c/0#1")
    assert not story.cluster.stands_still
    mark = story.mark()
    story.send(ev.StepsRequested(3, "you"))
    story.quiet(60.0)
    first, last = (halt.commit for halt in story.commands(cmd.HaltAt, mark))
    assert (story.cluster.phase, last - first) == ("paused", 3)


def test_a_halt_that_nobody_wants_any_more_is_cancelled():
    """A program may come to no commit for hours; it trains on, without a break."""
    story = cell(with_stage(Stage.RUNNING)).hear(ev.LeaveAcknowledged)
    story.wait(100_000.0)
    mark = story.mark()
    story.send(ev.CommitCellCancelled(1))
    assert story.commands(cmd.CancelLeave, mark)
    assert (story.cluster.stage, story.cluster.resets) == (Stage.RUNNING, 0)


def test_a_loss_during_a_pause_is_recovered_and_paused_again():
    """The next world makes one commit, and stands still."""
    story = halted(min=2)
    story.kill("c/0#1").quiet(60.0)
    assert (story.cluster.phase, story.cluster.resets) == ("paused", 1)


def test_the_end_of_the_training_ends_the_halt():
    """A rank whose function returns comes to no other commit."""
    story = cell(with_stage(Stage.RUNNING)).hear(ev.LeaveAcknowledged)
    story.hear(ev.WorkerHalted, "a/0#1")
    story.hold_back(wid("b/0#1"))
    story._unsay(wid("b/0#1"), ev.WorkerHalted)
    story.returned("b/0#1")
    assert story.cluster.stage is Stage.RUNNING
    assert not story.cluster.halt.cells
    story.returned("a/0#1", "c/0#1")
    story.ended(*MEMBERS)
    assert story.cluster.job.outcome == "succeeded"


def test_a_member_that_does_not_come_to_the_halt_is_replaced():
    """The others wait for it as they do for a planned change."""
    story = cell(with_stage(Stage.RUNNING)).hear(ev.LeaveAcknowledged).hang("b/0#1")
    story.quiet(600.0)
    assert any(
        "b/0#1 did not come to the halt in generation 1 while others waited" in text
        for text in story.records("worker-lost")
    )
    assert len(story.commands(cmd.RunCommitCell)) == 1
