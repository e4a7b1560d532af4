"""Messages between driver and peers: their order, when they may be sent, names, and errors of receivers."""

import asyncio
import json
import logging
import threading

from nbelastic.protocol import events as ev
from nbelastic.protocol import worker_messages
from nbelastic.protocol.json_encoding import encode
from nbelastic.transport.client import Client
from nbelastic.transport.delivery import RETRANSMIT_BATCH, Delivery
from nbelastic.transport.server import Server
from tests.support import waiting
from tests.support.waiting import until_async as until
from tests.transport.link_ends import MESSAGE, PEER, WORKER, RunningDriver, connected_client, raw_socket, running_driver


def test_messages_go_both_ways_in_order():
    """The driver receives a worker's messages in order, and the worker receives the driver's messages in order."""

    async def story():
        async with running_driver() as driver:
            async with connected_client(driver) as worker:
                for commit in range(100):
                    worker.send(ev.LeaveAcknowledged(WORKER, 1, commit))
                await until(lambda: len(driver.received) == 100)
                assert [message.commit for message in driver.received_from(PEER)] == list(range(100))
                for generation in range(100):
                    driver.server.send(PEER, worker_messages.Abort(generation, "because"))
                await until(lambda: len(worker.received) == 100)
                assert [message.generation for message in worker.received] == list(range(100))

    asyncio.run(story())


def test_an_answer_acknowledges(monkeypatch):
    """A worker sends no acknowledgement before its next message, unless eight messages have come."""
    empty = []
    receive_now = Server._receive

    def receive(server, peer, frames, now):
        if frames[-1] == b"":
            empty.append(peer)
        receive_now(server, peer, frames, now)

    async def story():
        async with running_driver(100.0) as driver, connected_client(driver, heartbeat=100.0) as client:
            client.send(ev.WorkerFormed(WORKER, 1))
            await until(lambda: driver.received)
            monkeypatch.setattr(Server, "_receive", receive)
            delivery = driver.server._deliveries[PEER]
            driver.server.send(PEER, worker_messages.Abort(1, "because"))
            await until(lambda: client.received)
            assert delivery.pending == 1
            client.send(ev.WorkerFormed(WORKER, 2))
            await until(lambda: delivery.pending == 0)
            assert not empty
            for number in range(RETRANSMIT_BATCH):
                driver.server.send(PEER, worker_messages.Abort(number, "because"))
            await until(lambda: delivery.pending == 0)
            assert len(client.received) == RETRANSMIT_BATCH + 1

    asyncio.run(story())


def test_a_message_before_the_connection_is_kept():
    """The driver receives a message that a worker sent before its connection was made."""

    async def story():
        async with running_driver() as driver:
            client = Client(
                driver.server.address, driver.keys.for_clients(), PEER, worker_messages.ToWorker, lambda _: None
            )
            client.send(MESSAGE)
            client.start()
            await until(lambda: driver.received_from(PEER) == [MESSAGE])
            await asyncio.to_thread(client.close)

    asyncio.run(story())


def test_closing_sends_what_is_queued():
    """The last messages of a closing client arrive."""

    async def story():
        async with running_driver() as driver:
            async with connected_client(driver) as worker:
                worker.send(MESSAGE)
                await until(
                    lambda: driver.received
                )  # so that the client is connected: it then has half a second for its last messages
                worker.send(ev.WorkerSucceeded(WORKER, 1))
            await until(lambda: driver.received_from(PEER) == [MESSAGE, ev.WorkerSucceeded(WORKER, 1)])

    asyncio.run(story())


def test_a_tick_follows_the_call_that_closes(tmp_path):
    """A client ticks once more after `close()` was called, also if it was ticking just then."""
    ticks, ticking, go_on = [], threading.Event(), threading.Event()

    def tick():
        ticks.append(client._closing)
        ticking.set()
        assert go_on.wait(10)
        return 10.0

    client = Client(tmp_path, None, PEER, worker_messages.ToWorker, print, tick=tick)
    client.start()
    assert ticking.wait(10)
    closing = threading.Thread(target=client.close)
    closing.start()
    waiting.until(lambda: client._closing)
    go_on.set()
    closing.join(10)
    assert ticks == [False, True]


def test_a_returning_peer_takes_its_name_over():
    """If a peer connects again under the same name, messages go to the new connection only."""

    async def story():
        async with running_driver() as driver:
            async with connected_client(driver) as first:
                first.send(MESSAGE)
                await until(lambda: len(driver.received) == 1)
                async with connected_client(driver) as second:
                    second.send(MESSAGE)
                    await until(lambda: len(driver.received) == 2)
                    driver.server.send(PEER, worker_messages.Abort(1, ""))
                    await until(lambda: second.received)
                    assert not first.received

    asyncio.run(story())


