"""A server takes over another one's address: it greets unknown peers, and accepts their messages after their reports."""

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

WORKER = WorkerId("a", 0, 1)
PEER = f"worker/{WORKER}"


class Worker:
    """A worker that reports to each new driver, as real ones do."""

    def __init__(self, address, keys, peer=PEER):
        self.received = []
        self.client = Client(address, keys.for_clients(), peer, worker_messages.ToWorker, self.receive, heartbeat=0.1)

    def receive(self, message):
        self.received.append(message)
        if isinstance(message, messages.NewDriver):
            self.send_report()

    def send_report(self):
        self.client.reset_session(lambda: worker_messages.WorkerReport(WORKER, os.getpid(), commit=7))


async def start_server(keys, received, term, port=0, is_known=lambda _: True):
    server = Server(keys, lambda peer, message: received.append(message), heartbeat=0.1, term=term, is_known=is_known)
    await server.start(port=port)
    return server


def test_a_worker_reports_to_the_next_driver():
    """The next driver receives nothing from a worker before its report. The worker knew that it had no driver."""

    async def story():
        keys, received_by_first, received_by_second = Keys.make(), [], []
        server = await start_server(keys, received_by_first, 1)
        port = split_endpoint(server.address)[1]
        worker = Worker(server.address, keys)
        worker.client.start()
        worker.client.send(ev.WorkerFormed(WORKER, 1))
        await until(lambda: received_by_first == [ev.WorkerFormed(WORKER, 1)])
        assert worker.received == [], "a first driver greets no peer: it has started them all"
        await server.stop()
        worker.client.send(ev.LeaveAcknowledged(WORKER, 1, 5))
        await until(lambda: worker.client.disconnected)
        server = await start_server(keys, received_by_second, 2, port)
        try:
            await until(lambda: received_by_second)
            assert not worker.client.disconnected
            assert worker.received[0] == messages.NewDriver(2)
            assert received_by_second[0] == worker_messages.WorkerReport(WORKER, os.getpid(), commit=7)
            worker.client.send(ev.WorkerSucceeded(WORKER, 1))
            await until(lambda: ev.WorkerSucceeded(WORKER, 1) in received_by_second)
            assert {type(message) for message in received_by_second} == {
                worker_messages.WorkerReport,
                ev.WorkerSucceeded,
            }
        finally:
            await asyncio.to_thread(worker.client.close)
            await server.stop()

    asyncio.run(story())


@pytest.mark.parametrize("sends_before_report", [False, True], ids=["meanwhile", "first"])
def test_a_report_comes_before_other_messages(sends_before_report):
    """Messages of other threads come after the report. A worker that sends one before its report is greeted again."""

    class TalkingWorker(Worker):
        def send_report(self):
            if sends_before_report and len(self.received) == 1:
                self.client.send(ev.LeaveAcknowledged(WORKER, 1, 5))
                self.client.send(self.report())
            else:
                self.client.reset_session(self.report)

        def report(self):
            if not sends_before_report:
                self.client.send(ev.LeaveAcknowledged(WORKER, 1, 5))
            return worker_messages.WorkerReport(WORKER, os.getpid(), commit=7)

    async def story():
        keys, received = Keys.make(), []
        server = await start_server(keys, received, 2)
        worker = TalkingWorker(server.address, keys)
        worker.client.start()
        try:
            await until(lambda: received)
            worker.client.send(ev.WorkerSucceeded(WORKER, 1))
            await until(lambda: ev.WorkerSucceeded(WORKER, 1) in received)
        finally:
            await asyncio.to_thread(worker.client.close)
            await server.stop()
        between = [] if sends_before_report else [ev.LeaveAcknowledged(WORKER, 1, 5)]
        assert received == [
            worker_messages.WorkerReport(WORKER, os.getpid(), commit=7),
            *between,
            ev.WorkerSucceeded(WORKER, 1),
        ]

    asyncio.run(story())


def test_a_lost_worker_is_not_greeted():
    """A cluster of many days loses many: the driver keeps nothing of one whose last messages come late, and its lease runs."""

    lost_peer = f"worker/{WorkerId('a', 1, 1)}"

    async def story():
        keys, received, heard = Keys.make(), [], []
        server = await start_server(keys, received, 2, is_known=lambda peer: heard.append(peer) or peer == PEER)
        workers = lost, _ = [Worker(server.address, keys, peer) for peer in (lost_peer, PEER)]
        try:
            for worker in workers:
                worker.client.start()
                worker.client.send(ev.WorkerSucceeded(WORKER, 1))
            await until(lambda: heard.count(lost_peer) >= 3 and received)
            assert received == [worker_messages.WorkerReport(WORKER, os.getpid(), commit=7)]
            assert lost.received == []
        finally:
            for worker in workers:
                await asyncio.to_thread(worker.client.close)
            await server.stop()

    asyncio.run(story())


def test_a_port_in_use_is_an_error():
    """An OSError at once; the server leaves no thread."""

    async def story():
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            with pytest.raises(OSError, match="in use"):
                await start_server(Keys.make(), [], 2, other.getsockname()[1])

    before = set(threading.enumerate())
    asyncio.run(story())
    assert set(threading.enumerate()) <= before


def test_the_port_is_not_an_ephemeral_one():
    """An ephemeral port might be in use when a driver returns, or a returning worker might connect to itself there."""

    async def story():
        server = await start_server(Keys.make(), [], 1)
        await server.stop()
        return split_endpoint(server.address)[1]

    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        low = int(file.read().split()[0])
    before = random.getstate()
    assert all(asyncio.run(story()) < low for _ in range(20))
    assert random.getstate() == before, "the random numbers of the user are the same"


def test_a_reserved_port_is_not_used(monkeypatch):
    """Another cluster reserves ports for its controller: if ZeroMQ listened there, that controller could not restart."""

    async def story():
        with socket.socket() as holder, socket.socket() as other:
            holder.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            reserved, free = holder.getsockname()[1], other.getsockname()[1]
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.close()
            monkeypatch.setattr(ports, "random_ports", lambda *_: [reserved, free])
            server = await start_server(Keys.make(), [], 1)
            await server.stop()
            assert split_endpoint(server.address)[1] == free

    asyncio.run(story())
