"""The next generation's group is built beside the training: it may fail, or workers may be lost meanwhile."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.state import Stage
from nbelastic.protocol import events as ev
from tests.core.story import Story, wid, with_stage

BEFORE_LEAVING = [Stage.PREPARING, Stage.ASKED]


def test_members_are_asked_after_all_is_prepared():
    """The members are asked for a leave point after members and newcomers have built the group."""
    story = with_stage(Stage.PREPARING)
    order = story.last(cmd.PrepareWorld).formation
    assert (order.generation, len(order.members), order.root, order.receivers) == (2, 4, 0, (3,))
    story.commit(5).hear(ev.WorkerPrepared, "a/0#1", "b/0#1", "d/0#1")
    assert story.commands(cmd.AskLeave) == []
    assert "not prepared yet: c/0#1" in story.reason
    story.hear(ev.WorkerPrepared)
    assert story.last(cmd.AskLeave).members == story.cluster.members


def test_all_change_over_at_the_agreed_commit():
    """The formation is sent once, with the leave point, so that no round trip delays the training."""
    story = with_stage(Stage.LEAVING)
    assert story.last(cmd.FormWorld) == story.last(cmd.PrepareWorld).formation
    mark = story.mark()
    story.answer()
    assert story.commands(cmd.FormWorld, mark) == []
    assert (story.cluster.generation, story.names) == (2, ["a/0#1", "b/0#1", "c/0#1", "d/0#1"])
    assert len({story.fakes[w].commit for w in story.cluster.members}) == 1


def test_some_have_joined_before_others_have_left():
    """Messages of the new generation count although they arrive before the last ones of the old generation."""
    story = with_stage(Stage.LEAVING)
    newcomer = replace(story.cluster.workers[wid("d/0#1")], failures=1)
    story.cluster = replace(story.cluster, workers=story.cluster.workers | {newcomer.id: newcomer})
    story.hear(ev.WorkerReady, "a/0#1").hear(ev.WorkerFormed, "a/0#1", "d/0#1")
    assert (story.cluster.generation, story.cluster.entered_next) == (1, {wid("a/0#1"), wid("d/0#1")})
    assert story.cluster.workers[wid("d/0#1")].failures == 0
    story.hear(ev.WorkerReady)
    assert (story.cluster.generation, story.cluster.stage) == (2, Stage.FORMING)
    assert story.cluster.awaiting == {wid("b/0#1"), wid("c/0#1")}
    story.answer()
    assert story.cluster.stage is Stage.RUNNING


def test_one_finishes_in_the_next_generation_before_others_have_left_this_one():
    """A rank returns in the next generation before others have left: it counts, and the change goes on."""
    story = with_stage(Stage.LEAVING)
    story.hear(ev.WorkerReady, "a/0#1").hear(ev.WorkerFormed, "a/0#1").returned("a/0#1").ended("a/0#1")
    assert (story.cluster.generation, story.cluster.stage) == (1, Stage.LEAVING)
    mark = story.mark()
    story.answer()
    assert story.commands(cmd.DropWorld, mark) + story.commands(cmd.AbortWorld, mark) == []
    assert (story.cluster.generation, story.job.succeeded) == (2, {wid("a/0#1")})
    story.returned("b/0#1", "c/0#1", "d/0#1").ended("b/0#1", "c/0#1", "d/0#1")
    assert (story.job.outcome, story.job.reason) == ("succeeded", "every rank finished")


def test_one_finishes_in_the_next_generation_and_another_never_joins_it():
    """A member never joins the next generation: it is replaced, as far as there is work left."""
    story = with_stage(Stage.LEAVING)
    story.hear(ev.WorkerReady, "a/0#1").hear(ev.WorkerFormed, "a/0#1").returned("a/0#1").ended("a/0#1")
    story.answer(lambda event: not (isinstance(event, ev.WorkerFormed) and event.worker == wid("d/0#1")))
    assert (story.cluster.stage, story.cluster.awaiting, story.job.succeeded) == (
        Stage.FORMING,
        {wid("d/0#1")},
        {wid("a/0#1")},
    )
    assert story.cluster.wait is not None
    story.silent.add(wid("d/0#1"))
    story.answers = []
    story.quiet(600.0)
    assert story.job.outcome == "succeeded"


def test_a_program_that_ended_in_the_next_generation_is_not_waited_for_when_the_job_is_stopped():
    """A program's end in the next generation counts when the job is stopped, and no worker is killed."""
    story = with_stage(Stage.LEAVING)
    story.hear(ev.WorkerReady, "a/0#1").hear(ev.WorkerFormed, "a/0#1").returned("a/0#1").ended("a/0#1")
    story.stop_job().quiet(100.0)
    assert story.records("worker-killed") == []
    assert story.alive() == ["a/0#1", "b/0#1", "c/0#1", "d/0#1"]


