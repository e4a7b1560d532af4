"""Failures and back-off: which slot or host pauses, for how long, and what clears its failures."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbelastic.core import commands as cmd
from nbelastic.core.host_slots import host_backoff_until
from nbelastic.core.state import Host, HostPhase, Slot, Stage
from nbelastic.core.step import deadline
from nbelastic.protocol import events as ev
from nbelastic.protocol.connection_events import EnvironmentReported
from nbelastic.protocol.exit_codes import GPU_LOST
from nbelastic.protocol.ids import HostSpec
from tests.core.story import Story, wid
from tests.support.soak import examples


def crash(story: Story, times: int, host: str = "a") -> Story:
    for _ in range(times):
        story.kill(story.alive(host)[0]).answer()
    return story


def test_a_slot_that_a_host_no_longer_has_ends_no_pause():
    """A host of two slots has one now, which pauses."""
    slots = (Slot(backoff_until=9.0), Slot())
    assert host_backoff_until(Host(HostSpec("a", 1), joined=1, slots=slots, phase=HostPhase.UP), 5.0) == 9.0
    assert host_backoff_until(Host(HostSpec("a", 2), joined=1, slots=slots, phase=HostPhase.UP), 5.0) == 0.0


def test_the_first_restart_is_at_once_then_the_cooldown_doubles():
    """A slot restarts at once, then after 5, 10, 20, … at most 300 s; the status shows until when, and why."""
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
    """A slot in back-off stays empty until its time, whatever else happens (ticks, other hosts, requests)."""
    story = crash(Story("a:1", min=1).answer(), 2)
    mark = story.mark()
    story.send(ev.Ticked())
    story.add("b:1").scale(1, None).quiet(4.9)
    assert [c.worker.host for c in story.commands(cmd.StartWorker, mark)] == ["b"]
    story.wait(0.2)
    assert story.alive("a") == ["a/0#3"]


@pytest.mark.parametrize("comes_up", [False, True])
def test_the_last_line_of_a_worker_that_never_came_up_is_shown(comes_up):
    """The user's `comm.py` hides a module: the wait names it. Of a worker that came up, the line may be anything."""
    story = Story("a:1", min=1).hear(ev.AgentReady)
    for incarnation in (1, 2):
        if comes_up:
            story.hear(ev.WorkerRegistered)
        story.send(
            ev.WorkerExited(wid(f"a/0#{incarnation}"), 1, "ModuleNotFoundError: No module named 'comm.base_comm'")
        )
    shown = "" if comes_up else ": ModuleNotFoundError: No module named 'comm.base_comm'"
    assert story.reason.endswith(f"waiting for a/0 (in back-off, 5 s more: a/0#2 died (exit code 1{shown}))")
    story.wait(5.0)
    assert story.reason.endswith(f"waiting for a/0#3 (0 s; a/0#2 died (exit code 1{shown}))")


def test_nothing_waits_for_a_slot_that_the_host_has_no_more():
    """Its worker was to leave, and failed before."""
    story = Story("a:2", min=1, cooldown=(100.0, 100.0)).run().add("a:1")
    story.send(ev.WorkerExited(wid("a/1#1"), GPU_LOST))
    story.send(ev.WorkerExited(wid("a/0#1"), GPU_LOST))
    assert "a/0 (in back-off, 100 s more: " in story.reason
    assert "a/1" not in story.reason


def test_a_backed_off_slot_returns_even_if_min_equals_what_it_brings():
    """With min=2 on one host of two slots, the job waits for the slot in back-off, then goes on."""
    story = Story("a:2", min=2).run()
    for _ in range(2):
        story.kill("a/1#1" if "a/1#1" in story.names else "a/1#2").answer()
    assert "a/1 (in back-off, 5 s more: a/1#2 died (SIGKILL))" in story.reason
    story.quiet(6.0)
    assert (story.names, story.cluster.stage) == (["a/0#1", "a/1#3"], Stage.RUNNING)


def test_a_host_backs_off_when_its_every_slot_does():
    """A host is in back-off while all its slots are, and not while only one of two is."""
    story = Story("a:2", min=1).answer()
    story.kill("a/0#1").answer()
    story.kill("a/0#2")
    assert host_backoff_until(story.cluster.hosts["a"], story.now) == 0.0
    story.answer()
    story.kill("a/1#1").answer()
    story.now += 1
    story.kill("a/1#2")
    assert host_backoff_until(story.cluster.hosts["a"], story.now) == story.now + 4
    assert host_backoff_until(story.cluster.hosts["a"], story.now + 4) == 0.0


def test_a_healthy_spell_clears_a_slots_failures():
    """A worker that has run for 60 s fails: the count of its slot begins again, and it restarts at once."""
    story = crash(Story("a:1", min=1).answer(), 2).quiet(5.0)
    assert story.cluster.hosts["a"].slots[0].failures == 2
    story.quiet(60.0)
    story.kill(story.alive()[0])
    assert len(story.alive()) == 1
    assert story.cluster.hosts["a"].slots[0].failures == 1


