"""Many queued messages: the driver's loop stays responsive, telemetry waits, and a stopped driver is not flooded."""

import asyncio
import json
import logging
import time
from collections import Counter, defaultdict
from itertools import pairwise

import zmq

from nbelastic.protocol import events as ev
from nbelastic.protocol import worker_messages
from nbelastic.protocol.json_encoding import encode
from nbelastic.transport.backlog import read_turn
from nbelastic.transport.client import Client
from nbelastic.transport.delivery import MAX_UNACKNOWLEDGED, RETRANSMIT_BATCH, WINDOW, Delivery
from nbelastic.transport.sockets import BATCH
from tests.support.waiting import until as block_until
from tests.support.waiting import until_async as until
from tests.transport.link_ends import MESSAGE, PEER, WORKER, connected_client, raw_socket, running_driver


def test_the_loop_runs_other_tasks_between_batches():
    """After each batch of queued messages the other tasks of the driver's loop run."""

    async def story():
        async with running_driver() as driver:
            count, turns = 20_000, []
            with raw_socket(driver) as socket:
                socket.send(encode(ev.LeaveAcknowledged(WORKER, 1, 0)))  # the handshake needs this loop
                await until(lambda: driver.received)
                for number in range(1, count):  # none is read meanwhile, as if the driver were stopped
                    socket.send(encode(ev.LeaveAcknowledged(WORKER, 1, number)))
                while len(driver.received) < count:
                    turns.append(len(driver.received))
                    await asyncio.sleep(0)
            batches = [after - before for before, after in pairwise([*turns, count])]
            assert max(batches) <= BATCH
            assert [message.commit for message in driver.received_from(PEER)] == list(range(count))

    asyncio.run(story())


class Waiting:
    """Stands for the server's socket: so many heartbeats of one connection wait in it."""

    def __init__(self, count):
        self.count = count

    def recv_multipart(self, _flags):
        if not self.count:
            raise zmq.Again
        self.count -= 1
        return [PEER.encode(), b""]

    def send_multipart(self, _frames, _flags):
        pass


def test_the_server_knows_that_messages_wait(monkeypatch):
    """Until the last one is read, it has read only what came before it had last read all."""

    async def story():
        async with running_driver() as driver:
            await asyncio.sleep(0)  # its first read finds nothing
            backlog, socket, began = driver.server.backlog, Waiting(5 * BATCH), time.monotonic()
            with monkeypatch.context() as patch:
                patch.setattr(driver.server, "_socket", socket)
                driver.server._schedule_read()
                await asyncio.sleep(0)
                while socket.count:
                    assert backlog.messages.read_up_to(time.monotonic()) <= began
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
                now = time.monotonic()
                assert backlog.messages.read_up_to(now) == now

    asyncio.run(story())


def test_after_a_long_turn_nothing_is_sent_twice():
    """The driver's loop was busy for longer than acknowledgements take. They wait unread, and are read before others are missed."""

    async def story():
        first, second = (worker_messages.DropGroup(generation) for generation in (1, 2))
        async with running_driver(heartbeat=0.1) as driver, connected_client(driver, heartbeat=0.1) as client:
            client.send(MESSAGE)
            await until(lambda: driver.received and driver.server.has_acknowledged(PEER))
            sent, send_frames = Counter(), driver.server._send_frames

            def counted(peer, frames):
                sent.update([list(frames)[-1]])
                send_frames(peer, frames)

            driver.server._send_frames = counted
            driver.server.send(PEER, first)
            block_until(lambda: client.received and not client._delivery.must_acknowledge)  # the loop is busy
            time.sleep(0.5)  # noqa: ASYNC251  (longer than an acknowledgement may take)
            driver.server.send(PEER, second)
            assert sent[encode(first)] == sent[encode(second)] == 1
            await until(lambda: driver.server.has_acknowledged(PEER))
            assert client.received == [first, second]
            assert sent[encode(first)] == 1

    asyncio.run(story())


def test_a_message_that_is_sent_does_not_hide_that_others_wait(monkeypatch):
    """Messages came during a long turn of the loop. The driver sends one before it reads: it still knows that they may wait."""

    async def story():
        async with running_driver() as driver:
            with raw_socket(driver) as socket:
                socket.send(encode(MESSAGE))
                await until(lambda: driver.received)
            began, waiting = time.monotonic(), Waiting(5 * BATCH)
            with monkeypatch.context() as patch:
                patch.setattr(driver.server, "_socket", waiting)
                driver.server.send(PEER, worker_messages.DropGroup(1))
                await read_turn()
                assert waiting.count
                assert driver.server.backlog.messages.read_up_to(time.monotonic()) <= began

    asyncio.run(story())


def test_queued_messages_come_before_telemetry():
    """All queued messages are received before telemetry.

    Of the telemetry between them few are received, the newest last.
    """

    async def story():
        async with running_driver() as driver:
            count, turns, delivery = 5000, 0, Delivery(1.0, 7)
            with raw_socket(driver) as socket:
                socket.send(encode(MESSAGE))
                await until(lambda: driver.received)
                for number in range(1, count + 1):
                    delivery.enqueue(encode(ev.LeaveAcknowledged(WORKER, 1, number)))
                    if delivery.pending < WINDOW:
                        socket.send_multipart(delivery.due(0.0)[0])
                    socket.send_multipart(
                        [delivery.head(), encode(worker_messages.WorkerProgress(WORKER, 1, number, {}))]
                    )
                sent_messages = [ev.LeaveAcknowledged(WORKER, 1, number) for number in range(1, WINDOW)]
                newest = worker_messages.WorkerProgress(WORKER, 1, count, {})
                while newest not in driver.received_from(PEER):
                    turns += 1
                    await asyncio.sleep(0)
            received = driver.received_from(PEER)[1:]
            assert [message for message in received if isinstance(message, ev.LeaveAcknowledged)] == sent_messages
            telemetry = [message.commit for message in received if isinstance(message, worker_messages.WorkerProgress)]
            assert telemetry == sorted(set(telemetry))
            assert len(telemetry) <= turns  # many, if this loop is faster than ZeroMQ
            assert len(telemetry) < count

    asyncio.run(story())


