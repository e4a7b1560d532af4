"""The driver's own code has a fault: it is reported, costs one thing or all decisions, and never the training."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

import nbelastic as nbe
from nbelastic import supervision
from nbelastic.core import messages as m
from nbelastic.core import wire
from nbelastic.core.group import Terms
from nbelastic.core.membership import step
from nbelastic.core.rounds import advance
from nbelastic.core.script_messages import ScriptStopped
from nbelastic.core.world import Stage
from nbelastic.driver import driver as module
from nbelastic.driver import scripts
from nbelastic.driver.driver import Driver
from nbelastic.driver.run import Run
from tests.core.story import wid, with_stage
from tests.driver.quiet import NoHosts


def broken_step(world, event, now):
    """Fails at one kind of event."""
    if isinstance(event, m.Scaled):
        raise KeyError("b/0#1")
    return step(world, event, now)


def break_it(cluster):
    """Have the driver take an event that its code cannot take."""
    cluster.scale(2, 3)
    with pytest.raises(nbe.ClusterStoppedError):
        cluster.wait(1, timeout=20)


def reverse(group, commands):
    return group, commands[::-1]


def kinds(cluster):
    return [event.kind for event in cluster.events]


def test_a_fault_in_a_decision_ends_the_deciding(quiet, monkeypatch, caplog):
    """Who waits is told; the status, one event and one message with the traceback say what to do; a stop still works."""
    monkeypatch.setattr(module, "step", broken_step)
    cluster = quiet()
    job = cluster.run(print)
    with caplog.at_level(logging.ERROR, logger="nbelastic"):
        break_it(cluster)
    said = r"has a fault and decides nothing any more \(KeyError: 'b/0#1', at Scaled\): what trains goes on; stop"
    with pytest.raises(nbe.ClusterStoppedError, match=said):
        job.result(timeout=20)
    for ask in (
        lambda: cluster.run(print),
        lambda: cluster.execute("1"),
        lambda: cluster.add_host("h"),
        cluster.stop_job,
    ):
        with pytest.raises(nbe.ClusterStoppedError, match=said):
            ask()
    assert "decides nothing any more" in cluster.status().reason
    assert kinds(cluster).count("driver-failed") == 1
    assert [bool(record.exc_info) for record in caplog.records] == [True]
    cluster.stop()
    assert cluster.status().phase == "finished"
    assert not cluster._run_dir.path.exists()


def test_a_kept_cluster_gets_a_sound_driver_by_an_attach(quiet, monkeypatch):
    """After a fault, `detach` and `attach` are enough: the next driver decides from what it finds."""
    cluster = quiet(keep=True)
    with monkeypatch.context() as fault:
        fault.setattr(module, "step", broken_step)
        break_it(cluster)
    cluster.detach()
    with nbe.Cluster.attach("quiet", discovery=NoHosts()) as again:
        again.scale(2, 3)
        again._wait(lambda driver: driver.world.limits.min == 2 or None, 20, "the new bounds")


def test_the_other_commands_of_a_decision_are_carried_out(quiet, monkeypatch):
    """One command fails: the others, which may abort a broken world, do not wait for a repair."""
    done = []

    def do(_, command, now):
        if isinstance(command, m.Record):
            raise OSError("no")
        done.append(command)

    cluster = quiet()
    monkeypatch.setattr(Driver, "_do", do)
    cluster.add_host("gpu9")
    with pytest.raises(nbe.ClusterStoppedError, match="OSError: no, at HostAdded"):
        cluster.wait(1, timeout=20)
    assert done == [m.StartAgent(m.HostSpec("gpu9", cluster._default_slots))]


def test_members_that_were_asked_to_leave_stay(quiet, monkeypatch):
    """Each has promised to stop at its next commit until it hears more: the faulty driver sends that they stay."""
    cluster, sent = quiet(), []
    driver = cluster._driver
    story = with_stage(Stage.ASKED)
    asked, world = story.last(m.AskLeave), story.world
    monkeypatch.setattr(driver.fleet, "to_workers", lambda workers, message: sent.append((workers, message)))
    driver.request(driver.carry_out, [asked], story.now).exception(timeout=20)
    driver.request(driver.stop_deciding, m.Ticked(), KeyError("x")).exception(timeout=20)
    assert sent[1:] == [(world.members, wire.Leave(world.epoch, wire.Leave.STAY))]


@pytest.mark.parametrize("broken", ["note", "to_workers"])
def test_members_that_have_answered_stay_if_nobody_tells_them_where_to_leave(quiet, monkeypatch, broken):
    """The fault comes when the last of them has answered: the agreed commit has been chosen, and they have not heard of it."""
    cluster, sent = quiet(), []
    driver = cluster._driver
    story = with_stage(Stage.ASKED).hear(m.WorkerOffered, "a/0#1", "b/0#1")

    def to_workers(workers, message):
        if broken == "to_workers" and isinstance(message, wire.Leave) and message.commit not in (None, wire.Leave.STAY):
            raise KeyError("c/0#1")
        sent.append((workers, message))

    def begin():
        monkeypatch.setattr(driver.clock, "now", lambda: story.now)
        driver.world = story.world
        driver.carry_out([story.last(m.AskLeave)], story.now)

    monkeypatch.setattr(driver.fleet, "to_workers", to_workers)
    driver.request(begin).result(timeout=20)
    if broken == "note":
        monkeypatch.setattr(driver.chronicle, "note", lambda event, now: 1 / 0)
    driver.post(m.WorkerOffered(wid("c/0#1"), 1, 3, story.world.asks))
    with pytest.raises(nbe.ClusterStoppedError):
        cluster.wait(9, timeout=20)
    leaves = [message.commit for _, message in sent if isinstance(message, wire.Leave)]
    assert leaves[0] is None
    assert leaves[-1] == (4 if broken == "note" else wire.Leave.STAY), leaves


def test_a_fault_in_a_decision_about_a_script_ends_the_deciding_too(quiet, monkeypatch):
    """Its timer is not left without a next one unseen, nor does it act on a group of which nobody knows whether it is right."""
    cluster = quiet()
    driver, passed = cluster._driver, []

    def broken_advance(group, event, now):
        passed.append(event)
        if len(passed) == 2:
            raise KeyError("round 1")
        return advance(group, event, now)

    monkeypatch.setattr(scripts, "advance", broken_advance)
    script = Run("script-1", None, None)
    driver.request(driver.scripts.submit, script, wire.Script("script-1", "train.py"), Terms()).result(timeout=20)
    for _ in range(3):
        driver.call(driver.scripts._pass)
    with pytest.raises(nbe.ClusterStoppedError, match=r"decides nothing any more \(KeyError: 'round 1', at Passed\)"):
        cluster.wait(1, timeout=20)
    driver.request(lambda: None).exception(timeout=20)
    assert len(passed) == 2
    cluster.stop()
    assert script.future.done()


def test_the_other_commands_of_a_decision_about_a_script_are_carried_out(quiet, monkeypatch):
    """One of them fails: the others, which end its nodes, do not wait for a repair."""
    cluster = quiet()
    driver, done = cluster._driver, []
    do = driver.scripts._do

    def failing(command):
        if isinstance(command, m.Record) and command.kind == "job-stopped":
            raise OSError("no")
        done.append(command)
        do(command)

    script = Run("script-1", None, None)
    driver.request(driver.scripts.submit, script, wire.Script("script-1", "train.py"), Terms()).result(timeout=20)
    monkeypatch.setattr(driver.scripts, "_do", failing)
    monkeypatch.setattr(scripts, "advance", lambda group, event, now: reverse(*advance(group, event, now)))
    driver.call(driver.scripts._advance, ScriptStopped("stopped by a test"), driver.clock.read())
    with pytest.raises(nbe.ClusterStoppedError):
        cluster.wait(1, timeout=20)
    assert [type(command).__name__ for command in done] == ["EndScript"]


def test_a_fault_beside_the_decisions_costs_one_thing(quiet, monkeypatch, caplog):
    """A question, a message, a callback: who asked is told, one event each says the rest, and the driver decides on."""
    cluster = quiet()
    driver = cluster._driver

    def fail(*_):
        raise LookupError("nobody")

    with pytest.raises(LookupError):
        driver.when(fail).result(timeout=20)
    monkeypatch.setattr(driver, "_read", fail)
    for _ in range(3):
        driver.call(driver._hear, "agent/gpu9~1", wire.AgentGoodbye("gpu9", "test"))
    driver.call(fail)
    cluster.scale(2, 3)
    cluster._wait(lambda driver: driver.world.limits.min == 2 or None, 20, "the new bounds")
    texts = [event.text for event in cluster.events if event.kind == "driver-error"]
    assert len(texts) == 2, texts
    assert texts[0] == "AgentGoodbye of agent/gpu9~1: LookupError: nobody"
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 2


def test_a_cluster_that_cannot_be_saved_goes_on(quiet, monkeypatch):
    """A fault where the next driver's knowledge is written costs that knowledge alone, and is reported."""
    cluster = quiet(keep=True)
    with monkeypatch.context() as fault:
        fault.setattr(cluster._driver.notes, "save", lambda driver: {}["keys"])
        cluster.scale(2, 3)
        cluster._wait(lambda driver: driver.world.limits.min == 2 or None, 20, "the new bounds")
    (text,) = [event.text for event in cluster.events if event.kind == "driver-error"]
    assert text == "the cluster cannot be saved for another kernel: KeyError: 'keys'"


