"""No stage waits without end: each deadline replaces a worker or cancels the wait."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.state import HostPhase, Stage
from nbelastic.core.step import deadline
from nbelastic.protocol import events as ev
from nbelastic.protocol.cluster_limits import NEVER
from nbelastic.protocol.timeouts import Timeouts
from tests.core.story import Story, wid, with_stage

WAITING = [stage for stage in Stage if stage is not Stage.RUNNING]  # a running world awaits no message


@pytest.mark.parametrize("stage", WAITING)
def test_no_stage_is_without_a_deadline(stage):
    """No worker answers: each stage has a near deadline, after which the core awaits something else or nothing."""
    story = with_stage(stage)
    story.hang(*map(str, story.fakes))
    before, members, ticks = story.cluster.stage, story.names, 0
    while (story.cluster.stage, story.names) == (before, members) and story.cluster.active:
        at = deadline(story.cluster, story.now)
        assert at != NEVER, story.reason
        story.wait(at - story.now)
        ticks += 1
        assert ticks < 1000, story.reason
    assert story.now < 100.0 + 3700.0


def test_a_survivor_that_never_leaves_is_replaced():
    """A survivor that no abort wakes is killed after `recover` seconds, and the others train on."""
    story = with_stage(Stage.RUNNING).hang("c/0#1").kill("b/0#1").answer()
    assert "1 of 2 survivors have left generation 1; not yet c/0#1" in story.reason
    story.wait(59.9)
    assert cmd.StopWorker(wid("c/0#1"), kill=True) not in story.said
    story.wait(0.2)
    assert story.last(cmd.StopWorker) == cmd.StopWorker(wid("c/0#1"), kill=True)
    assert story.records("worker-lost")[-1] == "c/0#1 did not leave generation 1 while others waited"
    story.quiet(3.0)
    assert (story.cluster.stage, len(story.names), story.cluster.resets) == (Stage.RUNNING, 3, 1)


@pytest.mark.parametrize("sign", ["cpu", "begun"])
def test_a_survivor_that_computes_gets_longer(sign):
    """A survivor that compiles or begins collectives has ten minutes instead of one."""
    story = with_stage(Stage.RUNNING).hang("c/0#1").kill("b/0#1").answer()
    story.silent.clear()
    for _ in range(59):
        story.wait(10.0)
        fake = story.fakes[wid("c/0#1")]
        setattr(fake, sign, getattr(fake, sign) + 1)
        story.hear(ev.PositionReported)
        assert story.commands(cmd.StopWorker) == []
    story.wait(11.0)
    assert story.last(cmd.StopWorker) == cmd.StopWorker(wid("c/0#1"), kill=True)


def test_a_survivor_that_alone_holds_the_state_is_not_killed():
    """The only holder of the state is not killed: the reason says so, and elastic_timeout ends the job."""
    story = Story("a:2", min=1, elastic_timeout=100.0).run().commit(3).answer()
    story.hang("a/1#1").kill("a/0#1").quiet(61.0)
    assert story.commands(cmd.StopWorker) == []
    why = "a/1#1 did not leave generation 1, and no other worker holds the training state"
    assert f"{why}; the others wait for 100 s" in story.reason
    story.quiet(40.0)
    assert (story.job.outcome, story.job.reason) == ("failed", f"{why}; waited for 100 s (elastic_timeout)")


def test_one_of_two_that_alone_hold_the_state_wakes():
    """One of two hung holders wakes: the other is replaced, and the job goes on."""
    story = Story("a:3", min=1).run().commit(3).answer()
    story.hang("a/1#1", "a/2#1").kill("a/0#1").quiet(61.0)
    assert "no other worker holds the training state" in story.reason
    story.silent.remove(wid("a/1#1"))
    story._say_ready(wid("a/1#1"))
    story.quiet(63.0)
    assert (story.cluster.stage, story.names) == (Stage.RUNNING, ["a/1#1", "a/0#2", "a/2#2"])


def test_only_elastic_timeout_none_waits_without_end():
    """With elastic_timeout None the wait has no end: it goes on asking, and the reason says so."""
    story = Story("a:2", min=1, elastic_timeout=None).run().commit(3).answer()
    story.hang("a/1#1").kill("a/0#1").quiet(3000.0)
    assert story.cluster.active
    assert "the others wait without end, as elastic_timeout is None" in story.reason
    story.silent.clear()
    story._say_ready(wid("a/1#1"))
    story.quiet(2.0)
    assert (story.cluster.stage, len(story.names)) == (Stage.RUNNING, 2)


def test_a_member_that_never_leaves_for_a_change_is_replaced():
    """A member does not leave at the leave point: after a minute it is killed, and the others change without it."""
    story = with_stage(Stage.LEAVING).hang("c/0#1").answer()
    story.quiet(61.0).quiet(3.0)
    assert (story.cluster.stage, len(story.names), story.cluster.resets) == (Stage.RUNNING, 4, 1)
    assert wid("c/0#1") not in story.cluster.member_set


def test_a_long_step_does_not_break_a_world():
    """No member reaches the leave point for half an hour: they train undisturbed."""
    story = with_stage(Stage.LEAVING)
    mark = story.mark()
    story.wait(1800.0)
    assert {type(command) for command in story.said[mark:]} <= {cmd.QueryPosition}
    story.answer()
    assert (story.cluster.stage, len(story.names)) == (Stage.RUNNING, 4)


def test_a_member_that_does_not_answer_postpones_the_change():
    """A member does not answer for ten seconds: the others go on, and are asked again ten seconds later."""
    story = with_stage(Stage.ASKED)
    story.hear(ev.LeaveAcknowledged, "a/0#1", "b/0#1").wait(10.0)
    assert story.last(cmd.CancelLeave).members == story.cluster.members
    reason = "3 workers train in generation 1; the next change waits, as c/0#1 did not report where it is"
    assert (story.cluster.stage, story.reason) == (Stage.RUNNING, reason)
    story.answers.clear()
    story.quiet(10.0)
    assert (story.cluster.stage, len(story.names), story.cluster.resets) == (Stage.RUNNING, 4, 0)


def test_an_answer_to_a_cancelled_question_does_not_count():
    """An answer to a cancelled question does not count, as the member has made more commits since."""
    story = with_stage(Stage.ASKED)
    late = ev.LeaveAcknowledged(wid("a/0#1"), 1, 3, story.cluster.ask_number)
    story.answers.clear()
    story.wait(10.0)
    assert story.last(cmd.CancelLeave).members == story.cluster.members
    story.wait(10.0).hear(ev.WorkerPrepared)
    assert story.cluster.stage is Stage.ASKED
    story.send(late)
    assert story.cluster.awaiting == story.cluster.member_set


def test_a_member_that_never_answers_is_replaced():
    """A member that misses three questions in a row is replaced."""
    story = with_stage(Stage.ASKED)
    for pause in (10.0, 20.0, 40.0):
        assert story.names == ["a/0#1", "b/0#1", "c/0#1"]
        story.answer(lambda e: not isinstance(e, ev.LeaveAcknowledged) or e.worker != wid("c/0#1")).wait(10.0)
        story._unsay(wid("c/0#1"), ev.LeaveAcknowledged)
        story.wait(pause)
    assert "c/0#1 did not answer when asked 3 times" in story.records("worker-lost")
    story.quiet(3.0)
    assert (story.cluster.stage, len(story.names)) == (Stage.RUNNING, 4)


def test_the_question_waits_as_long_as_silence_allows():
    """With `silence` of a minute, a member that answers after 59 s is in time."""
    story = with_stage(Stage.ASKED, silence=60.0)
    story.hear(ev.LeaveAcknowledged, "a/0#1", "b/0#1").wait(59.0)
    assert story.cluster.stage is Stage.ASKED
    story.quiet(2.0)
    assert (story.cluster.stage, len(story.names), story.cluster.resets) == (Stage.RUNNING, 4, 0)
    assert story.records("change-put-off") == []


def test_only_a_member_that_missed_three_questions_is_replaced():
    """Three members miss one question each: the change is postponed, and none is replaced."""
    story = with_stage(Stage.ASKED)
    for late, pause in (("a/0#1", 10.0), ("b/0#1", 20.0), ("c/0#1", 40.0)):
        story.answer(lambda e, w=wid(late): not isinstance(e, ev.LeaveAcknowledged) or e.worker != w).wait(10.0)
        story._unsay(wid(late), ev.LeaveAcknowledged)
        story.wait(pause)
    story.quiet(3.0)
    assert (story.commands(cmd.StopWorker), len(story.records("change-put-off"))) == ([], 3)
    assert (story.cluster.stage, len(story.names), story.cluster.resets) == (Stage.RUNNING, 4, 0)


def test_a_world_that_does_not_form_is_formed_without_the_newcomer():
    """A newcomer never joins: after a minute all are aborted, and the holders of the state train without it."""
    story = Story("a:1", "b:1", min=1).run()
    story.add("c:1").answer(lambda e: not isinstance(e, ev.WorkerFormed))
    assert (story.cluster.stage, story.cluster.formation.store) == (Stage.FORMING, "a/0#1@1")
    story.hang("c/0#1")
    story.quiet(60.2)
    assert story.names == ["a/0#1", "b/0#1"]
    why = "c/0#1 did not connect in generation 2 within 60 s"
    assert why in story.records("world-broken")
    assert story.records("newcomer-held") == [f"c/0#1 is left out: {why}; tried again in 5 s"]


def test_a_large_state_may_take_its_time():
    """A transfer of twenty minutes is waited for, as workers report that they send or receive."""
    story = Story("a:1", "b:1", min=1).run()
    story.add("c:1").answer(lambda e: not isinstance(e, ev.WorkerFormed))
    formed = [e for e in story.answers if isinstance(e, ev.WorkerFormed)]
    story.answers.clear()
    for _ in range(120):
        story.wait(10.0)
        story.fakes[wid("a/0#1")].cpu += 3.0
        story.hear(ev.PositionReported)
    story.send(*formed)
    assert (story.cluster.stage, len(story.names), story.cluster.resets) == (Stage.RUNNING, 3, 0)


def test_a_pair_that_cannot_form_a_world_is_named():
    """Two hosts of a first world do not reach one another: one is left out with that reason."""
    story = Story(min=2)
    for number in (3, 1, 2):
        story.add(f"gpu{number}:1", f"10.0.0.{number}")
    story.answer()
    story.cut |= {("gpu1", "10.0.0.2"), ("gpu2", "10.0.0.1")}
    story.submit().quiet(2.0)
    assert story.cluster.stage is Stage.FORMING
    story.quiet(65.0)
    assert (story.names, story.cluster.stage) == (["gpu3/0#1", "gpu1/0#1"], Stage.RUNNING)
    why = "gpu2 and gpu1 do not reach one another; gpu2 is left out, as it is younger"
    assert story.records("host-unreachable")[0].startswith(f"gpu2: {why}")
    assert story.cluster.hosts["gpu2"].phase is HostPhase.LOST


def test_a_world_that_does_not_form_twice_gets_other_processes():
    """A world fails twice to form without a known cause: all but one holder of the state are replaced."""
    story = with_stage(Stage.RUNNING)
    story.kill("c/0#1").hear(ev.WorkerReady)
    story.hang("a/0#1", "b/0#1")
    assert story.cluster.stage is Stage.FORMING
    story.silent.clear()
    story.answers.clear()
    for _ in range(2):
        story.wait(60.2)
        story.answer(lambda e: not isinstance(e, ev.WorkerFormed))
        story.answers.clear()
    assert cmd.StopWorker(wid("b/0#1"), kill=True) in story.said
    assert cmd.StopWorker(wid("a/0#1"), kill=True) not in story.said


def test_each_deadline_can_be_set():
    """Each deadline can be set."""
    limits = {"min": 1, "timeouts": Timeouts(recover=5.0)}
    story = Story("a:3", **limits).run().commit(3).answer()
    story.hang("a/1#1").kill("a/2#1").quiet(5.1)
    assert story.last(cmd.StopWorker) == cmd.StopWorker(wid("a/1#1"), kill=True)


def test_one_world_breaks_once():
    """A world's connections break at its deadline to form: one reset."""
    story = with_stage(Stage.FORMING)
    story.now += 59.0
    story.raised("a/0#1", "connection reset", intact=False)
    story.now += 2.0
    story.send(ev.Ticked())
    assert (story.cluster.stage, story.cluster.resets) == (Stage.GATHERING, 1)
    assert len(story.records("world-broken")) == 1


