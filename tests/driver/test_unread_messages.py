"""What the driver says of hosts and workers whose messages may wait unread."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

from nbelastic.client.stopping import CLOSING_TIMEOUT
from nbelastic.driver.agents import Agents
from nbelastic.driver.clock import MAX_HELD, Clock
from nbelastic.driver.liveness import MAX_CHECK_DELAY, Liveness
from nbelastic.driver.workers import Workers
from nbelastic.protocol import events as ev
from nbelastic.protocol.json_encoding import encode
from nbelastic.protocol.timeouts import Timeouts
from nbelastic.transport.backlog import Backlog
from tests.driver.fakes import run_story, training
from tests.support.waiting import until_async as until
from tests.transport.link_ends import MESSAGE, PEER, WORKER, raw_socket, running_driver

HEARTBEAT = 0.5


class Checks:
    """The checks of a driver with one host, on this machine. `made`: how many; `lost` and `records` say what they have found."""

    def __init__(self, server, clock, silence, workers=None):
        self.made, self.lost, self.records, self.posted = 0, [], [], []
        part = SimpleNamespace(_server=server, _clock=clock, peer_of=lambda _: PEER)
        agents = SimpleNamespace(
            unread_seconds=lambda: Agents.unread_seconds(part),
            silence_of=lambda host: Agents.silence_of(part, host),
            has_local_agent=lambda _: True,
            has_reconnected=lambda _: False,
            lose=lambda host, *_: self.lost.append(host),
        )
        self.cluster = SimpleNamespace(
            hosts={"a": SimpleNamespace(phase=None)},
            disconnected={},
            ending={},
            ending_nodes={},
            stopping="",
            phase="waiting",
            members=[],
            generation=1,
            stands_still=False,
            workers={},
        )
        self.liveness = Liveness(
            SimpleNamespace(silence=silence, heartbeat=HEARTBEAT, lease=900.0),
            agents,
            workers or SimpleNamespace(are_heard=lambda _: True),
            telemetry=SimpleNamespace(is_idle=lambda *_: False, blocked_text=lambda _: ""),
            clock=clock,
            cluster=self._look,
            post=self.posted.append,
            record=lambda record: self.records.append(record.kind),
        )

    def _look(self):
        self.made += 1
        return self.cluster


def test_a_driver_that_was_stopped_was_away_and_not_late():
    """Its hosts have sent more than one batch meanwhile. These messages did not wait because they came too fast."""

    async def story():
        async with running_driver() as driver:
            checks = Checks(driver.server, Clock(HEARTBEAT + MAX_CHECK_DELAY), silence=2.0)
            with raw_socket(driver) as socket:
                socket.send(encode(MESSAGE))
                await until(lambda: driver.received)
                task = asyncio.create_task(checks.liveness.watch())
                await asyncio.sleep(0.1)
                for _ in range(2000):
                    socket.send(b"")
                time.sleep(3.5)  # noqa: ASYNC251  (as if the process were stopped)
                await asyncio.sleep(1.0)
                task.cancel()
            assert checks.records == ["driver-away"]

    asyncio.run(story())


def test_a_host_that_sends_is_not_lost_after_a_long_turn_of_the_loop():
    """Many decisions are made in one turn, in which a check is due too. The host's messages wait in the socket meanwhile."""

    async def story():
        async with running_driver() as driver:
            clock = Clock(HEARTBEAT + MAX_CHECK_DELAY)
            checks, decided = Checks(driver.server, clock, silence=1.0), asyncio.Event()

            with raw_socket(driver) as socket:

                def decide() -> None:  # as `Decisions.run` with a full inbox: no other task runs
                    for _ in range(20):
                        socket.send(b"")
                        time.sleep(0.1)
                        clock.now()
                    decided.set()

                socket.send(encode(MESSAGE))
                await until(lambda: driver.received)
                loop = asyncio.get_running_loop()
                task = asyncio.create_task(checks.liveness.watch())
                await asyncio.sleep(0)
                at = loop.time() + HEARTBEAT
                loop.call_at(at - 0.02, time.sleep, 0.06)  # so that these two are due in one turn: the check first
                loop.call_at(at + 0.02, decide)
                await decided.wait()
                for _ in range(10):  # turns, in which the check is made
                    await asyncio.sleep(0)
                task.cancel()
            assert checks.made == 1
            assert not checks.lost

    asyncio.run(story())


def test_no_worker_responds_without_a_message():
    """A worker was unresponsive before messages began to wait. None of it has come since."""
    now = [100.0]
    clock = Clock(3.0, lambda: now[0], lambda: now[0])
    server = SimpleNamespace(heard_at={PEER: 100.0, f"worker/{WORKER}": 100.0}, backlog=Backlog(1000))
    checks = Checks(server, clock, 10.0, workers=Workers(server, None, clock, None, None))
    checks.liveness._agents.silence_of = lambda _: 0.0
    checks.cluster.workers = {WORKER: None}
    for at in range(101, 110):
        now[0] = float(at)
        clock.now()
    server.backlog.end(109.5)
    now[0] = 110.2
    checks.liveness._check_workers(checks.cluster)
    server.backlog.begin()
    now[0] = 111.2
    checks.liveness._check_workers(checks.cluster)
    assert [type(event) for event in checks.posted] in ([ev.WorkerSilent], [ev.WorkerSilent, ev.WorkerSilent])