@pytest.mark.parametrize("stage", BEFORE_LEAVING)
def test_a_newcomer_is_lost_and_members_stay(stage):
    """A newcomer is lost: the prepared group is dropped, and the members are not aborted."""
    story = with_stage(stage)
    mark = story.mark()
    story.kill("d/0#1")
    assert story.last(cmd.DropWorld).members == (wid("a/0#1"), wid("b/0#1"), wid("c/0#1"))
    assert story.commands(cmd.AbortWorld, mark) == []
    assert (story.cluster.generation, story.cluster.stage) == (1, Stage.RUNNING)
    story.quiet(2.0)
    assert (story.cluster.generation, len(story.names)) == (3, 4)  # with its replacement, and a number of its own


@pytest.mark.parametrize("joined", [False, True])
def test_a_newcomer_is_lost_while_members_leave(joined):
    """A newcomer is lost while members leave: no commit is lost, and all members form another world."""
    story = with_stage(Stage.LEAVING)
    if joined:
        story.hear(ev.WorkerReady, "a/0#1").hear(ev.WorkerFormed, "a/0#1")
    mark = story.mark()
    story.kill("d/0#1")
    assert story.last(cmd.DropWorld).generation == 2
    story.hear(ev.WorkerReady)
    assert story.commands(cmd.AbortWorld, mark) == []
    story.quiet(2.0)
    assert (len(story.names), story.cluster.stage, story.cluster.resets) == (4, Stage.RUNNING, 0)
    assert len({story.fakes[w].commit for w in story.cluster.members}) == 1


def stale(story):
    """Messages that leaving members have already sent, and that arrive later than the next ones."""
    return [event for event in story.answers if isinstance(event, ev.WorkerReady)]


def test_a_connection_that_broke_as_all_were_leaving_is_forgotten():
    """A connection that broke as the members left does not disturb the next world."""
    story = with_stage(Stage.LEAVING)
    story.send(ev.WorkerRaised(wid("b/0#1"), 1, intact=False, error="RuntimeError: connection reset"))
    assert story.cluster.suspects == {wid("b/0#1")}
    story.answer()
    assert (story.cluster.generation, story.cluster.stage) == (2, Stage.RUNNING)
    mark = story.mark()
    story.quiet(60.0)
    assert story.records("world-broken") == []
    assert story.commands(cmd.AbortWorld, mark) == []


def test_reports_from_before_a_failed_prepared_world_are_stale():
    """A newcomer is lost after all but one member made a step there: the member behind receives the newest state."""
    story = with_stage(Stage.LEAVING)
    late = stale(story)
    story.hear(ev.WorkerReady, "a/0#1")
    for w in (wid("a/0#1"), wid("b/0#1")):
        story.fakes[w].commit += 1
    mark = story.mark()
    story.kill("d/0#1")
    story.send(*late)
    assert story.commands(cmd.FormWorld, mark) == []
    story.hear(ev.WorkerReady)
    order = story.last(cmd.FormWorld)
    assert (order.generation, order.root, order.receivers) == (3, 0, (2,))
    story.quiet(2.0)
    assert (len(story.names), story.cluster.stage, story.cluster.resets) == (4, Stage.RUNNING, 0)
    assert len({story.fakes[w].commit for w in story.cluster.members}) == 1


