"""A host's workers and nodes are connected through the host's agent, which relays their messages in bundles."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
import zmq

from nbelastic.protocol import agent_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.json_encoding import encode
from nbelastic.transport.client import Client
from nbelastic.transport.delivery import Delivery
from nbelastic.transport.relay import bundles
from nbelastic.transport.server import Server
from nbelastic.transport.sockets import HEARD, RELAY
from tests.support.waiting import until_async as until
from tests.transport.link_ends import PEER, WORKER, connected_client, raw_socket, running_driver
from tests.transport.test_breaks import CuttableProxy

AGENT = "agent/a~1"
OTHER_WORKER = WorkerId("a", 1, 1)


@asynccontextmanager
async def running_agent(driver, folder, name=AGENT, heartbeat=0.1):
    """An agent whose client relays its workers' messages."""
    folder.mkdir(parents=True, exist_ok=True)
    client = Client(
        driver.server.address,
        driver.keys.for_clients(),
        name,
        agent_messages.ToAgent,
        lambda _: None,
        heartbeat=heartbeat,
    )
    client.start(relay=folder)
    try:
        yield client
    finally:
        await asyncio.to_thread(client.close)


@asynccontextmanager
async def connected_worker(folder, w=WORKER, heartbeat=0.1):
    """A worker that is connected to its host's agent only."""
    received = []
    client = Client(folder, None, f"worker/{w}", worker_messages.ToWorker, received.append, heartbeat=heartbeat)
    client.received = received
    client.start()
    try:
        yield client
    finally:
        await asyncio.to_thread(client.close)


def test_messages_go_both_ways_in_order(tmp_path):
    """Two workers exchange a thousand messages each way, in a folder whose path is longer than a socket's may be."""
    folder = tmp_path / ("x" * 120)

    async def story():
        async with (
            running_driver() as driver,
            running_agent(driver, folder),
            connected_worker(folder) as first,
            connected_worker(folder, OTHER_WORKER) as second,
        ):
            for commit in range(1000):
                first.send(ev.LeaveAcknowledged(WORKER, 1, commit))
                second.send(ev.LeaveAcknowledged(OTHER_WORKER, 1, commit))
            await until(lambda: len(driver.received) == 2000)
            for w in (WORKER, OTHER_WORKER):
                assert [message.commit for message in driver.received_from(f"worker/{w}")] == list(range(1000))
            for generation in range(1000):
                driver.server.send_to_all(
                    (PEER, f"worker/{OTHER_WORKER}"), worker_messages.Abort(generation, "because")
                )
            await until(lambda: len(first.received) == len(second.received) == 1000)
            assert [message.generation for message in second.received] == list(range(1000))

    asyncio.run(story())


@asynccontextmanager
async def two_workers(folder, monkeypatch):
    """A driver, two registered workers of one host, and all that it sends from then on: pairs of a peer and frames."""
    sent = []
    async with (
        running_driver(0.1) as driver,
        running_agent(driver, folder),
        connected_worker(folder) as first,
        connected_worker(folder, OTHER_WORKER) as second,
    ):
        first.send(ev.WorkerFormed(WORKER, 1))
        second.send(ev.WorkerFormed(OTHER_WORKER, 1))
        await until(lambda: len(driver.received) == 2)
        send_now = Server._send_frames
        monkeypatch.setattr(Server, "_send_frames", lambda server, *args: (sent.append(args), send_now(server, *args)))
        yield driver, first, second, sent


def test_a_message_to_all_workers_of_a_host_is_sent_once(tmp_path, monkeypatch):
    """The driver sends it, and its heartbeats to these workers, as one message to the agent."""

    async def story():
        async with two_workers(tmp_path, monkeypatch) as (driver, first, second, sent):
            driver.server.send_to_all((PEER, f"worker/{OTHER_WORKER}"), worker_messages.Abort(1, "because"))
            await until(lambda: first.received and second.received)
            orders = [frames for peer, frames in sent if any(b"because" in frame for frame in frames)]
            assert len(orders) == 1
            await until(lambda: len(sent) > 10)
            assert {peer for peer, _ in sent} == {AGENT}

    asyncio.run(story())