def test_a_message_to_a_missing_peer_is_dropped():
    """A message to a peer that is not connected is dropped silently."""

    async def story():
        async with running_driver() as driver:
            driver.server.send("worker/nobody/0#1", worker_messages.Abort(1, ""))
            async with connected_client(driver) as worker:
                worker.send(MESSAGE)
                await until(lambda: driver.received)

    asyncio.run(story())


def test_a_client_drops_unknown_messages(caplog):
    """A worker counts and drops what is not one of its messages, and receives the next one."""

    async def story():
        async with running_driver() as driver:
            async with connected_client(driver) as worker:
                worker.send(MESSAGE)
                await until(lambda: driver.received)
                for frame in (b"{", b'{"type":"Retire"}', b"[" * 100_000, b"\xff\xfe"):
                    driver.server._send_or_bundle(PEER, frame)
                driver.server.send(PEER, worker_messages.Abort(1, ""))
                await until(lambda: worker.received)
                assert worker.received == [worker_messages.Abort(1, "")]
                assert worker.dropped == 4

    with caplog.at_level(logging.WARNING, "nbelastic.transport"):
        asyncio.run(story())
    assert len(caplog.records) == 1


def test_an_error_in_a_receiver_does_not_end_the_link(caplog):
    """An exception in the handling of a message is logged, and the next message is received."""

    async def story():
        received = []

        def fail_once(*message):
            received.append(message)
            if len(received) == 1:
                raise ValueError("a bug")

        driver = RunningDriver(1.0)
        driver.server = Server(driver.keys, fail_once)
        await driver.server.start()
        async with connected_client(driver) as worker:
            worker._on_message = fail_once
            worker.send(MESSAGE)
            worker.send(MESSAGE)
            await until(lambda: len(received) == 2)
            received.clear()
            driver.server.send(PEER, worker_messages.Abort(1, ""))
            driver.server.send(PEER, worker_messages.Abort(1, ""))
            await until(lambda: len(received) == 2)
        await driver.server.stop()

    with caplog.at_level(logging.ERROR, "nbelastic.transport"):
        asyncio.run(story())
    assert caplog.text.count("ValueError: a bug") == 2


def test_text_with_a_lone_surrogate_can_be_sent():
    """A lone surrogate in an error's text, as from a file name, does not keep the message from arriving."""

    async def story():
        async with running_driver() as driver:
            async with connected_client(driver) as worker:
                worker.send(ev.WorkerRaised(WORKER, 1, True, "no such file: '\udcff'"))
                await until(lambda: driver.received)
                assert driver.received_from(PEER)[0].error.startswith("no such file")

    asyncio.run(story())


def test_text_with_a_lone_surrogate_can_be_logged():
    """In JSON, as in the event log, a lone surrogate becomes `?`."""
    line = {"at": 1.5, "event": {"type": "ProgramEnded", "error": "\udcff", "more": ["a", None]}}
    assert json.loads(encode(line)) == {"at": 1.5, "event": {"type": "ProgramEnded", "error": "?", "more": ["a", None]}}


def test_a_repeated_message_is_not_decoded():
    """A repeated message is dropped by its number: an invalid one under that number is not decoded."""

    async def story():
        async with running_driver() as driver:
            with raw_socket(driver) as socket:
                delivery = Delivery(1.0, 7)
                delivery.enqueue(encode(MESSAGE))
                ((head, frame),) = delivery.due(0.0)
                socket.send_multipart([head, frame])
                await until(lambda: driver.received)
                socket.send_multipart([head, b"nonsense"])
                delivery.enqueue(encode(ev.LeaveAcknowledged(WORKER, 1, 1)))
                socket.send_multipart(delivery.due(0.0)[0])
                await until(lambda: len(driver.received) == 2)
                assert not driver.server.dropped

    asyncio.run(story())


def test_a_forgotten_peer_leaves_no_state():
    """The last message of a lost peer is received, but the server keeps no state of it and sends it no heartbeat."""

    async def story():
        async with running_driver() as driver:
            lost = set()
            driver.server._is_known = lambda peer: peer not in lost
            with raw_socket(driver) as socket:
                delivery = Delivery(1.0, 7)
                delivery.enqueue(encode(MESSAGE))
                socket.send_multipart(delivery.due(0.0)[0])
                await until(lambda: driver.received)
                lost.add(PEER)
                driver.server.forget(PEER)
                delivery.enqueue(encode(ev.WorkerSucceeded(WORKER, 1)))
                socket.send_multipart(delivery.due(0.0)[0])
                await until(lambda: len(driver.received) == 2)
                assert not driver.server.heard_at
                assert not driver.server._deliveries

    asyncio.run(story())