def test_the_job_ends_when_the_prepared_world_has_come_to_nothing():
    """A job ends after its prepared world has failed: the next job begins clean."""
    story = with_stage(Stage.LEAVING)
    story.kill("d/0#1").hear(ev.WorkerReady, "a/0#1")
    story.send(ev.JobStopRequested(story.cluster.job.name, "stopped by you"))
    story.quiet(2.0)
    assert story.run("next").cluster.stage is Stage.RUNNING


def test_max_changes_when_all_have_left():
    """max is lowered after all have left: the next world uses a store that the other did not use."""
    story = with_stage(Stage.LEAVING)
    story.scale(2, 3)
    story.send(*stale(story))
    assert story.last(cmd.DropWorld).generation == 2
    story.answer()
    order = story.last(cmd.FormWorld)
    assert (order.generation, len(order.members), order.store) == (3, 3, "a/0#1@2")
    assert story.cluster.stage is Stage.RUNNING


def test_a_leaver_was_never_in_the_prepared_world():
    """A leaver has reported its leaving: the core awaits nothing more of it when the prepared world fails."""
    story = Story("a:2", "b:1", min=1).run().commit(3).answer()
    story.remove("b").answer(lambda e: not isinstance(e, ev.WorkerReady))
    story.kill("a/1#1").quiet(2.0)
    assert (story.cluster.stage, story.cluster.resets) == (Stage.RUNNING, 1)
    story = with_stage(Stage.LEAVING).remove("c")
    story.hear(ev.WorkerReady, "c/0#1").kill("d/0#1").quiet(2.0)
    assert (story.cluster.stage, len(story.names), story.cluster.resets) == (Stage.RUNNING, 3, 0)


@pytest.mark.parametrize("stage", [*BEFORE_LEAVING, Stage.LEAVING])
def test_a_member_dies_while_the_next_world_is_prepared(stage):
    """One abort ends both generations, for members and for newcomers in the prepared one."""
    story = with_stage(stage)
    mark = story.mark()
    story.kill("b/0#1")
    (abort,) = story.commands(cmd.AbortWorld, mark)
    assert (abort.generation, set(abort.members)) == (2, {wid("a/0#1"), wid("c/0#1"), wid("d/0#1")})
    story.quiet(2.0)
    assert (story.cluster.stage, len(story.names), story.cluster.resets) == (Stage.RUNNING, 4, 1)


def untouched(story, since):
    """The members train on in the first world, and are asked for nothing."""
    disturbing = (cmd.AskLeave, cmd.LeaveAt, cmd.AbortWorld, cmd.FormWorld)
    assert [command for command in story.said[since:] if isinstance(command, disturbing)] == []
    assert (story.cluster.generation, story.cluster.stage) == (1, Stage.RUNNING)
    assert story.names == ["a/0#1", "b/0#1", "c/0#1"]


@pytest.mark.parametrize(("silent", "told"), [("d/0#1", ""), ("b/0#1", "; nor did b/0#1 prepare")])
def test_a_newcomer_that_cannot_be_joined_is_left_out(silent, told):
    """A newcomer never reports that it is prepared: it waits with a reason, and the training is not touched."""
    story = with_stage(Stage.PREPARING)
    mark = story.mark()
    story._unsay(wid(silent), ev.WorkerPrepared)
    story.answer().wait(15.1)
    assert story.cluster.stage is Stage.PREPARING
    story.wait(0.2)
    assert story.last(cmd.DropWorld).generation == 2
    untouched(story, mark)
    text = f"d/0#1 is left out: no group was formed within 15.2 s{told}"
    assert story.records("newcomer-held") == [f"{text}; tried again in 1 s"]
    assert story.reason == f"3 workers train in generation 1; {text}"
    assert story.cluster.workers[wid("d/0#1")].reason == text.removeprefix("d/0#1 is ")