def test_a_newcomer_that_never_connects_is_replaced_when_min_needs_it():
    """Below min, a newcomer that failed to form two worlds is replaced."""
    story = Story("a:1", "b:1", min=2, elastic_timeout=None, cooldown=(0.0, 0.0)).run().commit(3).answer()
    story.kill("b/0#1").answer(lambda e: not isinstance(e, ev.WorkerFormed))
    deaf = wid("b/0#2")
    while deaf in story.cluster.workers:
        assert story.now < 300.0, story.reason
        story._unsay(deaf, ev.WorkerFormed, ev.PositionReported)
        story.answer(lambda e: isinstance(e, ev.WorkerReady | ev.PositionReported)).wait(1.0)
    assert [text for text in story.records("worker-lost") if str(deaf) in text] == [
        "b/0#2 did not connect in generation 3 within 60 s"
    ]
    story.quiet(3.0)
    assert (story.cluster.stage, story.names) == (Stage.RUNNING, ["a/0#1", "b/0#3"])


@pytest.mark.parametrize("now", [False, True])
def test_a_worker_whose_end_is_never_reported_counts_as_ended(now):
    """An agent of a removed host does not answer: after half a minute its workers and the host are removed."""
    story = with_stage(Stage.RUNNING)
    story.remove("c", now=now).answer(lambda e: not isinstance(e, ev.WorkerExited))
    assert story.cluster.stopped == {wid("c/0#1")}
    story.wait(29.9)
    assert story.cluster.stopped == {wid("c/0#1")}
    story.wait(0.2)
    assert (story.cluster.stopped, list(story.cluster.hosts)) == (frozenset(), ["a", "b"])
    assert story.last(cmd.StopAgent) == cmd.StopAgent("c")
    (text,) = [text for text in story.records("worker-lost") if text.startswith("c/0#1")]
    assert text == "c/0#1 was asked to end, and its end was not reported within 30 s: it counts as ended"
    story.answers.clear()
    story.quiet(3.0)
    assert story.names == ["a/0#1", "b/0#1"]


