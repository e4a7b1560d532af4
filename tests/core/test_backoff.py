"""Strikes and cooldowns: who is punished, for how long, and what forgives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.core import commands as cmd
from nbelastic.core.state import HostPhase, Stage, host_backoff_until
from nbelastic.core.step import deadline
from nbelastic.protocol import events as ev
from tests.core.story import Story, wid
from tests.support.soak import examples


def crash(story: Story, times: int, host: str = "a") -> Story:
    for _ in range(times):
        story.kill(story.alive(host)[0]).answer()
    return story


def test_the_first_restart_is_at_once_then_the_cooldown_doubles():
    """Deaths of one slot: at once, 5 s, 10 s, 20 s, …, at most 300 s; visible until when, and why."""
    story = Story("a:1", min=1)
    story.answer()
    waits = []
    for _ in range(9):
        victim = story.alive()[0]
        story.kill(victim)
        until = host_backoff_until(story.cluster.hosts["a"], story.now)
        waits.append(until - story.now if until else 0.0)
        if until:
            assert story.cluster.hosts["a"].reason == story.cluster.hosts["a"].slots[0].reason
            assert f"{victim} died (SIGKILL)" in story.cluster.hosts["a"].reason
            assert story.alive() == []
            assert deadline(story.cluster, story.now) == until
            story.wait(until - story.now)
        assert len(story.alive()) == 1
        assert story.cluster.hosts["a"].reason == ""
        story.answer()
    assert waits == pytest.approx([0, 5, 10, 20, 40, 80, 160, 300, 300])


def test_nothing_starts_on_a_backing_off_slot():
    """Whatever happens meanwhile (ticks, other hosts, other orders), a cooling slot stays empty until its time."""
    story = crash(Story("a:1", min=1).answer(), 2)
    mark = story.mark()
    story.send(ev.Ticked())
    story.add("b:1").scale(1, None).quiet(4.9)
    assert [c.worker.host for c in story.commands(cmd.StartWorker, mark)] == ["b"]
    story.wait(0.2)
    assert story.alive("a") == ["a/0#3"]


def test_a_backed_off_slot_returns_even_if_min_equals_what_it_brings():
    """min=2 on one host of two, one slot cooling: the job waits, the slot comes back after its cooldown, it goes on."""
    story = Story("a:2", min=2).run()
    for _ in range(2):
        story.kill("a/1#1" if "a/1#1" in story.names else "a/1#2").answer()
    assert "a/1 (in back-off, 5 s more)" in story.reason
    story.quiet(6.0)
    assert (story.names, story.cluster.stage) == (["a/0#1", "a/1#3"], Stage.RUNNING)


def test_a_host_backs_off_when_its_every_slot_does():
    """One slot of two cools: the host does not. Both: it does, until the first may start again."""
    story = Story("a:2", min=1).answer()
    story.kill("a/0#1").answer()
    story.kill("a/0#2")
    assert host_backoff_until(story.cluster.hosts["a"], story.now) == 0.0
    story.answer()
    story.kill("a/1#1").answer()
    story.now += 1
    story.kill("a/1#2")
    assert host_backoff_until(story.cluster.hosts["a"], story.now) == story.now + 4


def test_a_healthy_spell_forgives():
    """A worker that lived for 60 s dies: its slot's strikes begin anew, and it restarts at once."""
    story = crash(Story("a:1", min=1).answer(), 2).quiet(5.0)
    assert story.cluster.hosts["a"].slots[0].failures == 2
    story.quiet(60.0)
    story.kill(story.alive()[0])
    assert len(story.alive()) == 1
    assert story.cluster.hosts["a"].slots[0].failures == 1


def test_adding_a_backing_off_host_clears_it():
    """`%elastic_add` of a host that cools: its slots start at once, with no strikes."""
    story = crash(Story("a:1", min=1).answer(), 2)
    assert story.alive() == []
    story.add("a:1")
    assert story.alive() == ["a/0#3"]
    assert story.cluster.hosts["a"].slots[0].failures == 0


def test_cooldown_zero_switches_it_off():
    """`(0, 0)`: every restart is at once, after any number of deaths."""
    story = Story("a:1", min=1, cooldown=(0.0, 0.0)).answer()
    crash(story, 1100)
    assert len(story.alive()) == 1


