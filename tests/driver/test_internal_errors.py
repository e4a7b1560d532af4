"""Errors in the driver's own code: each is reported, and ends one message or all decisions, but never the training."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import tempfile
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

import nbelastic as nbe
from nbelastic.core import commands as cmd
from nbelastic.core import script_rounds
from nbelastic.core.script_rounds import advance
from nbelastic.core.state import Stage
from nbelastic.core.step import step
from nbelastic.driver import decisions, snapshot_writer
from nbelastic.driver.command_executor import CommandExecutor
from nbelastic.driver.driver_snapshot import SavedJob
from nbelastic.driver.job_run import JobRun
from nbelastic.driver.snapshot_writer import SnapshotWriter
from nbelastic.protocol import agent_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.script_events import NodeReady, Terms
from nbelastic.system import fault_handling
from tests.core.story import wid
from tests.driver.fakes import DriverWithFakes, run_story, training
from tests.driver.hostless_cluster import NoHosts
from tests.support.processes import run_folder
from tests.support.waiting import until


def failing_step(world, event, now, **options):
    """Raise for one kind of event."""
    if isinstance(event, ev.Scaled):
        raise KeyError("b/0#1")
    return step(world, event, now, **options)


def trigger_fault(cluster):
    """Send the driver the event for which its code raises."""
    with pytest.raises(nbe.ClusterStoppedError):
        cluster.scale(2, 3)


def kinds(cluster):
    return [event.kind for event in cluster.events]


def test_a_fault_in_a_decision_ends_all_decisions(start_hostless, monkeypatch, caplog):
    """After a fault in a decision all calls raise; status, event and log give advice; only a stop works."""
    monkeypatch.setattr(decisions, "step", failing_step)
    cluster = start_hostless()
    job = cluster.run(print)
    with caplog.at_level(logging.ERROR, logger="nbelastic"):
        trigger_fault(cluster)
    error = r"has failed and makes no more decisions \(KeyError: 'b/0#1', at Scaled\): running jobs continue; stop"
    with pytest.raises(nbe.ClusterStoppedError, match=error):
        job.result(timeout=20)
    for ask in (
        lambda: cluster.run(print),
        lambda: cluster.execute("1"),
        lambda: cluster.add_host("h"),
        cluster.stop_job,
    ):
        with pytest.raises(nbe.ClusterStoppedError, match=error):
            ask()
    assert "makes no more decisions" in cluster.status().reason
    assert kinds(cluster).count("driver-failed") == 1
    assert [bool(record.exc_info) for record in caplog.records] == [True]
    cluster.stop()
    assert cluster.status().phase == "finished"
    assert not run_folder(cluster).exists()


def test_a_button_stops_a_cluster_after_a_fault(start_hostless, monkeypatch):
    """The dashboard's button stops a cluster whose driver makes no more decisions."""
    monkeypatch.setattr(decisions, "step", failing_step)
    cluster = start_hostless()
    trigger_fault(cluster)
    cluster.order({"order": "stop"}, "a page")
    until(lambda: cluster.status().phase == "finished")


def test_an_attach_replaces_a_faulty_driver(start_hostless, monkeypatch):
    """After a fault, `detach` and `attach` give a kept cluster a new driver that makes decisions."""
    cluster = start_hostless(keep=True)
    with monkeypatch.context() as fault:
        fault.setattr(decisions, "step", failing_step)
        trigger_fault(cluster)
    cluster.detach()
    with nbe.Cluster.attach("quiet", discovery=NoHosts()) as again:
        again.scale(2, 3)
        assert again.status().min == 2


def test_the_other_commands_of_a_decision_are_carried_out(start_hostless, monkeypatch):
    """After one command of a decision fails, the driver executes the others: they may abort a broken world."""
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
    slots = cluster._link.configuration.default_slots
    assert done == [cmd.StartAgent(HostSpec("gpu9", slots, follows_gpus=True))]


async def ask_to_leave(fakes):
    """Form a world of two: one member has agreed to leave for a newcomer, the other has not received the request."""
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


def leave_commits(fakes):
    return [message.commit for _, message in fakes.sent if isinstance(message, worker_messages.Leave)]


def test_members_that_were_asked_to_leave_stay(tmp_path):
    """A faulty driver asks the members that agreed to leave at the next commit to stay."""

    async def story():
        async with DriverWithFakes(tmp_path, "a:2") as fakes:
            await ask_to_leave(fakes)
            fakes.driver.stop_deciding(ev.Ticked(), KeyError("x"))
            assert leave_commits(fakes) == [None, None, worker_messages.Leave.STAY, worker_messages.Leave.STAY]

    run_story(story)


@pytest.mark.parametrize("failing", ["note", "send"])
def test_members_that_answered_receive_a_decision(tmp_path, monkeypatch, failing):
    """If the fault comes with the last answer, members learn at which commit they leave or, if that fails, stay."""

    async def story():
        async with DriverWithFakes(tmp_path, "a:2") as fakes:
            await ask_to_leave(fakes)
            driver, send = fakes.driver, fakes.server.send_to_all

            def fail(*event):
                if failing == "note" or (isinstance(event[-1], worker_messages.Leave) and event[-1].commit == 6):
                    raise KeyError("b/0#1")
                send(*event)

            target, name = (driver.event_log, "note_all") if failing == "note" else (fakes.server, "send_to_all")
            monkeypatch.setattr(target, name, fail)
            fakes.deliver("worker/a/1#1", ev.LeaveAcknowledged(wid("a/1#1"), 1, 5, driver.cluster.ask_number))
            await fakes.settle()
            assert driver.internal_errors.decision_failure
            commit = 6 if failing == "note" else worker_messages.Leave.STAY
            assert leave_commits(fakes) == [None, None, commit, commit]

    run_story(story)