def test_who_gives_up_waiting_is_forgotten(quiet):
    """Time-outs leave nothing behind that each later event would ask."""
    cluster = quiet()
    for _ in range(3):
        with pytest.raises(nbe.WaitTimeoutError):
            cluster.wait(1, timeout=0.01)
    cluster.scale(2, 3)
    cluster._wait(lambda driver: driver.world.limits.min == 2 or None, 20, "the new bounds")
    assert cluster._driver._waiters == []


def test_a_background_task_that_fails_is_started_again(monkeypatch):
    """After a pause that doubles up to 30 s, and begins anew after a long life; each failure is reported."""
    pauses, reports, now = [], [], [0.0]
    lives = iter([0.0] * 10 + [31.0, 0.0])

    async def pause(seconds):
        pauses.append(seconds)

    async def run():
        life = next(lives, None)
        if life is not None:
            now[0] += life
            raise ValueError("no")

    monkeypatch.setattr(supervision, "asyncio", SimpleNamespace(sleep=pause))
    monkeypatch.setattr(supervision, "time", SimpleNamespace(monotonic=lambda: now[0]))
    asyncio.run(
        supervision.supervise("the look at nothing", run, lambda what, error: reports.append((what, str(error))))
    )
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 0.1, 0.2])
    assert reports == [("the look at nothing (it is started again)", "no")] * 12