def test_thousands_of_deaths_overflow_nothing():
    """A slot that has died 1,100 times cools for the longest time, and the core goes on."""
    story = Story("a:1", min=1, cooldown=(5.0, 300.0)).answer()
    for _ in range(1100):
        story.kill(story.alive()[0]).wait(300.0).answer()
    assert story.cluster.hosts["a"].slots[0].failures == 1100


def test_a_host_lost_a_thousand_times_overflows_nothing():
    """The same for an agent that cannot be started."""
    story = Story("a:1", min=1)
    for _ in range(1100):
        story.lose_host("a").wait(300.0)
    assert story.cluster.hosts["a"].phase is HostPhase.STARTING


@pytest.mark.parametrize("code", [-9, -11, 3, 1])
def test_a_process_that_dies_is_a_failure(code):
    """Killed, a segmentation fault, `os._exit(3)`: the process is gone without being told, and its slot has a strike."""
    story = Story("a:1", min=1).answer()
    story.kill("a/0#1", code=code)
    assert story.cluster.hosts["a"].slots[0].failures == 1
    assert ("SIG" in story.records("worker-lost")[0]) == (code < 0)


def test_exceptions_never_back_off_a_host():
    """Job after job fails by an exception: no strike, and the same workers take the next one."""
    story = Story("a:2", min=2)
    for number in range(5):
        story.run(f"job-{number}").raised("a/0#1").quiet(1.0)
    assert story.alive() == ["a/0#1", "a/1#1"]
    assert [slot.failures for slot in story.cluster.hosts["a"].slots] == [0, 0]


def test_an_agent_that_cannot_start_is_tried_less_and_less_often():
    """Its host cools with its own doubling, is named in the reason, and comes up at last."""
    story = Story("a:1", min=1)
    for wait in (5.0, 10.0, 20.0):
        story.lose_host("a", "ssh: refused")
        assert story.cluster.hosts["a"].retry_at == story.now + wait
        assert story.cluster.hosts["a"].reason == "ssh: refused"
        mark = story.mark()
        story.wait(wait - 0.1)
        assert story.commands(cmd.StartAgent, mark) == []
        story.wait(0.2)
        assert len(story.commands(cmd.StartAgent, mark)) == 1
    story.answer()
    assert story.alive() == ["a/0#1"]


def test_an_agent_is_never_tried_in_a_hot_loop():
    """Without any cooldown, an agent that cannot start is tried once a second at most."""
    story = Story("a:1", min=1, cooldown=(0.0, 0.0))
    story.lose_host("a")
    assert deadline(story.cluster, story.now) == story.now + 1.0


def test_a_host_that_was_up_for_long_is_forgiven():
    """A host that is lost after a healthy spell is tried again after the first cooldown, not after the next longer."""
    story = Story("a:1", min=1)
    story.lose_host("a").quiet(5.0).quiet(60.0).lose_host("a")
    assert story.cluster.hosts["a"].retry_at == story.now + 5.0


def test_the_same_loss_told_twice_is_one():
    """The agent's end is seen by the link and by the launcher: one loss, one strike, one cooldown."""
    story = Story("a:1", min=1).answer()
    story.lose_host("a")
    story.now += 1
    before = story.cluster.hosts["a"]
    story.send(ev.AgentLost("a", "and again"))
    assert story.cluster.hosts["a"] == before


def test_workers_that_end_as_told_are_no_failures():
    """Scaled down, drained, killed with `--now`: their exits, whatever the code, cool nothing."""
    story = Story("a:3", "b:1", min=1).answer()
    story.scale(1, 2).answer()
    story.remove("b", now=True).answer()
    assert all(slot.failures == 0 for host in story.cluster.hosts.values() for slot in host.slots)
    assert story.records("worker-lost") == []


def test_a_lost_host_comes_back_with_new_workers():
    """After a host's loss its workers are new ones, and those of the old agent are nobody."""
    story = Story("a:1", "b:1", min=1).run()
    story.lose_host("b").quiet(10.0)
    assert story.names == ["a/0#1", "b/0#2"]
    before = story.cluster
    story.send(ev.WorkerExited(wid("b/0#1"), -9))
    assert story.cluster == before


LIVES = st.sampled_from([0.0, 0.5, 59.9, 60.0, 61.0, 200.0])
COOLDOWNS = st.sampled_from([(0.0, 0.0), (1.0, 2.0), (5.0, 300.0), (5.0, 5.0)])
BRIEF = settings(max_examples=examples(150))


