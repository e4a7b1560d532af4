"""A hub takes over from another: on the same address, whom it has to ask who they are, and what is believed."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading

import pytest

from nbelastic.protocol import events as ev
from nbelastic.protocol import messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.system import ports
from nbelastic.system.addresses import split_endpoint
from nbelastic.transport.client import Client
from nbelastic.transport.keys import Keys
from nbelastic.transport.server import Server
from tests.support.waiting import until_async as until

W = WorkerId("a", 0, 1)
NAME = f"worker/{W}"


class Worker:
    """As a real one: it says who it is when it is welcomed."""

    def __init__(self, address, keys):
        self.heard = []
        self.link = Client(address, keys.for_clients(), NAME, worker_messages.ToWorker, self.receive, heartbeat=0.1)

    def receive(self, message):
        self.heard.append(message)
        if isinstance(message, messages.NewDriver):
            self.answer()

    def answer(self):
        self.link.reset_session(lambda: worker_messages.WorkerReport(W, os.getpid(), commit=7))


async def hub_at(keys, heard, term, port=0):
    server = Server(keys, lambda peer, message: heard.append(message), heartbeat=0.1, term=term)
    await server.start(port=port)
    return server


def test_who_lives_on_is_asked_who_it_is():
    """The next driver hears nothing of a worker before that has said who it is, and then all; the worker knew it was alone."""

    async def story():
        keys, first, second = Keys.make(), [], []
        server = await hub_at(keys, first, 1)
        port = split_endpoint(server.address)[1]
        worker = Worker(server.address, keys)
        worker.link.start()
        worker.link.send(ev.WorkerFormed(W, 1))
        await until(lambda: first == [ev.WorkerFormed(W, 1)])
        assert worker.heard == [], "a first driver welcomes nobody: all are its own"
        await server.stop()
        worker.link.send(ev.LeaveAcknowledged(W, 1, 5))
        await until(lambda: worker.link.disconnected)
        server = await hub_at(keys, second, 2, port)
        try:
            await until(lambda: second)
            assert not worker.link.disconnected
            assert worker.heard[0] == messages.NewDriver(2)
            assert second[0] == worker_messages.WorkerReport(W, os.getpid(), commit=7)
            worker.link.send(ev.WorkerSucceeded(W, 1))
            await until(lambda: ev.WorkerSucceeded(W, 1) in second)
            assert {type(message) for message in second} == {worker_messages.WorkerReport, ev.WorkerSucceeded}
        finally:
            await asyncio.to_thread(worker.link.close)
            await server.stop()

    asyncio.run(story())


@pytest.mark.parametrize("careless", [False, True], ids=["meanwhile", "first"])
def test_who_somebody_is_comes_before_what_it_says(careless):
    """What its other thread says while it looks up who it is comes after that; one that says it first is asked again."""

    class Talker(Worker):
        def answer(self):
            if careless and len(self.heard) == 1:
                self.link.send(ev.LeaveAcknowledged(W, 1, 5))
                self.link.send(self.who())
            else:
                self.link.reset_session(self.who)

        def who(self):
            if not careless:
                self.link.send(ev.LeaveAcknowledged(W, 1, 5))
            return worker_messages.WorkerReport(W, os.getpid(), commit=7)

    async def story():
        keys, heard = Keys.make(), []
        server = await hub_at(keys, heard, 2)
        worker = Talker(server.address, keys)
        worker.link.start()
        try:
            await until(lambda: heard)
            worker.link.send(ev.WorkerSucceeded(W, 1))
            await until(lambda: ev.WorkerSucceeded(W, 1) in heard)
        finally:
            await asyncio.to_thread(worker.link.close)
            await server.stop()
        between = [] if careless else [ev.LeaveAcknowledged(W, 1, 5)]
        assert heard == [worker_messages.WorkerReport(W, os.getpid(), commit=7), *between, ev.WorkerSucceeded(W, 1)]

    asyncio.run(story())


def test_a_port_that_is_taken_is_said():
    """By an OSError, at once; nothing of the hub is left."""

    async def story():
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            with pytest.raises(OSError, match="in use"):
                await hub_at(Keys.make(), [], 2, other.getsockname()[1])

    before = set(threading.enumerate())
    asyncio.run(story())
    assert set(threading.enumerate()) <= before


def test_a_port_is_none_that_the_system_gives_away():
    """Else it might be taken when a driver comes back; or a worker that tries to come back might meet itself there."""

    async def story():
        server = await hub_at(Keys.make(), [], 1)
        await server.stop()
        return split_endpoint(server.address)[1]

    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        low = int(file.read().split()[0])
    before = random.getstate()
    assert all(asyncio.run(story()) < low for _ in range(20))
    assert random.getstate() == before, "the user's dice are not thrown for that"


def test_a_port_that_somebody_holds_is_none_to_take(monkeypatch):
    """As another cluster does for its controller: ZeroMQ would listen there, and that controller could not any more."""

    async def story():
        with socket.socket() as holder, socket.socket() as other:
            holder.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            held, free = holder.getsockname()[1], other.getsockname()[1]
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.close()
            monkeypatch.setattr(ports, "random_ports", lambda *_: [held, free])
            server = await hub_at(Keys.make(), [], 1)
            await server.stop()
            assert split_endpoint(server.address)[1] == free

    asyncio.run(story())
