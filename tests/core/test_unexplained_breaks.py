"""Connections between members break although no worker was lost."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.state import Stage
from nbelastic.protocol import events as ev
from nbelastic.protocol.exit_codes import HUNG
from tests.core.story import Story, wid


def test_a_lost_connection_waits_for_the_report_of_the_loss():
    """A collective fails before the loss is known: the lost worker's break is the only one."""
    story = Story("a:3", min=2).run()
    story.raised("a/1#1", "RuntimeError: Connection closed", intact=False)
    assert story.cluster.active
    assert story.cluster.stage is Stage.RUNNING
    story.wait(0.05).kill("a/0#1").hear(ev.WorkerReady)
    assert story.names == ["a/1#1", "a/2#1"]
    story.quiet(5.0)
    assert story.cluster.resets == 1


def test_lost_connections_without_a_death_break_the_world():
    """A rank's connections break without a lost worker: after the grace time another world forms."""
    story = Story("a:3", min=2).run()
    story.raised("a/1#1", "RuntimeError: Connection closed", intact=False).quiet(2.0)
    assert (story.cluster.generation, story.cluster.stage, len(story.names)) == (2, Stage.RUNNING, 3)
    assert story.records("world-broken") == [
        "connections of a/1#1 broke though every worker lives: RuntimeError: Connection closed"
    ]


def test_connections_that_break_again_and_again_are_the_programs_fault():
    """After three unexplained breaks at one commit the job ends with that rank's error."""
    story = Story("a:3", min=2).run()
    for _ in range(2):
        story.raised("a/1#1", "RuntimeError: sizes differ", intact=False).quiet(2.0)
        assert story.cluster.stage is Stage.RUNNING
    story.raised("a/1#1", "RuntimeError: sizes differ", intact=False).quiet(2.0)
    assert story.job.outcome == "failed"
    assert "rank 1 (a/1#1) raised RuntimeError: sizes differ (3 times in a row" in story.job.reason
    assert story.last(cmd.EndJob).culprit == wid("a/1#1")


def test_progress_clears_unexplained_breaks():
    """Unexplained breaks with commits between them never add up."""
    story = Story("a:3", min=2).run()
    for _ in range(5):
        story.commit().raised("a/1#1", "RuntimeError: Connection closed", intact=False).quiet(2.0)
    assert not story.job.outcome
    assert story.cluster.resets == 5


def test_unexplained_breaks_of_one_job_do_not_count_in_the_next():
    """Two unexplained breaks of a stopped job do not count in the next job."""
    story = Story("a:3", min=2).run()
    for _ in range(2):
        story.raised("a/1#1", "RuntimeError: Connection closed", intact=False).quiet(2.0)
    story.send(ev.JobStopRequested("job", "a test"))
    story.quiet(6.0)
    story.submit("other").quiet(2.0)
    story.raised("a/1#1", "RuntimeError: Connection closed", intact=False).quiet(2.0)
    assert not story.job.outcome
    assert story.cluster.stage is Stage.RUNNING


@pytest.mark.parametrize("lost", ["worker", "host"])
def test_a_loss_between_unexplained_breaks_restarts_their_count(lost):
    """A lost member between unexplained breaks restarts their count."""
    story = Story("a:3", "b:1", min=2).run()
    others = ("a/0#1", "a/1#1", "a/2#1")
    for _ in range(2):
        story.raised("a/1#1", "RuntimeError: Connection closed", intact=False).quiet(2.0)
    if lost == "host":
        story.send(ev.AgentLost("b", "a test"))
    else:
        story.kill("b/0#1")
    story.hear(ev.WorkerReady, *others).hear(ev.WorkerFormed, *others)  # no commit, and no other worker joins
    assert story.cluster.stage is Stage.RUNNING
    story.raised("a/1#1", "RuntimeError: Connection closed", intact=False).wait(2.0)
    assert not story.job.outcome


