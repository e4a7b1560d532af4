"""Workers are lost or freeze while a cluster has no driver, and a new driver takes over."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.state import HostPhase, Stage
from nbelastic.protocol import events as ev
from tests.core.away import Away, disturbed, three, trains
from tests.core.story import LIVE, Story, wid, with_stage

# ---- deaths meanwhile ----


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("victims", [["a/1#1"], ["a/0#1"], ["a/0#1", "b/0#1"]])
def test_members_that_died_meanwhile_are_replaced(victims, noticed):
    """Lost members, noticed by others or not, cost one reset; the newest commit wins, and replacements join."""
    story = three()
    Away(story).commit(4).kill(*victims, noticed=noticed).new_driver()
    assert trains(story.quiet(3.0))
    assert len(story.names) == 3
    assert story.fakes[story.cluster.members[0]].commit >= 9
    assert story.cluster.resets == 1
    assert not set(victims) & set(story.names)


@pytest.mark.parametrize("stage", LIVE)
def test_a_death_at_any_point(stage):
    """The driver ends and rank 0 is lost, in any stage: the others train on."""
    story = with_stage(stage)
    Away(story).kill("a/0#1").new_driver()
    assert trains(story.quiet(3.0))
    assert len(story.names) == (3 if stage in (Stage.FORMING, Stage.RUNNING, Stage.HALTED) else 4)


def test_all_members_died():
    """All holders of the state are lost: the job fails with that reason, and the next one runs."""
    story = three()
    Away(story).kill("a/0#1", "a/1#1", "b/0#1").new_driver()
    assert story.last(cmd.EndJob).outcome == "failed"
    assert "no worker is left that holds the training state" in story.last(cmd.EndJob).reason
    assert "no driver was running" in story.last(cmd.EndJob).reason
    assert trains(story.quiet(2.0).run("next"))


def test_all_died_before_anything_was_trained():
    """All workers are lost before the first world has run: the job begins with their replacements."""
    story = with_stage(Stage.FORMING)
    Away(story).kill("a/0#1", "b/0#1", "c/0#1").new_driver()
    assert trains(story.quiet(3.0), "a/0#2", "b/0#2", "c/0#2")


def test_a_whole_host_died():
    """A lost host is tried again, and its workers have new incarnations."""
    story = three()
    Away(story).lose_host("a").new_driver()
    assert story.records("host-lost") == ["a: its agent was lost while no driver was running"]
    story.quiet(4.0)
    assert trains(story)
    assert story.names[0] == "b/0#1"
    assert not {"a/0#1", "a/1#1"} & set(story.names)


def test_a_host_that_died_meanwhile_is_lost_once():
    """The new driver tries it in vain, and so does the next one, for the same reason."""
    story = three()
    Away(story).lose_host("a").new_driver()
    story.answers = [answer for answer in story.answers if not isinstance(answer, ev.AgentReady)]
    for _ in range(2):
        story.wait(max(0.0, story.cluster.hosts["a"].retry_at - story.now))
        story.send(ev.AgentLost("a", "no route"))
    Away(story).new_driver()
    assert story.cluster.hosts["a"].lost_for == "no route"
    assert len(story.records("host-lost")) == 1
    assert story.records("host-still-down") == ["a: no route; tried again in 1 s"]


def test_a_host_without_members_died():
    """A host without members is lost: the world is not disturbed, and the host is tried again."""
    story = three(max=3).add("c:1").quiet(2.0)
    generation = story.cluster.generation
    Away(story).lose_host("c").new_driver()
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1", "b/0#1")
    assert (story.cluster.generation, story.cluster.resets) == (generation, 0)
    assert story.cluster.hosts["c"].phase is HostPhase.UP


def test_a_newcomer_died():
    """A waiting newcomer is lost: the world is whole, and the replacement joins without an abort."""
    story = three()
    story.add("c:1").answer(lambda e: not isinstance(e, ev.WorkerPrepared))
    Away(story).kill("c/0#1").new_driver()
    assert story.cluster.generation == 1
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1", "b/0#1", "c/0#2")
    assert story.cluster.resets == 0


def test_survivors_of_a_break_go_on_gathering():
    """A break that the old driver has counted is not counted again."""
    story = three()
    story.kill("a/0#1").hear(ev.WorkerReady, "a/1#1")
    assert story.cluster.stage is Stage.GATHERING
    Away(story).new_driver()
    assert trains(story.quiet(3.0))
    assert len(story.names) == 3
    assert story.cluster.resets == 1


@pytest.mark.parametrize("reached", [0, 1, 2])
def test_the_abort_reached_only_some(reached):
    """The driver ends while it aborts survivors: the new one aborts all, and they gather."""
    story = three()
    story._forget(wid("a/0#1"))
    away = Away(story, ev.WorkerExited(wid("a/0#1"), -9), reached=reached, written=reached > 0)
    away.break_off(1)
    away.new_driver()
    assert trains(story.quiet(3.0))
    assert story.cluster.resets == 1


def test_below_min_they_park():
    """Survivors below min keep the state and wait, and go on when there are enough."""
    story = three()
    story.silent |= {wid("a/0#2"), wid("a/1#2"), wid("a/0#3"), wid("a/1#3")}
    Away(story).commit(2).lose_host("a").new_driver().answer()
    assert "1 of min 2 workers ready" in story.reason
    assert trains(story.add("c:1").quiet(3.0), "b/0#1", "c/0#1")
    assert story.fakes[wid("c/0#1")].commit == 7


@pytest.mark.parametrize("noticed", [True, False])
def test_a_member_that_is_frozen(noticed):
    """A frozen member is killed and replaced; the others train on."""
    story = three()
    away = Away(story)
    if noticed:
        away.break_off(1)
    mark = story.mark()
    away.new_driver(frozen=["a/1#1"])
    story.hear(ev.WorkerFrozen)
    assert story.commands(cmd.StopWorker, mark) == [cmd.StopWorker(wid("a/1#1"), kill=True)]
    assert trains(story.quiet(3.0), "a/0#1", "a/1#2", "b/0#1")


def test_a_member_that_has_not_answered_yet_is_not_disturbed():
    """A member that has not answered but whose process runs trains on with the others."""
    story = three()
    mark = story.mark()
    Away(story).new_driver(frozen=["a/1#1"])
    story.answers = []  # its process is not stopped
    assert disturbed(story, mark) == []
    assert story.names == ["a/0#1", "a/1#1", "b/0#1"]
    story.quiet(3.0).commit(3)
    assert trains(story, "a/0#1", "a/1#1", "b/0#1")
    story.send(ev.WorkerSilent(wid("a/1#1"), 60.0, idle=True))
    assert trains(story.quiet(3.0), "a/0#1", "a/1#2", "b/0#1")


def test_a_member_that_has_not_answered_where_another_is_gone():
    """A member that has not answered is replaced when another member was lost."""
    story = three()
    mark = story.mark()
    Away(story).kill("b/0#1").new_driver(frozen=["a/1#1"])
    assert story.commands(cmd.StopWorker, mark) == [cmd.StopWorker(wid("a/1#1"), kill=True)]
    assert trains(story.quiet(3.0), "a/0#1", "a/1#2", "b/0#2")


def test_a_newcomer_that_is_frozen_gets_no_program():
    """A frozen newcomer gets no program, and the world is not disturbed."""
    story = three().add("c:1")
    story.answer(lambda e: not isinstance(e, ev.WorkerReady))
    mark = story.mark()
    Away(story).new_driver(frozen=["c/0#1"])
    assert disturbed(story, mark) == []
    assert trains(story.quiet(3.0), "a/0#1", "a/1#1", "b/0#1", "c/0#2")


@pytest.mark.parametrize("reached", [1, 2, 3])
def test_a_preparation_that_reached_only_some_is_dropped(reached):
    """The driver ends while members prepare the next world: all drop what some have prepared."""
    story = Story("c:1", "a:1", "b:1", min=2).run().commit(3).answer()
    story.add("d:1").answer(lambda e: not isinstance(e, ev.WorkerReady | ev.WorkerPrepared))
    newcomer = next(e for e in story.answers if isinstance(e, ev.WorkerReady))
    story.answers.remove(newcomer)
    mark = story.mark()
    away = Away(story, newcomer, reached=1 + reached)  # a record, and so many of the members
    assert (
        sorted(fake.numbered for w, fake in story.fakes.items() if w.host != "d") == [1] * (3 - reached) + [2] * reached
    )
    away.new_driver()
    assert [(c.generation, len(c.members)) for c in story.commands(cmd.DropWorld, mark)] == [(2, 3)]
    assert trains(story.quiet(3.0), "c/0#1", "a/0#1", "b/0#1", "d/0#1")