def test_workers_of_a_host_share_a_heartbeat(tmp_path, monkeypatch):
    """If the driver has nothing to acknowledge, one frame is its heartbeat for both workers, and both receive it."""
    names = {PEER.encode(), f"worker/{OTHER_WORKER}".encode()}

    def shared(sent):
        """The frames from the first one on that names both workers."""
        frames = [frame for _, each in sent for frame in each]
        return next((frames[at:] for at, frame in enumerate(frames) if set(frame.split(b"\n")) == names), None)

    async def story():
        async with two_workers(tmp_path, monkeypatch) as (_, first, second, sent):
            _, *heartbeat = (await until(lambda: shared(sent)))[:3]
            assert heartbeat == [b"", HEARD]
            now = time.monotonic()
            await until(lambda: first.heard_at > now and second.heard_at > now)

    asyncio.run(story())


def test_an_agent_relays_messages_of_its_own_host_only(tmp_path):
    """The server drops relayed messages of another host's worker, and all that another peer than an agent relays."""

    async def story():
        message = encoded(ev.WorkerFormed(WorkerId("b", 0, 1), 1))
        async with running_driver() as driver:
            for peer in (AGENT, "worker/b/1#1", "driver/7", "node/b~1"):
                with raw_socket(driver, peer) as socket:
                    socket.send_multipart(next(bundles([(b"worker/b/0#1", *message), (b"agent/b~1", *message)])))
                    await until(lambda peer=peer: driver.server.dropped.total() >= 2, what=peer)
                driver.server.dropped.clear()
            assert driver.received == []

    asyncio.run(story())


def encoded(message):
    delivery = Delivery(1.0, 7)
    delivery.enqueue(encode(message))
    return delivery.due(0.0)[0]


def test_a_worker_knows_that_the_driver_is_away(tmp_path):
    """If the agent loses its connection, its workers are disconnected too; later their messages arrive."""

    async def story():
        async with running_driver(0.1) as driver, running_agent(driver, tmp_path), connected_worker(tmp_path) as first:
            first.send(ev.WorkerFormed(WORKER, 1))
            await until(lambda: driver.received and not first.disconnected)
            port = int(driver.server.address.rpartition(":")[2])
            await driver.server.stop()
            first.send(ev.WorkerFormed(WORKER, 2))
            await until(lambda: first.disconnected)
            driver.server = Server(driver.keys, lambda peer, message: driver.received.append((peer, message)), 0.1)
            await driver.server.start(port=port)
            await until(lambda: not first.disconnected)
            await until(lambda: (PEER, ev.WorkerFormed(WORKER, 2)) in driver.received)

    asyncio.run(story())


def test_messages_from_a_broken_connection_arrive_at_once(tmp_path):
    """The agent keeps messages until it is connected: a retransmission would come after 2.5 heartbeats, here 250 s."""

    async def story():
        async with running_driver(100) as driver:
            proxy = CuttableProxy(int(driver.server.address.rpartition(":")[2]))
            await proxy.start()
            address = f"tcp://127.0.0.1:{proxy.port}"
            agent = Client(
                address, driver.keys.for_clients(), AGENT, agent_messages.ToAgent, lambda _: None, heartbeat=100
            )
            agent.start(relay=tmp_path)
            async with connected_worker(tmp_path, heartbeat=100) as first:
                first.send(ev.WorkerFormed(WORKER, 1))
                await until(lambda: driver.received)
                await proxy.stop()
                agent.send(agent_messages.AgentGoodbye("a", "no"))
                await until(lambda: agent._blocked, what="the agent to see that its connection is broken")
                first.send(ev.WorkerFormed(WORKER, 2))
                await until(lambda: first.disconnected)
                first.send(ev.WorkerFormed(WORKER, 3))
                await proxy.start(proxy.port)
                await until(lambda: (PEER, ev.WorkerFormed(WORKER, 3)) in driver.received)
                assert driver.received_from(PEER) == [ev.WorkerFormed(WORKER, number) for number in (1, 2, 3)]
            await asyncio.to_thread(agent.close)
            await proxy.stop()

    asyncio.run(story())


def test_a_folder_that_cannot_be_used(tmp_path):
    """The start of a relay there fails at once, and leaves nothing open."""
    (tmp_path / RELAY).mkdir()
    (tmp_path / RELAY / "something").touch()

    async def story():
        async with running_driver() as driver:
            client = Client(
                driver.server.address, driver.keys.for_clients(), AGENT, agent_messages.ToAgent, lambda _: None
            )
            with pytest.raises(OSError, match="relay"):
                client.start(relay=tmp_path)
            with pytest.raises(FileNotFoundError):
                client.start(relay=tmp_path / "nowhere")

    asyncio.run(story())


