"""A whole driver, from its start to its end, without a process, a socket or a real wait."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nbelastic.core.state import HostPhase
from nbelastic.driver.driver_snapshot import DriverSnapshot
from nbelastic.driver.request_answers import ready_workers
from nbelastic.driver.snapshot_writer import SnapshotWriter
from nbelastic.protocol import agent_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import HostSpec, WorkerId
from nbelastic.protocol.requests import FindController
from tests.driver.fakes import DriverWithFakes, run_story, training


def test_a_whole_life(tmp_path: Path) -> None:
    """Two hosts start, a world forms, a worker dies and is replaced, the job is stopped, and then the cluster."""

    async def story() -> None:
        async with DriverWithFakes(tmp_path, "a:2,b:1", min=2) as fakes:
            await fakes.advance_time(2.0)
            assert ready_workers(fakes.driver.cluster) == 3
            run = fakes.submit()
            await fakes.advance_time(2.0)
            assert fakes.ranks == ["a/0#1", "a/1#1", "b/0#1"]
            fakes.train(5)
            await fakes.settle()
            fakes.kill("a/1#1")
            await fakes.advance_time(3.0)
            assert fakes.ranks == ["a/0#1", "a/1#2", "b/0#1"]
            assert [fakes.kinds().count(kind) for kind in ("worker-lost", "world-broken")] == [1, 1]
            fakes.train(5)
            await fakes.settle()
            assert (fakes.driver.status.step, fakes.driver.cluster.resets) == (
                11,
                1,
            )  # one commit before all left for the newcomer
            fakes.driver.post(ev.JobStopRequested("job-1"))
            await fakes.advance_time(1.0)
            assert run.future.done()
        assert fakes.ended
        assert not any(agent.is_alive for agent in fakes.agents.values())
        assert fakes.driver.status.phase == "finished"

    run_story(story)


def test_a_user_without_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run with a number for which no account is known. A cluster there ends as any other."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)

    async def story() -> None:
        async with DriverWithFakes(tmp_path, "a:1", min=1) as fakes:
            await fakes.advance_time(2.0)
        assert fakes.driver.why_ended == "the test is over"

    run_story(story)


def test_a_newcomer_joins_by_plan(tmp_path: Path) -> None:
    """A newcomer joins at an agreed commit: no generation breaks, and no step is lost."""

    async def story() -> None:
        async with training(tmp_path, "a:2", min=1) as fakes:
            fakes.train(5)
            await fakes.settle()
            fakes.driver.post(ev.HostAdded(HostSpec("b", 1), "a test"))
            await fakes.advance_time(3.0)
            assert fakes.ranks == ["a/0#1", "a/1#1", "b/0#1"]
            assert (fakes.driver.cluster.resets, fakes.driver.status.step) == (0, 5)
            agreed = [message.commit for _, message in fakes.sent if isinstance(message, worker_messages.Leave)]
            assert agreed == [None, None, 6, 6]

    run_story(story)


def test_late_progress_of_an_earlier_job_is_dropped(tmp_path: Path) -> None:
    """A late progress message of the earlier job does not change the progress of the next job."""

    async def story() -> None:
        async with training(tmp_path, "a:1", min=1) as fakes:
            fakes.train(5)
            await fakes.settle()
            fakes.driver.post(ev.JobStopRequested("job-1"))
            await fakes.advance_time(1.0)
            fakes.submit("job-2")
            late = worker_messages.WorkerProgress(WorkerId("a", 0, 1), 1, 7, {"loss": 0.5})
            fakes.deliver("worker/a/0#1", late)
            await fakes.advance_time(2.0)
            status = fakes.driver.status
            assert (status.job, status.step, status.report) == ("job-2", 0, {})
            fakes.train(3)
            await fakes.settle()
            assert fakes.driver.status.step == 3

    run_story(story)


def test_the_event_log_says_from_which_commit_a_sharded_model_continues(tmp_path: Path) -> None:
    """The new rank 0 reports lost ranks of the generation before; the event names their workers, once."""

    async def story() -> None:
        async with training(tmp_path, "a:2,b:1", min=2) as fakes:
            first = fakes.driver.cluster.generation
            members = [str(w) for w in fakes.driver.cluster.members]
            report = worker_messages.WorkerProgress(
                WorkerId.parse(members[0]), first, 1, {}, 1.0, worker_messages.Copies(100, 1)
            )
            fakes.deliver(f"worker/{members[0]}", report)
            await fakes.settle()
            fakes.kill(members[2])
            await fakes.advance_time(1.0)
            now = fakes.driver.cluster
            continued = worker_messages.Continued(first, 1, (2,), now.size)
            again = worker_messages.Copies(100, 2, continued=continued)
            for took in (1.0, None):
                report = worker_messages.WorkerProgress(now.members[0], now.generation, 2, {}, took, again)
                fakes.deliver(f"worker/{now.members[0]}", report)
            await fakes.settle()
            texts = [event.text for event in fakes.driver.event_log.kept()[0] if event.kind == "state-recovered"]
            assert texts == [f"world of {now.size} continues from commit 1 (copies of {members[2]})"]

    run_story(story)


def test_a_recovery_that_is_reported_late_is_in_the_event_log(tmp_path: Path) -> None:
    """Rank 0's first report of a short world comes after the next one has formed: the event is about the world that has continued."""

    async def story() -> None:
        async with training(tmp_path, "a:2,b:1", min=2) as fakes:
            first, lost = fakes.driver.cluster.generation, fakes.driver.cluster.members[2]
            world = fakes.driver.cluster.members[:2]
            fakes.driver.telemetry.add_world(first, fakes.driver.cluster.members)
            fakes.kill(str(lost))
            await fakes.advance_time(8.0)
            fakes.train(3)
            await fakes.advance_time(3.0)
            assert fakes.driver.cluster.generation > first + 1
            for rank, w in enumerate(world):  # rank 1 says so too, and is not recorded
                continued = worker_messages.Continued(first, 1, (2,), 2, rank)
                copies = worker_messages.Copies(100, 2, continued=continued)
                report = worker_messages.WorkerProgress(w, first + 1, 2, {}, 1.0, copies)
                fakes.deliver(f"worker/{w}", report)
            await fakes.settle()
            texts = [event.text for event in fakes.driver.event_log.kept()[0] if event.kind == "state-recovered"]
            assert texts == [f"world of 2 continues from commit 1 (copies of {lost})"]

    run_story(story)