def test_the_error_of_a_job_belongs_to_the_rank_that_raised_it_first():
    """Rank 2 raises in each attempt, and rank 0 reports its lost connection later: the job fails with rank 2's error."""
    story = Story("a:3", min=2).run()
    for _ in range(3):
        story.raised("a/2#1", "RuntimeError: sizes differ", intact=False)
        story.raised("a/0#1", "RuntimeError: Connection closed by peer", intact=False).wait(2.0)
        story.quiet(2.0)
    assert "rank 2 (a/2#1) raised RuntimeError: sizes differ" in story.job.reason
    assert story.last(cmd.EndJob).culprit == wid("a/2#1")


def test_a_hung_worker_does_not_explain_a_break():
    """A hung rank that ends after an unexplained break does not explain that break."""
    story = Story("a:3", min=2).run()
    others = ("a/0#1", "a/1#1")
    for _ in range(2):
        story.raised("a/1#1", "RuntimeError: sizes differ", intact=False).quiet(2.0)
    story.kill("a/2#1", code=HUNG).hear(ev.WorkerReady, *others).hear(ev.WorkerFormed, *others)
    assert story.cluster.stage is Stage.RUNNING
    story.raised("a/1#1", "RuntimeError: sizes differ", intact=False).wait(2.0)
    assert story.job.outcome == "failed"


def test_a_connection_lost_while_others_still_form_is_not_forgotten():
    """A rank raises right after it has formed: the forming of other ranks does not clear that."""
    story = Story("a:2", min=2)
    story.answer()
    story.submit().hear(ev.WorkerReady).hear(ev.WorkerFormed, "a/0#1")
    story.raised("a/0#1", "RuntimeError", intact=False).hear(ev.WorkerFormed)
    assert story.cluster.stage is Stage.RUNNING
    story.quiet(2.0)
    assert (story.cluster.generation, story.cluster.stage) == (2, Stage.RUNNING)


def test_a_member_that_leaves_unasked_is_noticed():
    """A member reports that it waits although its world runs: the world breaks, and no rank blocks without end."""
    story = Story("a:2", min=2).run()
    story._abort(wid("a/1#1"), story.cluster.generation)
    story.hear(ev.WorkerReady).quiet(2.0)
    assert (story.cluster.generation, story.cluster.stage) == (2, Stage.RUNNING)


def test_a_worker_that_missed_the_formation_gets_it_again():
    """A member reports ready while its world forms: the same formation is sent again to it alone."""
    story = Story("a:2", min=2)
    story.answer()
    story.submit().hear(ev.WorkerReady)
    order = story.last(cmd.FormWorld)
    story.send(ev.WorkerReady(wid("a/1#1"), "job", 0, 0, clean=True, store="x"))
    again = story.last(cmd.FormWorld)
    assert (again.to, again.generation, again.root, again.store) == ((wid("a/1#1"),), 1, order.root, order.store)


def test_the_errors_of_a_break_are_answered_once():
    """Each survivor that raises is aborted once; a repeated report later is answered again."""
    story = Story("a:3", min=2)
    story.answer()
    story.submit().hear(ev.WorkerReady).hear(ev.WorkerFormed)
    mark = story.mark()
    story.kill("a/0#1")
    for worker in ("a/1#1", "a/2#1"):
        story.send(ev.WorkerRaised(wid(worker), 1, False, "Connection closed by peer"))
    (abort,) = story.commands(cmd.AbortWorld, mark)
    assert abort.members == (wid("a/1#1"), wid("a/2#1"))
    mark = story.mark()
    story.wait(2.0).send(ev.WorkerRaised(wid("a/2#1"), 1, False, "Connection closed by peer"))
    assert [command.members for command in story.commands(cmd.AbortWorld, mark)] == [(wid("a/2#1"),)]


def test_a_worker_that_missed_the_broken_generation_is_sent_the_abort():
    """A worker repeats its old report while others gather: it is sent the abort, so that it can report again."""
    story = Story("a:3", min=2)
    story.answer()
    story.submit().hear(ev.WorkerReady).kill("a/0#1")
    mark = story.mark()
    story.send(ev.WorkerReady(wid("a/1#1"), "job", 0, 0, clean=True, store="x"))
    assert [(c.generation, c.members) for c in story.commands(cmd.AbortWorld, mark)] == [(1, (wid("a/1#1"),))]
    assert wid("a/1#1") in story.cluster.awaiting