def records_of(durations):
    """What a driver records that never sees an empty socket: each message of the only connection takes so many seconds."""
    now = [100.0]
    clock = Clock(3.0, lambda: now[0], lambda: now[0])
    server = SimpleNamespace(heard_at={}, backlog=Backlog(7))
    checks = Checks(server, clock, 10.0)
    server.backlog.end(now[0])
    server.backlog.begin()
    for seconds in durations:
        now[0] += seconds
        clock.now()
        server.backlog.note_read(b"a", now[0])
        checks.liveness._note_backlog(checks.cluster)
    return checks.records


def test_it_is_said_once_that_the_driver_is_late():
    """One connection sends without end, and a whole queue of it is read each seven seconds."""
    assert records_of([1.0] * 600) == ["driver-late"]


def test_a_busy_driver_that_is_late_again_says_it_again():
    """Meanwhile it reads each queue within a heartbeat, but never sees that no message waits."""
    assert records_of([2.0] * 20 + [HEARTBEAT / 50] * 100 + [2.0] * 20) == ["driver-late", "driver-late"]


def hold_back_messages(fakes):
    """From now on messages wait unread. Returns a function with which the driver reads them."""
    waiting, receive = [], fakes.server.on_message
    fakes.server.on_message = lambda *message: waiting.append(message)
    fakes.server.backlog.end(asyncio.get_running_loop().time())
    fakes.server.backlog.begin()

    def read() -> None:
        fakes.server.on_message = receive
        fakes.server.backlog.end(asyncio.get_running_loop().time())
        for message in waiting:
            receive(*message)

    return read


def test_a_deadline_waits_for_messages_that_are_unread(tmp_path):
    """A job is stopped, and both programs report their ends at once. The driver reads that only 12 s later.

    It killed both workers after 5 s, and replaced them.
    """

    async def story():
        async with training(tmp_path, "a,b", min=2, timeouts=Timeouts(leave=5.0, stop=5.0)) as fakes:
            workers, read = set(fakes.workers), hold_back_messages(fakes)
            await fakes.advance_time(2.0)
            fakes.driver.post(ev.JobStopRequested("job-1", "by the test"))
            await fakes.advance_time(12.0)
            read()
            await fakes.advance_time(2.0)
            assert not fakes.driver.jobs.present
            assert set(fakes.workers) == workers
            assert "worker-killed" not in fakes.kinds()

    run_story(story)


def test_a_deadline_waits_for_half_a_minute_at_most(tmp_path):
    """The driver never catches up: what it has not read then counts as missing."""

    async def story():
        async with training(tmp_path, "a,b", min=2, timeouts=Timeouts(leave=5.0, stop=5.0)) as fakes:
            hold_back_messages(fakes)
            await fakes.advance_time(2.0)
            fakes.driver.post(ev.JobStopRequested("job-1", "by the test"))
            await fakes.advance_time(MAX_HELD)
            assert "worker-killed" not in fakes.kinds()
            await fakes.advance_time(6.0)
            assert "worker-killed" in fakes.kinds()

    run_story(story)


def test_the_announced_end_of_a_host_waits_for_no_message(tmp_path):
    """While messages wait unread, a host with 20 s to go leaves in time."""

    async def story():
        async with training(tmp_path, "a,b", min=1, timeouts=Timeouts(leave=5.0, stop=5.0)) as fakes:
            fakes.train()
            await fakes.advance_time(1.0)
            hold_back_messages(fakes)
            await fakes.advance_time(2.0)
            fakes.driver.post(ev.HostRemoved("b", within=20.0))
            await fakes.advance_time(21.0)
            assert not fakes.driver.cluster.ending
            assert "world-broken" in fakes.kinds()

    run_story(story)


def test_a_silent_host_is_lost_in_time_while_deadlines_wait(tmp_path):
    """The driver reads every connection in turn, so it knows that this host has sent nothing, though some queues are long."""

    async def story():
        async with training(tmp_path, "a,b", min=1) as fakes:
            fakes.train()
            messages, silence = fakes.server.backlog.messages, fakes.driver.settings.silence
            messages.end(asyncio.get_running_loop().time())
            messages.begin()
            fakes.silent.add("b")
            await fakes.advance_time(silence + 3.0)
            assert fakes.driver._clock.is_held
            assert "host-lost" in fakes.kinds()

    run_story(story)


def test_the_end_of_the_cluster_waits_for_no_message(tmp_path):
    """Programs had half a minute more than the user gave, and the client had killed the driver by then."""

    async def story():
        async with training(tmp_path, "a,b", min=2) as fakes:
            fakes.train()
            hold_back_messages(fakes)
            await fakes.advance_time(2.0)
            fakes.driver.post(ev.StopRequested("by the test", within=5.0))
            await fakes.advance_time(4.0)
            assert "worker-killed" not in fakes.kinds()
            await fakes.advance_time(1.0 + CLOSING_TIMEOUT)
            assert "worker-killed" in fakes.kinds()
            assert fakes.ended

    run_story(story)