def test_a_newcomer_that_was_left_out_comes_when_the_way_is_open_again():
    """A left-out newcomer is tried again after pauses that double, then joins, and its failures are cleared."""
    story = with_stage(Stage.PREPARING)
    story.silent.add(wid("d/0#1"))
    story._unsay(wid("d/0#1"), ev.WorkerPrepared)
    story.cluster = replace(story.cluster, limits=replace(story.cluster.limits, cooldown=(5.0, 300.0)))
    mark = story.mark()
    story.answer().quiet(15.2 + 5.0 + 15.2)
    untouched(story, mark)
    assert len(story.commands(cmd.PrepareWorld, mark)) == 1
    assert story.records("newcomer-held")[-1].endswith("tried again in 10 s")
    story.silent.clear()
    story.quiet(10.1)
    assert (story.cluster.stage, len(story.names), story.cluster.resets) == (Stage.RUNNING, 4, 0)
    joined = story.cluster.workers[wid("d/0#1")]
    assert (joined.failures, joined.reason, story.cluster.held_back) == (0, "", {})


def test_a_newcomer_that_raised_while_preparing_is_named():
    """A newcomer that raised while preparing is left out a moment later, with its error as the reason."""
    story = with_stage(Stage.PREPARING)
    mark = story.mark()
    story.hear(ev.WorkerPrepared, "a/0#1", "b/0#1", "c/0#1")
    story.send(ev.WorkerPrepared(wid("d/0#1"), 2, "RuntimeError: refused"))
    story.wait(1.0)
    untouched(story, mark)
    assert "d/0#1 is left out: d/0#1 could not prepare a group (RuntimeError: refused)" in story.reason


def test_of_two_newcomers_only_the_one_that_did_not_prepare_is_left_out():
    """Of two newcomers the one that prepared joins at once."""
    story = with_stage(Stage.RUNNING)
    story.add("d:1").add("e:1").answer(lambda e: not isinstance(e, ev.WorkerPrepared))
    story._unsay(wid("e/0#1"), ev.WorkerPrepared)
    story.silent.add(wid("e/0#1"))
    story.quiet(16.0)
    assert story.names == ["a/0#1", "b/0#1", "c/0#1", "d/0#1"]
    assert story.cluster.held_back.keys() == {wid("e/0#1")}


def test_of_several_newcomers_that_are_left_out_one_is_named():
    """The first by name, and how many more there are."""
    story = with_stage(Stage.RUNNING)
    story.add("d:1").add("e:1").answer(lambda e: not isinstance(e, ev.WorkerPrepared))
    for w in ("a/0#1", "b/0#1", "c/0#1"):
        story.send(ev.WorkerPrepared(wid(w), 2))
    story.send(ev.WorkerPrepared(wid("e/0#1"), 2, "RuntimeError: refused"))
    story.wait(1.0)
    assert story.cluster.held_back.keys() == {wid("d/0#1"), wid("e/0#1")}
    assert story.reason.endswith(
        "d/0#1 is left out: e/0#1 could not prepare a group (RuntimeError: refused) (and 1 more)"
    )


def test_a_newcomer_that_is_left_out_for_days_makes_few_events():
    """It is recorded while its back-off grows: at last it is tried every five minutes, without an event."""
    story = with_stage(Stage.PREPARING)
    story.silent.add(wid("d/0#1"))
    story._unsay(wid("d/0#1"), ev.WorkerPrepared)
    story.cluster = replace(story.cluster, limits=replace(story.cluster.limits, cooldown=(5.0, 300.0)))
    story.answer().quiet(86400.0)
    waits = [text.rpartition("tried again in ")[2] for text in story.records("newcomer-held")]
    assert waits == ["5 s", "10 s", "20 s", "40 s", "80 s", "160 s", "300 s"]
    assert story.cluster.workers[wid("d/0#1")].failures > 100
    assert "d/0#1 is left out" in story.reason