def test_messages_to_a_host_arrive_in_order(tmp_path, monkeypatch):
    """A message to an agent does not overtake an earlier one to its worker."""
    sent = []

    async def story():
        async with (
            running_driver() as driver,
            running_agent(driver, tmp_path) as agent,
            connected_worker(tmp_path) as first,
        ):
            agent.send(agent_messages.AgentGoodbye("a", "no"))
            first.send(ev.WorkerFormed(WORKER, 1))
            await until(lambda: len(driver.received) == 2)
            send_now = Server._send_frames
            monkeypatch.setattr(
                Server, "_send_frames", lambda server, *args: (sent.append(args), send_now(server, *args))
            )
            driver.server.send(PEER, worker_messages.Abort(1, "because"))
            driver.server.send(AGENT, agent_messages.StopWorker(WORKER, kill=True))
            orders = [word for _, frames in sent for word in (b"Abort", b"StopWorker") if word in b"".join(frames)]
            assert orders == [b"Abort", b"StopWorker"]

    asyncio.run(story())


def test_a_forgotten_worker_leaves_no_route(tmp_path):
    """The driver acknowledges last messages of a forgotten worker, but stores no route to it."""

    async def story():
        async with running_driver(0.1) as driver, running_agent(driver, tmp_path), connected_worker(tmp_path) as first:
            first.send(ev.WorkerFormed(WORKER, 1))
            await until(lambda: driver.received)
            driver.server._is_known = lambda _: False
            driver.server.forget(PEER)
            first.send(ev.WorkerFormed(WORKER, 2))
            await until(lambda: len(driver.received) > 1)
            assert driver.server._routes == {}

    asyncio.run(story())


def test_a_silent_worker_is_unresponsive(tmp_path):
    """The agent relays other workers' heartbeats; these do not count for the silent worker."""

    async def story():
        async with running_driver(0.1) as driver, running_agent(driver, tmp_path), connected_worker(tmp_path) as first:
            async with connected_worker(tmp_path, OTHER_WORKER) as second:
                first.send(ev.WorkerFormed(WORKER, 1))
                second.send(ev.WorkerFormed(OTHER_WORKER, 1))
                await until(lambda: len(driver.received) == 2)
            lost_at = driver.server.heard_at[f"worker/{OTHER_WORKER}"]
            await until(lambda: driver.server.heard_at[PEER] > lost_at + 0.5)
            assert driver.server.heard_at[f"worker/{OTHER_WORKER}"] < lost_at + 0.3

    asyncio.run(story())


def test_workers_report_to_a_new_driver(tmp_path):
    """A new driver greets unknown workers through their agents, and receives nothing else before their reports."""

    async def story():
        async with running_driver(0.1) as driver, running_agent(driver, tmp_path), connected_worker(tmp_path) as first:
            first.send(ev.WorkerFormed(WORKER, 1))
            await until(lambda: driver.received)
            port = int(driver.server.address.rpartition(":")[2])
            await driver.server.stop()
            driver.received.clear()
            driver.server = Server(
                driver.keys, lambda peer, message: driver.received.append((peer, message)), 0.1, term=2
            )
            await driver.server.start(port=port)
            await until(lambda: messages.NewDriver(2) in first.received)
            first.reset_session(lambda: worker_messages.WorkerReport(WORKER, 1))
            await until(lambda: driver.received)
            assert driver.received == [(PEER, worker_messages.WorkerReport(WORKER, 1))]

    asyncio.run(story())


def test_a_flood_of_one_process_does_not_delay_others(tmp_path):
    """The relay drops invalid messages, and the messages of a worker beside it arrive within moments."""

    async def story():
        async with (
            running_driver(0.1) as driver,
            running_agent(driver, tmp_path),
            connected_worker(tmp_path) as first,
            connected_client(driver, "agent/b~1"),
        ):
            with zmq.Context() as context, context.socket(zmq.DEALER) as flood:
                flood.setsockopt(zmq.LINGER, 0)
                flood.connect(f"ipc://{tmp_path / RELAY}")
                for _ in range(20_000):
                    flood.send_multipart([b"x" * 100, b"y" * 100])
                first.send(ev.WorkerFormed(WORKER, 1))
                await until(lambda: driver.received)

    asyncio.run(story())
