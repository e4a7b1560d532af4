"""The driver's inbox: events that wait there together are decided on one after the other, and saved once."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.state import Stage
from nbelastic.driver import decisions
from nbelastic.driver.clock import Clock
from nbelastic.driver.decisions import BATCH, HELD_TICK, Decisions
from nbelastic.driver.event_log import EventLog
from nbelastic.driver.internal_errors import InternalErrors
from nbelastic.protocol import events as ev
from nbelastic.protocol.cluster_limits import Limits
from nbelastic.protocol.ids import HostSpec
from tests.core.story import wid

HOSTS = [HostSpec(f"h{number}", 2) for number in range(300)]


class Watched(Decisions):
    """Decisions whose steps are noted in this order: `save`, executed commands, and events after their decisions."""

    def __init__(self, folder: Path, clock: Clock | None = None) -> None:
        self.done: list[object] = []
        self.failures: list[ev.Event] = []
        self.log = folder / "events.jsonl"
        errors = InternalErrors("here", lambda _: None)

        def fail(event: ev.Event, error: Exception) -> None:
            self.failures.append(event)
            errors.report_decision_failure(event, error)

        super().__init__(
            Limits(min=1),
            clock or Clock(3600.0),
            EventLog(self.log),
            errors,
            is_stale=lambda _: False,
            save=lambda: self.done.append("save"),
            execute=lambda command, _: self.done.append(command),
            after_decisions=lambda decided: self.done.extend(event for each in decided for event in each.events),
            on_failure=fail,
        )

    def start(self, event: ev.Event) -> None:
        self._decide([event])
        self.done.clear()


@pytest.fixture
def driver(tmp_path):
    made = Watched(tmp_path)
    yield made
    made.close()
    made._event_log.close()


def decide(driver, *events):
    """Put these events into the inbox and decide on all of them. Returns the steps."""
    for event in events:
        driver.post(event)
    while driver._inbox:
        driver._decide_waiting()
    return driver.done


def test_events_that_wait_together_are_saved_once(driver):
    """Of 300 agents that have connected together, 256 start their workers after one save."""
    driver.start(ev.HostsDiscovered(tuple(HOSTS)))
    agents = [ev.AgentReady(host.name, 1) for host in HOSTS]
    done = decide(driver, *agents)
    assert len([step for step in done if isinstance(step, cmd.StartWorker)]) == 2 * len(HOSTS)
    first = done.index(next(step for step in done if isinstance(step, ev.AgentReady)))
    assert done[0] == "save"
    assert done[:first].count("save") == 2
    assert len([step for step in done[:first] if isinstance(step, cmd.StartWorker)]) == 2 * BATCH
    assert [step for step in done if isinstance(step, ev.AgentReady)] == agents


def test_other_events_are_decided_on_alone(driver):
    """The commands of earlier events are executed before an event that is not one of thousands."""
    driver.start(ev.HostsDiscovered(tuple(HOSTS[:2])))
    first, lost = ev.AgentReady("h0", 1), ev.AgentLost("h1", "gone")
    done = decide(driver, first, lost, ev.AgentReady("h1", 1))
    kinds = [step for step in done if step in (first, lost) or isinstance(step, cmd.StartWorker)]
    assert kinds[:4] == [cmd.StartWorker(wid("h0/0#1")), cmd.StartWorker(wid("h0/1#1")), first, lost]


def test_a_fault_in_a_decision_leaves_those_before_it(driver, monkeypatch):
    """Decisions before the fault are saved and executed, and the log names the event that caused the fault."""
    step = decisions.step

    def failing(cluster, event, now, **options):
        if event == ev.AgentReady("h1", 1):
            raise KeyError("h1")
        return step(cluster, event, now, **options)

    driver.start(ev.HostsDiscovered(tuple(HOSTS[:3])))
    monkeypatch.setattr(decisions, "step", failing)
    done = decide(driver, *(ev.AgentReady(f"h{number}", 1) for number in range(3)))
    assert [step for step in done if isinstance(step, cmd.StartWorker)] == [
        cmd.StartWorker(wid("h0/0#1")),
        cmd.StartWorker(wid("h0/1#1")),
    ]
    assert driver.failures == [ev.AgentReady("h1", 1)]
    lines = driver.log.read_text().splitlines()
    assert [json.loads(line)["event"]["host"] for line in lines if "AgentReady" in line] == ["h0", "h1"]


def test_reports_that_change_nothing_saved_are_not_saved(driver):
    """The reports for which a stage waits are saved only when a command follows, as after the last one."""
    driver.start(ev.HostsDiscovered((HostSpec("h0", 8),)))
    workers = [wid(f"h0/{slot}#1") for slot in range(8)]
    decide(driver, ev.AgentReady("h0", 1), *(ev.WorkerRegistered(w) for w in workers), ev.JobSubmitted("job"))
    decide(driver, *(ev.WorkerReady(w, "job", 0, 0, clean=True, store="x", holds_state=False) for w in workers))
    assert driver.cluster.stage is Stage.FORMING
    driver.done.clear()
    formed = [ev.WorkerFormed(w, 1, {}) for w in workers]
    assert decide(driver, *formed[:-1]) == formed[:-1]
    assert driver._save_timer is None
    assert decide(driver, formed[-1])[len(formed) - 1] == "save"
    assert driver.cluster.stage is Stage.RUNNING


def test_workers_that_end_together_are_replaced_together(driver):
    """A library crashes in all eight: the others are aborted at once, and then all are replaced after one save."""
    driver.start(ev.HostsDiscovered((HostSpec("h0", 8),)))
    workers = [wid(f"h0/{slot}#1") for slot in range(8)]
    decide(driver, ev.AgentReady("h0", 1), *(ev.WorkerRegistered(w) for w in workers), ev.JobSubmitted("job"))
    decide(driver, *(ev.WorkerReady(w, "job", 0, 0, clean=True, store="x", holds_state=False) for w in workers))
    decide(driver, *(ev.WorkerFormed(w, 1, {}) for w in workers))
    driver.done.clear()
    done = decide(driver, *(ev.WorkerExited(w, -11) for w in workers))
    assert done.index(ev.WorkerExited(workers[0], -11)) < done.index(cmd.StartWorker(wid("h0/1#2")))
    assert any(isinstance(step, cmd.AbortWorld) for step in done[: done.index(ev.WorkerExited(workers[0], -11))])
    started = [number for number, step in enumerate(done) if isinstance(step, cmd.StartWorker)]
    assert len(started) == 8
    assert "save" not in done[started[1] : started[-1]]


def test_many_decisions_let_the_driver_read_messages_meanwhile(tmp_path, monkeypatch):
    """A hundred hosts are lost together, and each decision takes 10 ms. Other tasks run about every 0.1 s, not only after all."""
    step, turns = decisions.step, []

    def slow(*arguments, **options):
        time.sleep(0.01)
        return step(*arguments, **options)

    async def story():
        driver = Watched(tmp_path)
        driver.start(ev.HostsDiscovered(tuple(HOSTS[:100])))
        deciding = asyncio.create_task(driver.run())
        await asyncio.sleep(0)  # it waits for events
        for host in HOSTS[:100]:
            driver.post(ev.AgentLost(host.name, "gone"))
        while driver._inbox:
            turns.append(len(driver._inbox))
            await asyncio.sleep(0)
        deciding.cancel()
        driver.close()
        driver._event_log.close()

    monkeypatch.setattr(decisions, "step", slow)
    asyncio.run(story())
    assert len(turns) > 3


def test_a_clock_that_stands_still_causes_no_tick(tmp_path):
    """A deadline is a millisecond away, for as long as messages wait unread. A tick a millisecond would save the snapshot each time."""

    async def story():
        clock = Clock(3600.0)
        driver = Watched(tmp_path, clock)
        at = clock.now() + 0.001
        clock.hold(hold=True)
        driver._tick(at)
        assert not driver._inbox
        assert driver._deadline_timer.when() - asyncio.get_running_loop().time() > HELD_TICK / 2
        clock.hold(hold=False)
        driver._tick(at)
        assert list(driver._inbox) == [ev.Ticked()]
        driver.close()
        driver._event_log.close()

    asyncio.run(story())
