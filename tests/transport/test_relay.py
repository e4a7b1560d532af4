"""A host's processes and the driver speak by the host's agent: in bundles, and with nobody else's voice."""

from __future__ import annotations

import asyncio
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
from nbelastic.transport.sockets import RELAY
from tests.transport.test_breaks import Relay
from tests.transport.test_link import NAME, W, client, place, stranger, until

AGENT = "agent/a~1"
OTHER = WorkerId("a", 1, 1)


@asynccontextmanager
async def relay(there, folder, name=AGENT, heartbeat=0.1):
    """An agent's end of the link."""
    folder.mkdir(parents=True, exist_ok=True)
    one = Client(
        there.server.address,
        there.keys.for_clients(),
        name,
        agent_messages.ToAgent,
        lambda _: None,
        heartbeat=heartbeat,
    )
    one.start(relay=folder)
    try:
        yield one
    finally:
        await asyncio.to_thread(one.close)


@asynccontextmanager
async def worker(folder, w=W, heartbeat=0.1):
    """One that knows its host's agent alone."""
    heard = []
    one = Client(folder, None, f"worker/{w}", worker_messages.ToWorker, heard.append, heartbeat=heartbeat)
    one.heard = heard
    one.start()
    try:
        yield one
    finally:
        await asyncio.to_thread(one.close)


def test_messages_go_both_ways_in_order(tmp_path):
    """A thousand each way, of two workers, in a folder whose path is longer than a socket's may be."""
    folder = tmp_path / ("x" * 120)

    async def story():
        async with place() as there, relay(there, folder), worker(folder) as one, worker(folder, OTHER) as other:
            for commit in range(1000):
                one.send(ev.LeaveAcknowledged(W, 1, commit))
                other.send(ev.LeaveAcknowledged(OTHER, 1, commit))
            await until(lambda: len(there.heard) == 2000)
            for w in (W, OTHER):
                assert [message.commit for message in there.of(f"worker/{w}")] == list(range(1000))
            for generation in range(1000):
                there.server.send_to_all((NAME, f"worker/{OTHER}"), worker_messages.Abort(generation, "because"))
            await until(lambda: len(one.heard) == len(other.heard) == 1000)
            assert [message.generation for message in other.heard] == list(range(1000))

    asyncio.run(story())


def test_an_order_to_all_workers_of_a_host_is_one_message(tmp_path, monkeypatch):
    """And so are the driver's heartbeats to them."""
    sent = []

    async def story():
        async with (
            place(0.1) as there,
            relay(there, tmp_path),
            worker(tmp_path) as one,
            worker(tmp_path, OTHER) as other,
        ):
            one.send(ev.WorkerFormed(W, 1))
            other.send(ev.WorkerFormed(OTHER, 1))
            await until(lambda: len(there.heard) == 2)
            send_now = Server._send_frames
            monkeypatch.setattr(
                Server, "_send_frames", lambda server, *said: (sent.append(said), send_now(server, *said))
            )
            there.server.send_to_all((NAME, f"worker/{OTHER}"), worker_messages.Abort(1, "because"))
            await until(lambda: one.heard and other.heard)
            orders = [frames for peer, frames in sent if any(b"because" in frame for frame in frames)]
            assert len(orders) == 1
            await until(lambda: len(sent) > 10)
            assert {peer for peer, _ in sent} == {AGENT}

    asyncio.run(story())


def test_whoever_relays_speaks_for_its_own_host_alone(tmp_path):
    """An agent cannot pass on words of another host's worker; nor can anybody else pass on words."""

    async def story():
        said = encoded(ev.WorkerFormed(WorkerId("b", 0, 1), 1))
        async with place() as there:
            for liar in (AGENT, "worker/b/1#1", "driver/7", "node/b~1"):
                with stranger(there, liar) as socket:
                    socket.send_multipart(next(bundles([(b"worker/b/0#1", *said), (b"agent/b~1", *said)])))
                    await until(lambda liar=liar: there.server.dropped.total() >= 2, what=liar)
                there.server.dropped.clear()
            assert there.heard == []

    asyncio.run(story())


def encoded(message):
    one = Delivery(1.0, 7)
    one.enqueue(encode(message))
    return one.due(0.0)[0]


def test_who_is_relayed_hears_that_the_driver_is_away(tmp_path):
    """The agent's connection is theirs: without it they are told so, and when it is back what they have said arrives."""

    async def story():
        async with place(0.1) as there, relay(there, tmp_path), worker(tmp_path) as one:
            one.send(ev.WorkerFormed(W, 1))
            await until(lambda: there.heard)
            assert not one.disconnected
            port = int(there.server.address.rpartition(":")[2])
            await there.server.stop()
            one.send(ev.WorkerFormed(W, 2))
            await until(lambda: one.disconnected)
            there.server = Server(there.keys, lambda peer, message: there.heard.append((peer, message)), 0.1)
            await there.server.start(port=port)
            await until(lambda: not one.disconnected)
            await until(lambda: (NAME, ev.WorkerFormed(W, 2)) in there.heard)

    asyncio.run(story())