def test_times_of_day_are_right_after_the_driver_was_stopped(tmp_path: Path) -> None:
    """The driver's process is stopped for 10 minutes: the times of output, reports and checkpoints are right before and after it."""

    async def story() -> None:
        async with training(tmp_path, "a:1", min=1) as fakes:
            driver, w = fakes.driver, fakes.driver.cluster.members[0]
            now, generation = asyncio.get_running_loop().time, driver.cluster.generation

            async def shown(commit: int) -> list[float]:
                found = worker_messages.Checkpoint(1, commit, age=4.0)
                report = worker_messages.WorkerProgress(w, generation, commit, {"loss": 0.5}, checkpoint=found)
                printed = messages.WorkerOutput(w, "out", "x\n", 2 * commit, "job-1", 0)
                for message in (report, printed):
                    fakes.deliver(f"worker/{w}", message)
                await fakes.settle()
                ((_, line),) = driver.runs["job-1"].output.since(commit - 1, most=1)
                row = driver.telemetry.history.since("", 0).rows[-1]
                return [line.time, row[1], driver.status.checkpoint.made_at + 4.0]

            first, began = await shown(1), now()
            asyncio.get_running_loop().now += 600.0
            driver.post(ev.Ticked())
            await fakes.settle()
            assert driver.status.checkpoint.made_at + 4.0 == pytest.approx(first[2], abs=0.6)
            second = await shown(2)
            assert [b - a for a, b in zip(first, second, strict=True)] == pytest.approx([now() - began] * 3, abs=0.6)

    run_story(story)


def test_a_silent_host_is_lost_and_rejoins(tmp_path: Path) -> None:
    """A host is lost only after `silence`; the others continue, and the host rejoins when it sends messages again."""

    async def story() -> None:
        async with training(tmp_path, "a:1,b:1", min=1, silence=10.0) as fakes:
            fakes.silent.add("b")
            await fakes.advance_time(9.0)
            assert fakes.driver.cluster.hosts["b"].phase is HostPhase.UP
            await fakes.advance_time(3.0)
            assert fakes.driver.cluster.hosts["b"].reason.startswith("no message from it for 1")
            assert fakes.ranks == ["a/0#1"]
            fakes.silent.clear()
            fakes.train(5)
            await fakes.advance_time(10.0)
            assert fakes.ranks == ["a/0#1", "b/0#2"]

    run_story(story)