def cooling(failures: int, cooldown: tuple[float, float]) -> float:
    """The promise, written down once more: nothing, then the shortest, doubling up to the longest."""
    low, high = cooldown
    return min(high, low * 2.0 ** (failures - 1)) if failures else 0.0


@BRIEF
@given(lives=st.lists(st.tuples(st.integers(0, 1), LIVES, st.booleans()), max_size=20), cooldown=COOLDOWNS)
def test_each_slot_has_its_own_failures(lives, cooldown):
    """Whatever dies when: each slot cools by its own deaths alone, visibly, until its time; adding the host pardons it."""
    story = Story("a:2", min=1, cooldown=cooldown).answer()
    failures = [0, 0]
    for index, life, pardoned in lives:
        story.quiet(max(0.0, story.cluster.hosts["a"].slots[index].backoff_until - story.now))
        w = next(w for w in story.cluster.workers if w.slot == index)
        story.quiet(life)
        lived = story.now - story.cluster.workers[w].since
        story.kill(str(w))
        failures[index] = 1 if lived >= 60.0 else failures[index] + 1
        wait = cooling(failures[index] - 1, cooldown)
        slot = story.cluster.hosts["a"].slots[index]
        assert slot.failures == failures[index]
        assert slot.busy == (not wait)
        if wait:
            assert slot.backoff_until == story.now + wait
            assert f"{w} died (SIGKILL)" in slot.reason
            assert slot.reason == story.cluster.hosts["a"].reason
            assert f"in back-off for {wait:g} s after {failures[index]} failures" in slot.reason
        if pardoned:
            story.add("a:2")
            failures = [0, 0]
            assert all(slot.busy and not slot.failures and not slot.reason for slot in story.cluster.hosts["a"].slots)
            assert story.cluster.hosts["a"].reason == ""
        story.answer()


@BRIEF
@given(
    lives=st.lists(st.tuples(LIVES, st.sampled_from(["lost", "refused", "unreachable"]), st.booleans()), max_size=12),
    cooldown=COOLDOWNS,
)
def test_a_hosts_failures_are_its_own_losses(lives, cooldown):
    """Lost, refused or unreachable: all count alike, a healthy spell forgives, and adding the host pardons it at once."""
    story = Story(min=1, cooldown=cooldown).add("a:1", "10.0.0.1").answer().add("b:1", "10.0.0.2").answer()
    failures = 0
    for life, way, pardoned in lives:
        story.cut.clear()
        story.quiet(max(0.0, story.cluster.hosts["b"].retry_at - story.now))
        assert story.cluster.hosts["b"].phase is HostPhase.UP, story.cluster.hosts["b"].reason
        story.quiet(life)
        failures = 1 if story.now - story.cluster.hosts["b"].since >= 60.0 else failures + 1
        story.lose_host("b", "its machine is gone")
        if way != "lost":  # and when it is tried again, it is of no use
            story.wait(story.cluster.hosts["b"].retry_at - story.now)
            failures += 1
            if way == "refused":
                story.answers.clear()
                story.send(ev.AgentReady("b", 1, problem="another version"))
            else:
                story.cut.add(("b", "10.0.0.1"))
                story.answer()
        host = story.cluster.hosts["b"]
        assert (host.phase, host.failures) == (HostPhase.LOST, failures)
        assert host.retry_at == story.now + max(1.0, cooling(failures, cooldown))
        assert host_backoff_until(host, story.now) == host.retry_at
        expected = {"lost": "its machine is gone", "refused": "another version", "unreachable": "not its peers"}
        assert expected[way] in host.reason
        if pardoned:
            story.cut.clear()
            story.add("b:1")
            failures = 0
            assert story.cluster.hosts["b"].phase is HostPhase.STARTING, "it is tried at once"
            assert (story.cluster.hosts["b"].failures, story.cluster.hosts["b"].reason) == (0, "")
            story.answer()


def test_adding_a_host_that_was_left_out_clears_it():
    """`%elastic_add` of an unreachable host probes it again at once, and not after its cooldown."""
    story = Story(min=1).add("a:1", "10.0.0.1").answer()
    story.cut.add(("b", "10.0.0.1"))
    story.add("b:1", "10.0.0.2").answer()
    assert story.cluster.hosts["b"].phase is HostPhase.LOST
    story.cut.clear()
    story.add("b:1").answer()
    assert story.alive("b") == ["b/0#1"]
