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
from nbelastic.core.membership import step
from nbelastic.core.world import Stage
from nbelastic.driver import driver as module
from nbelastic.driver.driver import Driver
from tests.core.story import with_stage
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
    world = with_stage(Stage.ASKED).world
    monkeypatch.setattr(driver.fleet, "to_workers", lambda workers, message: sent.append((workers, message)))
    driver.world = world
    driver.request(driver._stop_deciding, m.Ticked(), KeyError("x")).exception(timeout=20)
    assert sent == [(world.members, wire.Leave(world.epoch, wire.Leave.STAY))]


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