async def submit_script(fakes):
    run = JobRun("script-1", None)
    script = agent_messages.Script("script-1", "train.py")
    fakes.driver.jobs.submit(run, SavedJob("script-1", script=(script, Terms())))
    await fakes.settle()
    return run


def test_a_fault_about_a_script_ends_all_decisions(tmp_path, monkeypatch):
    """After a fault about a script's worker group the driver makes no more decisions: the group may be wrong."""
    events = []

    def broken_advance(group, event, now):
        events.append(type(event).__name__)
        raise KeyError("round 1")

    async def story():
        async with DriverWithFakes(tmp_path, "a:1", min=2, elastic_timeout=5.0) as fakes:
            await fakes.advance_time(1.0)
            await submit_script(fakes)
            monkeypatch.setattr(script_rounds, "advance", broken_advance)
            await fakes.advance_time(6.0)
            assert "makes no more decisions (KeyError: 'round 1', at Ticked)" in fakes.driver.status.reason
            fakes.deliver("node/a~1", NodeReady("a", 0, "127.0.0.1:4000", "default"))
            await fakes.advance_time(6.0)
            assert events == ["Ticked"]

    run_story(story)


def test_the_other_commands_of_a_decision_about_a_script_are_carried_out(tmp_path, monkeypatch):
    """After the first command fails, the driver still reports the script's end."""

    def broken_advance(group, event, now):
        group, commands = advance(group, event, now)
        return group, (ev.Ticked(), *commands)

    async def story():
        async with DriverWithFakes(tmp_path, "", min=1) as fakes:
            run = await submit_script(fakes)
            monkeypatch.setattr(script_rounds, "advance", broken_advance)
            fakes.driver.post(ev.JobStopRequested("script-1"))
            await fakes.settle()
            assert "the driver cannot carry out the command Ticked" in fakes.driver.internal_errors.decision_failure
            assert isinstance(run.future.exception(0), nbe.JobStoppedError)

    run_story(story)


def test_a_fault_outside_decisions_fails_one_thing(tmp_path, caplog):
    """An error in a request, a message or a callback fails only that one, and decisions continue."""

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


def test_a_cluster_that_cannot_be_saved_continues(start_hostless, monkeypatch):
    """An error while the driver snapshot is written is reported, and the cluster continues."""
    cluster = start_hostless(keep=True)
    with monkeypatch.context() as fault:
        fault.setattr(SnapshotWriter, "save", lambda notes: {}["keys"])
        cluster.scale(2, 3)
        assert cluster.status().min == 2
    (text,) = [event.text for event in cluster.events if event.kind == "driver-error"]
    assert text == "the cluster cannot be saved for another driver: KeyError: 'keys'"


def test_a_disk_that_cannot_be_written_is_reported_once(tmp_path, monkeypatch):
    """Each file that cannot be written is one event, however many workers report. So other errors are still reported afterwards."""

    def no_file(path="", **name):
        path = path or f"{name['dir']}/{time.monotonic_ns()}"  # as tempfile does
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    async def story():
        async with training(tmp_path, "a:4", min=1) as fakes:
            fakes.train(1)
            await fakes.settle()
            monkeypatch.setattr(tempfile, "mkstemp", no_file)
            monkeypatch.setattr(snapshot_writer, "append_private", no_file)
            for _ in range(3):
                for w, worker in fakes.workers.items():
                    await fakes.advance_time(2.0)
                    worker.train(1)
                    worker.send(messages.WorkerOutput(w, "out", "step", 4, job="job-1"))
            fakes.driver.post(ev.Scaled(2, 3))
            await fakes.settle()
            texts = [record.text for record in fakes.driver.event_log.kept()[0] if record.kind == "driver-error"]
            assert [text.partition(":")[0] for text in texts] == [
                "WorkerProgress cannot be saved",
                "WorkerOutput cannot be saved",
                "the cluster cannot be saved for another driver",
            ]

    run_story(story)


def test_a_cancelled_request_is_forgotten(tmp_path):
    """The driver does not evaluate the condition of a cancelled request again."""
    asked = []

    async def story():
        async with DriverWithFakes(tmp_path, "a:1") as fakes:
            cancelled, waiting = Future(), Future()
            fakes.driver._pending.resolve(cancelled, lambda _: asked.append("cancelled"))
            fakes.driver._pending.resolve(waiting, lambda _: asked.append("waiting"))
            cancelled.cancel()
            await fakes.settle()
            asked.clear()
            fakes.driver.post(ev.Scaled(2, 3))
            await fakes.settle()
            assert set(asked) == {"waiting"}
            waiting.cancel()

    run_story(story)


def test_a_background_task_that_fails_is_started_again(monkeypatch):
    """A failed task restarts after a pause that doubles up to 30 s, and is reset by a long run."""
    pauses, reports, now = [], [], [0.0]
    run_times = iter([0.0] * 10 + [31.0, 0.0])

    async def pause(seconds):
        pauses.append(seconds)

    async def run():
        run_time = next(run_times, None)
        if run_time is not None:
            now[0] += run_time
            raise ValueError("no")

    monkeypatch.setattr(fault_handling, "asyncio", SimpleNamespace(sleep=pause))
    monkeypatch.setattr(fault_handling, "time", SimpleNamespace(monotonic=lambda: now[0]))
    asyncio.run(
        fault_handling.supervise("the look at nothing", run, lambda what, error: reports.append((what, str(error))))
    )
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 0.1, 0.2])
    assert reports == [("the look at nothing (it is started again)", "no")] * 12