def test_adding_a_backing_off_host_clears_it():
    """`%elastic_add` of a host in back-off starts its slots at once and clears their failures."""
    story = crash(Story("a:1", min=1).answer(), 2)
    assert story.alive() == []
    story.add("a:1")
    assert story.alive() == ["a/0#3"]
    assert story.cluster.hosts["a"].slots[0].failures == 0


def test_cooldown_zero_switches_it_off():
    """With `cooldown=(0, 0)` every restart is at once, after any number of failures."""
    story = Story("a:1", min=1, cooldown=(0.0, 0.0)).answer()
    crash(story, 1100)
    assert len(story.alive()) == 1


def test_thousands_of_deaths_overflow_nothing():
    """A slot with 1,100 failures pauses for the longest time, and the core goes on."""
    story = Story("a:1", min=1, cooldown=(5.0, 300.0)).answer()
    for _ in range(1100):
        story.kill(story.alive()[0])
        story.wait(max(0.0, story.cluster.hosts["a"].slots[0].backoff_until - story.now)).answer()
    assert story.cluster.hosts["a"].slots[0].failures == 1100


def test_a_host_lost_a_thousand_times_overflows_nothing():
    """An agent that cannot be started a thousand times pauses for the longest time, and the core goes on."""
    story = Story("a:1", min=1)
    for _ in range(1100):
        story.lose_host("a").wait(300.0)
    assert story.cluster.hosts["a"].phase is HostPhase.STARTING


@pytest.mark.parametrize("code", [-9, -11, 3, 1])
def test_a_process_that_dies_is_a_failure(code):
    """SIGKILL, a segmentation fault or `os._exit(3)` that the driver did not request is a failure of the slot."""
    story = Story("a:1", min=1).answer()
    story.kill("a/0#1", code=code)
    assert story.cluster.hosts["a"].slots[0].failures == 1
    assert ("SIG" in story.records("worker-lost")[0]) == (code < 0)


def test_exceptions_never_back_off_a_host():
    """Job after job fails with an exception: no slot has a failure, and the same workers run the next job."""
    story = Story("a:2", min=2)
    for number in range(5):
        story.run(f"job-{number}").raised("a/0#1").quiet(1.0)
    assert story.alive() == ["a/0#1", "a/1#1"]
    assert [slot.failures for slot in story.cluster.hosts["a"].slots] == [0, 0]


def test_an_agent_that_cannot_start_is_tried_less_and_less_often():
    """The back-off of its host doubles, the reason names the host, and the host is up at last."""
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
    """Without any cooldown, an agent that cannot start is tried at most once per second."""
    story = Story("a:1", min=1, cooldown=(0.0, 0.0))
    story.lose_host("a")
    assert deadline(story.cluster, story.now) == story.now + 1.0


def test_a_healthy_spell_clears_a_hosts_failures():
    """A host that is lost after a healthy spell is tried again after the first cooldown, not after a longer one."""
    story = Story("a:1", min=1)
    story.lose_host("a").quiet(5.0).quiet(60.0).lose_host("a")
    assert story.cluster.hosts["a"].retry_at == story.now + 5.0


def test_a_host_that_is_down_for_days_leaves_room_for_other_records():
    """It is lost once: recorded while its back-off grows, then only for another reason. Its next loss is one again."""
    story = Story("a:1", min=1, cooldown=(5.0, 20.0)).answer()
    for reason in ("no route", *["no route"] * 20, "no space", "no space", "no route"):
        story.send(ev.AgentLost("a", reason))
        story.wait(story.cluster.hosts["a"].retry_at - story.now)
    assert story.records("host-lost") == ["a: no route; tried again in 5 s"]
    again = [("no route", 10), ("no route", 20), ("no space", 20), ("no route", 20)]
    assert story.records("host-still-down") == [f"a: {why}; tried again in {wait} s" for why, wait in again]
    story.answer()
    story.send(ev.AgentLost("a", "no route"))
    assert story.records("host-lost")[1:] == ["a: no route; tried again in 20 s"]


def test_a_host_without_an_environment_leaves_room_for_other_records():
    """Texts of its preparation between two losses do not count as another reason."""
    story = Story("a:1", min=1, cooldown=(5.0, 20.0))
    for words in ["uv", "pip"] * 5:
        story.send(EnvironmentReported("a", words), ev.AgentLost("a", "no timm"))
        story.wait(story.cluster.hosts["a"].retry_at - story.now)
    assert len(story.records("host-lost") + story.records("host-still-down")) == 3
    assert len(story.records("environment-begun")) == 3


def test_a_lost_host_that_is_refused_then_is_recorded_as_refused():
    """Once, under the kind that the documents explain."""
    story = Story("a:1", min=1, cooldown=(5.0, 5.0))
    story.send(ev.AgentLost("a", "no route"))
    for _ in range(2):
        story.wait(5.0)
        story.send(ev.AgentReady("a", 1, problem="other torch"))
    assert story.records("host-lost") == ["a: no route; tried again in 5 s"]
    assert story.records("host-refused") == ["a: other torch; tried again in 5 s"]
    assert story.records("host-still-down") == []