def test_newcomers_of_which_none_is_to_blame_come_one_at_a_time():
    """All but one member have prepared, without a known cause: newcomers are left out, then tried one by one."""
    story = with_stage(Stage.RUNNING)
    story.add("d:1").add("e:1").answer(lambda e: not isinstance(e, ev.WorkerPrepared))
    story._unsay(wid("b/0#1"), ev.WorkerPrepared)
    mark = story.mark()
    story.answer().wait(15.3)
    assert len(story.records("newcomer-held")) == 2
    story.quiet(20.0)
    story.send(
        ev.StoreOffered(story.cluster.members[1], 3, "b/0#1@3")
    )  # which does not help: rank 0 has a world's store
    story.answer()
    assert story.reason.endswith("a/0#1 has to offer a store for the next generation")
    story.commit(3).quiet(20.0)
    sizes = [len(command.formation.members) for command in story.commands(cmd.PrepareWorld, mark)]
    assert sizes == [4, 5]
    assert len(story.names) == 5


def test_newcomers_that_min_needs_come_together():
    """A world is below a new `min`, and its newcomers could not be joined: they are left out, then tried together."""
    story = with_stage(Stage.RUNNING)
    story.scale(5, None).add("d:1").add("e:1").answer(lambda e: not isinstance(e, ev.WorkerPrepared))
    story._unsay(wid("b/0#1"), ev.WorkerPrepared)
    mark = story.mark()
    story.answer().wait(15.3)
    assert len(story.records("newcomer-held")) == 2
    story.quiet(5.0)
    assert [len(command.formation.members) for command in story.commands(cmd.PrepareWorld, mark)] == [5]
    assert len(story.names) == 5


def test_a_removal_that_cannot_be_prepared_is_made_plainly():
    """A removal that cannot be prepared is made without preparation."""
    story = with_stage(Stage.RUNNING).remove("b")
    story._unsay(wid("c/0#1"), ev.WorkerPrepared)
    story.answer().wait(15.2).answer()
    assert (story.names, story.cluster.resets) == (["a/0#1", "c/0#1"], 0)


def test_left_out_newcomers_are_taken_when_too_few_are_left():
    """Below min, a world takes a left-out newcomer."""
    story = with_stage(Stage.PREPARING)
    story._unsay(wid("d/0#1"), ev.WorkerPrepared)
    story.scale(3, None).answer().wait(15.3)
    story.remove("c", now=True).answer()
    assert story.names == ["a/0#1", "b/0#1", "d/0#1"]


def test_left_out_newcomers_stay_out_while_enough_are_left():
    """A member is lost and min others remain: a left-out newcomer stays out."""
    story = with_stage(Stage.PREPARING)
    story._unsay(wid("d/0#1"), ev.WorkerPrepared)
    story.answer().wait(15.3)
    story.kill("b/0#1").hear(ev.WorkerReady)
    assert story.names == ["a/0#1", "c/0#1"]


@pytest.mark.parametrize("stage", BEFORE_LEAVING)
def test_a_newcomers_host_is_removed_while_the_change_is_prepared(stage):
    """The newcomer's host is removed again: no member leaves."""
    story = with_stage(stage)
    mark = story.mark()
    story.remove("d").quiet(1.0)
    assert story.commands(cmd.LeaveAt, mark) == []
    assert (story.cluster.generation, story.cluster.stage, len(story.names)) == (1, Stage.RUNNING, 3)


def test_a_removal_is_prepared_too():
    """The remaining members change over at once; leavers stop when all have left the old generation."""
    story = Story("a:3", "b:1", min=1).run().commit(3).answer()
    story.remove("b").hear(ev.WorkerPrepared)
    order = story.last(cmd.PrepareWorld).formation
    assert (len(order.members), order.receivers) == (3, ())
    story.hear(ev.LeaveAcknowledged).hear(ev.WorkerReady, "b/0#1")
    assert story.commands(cmd.StopWorker) == []
    story.answer()
    assert story.last(cmd.StopWorker).worker == wid("b/0#1")
    assert (story.cluster.generation, len(story.names)) == (2, 3)


def test_without_a_store_the_change_is_made_plainly():
    """Rank 0 has not offered a store yet: the change is made without preparation."""
    story = Story("a:2", min=1).run()
    story.add("b:1").hear(ev.AgentReady).hear(ev.WorkerRegistered).hear(ev.WorkerReady)
    assert story.commands(cmd.PrepareWorld) == []
    assert story.cluster.stage is Stage.ASKED