def test_of_two_removed_hosts_each_counts_as_ended_in_its_own_time():
    """The second one is removed ten seconds after the first, and neither answers."""
    story, hosts = Story("a:1", "b:1", "c:1", min=1).run(), []
    for name in ("b", "c"):
        story.remove(name, now=True).answer(lambda e: not isinstance(e, ev.WorkerExited | ev.AgentLost))
        story.wait(10.1)
    for _ in range(2):
        story.wait(10.0)
        hosts.append([*story.cluster.hosts])
    assert hosts == [["a", "c"], ["a"]]


def test_a_member_that_answers_before_the_leave_point_is_waited_for():
    """A member saves a file for almost an hour without CPU time: it answers, so it is waited for."""
    story = with_stage(Stage.LEAVING).hear(ev.WorkerReady, "b/0#1", "c/0#1")
    words = tuple(story.answers)  # for when it gets there
    story.answers.clear()
    for _ in range(354):
        story.wait(10.0).hear(ev.PositionReported)
    assert story.commands(cmd.StopWorker) == []
    story.send(*words)
    assert (story.cluster.stage, len(story.names), story.cluster.resets) == (Stage.RUNNING, 4, 0)


def test_even_a_member_that_answers_is_not_waited_for_without_end():
    """A member that answers and never reaches the leave point is replaced after `step` seconds."""
    story = with_stage(Stage.LEAVING).hear(ev.WorkerReady, "b/0#1", "c/0#1")
    story.answers.clear()
    for _ in range(361):
        story.wait(10.0).hear(ev.PositionReported)
    assert story.last(cmd.StopWorker) == cmd.StopWorker(wid("a/0#1"), kill=True)