def test_no_host_is_lost_while_messages_wait_unread(tmp_path: Path) -> None:
    """The driver is slower than its hosts: they are not silent, and may make commits."""

    async def story() -> None:
        async with training(tmp_path, "a:1,b:1", min=1, silence=10.0) as fakes:
            fakes.server.backlog.end(asyncio.get_running_loop().time())
            fakes.server.backlog.begin()
            fakes.busy |= {"a", "b"}
            await fakes.advance_time(30.0)
            assert fakes.ranks == ["a/0#1", "b/0#1"]
            assert not fakes.driver.cluster.stall
            assert [each.kind for each in fakes.driver.event_log.records].count("driver-late") == 1
            fakes.server.backlog.end(asyncio.get_running_loop().time())
            await fakes.advance_time(3.0)
            assert fakes.driver.cluster.hosts["b"].phase is not HostPhase.UP

    run_story(story)


def test_the_end_of_an_old_agent_does_not_end_the_next(tmp_path: Path) -> None:
    """If a host is removed and added again, the late end of its old agent does not count against the new agent."""

    async def story() -> None:
        async with training(tmp_path, "a:1,b:1", min=1) as fakes:
            (old,) = (agent for agent in fakes.agents.values() if agent.spec.name == "b")
            receive = old.receive
            old.receive = lambda message: (
                isinstance(message, agent_messages.StopAgent) or receive(message)
            )  # the agent ends late
            fakes.driver.post(ev.HostRemoved("b", by="a test", now=True))
            await fakes.settle()
            assert "b" not in fakes.driver.cluster.hosts
            fakes.driver.post(ev.HostAdded(HostSpec("b", 1), "a test"))
            old._on_stop("its agent ended")
            await fakes.advance_time(3.0)
            assert "host-lost" not in fakes.kinds()
            assert fakes.driver.cluster.hosts["b"].phase is HostPhase.UP

    run_story(story)


class SlowSearch(DriverWithFakes):
    """A driver whose search for a host needs a while to end, as `ssh -G` does that is killed."""

    async def locate(self, spec: HostSpec, launcher: str) -> tuple[str, str]:
        self.may_end = asyncio.Event()
        try:
            await asyncio.Event().wait()
        finally:
            await self.may_end.wait()
        return "127.0.0.1", ""


def test_the_driver_ends_after_the_search_for_a_host_that_was_removed(tmp_path: Path) -> None:
    """The driver left the process behind that was searching."""

    async def story() -> None:
        async with SlowSearch(tmp_path, "a") as fakes:
            fakes.driver.post(ev.HostRemoved("a", now=True))
            await fakes.settle()
            fakes.driver.post(ev.StopRequested("by the test"))
            await fakes.advance_time(20.0)
            assert not fakes.ended
            fakes.may_end.set()
            await fakes.settle()
            assert fakes.ended

    run_story(story)


def test_the_controller_ends_last(tmp_path):
    """A controller ends after the driver, so that it removes the run folder if the driver is killed meanwhile."""
    stopped_before_close = []

    async def story():
        async with DriverWithFakes(tmp_path, "a:1") as fakes:
            await fakes.advance_time(2.0)
            fakes.driver.request(FindController(30.0))
            await fakes.settle()
            event_log = fakes.driver.event_log
            close = event_log.close
            event_log.close = lambda: (close(), stopped_before_close.append(fakes.controller_stopped))
        assert fakes.controller_stopped

    run_story(story)
    assert stopped_before_close == [False]


def test_reports_of_many_workers_are_saved_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a world forms, the driver saves once for many workers. A state is saved before its commands go out."""
    saved: list[int] = []  # how many members had a world at each save
    save = SnapshotWriter.save

    def note_and_save(writer: SnapshotWriter) -> None:
        save(writer)
        saved.append(len(writer._last.cluster.members) if writer._last is not None else 0)

    monkeypatch.setattr(SnapshotWriter, "save", note_and_save)

    async def story() -> None:
        async with DriverWithFakes(tmp_path, "a:40", min=40) as fakes:
            await fakes.advance_time(2.0)
            asked: list[bool] = []
            send = fakes.server.send

            def note(peer: str, message: Any) -> None:
                if isinstance(message, worker_messages.Formation):
                    asked.append(saved[-1] == 40)
                send(peer, message)

            fakes.server.send = note
            before = len(saved)
            fakes.submit()
            await fakes.advance_time(2.0)
            assert len(fakes.ranks) == 40
            assert asked
            assert all(asked)
            assert len(saved) - before < 40, "fewer than one a worker; each has reported three times"
            assert DriverSnapshot.read(tmp_path / "run").cluster.formed

    run_story(story)
