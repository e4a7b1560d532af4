"""Errors in the driver's own code: each is reported, and costs one message or all decisions, but never the training."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

import nbelastic as nbe
from nbelastic.core import commands as cmd
from nbelastic.core import script_rounds
from nbelastic.core.script_rounds import advance
from nbelastic.core.state import Stage
from nbelastic.core.step import step
from nbelastic.driver import decisions
from nbelastic.driver.command_executor import CommandExecutor
from nbelastic.driver.driver_snapshot import SavedJob
from nbelastic.driver.job_run import JobRun
from nbelastic.driver.snapshot_writer import SnapshotWriter
from nbelastic.protocol import agent_messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.script_events import NodeReady, Terms
from nbelastic.system import fault_handling
from tests.core.story import wid
from tests.driver.fakes import DriverWithFakes, run_story
from tests.driver.hostless_cluster import NoHosts
from tests.support.waiting import until


def broken_step(world, event, now):
    """Fails at one kind of event."""
    if isinstance(event, ev.Scaled):
        raise KeyError("b/0#1")
    return step(world, event, now)


def break_it(cluster):
    """Have the driver take an event that its code cannot take."""
    with pytest.raises(nbe.ClusterStoppedError):
        cluster.scale(2, 3)


def kinds(cluster):
    return [event.kind for event in cluster.events]


def test_a_fault_in_a_decision_ends_the_deciding(start_hostless, monkeypatch, caplog):
    """All waiting calls fail; the status, one event and one message with the traceback say what to do; a stop still works."""
    monkeypatch.setattr(decisions, "step", broken_step)
    cluster = start_hostless()
    job = cluster.run(print)
    with caplog.at_level(logging.ERROR, logger="nbelastic"):
        break_it(cluster)
    said = r"has failed and makes no more decisions \(KeyError: 'b/0#1', at Scaled\): running jobs continue; stop"
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
    assert "makes no more decisions" in cluster.status().reason
    assert kinds(cluster).count("driver-failed") == 1
    assert [bool(record.exc_info) for record in caplog.records] == [True]
    cluster.stop()
    assert cluster.status().phase == "finished"
    assert not cluster._link.run_folder.path.exists()


def test_a_button_stops_a_cluster_that_decides_nothing(start_hostless, monkeypatch):
    """The dashboard's button can end it."""
    monkeypatch.setattr(decisions, "step", broken_step)
    cluster = start_hostless()
    break_it(cluster)
    cluster.order({"order": "stop"}, "a page")
    until(lambda: cluster.status().phase == "finished")


def test_a_kept_cluster_gets_a_sound_driver_by_an_attach(start_hostless, monkeypatch):
    """After a fault, `detach` and `attach` are enough: the next driver decides from what it finds."""
    cluster = start_hostless(keep=True)
    with monkeypatch.context() as fault:
        fault.setattr(decisions, "step", broken_step)
        break_it(cluster)
    cluster.detach()
    with nbe.Cluster.attach("quiet", discovery=NoHosts()) as again:
        again.scale(2, 3)
        assert again.status().min == 2


def test_the_other_commands_of_a_decision_are_carried_out(start_hostless, monkeypatch):
    """One command fails: the others, which may abort a broken world, do not wait for a repair."""
    done = []

    def do(_, command, now):
        if isinstance(command, cmd.Record):
            raise OSError("no")
        done.append(command)

    cluster = start_hostless()
    monkeypatch.setattr(CommandExecutor, "execute", do)
    cluster.add_host("gpu9")
    with pytest.raises(nbe.ClusterStoppedError, match="OSError: no, at HostAdded"):
        cluster.wait(1, timeout=20)
    assert done == [cmd.StartAgent(HostSpec("gpu9", cluster._link.configuration.default_slots))]


async def asked_to_leave(fakes):
    """A world of two trains, one of them has promised to stop for a newcomer, and the other one has not heard the question."""
    await fakes.advance_time(2.0)
    fakes.submit()
    await fakes.advance_time(2.0)
    fakes.train(5)
    await fakes.settle()
    fakes.lost.add(("a/1#1", worker_messages.Leave))
    fakes.driver.post(ev.HostAdded(HostSpec("b", 1), "a test"))
    await fakes.settle()
    assert fakes.driver.cluster.awaiting == {wid("a/1#1")}
    assert fakes.driver.cluster.stage is Stage.ASKED


def leaves(fakes):
    return [message.commit for _, message in fakes.sent if isinstance(message, worker_messages.Leave)]


def test_members_that_were_asked_to_leave_stay(tmp_path):
    """Each has promised to stop at its next commit until it hears more: the faulty driver sends that they stay."""

    async def story():
        async with DriverWithFakes(tmp_path, "a:2") as fakes:
            await asked_to_leave(fakes)
            fakes.driver.stop_deciding(ev.Ticked(), KeyError("x"))
            assert leaves(fakes) == [None, None, worker_messages.Leave.STAY, worker_messages.Leave.STAY]

    run_story(story)