def test_a_slot_that_fails_for_days_leaves_room_for_other_records():
    """Its workers never come up: recorded while its back-off grows, then only for another reason."""
    story = Story("a:1", min=1, cooldown=(5.0, 20.0)).hear(ev.AgentReady)
    for line in ["no GPU"] * 20 + ["no space"] * 3:
        (w,) = story.cluster.workers
        story.send(ev.WorkerExited(w, 1, line))
        story.wait(story.cluster.hosts["a"].slots[0].backoff_until - story.now)
    lost = [(number, "no GPU") for number in range(1, 5)] + [(21, "no space")]
    assert story.records("worker-lost") == [f"a/0#{number} died (exit code 1: {line})" for number, line in lost]
    assert len(story.records("slot-backoff")) == 4
    story.answer().kill("a/0#24")
    assert story.records("worker-lost")[5:] == ["a/0#24 died (SIGKILL)"]


def test_a_worker_that_does_not_come_up_is_no_healthy_one():
    """It is killed after five minutes, which is longer than a healthy spell: its slot's back-off grows all the same."""
    story = Story("a:1", min=1).hear(ev.AgentReady)
    for _ in range(3):
        story.wait(story.cluster.limits.timeouts.worker + 10.0)
    assert story.cluster.hosts["a"].slots[0].failures == 3


def test_a_loss_that_is_reported_twice_counts_once():
    """The server and the launcher both report an agent's end: the core counts one failure and one back-off."""
    story = Story("a:1", min=1).answer()
    story.lose_host("a")
    story.now += 1
    before = story.cluster.hosts["a"]
    story.send(ev.AgentLost("a", "and again"))
    assert story.cluster.hosts["a"] == before


def test_workers_that_end_on_request_are_not_failures():
    """A worker that the driver stopped (scaled down, drained, `--now`) causes no back-off, whatever its exit code."""
    story = Story("a:3", "b:1", min=1).answer()
    story.scale(1, 2).answer()
    story.remove("b", now=True).answer()
    slots = [slot for host in story.cluster.hosts.values() for slot in host.slots]
    assert all(slot.failures == slot.restarts == 0 for slot in slots)
    assert story.records("worker-lost") == []


def test_a_lost_host_comes_back_with_new_workers():
    """A lost host returns with new workers; messages of its earlier workers are dropped."""
    story = Story("a:1", "b:1", min=1).run()
    story.lose_host("b").quiet(10.0)
    assert story.names == ["a/0#1", "b/0#2"]
    before = story.cluster
    story.send(ev.WorkerExited(wid("b/0#1"), -9))
    assert story.cluster == before


LIVES = st.sampled_from([0.0, 0.5, 59.9, 60.0, 61.0, 200.0])
COOLDOWNS = st.sampled_from([(0.0, 0.0), (1.0, 2.0), (5.0, 300.0), (5.0, 5.0)])
BRIEF = settings(max_examples=examples(150))


def expected_backoff(failures: int, cooldown: tuple[float, float]) -> float:
    """The expected back-off, written a second time: none, then the shortest, doubling up to the longest."""
    low, high = cooldown
    return min(high, low * 2.0 ** (failures - 1)) if failures else 0.0


@BRIEF
@given(lives=st.lists(st.tuples(st.integers(0, 1), LIVES, st.booleans()), max_size=20), cooldown=COOLDOWNS)
def test_each_slot_has_its_own_failures(lives, cooldown):
    """Each slot pauses for its own failures only, visibly, until its time; adding the host clears them."""
    story = Story("a:2", min=1, cooldown=cooldown).answer()
    failures = [0, 0]
    for index, life, pardoned in lives:
        story.quiet(max(0.0, story.cluster.hosts["a"].slots[index].backoff_until - story.now))
        w = next(w for w in story.cluster.workers if w.slot == index)
        story.quiet(life)
        lived = story.now - story.cluster.workers[w].since
        story.kill(str(w))
        failures[index] = 1 if lived >= 60.0 else failures[index] + 1
        wait = expected_backoff(failures[index] - 1, cooldown)
        slot = story.cluster.hosts["a"].slots[index]
        assert slot.failures == failures[index]
        assert slot.busy == (not wait)
        if wait:
            assert slot.backoff_until == story.now + wait
            assert f"{w} died (SIGKILL)" in slot.reason
            first = next(each for each in story.cluster.hosts["a"].slots if each.backoff_until > story.now)
            assert story.cluster.hosts["a"].reason == first.reason
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
    """Losses, refusals and failed probes count alike; a healthy spell or adding the host clears them."""
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
        assert host.retry_at == story.now + max(1.0, expected_backoff(failures, cooldown))
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
    """`%elastic_add` of an unreachable host probes it again at once, without waiting for its cooldown."""
    story = Story(min=1).add("a:1", "10.0.0.1").answer()
    story.cut.add(("b", "10.0.0.1"))
    story.add("b:1", "10.0.0.2").answer()
    assert story.cluster.hosts["b"].phase is HostPhase.LOST
    story.cut.clear()
    story.add("b:1").answer()
    assert story.alive("b") == ["b/0#1"]