def test_what_is_said_while_the_line_is_cut_is_not_late(tmp_path):
    """The agent keeps it until there is a connection: it would be sent again only after 2.5 heartbeats, here 250 s."""

    async def story():
        async with place(100) as there:
            line = Relay(int(there.server.address.rpartition(":")[2]))
            await line.start()
            address = f"tcp://127.0.0.1:{line.port}"
            agent = Client(
                address, there.keys.for_clients(), AGENT, agent_messages.ToAgent, lambda _: None, heartbeat=100
            )
            agent.start(relay=tmp_path)
            async with worker(tmp_path, heartbeat=100) as one:
                one.send(ev.WorkerFormed(W, 1))
                await until(lambda: there.heard)
                await line.stop()
                agent.send(agent_messages.AgentGoodbye("a", "no"))
                await until(lambda: agent._blocked, what="the agent to see that its connection is gone")
                one.send(ev.WorkerFormed(W, 2))
                await until(lambda: one.disconnected)
                one.send(ev.WorkerFormed(W, 3))
                await line.start(line.port)
                await until(lambda: (NAME, ev.WorkerFormed(W, 3)) in there.heard)
                assert there.of(NAME) == [ev.WorkerFormed(W, number) for number in (1, 2, 3)]
            await asyncio.to_thread(agent.close)
            await line.stop()

    asyncio.run(story())


def test_a_folder_that_cannot_be_used(tmp_path):
    """Who starts the relay is told at once, and nothing is left open."""
    (tmp_path / RELAY).mkdir()
    (tmp_path / RELAY / "something").touch()

    async def story():
        async with place() as there:
            one = Client(there.server.address, there.keys.for_clients(), AGENT, agent_messages.ToAgent, lambda _: None)
            with pytest.raises(OSError, match="relay"):
                one.start(relay=tmp_path)
            with pytest.raises(FileNotFoundError):
                one.start(relay=tmp_path / "nowhere")

    asyncio.run(story())


def test_what_goes_to_a_host_arrives_in_the_order_in_which_it_was_sent(tmp_path, monkeypatch):
    """An order to a worker and the next one to its agent: the second does not overtake the first."""
    sent = []

    async def story():
        async with place() as there, relay(there, tmp_path) as agent, worker(tmp_path) as one:
            agent.send(agent_messages.AgentGoodbye("a", "no"))
            one.send(ev.WorkerFormed(W, 1))
            await until(lambda: len(there.heard) == 2)
            send_now = Server._send_frames
            monkeypatch.setattr(
                Server, "_send_frames", lambda server, *said: (sent.append(said), send_now(server, *said))
            )
            there.server.send(NAME, worker_messages.Abort(1, "because"))
            there.server.send(AGENT, agent_messages.StopWorker(W, kill=True))
            orders = [word for _, frames in sent for word in (b"Abort", b"StopWorker") if word in b"".join(frames)]
            assert orders == [b"Abort", b"StopWorker"]

    asyncio.run(story())


def test_who_is_gone_leaves_no_route(tmp_path):
    """Last words of a worker that the driver has forgotten are answered, and not remembered."""

    async def story():
        async with place(0.1) as there, relay(there, tmp_path), worker(tmp_path) as one:
            one.send(ev.WorkerFormed(W, 1))
            await until(lambda: there.heard)
            there.server._is_known = lambda _: False
            there.server.forget(NAME)
            one.send(ev.WorkerFormed(W, 2))
            await until(lambda: len(there.heard) > 1)
            assert there.server._routes == {}

    asyncio.run(story())


def test_a_worker_that_is_silent_is_seen_to_be_so(tmp_path):
    """Its agent goes on relaying for others: nobody's heartbeat stands for another's."""

    async def story():
        async with place(0.1) as there, relay(there, tmp_path), worker(tmp_path) as one:
            async with worker(tmp_path, OTHER) as other:
                one.send(ev.WorkerFormed(W, 1))
                other.send(ev.WorkerFormed(OTHER, 1))
                await until(lambda: len(there.heard) == 2)
            gone = there.server.heard_at[f"worker/{OTHER}"]
            await until(lambda: there.server.heard_at[NAME] > gone + 0.5)
            assert there.server.heard_at[f"worker/{OTHER}"] < gone + 0.3

    asyncio.run(story())


def test_a_new_driver_is_told_who_is_there(tmp_path):
    """It welcomes those whom it does not know by their agents, and hears nothing else of them before."""

    async def story():
        async with place(0.1) as there, relay(there, tmp_path), worker(tmp_path) as one:
            one.send(ev.WorkerFormed(W, 1))
            await until(lambda: there.heard)
            port = int(there.server.address.rpartition(":")[2])
            await there.server.stop()
            there.heard.clear()
            there.server = Server(there.keys, lambda peer, message: there.heard.append((peer, message)), 0.1, term=2)
            await there.server.start(port=port)
            await until(lambda: messages.NewDriver(2) in one.heard)
            one.reset_session(lambda: worker_messages.WorkerReport(W, 1))
            await until(lambda: there.heard)
            assert there.heard == [(NAME, worker_messages.WorkerReport(W, 1))]

    asyncio.run(story())


def test_a_flood_of_one_process_holds_up_nobody(tmp_path):
    """Nonsense is dropped by the relay; a worker beside it is heard within moments."""

    async def story():
        async with place(0.1) as there, relay(there, tmp_path), worker(tmp_path) as one, client(there, "agent/b~1"):
            with zmq.Context() as context, context.socket(zmq.DEALER) as flood:
                flood.setsockopt(zmq.LINGER, 0)
                flood.connect(f"ipc://{tmp_path / RELAY}")
                for _ in range(20_000):
                    flood.send_multipart([b"x" * 100, b"y" * 100])
                one.send(ev.WorkerFormed(W, 1))
                await until(lambda: there.heard)

    asyncio.run(story())