@pytest.mark.parametrize("broken", ["note", "send"])
def test_members_that_have_answered_are_told_what_becomes_of_them(tmp_path, monkeypatch, broken):
    """The fault comes with the last answer, when the commit is chosen: they hear of it or, if that is what fails, stay."""

    async def story():
        async with DriverWithFakes(tmp_path, "a:2") as fakes:
            await asked_to_leave(fakes)
            driver, send = fakes.driver, fakes.server.send_to_all

            def fail(*event):
                if broken == "note" or (isinstance(event[-1], worker_messages.Leave) and event[-1].commit == 6):
                    raise KeyError("b/0#1")
                send(*event)

            target, name = (driver.event_log, "note") if broken == "note" else (fakes.server, "send_to_all")
            monkeypatch.setattr(target, name, fail)
            fakes.deliver("worker/a/1#1", ev.LeaveAcknowledged(wid("a/1#1"), 1, 5, driver.cluster.ask_number))
            await fakes.settle()
            assert driver.internal_errors.decision_failure
            commit = 6 if broken == "note" else worker_messages.Leave.STAY
            assert leaves(fakes) == [None, None, commit, commit]

    run_story(story)


async def with_script(fakes):
    run = JobRun("script-1", None)
    script = agent_messages.Script("script-1", "train.py")
    fakes.driver.jobs.submit(run, SavedJob("script-1", script=(script, Terms())))
    await fakes.settle()
    return run


def test_a_fault_in_a_decision_about_a_script_ends_the_deciding_too(tmp_path, monkeypatch):
    """The worker group may be wrong, so the driver makes no more decisions about it."""
    events = []

    def broken_advance(group, event, now):
        events.append(type(event).__name__)
        raise KeyError("round 1")

    async def story():
        async with DriverWithFakes(tmp_path, "a:1", min=2, elastic_timeout=5.0) as fakes:
            await fakes.advance_time(1.0)
            await with_script(fakes)
            monkeypatch.setattr(script_rounds, "advance", broken_advance)
            await fakes.advance_time(6.0)
            assert "makes no more decisions (KeyError: 'round 1', at Ticked)" in fakes.driver.status.reason
            fakes.deliver("node/a~1", NodeReady("a", 0, "127.0.0.1:4000", "default"))
            await fakes.advance_time(6.0)
            assert events == ["Ticked"]

    run_story(story)


def test_the_other_commands_of_a_decision_about_a_script_are_carried_out(tmp_path, monkeypatch):
    """The first one fails: the script's end is reported all the same."""

    def broken_advance(group, event, now):
        group, commands = advance(group, event, now)
        return group, (ev.Ticked(), *commands)

    async def story():
        async with DriverWithFakes(tmp_path, "", min=1) as fakes:
            run = await with_script(fakes)
            monkeypatch.setattr(script_rounds, "advance", broken_advance)
            fakes.driver.post(ev.JobStopRequested("script-1"))
            await fakes.settle()
            assert "the driver cannot carry out the command Ticked" in fakes.driver.internal_errors.decision_failure
            assert isinstance(run.future.exception(0), nbe.JobStoppedError)

    run_story(story)


def test_a_fault_beside_the_decisions_costs_one_thing(tmp_path, caplog):
    """A request, a message and a callback: the request fails, each other error is an event, and decisions go on."""

    def fail(*_):
        raise LookupError("nobody")

    async def story():
        async with DriverWithFakes(tmp_path, "a:1") as fakes:
            driver = fakes.driver
            await fakes.settle()
            question = Future()
            driver._pending.resolve(question, fail)
            for _ in range(3):
                fakes.deliver("agent/a~1", worker_messages.QueryPosition(1))
            asyncio.get_running_loop().call_soon(fail)
            driver.post(ev.Scaled(2, 3))
            await fakes.settle()
            assert isinstance(question.exception(0), LookupError)
            assert driver.cluster.limits.min == 2
            texts = [record.text for record in driver.event_log.kept()[0] if record.kind == "driver-error"]
            assert len(texts) == 2, texts
            assert (
                "QueryPosition of agent/a~1: TypeError: agent/a~1 has sent QueryPosition, which the driver does not know"
                in texts
            )

    run_story(story)
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 2


def test_a_cluster_that_cannot_be_saved_goes_on(start_hostless, monkeypatch):
    """An error while the driver snapshot is written is reported, and costs nothing else."""
    cluster = start_hostless(keep=True)
    with monkeypatch.context() as fault:
        fault.setattr(SnapshotWriter, "save", lambda notes: {}["keys"])
        cluster.scale(2, 3)
        assert cluster.status().min == 2
    (text,) = [event.text for event in cluster.events if event.kind == "driver-error"]
    assert text == "the cluster cannot be saved for another driver: KeyError: 'keys'"


def test_who_gives_up_waiting_is_forgotten(tmp_path):
    """Later events do not evaluate their predicates any more."""
    asked = []

    async def story():
        async with DriverWithFakes(tmp_path, "a:1") as fakes:
            given_up, waiting = Future(), Future()
            fakes.driver._pending.resolve(given_up, lambda _: asked.append("given up"))
            fakes.driver._pending.resolve(waiting, lambda _: asked.append("waiting"))
            given_up.cancel()
            await fakes.settle()
            asked.clear()
            fakes.driver.post(ev.Scaled(2, 3))
            await fakes.settle()
            assert set(asked) == {"waiting"}
            waiting.cancel()

    run_story(story)


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

    monkeypatch.setattr(fault_handling, "asyncio", SimpleNamespace(sleep=pause))
    monkeypatch.setattr(fault_handling, "time", SimpleNamespace(monotonic=lambda: now[0]))
    asyncio.run(
        fault_handling.supervise("the look at nothing", run, lambda what, error: reports.append((what, str(error))))
    )
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 0.1, 0.2])
    assert reports == [("the look at nothing (it is started again)", "no")] * 12