def test_a_stopped_driver_is_not_flooded():
    """A driver that does not read gets a limited number of messages, the first few again, and no telemetry."""

    async def story():
        async with running_driver(heartbeat=0.1) as driver:
            client = Client(
                driver.server.address,
                driver.keys.for_clients(),
                PEER,
                worker_messages.ToWorker,
                lambda _: None,
                heartbeat=0.1,
            )
            sent = count_sent(client)
            client.start()
            client.send(MESSAGE)
            await until(lambda: driver.received)
            sent_messages = [ev.LeaveAcknowledged(WORKER, 1, number) for number in range(300)]
            for message in sent_messages:
                client.send(message)

            def wait_without_reading(times):
                """Block this loop, and so the driver, until the client has sent the first message `times` times."""
                client.report(worker_messages.WorkerProgress(WORKER, 1, times, {}))
                while sent["LeaveAcknowledged"][encode(sent_messages[0])] < times:
                    client.report(worker_messages.WorkerProgress(WORKER, 1, times, {}))
                    time.sleep(0.001)
                return sent["WorkerProgress"].total()

            wait_without_reading(2)  # by now the client has read the driver's earlier messages
            assert wait_without_reading(3) == wait_without_reading(4)
            assert sent["LeaveAcknowledged"].total() <= WINDOW + 3 * RETRANSMIT_BATCH
            await until(lambda: sent_messages[-1] in driver.received_from(PEER))
            assert [
                message for message in driver.received_from(PEER) if isinstance(message, ev.LeaveAcknowledged)
            ] == sent_messages
            assert sent["LeaveAcknowledged"].total() <= len(sent_messages) + WINDOW + 3 * RETRANSMIT_BATCH
            await until(lambda: worker_messages.WorkerProgress(WORKER, 1, 4, {}) in driver.received_from(PEER))
            await asyncio.to_thread(client.close)

    asyncio.run(story())


def count_sent(client):
    """Count how often a client sends each of its messages, by kind and content."""
    sent = defaultdict(Counter)
    send_all = client._send_all

    def counted(socket, messages):
        for _, frame in messages:
            if frame:
                sent[json.loads(frame)["type"]][frame] += 1
        send_all(socket, messages)

    client._send_all = counted
    return sent


def test_unsent_telemetry_is_replaced():
    """Of the telemetry from before the driver is there, the newest of each kind arrives, and no other."""

    async def story():
        async with running_driver() as driver:
            client = Client(
                driver.server.address, driver.keys.for_clients(), PEER, worker_messages.ToWorker, lambda _: None
            )
            for number in range(100):
                client.report(worker_messages.WorkerProgress(WORKER, 1, number, {}))
                client.report(worker_messages.StackShown(WORKER, number, "", ""))
            client.start()
            await until(lambda: len(driver.received) == 2)
            client.send(MESSAGE)
            await until(lambda: MESSAGE in driver.received_from(PEER))
            assert len(driver.received) == 3
            assert worker_messages.WorkerProgress(WORKER, 1, 99, {}) in driver.received_from(PEER)
            assert worker_messages.StackShown(WORKER, 99, "", "") in driver.received_from(PEER)
            await asyncio.to_thread(client.close)

    asyncio.run(story())


class ClearedReports(dict):
    """Another thread begins a new session at the moment when a report is taken."""

    def popitem(self):
        self.clear()
        return super().popitem()


def test_a_new_session_begins_while_a_report_goes_out():
    """An agent's main thread begins it for a new driver. The report is lost, as it may be, and the link goes on."""

    async def story():
        async with running_driver() as driver:
            client = Client(
                driver.server.address, driver.keys.for_clients(), PEER, worker_messages.ToWorker, lambda _: None
            )
            client._reports = ClearedReports()
            client.start()
            client.report(worker_messages.WorkerProgress(WORKER, 1, 1, {}))
            await until(lambda: not client._reports)
            client.send(MESSAGE)
            await until(lambda: driver.received_from(PEER) == [MESSAGE])
            await asyncio.to_thread(client.close)

    asyncio.run(story())


def test_discarded_messages_are_logged(caplog):
    """While the driver is away a limited number of messages waits.

    The log reports once that older ones are discarded.
    """

    async def story():
        async with running_driver() as driver:
            await driver.server.stop()
            client = Client(
                driver.server.address, driver.keys.for_clients(), PEER, worker_messages.ToWorker, lambda _: None
            )
            client.start()
            for number in range(MAX_UNACKNOWLEDGED + 5):
                client.send(ev.LeaveAcknowledged(WORKER, 1, number))
            await until(lambda: client._delivery.discarded == 5)
            assert client._delivery.pending == MAX_UNACKNOWLEDGED
            await asyncio.to_thread(client.close)

    with caplog.at_level(logging.WARNING, "nbelastic.transport"):
        asyncio.run(story())
    assert [record.message for record in caplog.records] == [
        "the driver acknowledges nothing: the oldest messages are discarded"
    ]
