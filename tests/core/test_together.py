"""Reports of many workers are decided on together: the state is that of decisions one by one."""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.state import Stage
from nbelastic.core.step import step
from nbelastic.core.together import decide
from nbelastic.protocol import events as ev
from tests.core.story import Story, wid


def hear_together(story: Story, kind: type[ev.Event]) -> int:
    """The answers of this kind wait in the inbox together. Returns on how many the core decides together."""
    events = [answer for answer in story.answers if isinstance(answer, kind)]
    one_by_one = story.cluster
    at_once, count = decide(one_by_one, events[:-1], story.now)
    for number, event in enumerate(events):
        one_by_one, alone = step(one_by_one, event, story.now)
        if number < count:
            assert not alone
        else:
            at_once, commands = step(at_once, event, story.now, more=number < len(events) - 1)
            assert commands == alone
    assert at_once == one_by_one
    for field in ("workers", "awaiting", "newcomers"):
        assert list(getattr(at_once, field)) == list(getattr(one_by_one, field))
    story.hear(kind)
    assert story.cluster == one_by_one
    return count


def test_the_reports_of_a_break_and_of_a_change_are_decided_on_together():
    """After a death, and when the replacement joins, all reports of a stage but the last are decided on at once."""
    story = Story("a:8", "b:8", min=2).run().commit(2).quiet()
    story.kill("a/3#1")
    assert hear_together(story, ev.WorkerReady) == 14
    assert hear_together(story, ev.WorkerFormed) == 14
    assert hear_together(story.commit(2), ev.StoreOffered) == 14
    for kind in (ev.WorkerStarted, ev.WorkerRegistered, ev.WorkerReady):
        story.hear(kind, "a/3#2")
    story.wait(2.0)
    assert hear_together(story, ev.WorkerPrepared) == 15
    assert hear_together(story, ev.LeaveAcknowledged) == 14
    assert hear_together(story, ev.WorkerReady) == 14
    assert hear_together(story, ev.WorkerFormed) == 15
    assert (story.cluster.stage, len(story.names)) == (Stage.RUNNING, 16)


def test_lost_connections_are_decided_on_together():
    """The first member that raises begins the wait for the report of a loss; the others are suspects like it, at once."""
    story = Story("a:8", min=2).run().commit(2).quiet()
    story.answers += [ev.WorkerRaised(w, 1, False, "Connection closed by peer") for w in story.cluster.members]
    assert decide(story.cluster, story.answers, story.now) == (story.cluster, 0)
    story.send(story.answers.pop(0))
    assert hear_together(story, ev.WorkerRaised) == 6
    assert (len(story.cluster.suspects), story.cluster.first_suspect) == (8, wid("a/0#1"))
    story.kill("a/3#1")
    assert story.cluster.stage is Stage.GATHERING


def test_what_changes_more_is_decided_on_alone():
    """A member without the training state, one that reports twice, and the last report end what is decided on together."""
    story = Story("a:8", min=2).run().commit(2).quiet()
    story.kill("a/3#1")
    events = [answer for answer in story.answers if isinstance(answer, ev.WorkerReady)]
    assert [decide(story.cluster, waiting, story.now)[1] for waiting in (events, events[:3])] == [6, 3]
    assert decide(story.cluster, [events[0], replace(events[1], holds_state=False), events[2]], story.now)[1] == 1
    assert decide(story.cluster, [events[0], events[0], events[1]], story.now)[1] == 1
    assert decide(story.cluster, [events[0], ev.WorkerExited(wid("a/5#1"), 1), events[1]], story.now)[1] == 1


def test_with_many_workers_a_report_may_wait_for_the_driver():
    """Of 1,000 members that raise, none is aborted again while the driver may still handle the reports; later each is."""
    story = Story("a:2", min=1)
    story.answer()
    story.submit().hear(ev.WorkerReady).hear(ev.WorkerFormed).kill("a/0#1")
    raised = ev.WorkerRaised(wid("a/1#1"), 1, False, "Connection closed by peer")
    story.cluster = replace(story.cluster, members=story.cluster.members * 1000)  # only their number matters here
    for seconds, aborted in ((1.5, []), (2.5, [(wid("a/1#1"),)])):
        _, commands = step(story.cluster, raised, story.now + seconds)
        assert [command.members for command in commands if isinstance(command, cmd.AbortWorld)] == aborted
