"""Heartbeats go on after errors of the driver, and show when a peer is lost."""

from __future__ import annotations

import asyncio

from nbelastic.protocol import events as ev
from nbelastic.protocol import worker_messages
from nbelastic.system import fault_handling
from nbelastic.transport.client import Client
from nbelastic.transport.keys import Keys
from nbelastic.transport.server import Server
from tests.support.waiting import until_async as until
from tests.transport.link_ends import MESSAGE, PEER, WORKER, connected_client, is_silent, running_driver


def test_heartbeats_go_on_after_an_error(monkeypatch, caplog):
    """Without heartbeats each agent on another machine would end, and its workers with it."""
    calls = []

    async def send_heartbeats(self):
        calls.append(self)
        if len(calls) < 3:
            raise KeyError("a fault")
        recovered.set()
        await asyncio.Event().wait()

    async def story():
        server = Server(Keys.make(), lambda *_: None)
        await server.start()
        await asyncio.wait_for(recovered.wait(), 20)
        await server.stop()

    recovered = asyncio.Event()
    monkeypatch.setattr(Server, "_send_heartbeats", send_heartbeats)
    monkeypatch.setattr(fault_handling, "FIRST_PAUSE", 0.0)
    asyncio.run(story())
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        "nbelastic has a fault: the driver's heartbeats (it is started again)"
    ] * 2


def test_a_client_whose_owner_hangs_sends_nothing():
    """It sends neither heartbeats nor messages until its owner works again; then all messages arrive."""

    async def story():
        received, may_send = [], False
        server = Server(Keys.make(), lambda _, message: received.append(message), 0.05)
        await server.start()
        keys = server._keys.for_clients()
        client = Client(
            server.address,
            keys,
            PEER,
            worker_messages.ToWorker,
            lambda _: None,
            heartbeat=0.05,
            may_send=lambda: may_send,
        )
        client.start()
        try:
            client.send(ev.WorkerFormed(WORKER, 1))
            await asyncio.sleep(0.4)
            assert (received, server.heard_at) == ([], {})
            may_send = True
            await until(lambda: received)
            client.send(ev.WorkerFormed(WORKER, 2))
            await until(lambda: len(received) == 2)
            may_send = False
            await until(lambda: is_silent(server), what="messages on their way to arrive")
        finally:
            await asyncio.to_thread(client.close)
            await server.stop()
        assert received == [ev.WorkerFormed(WORKER, 1), ev.WorkerFormed(WORKER, 2)]

    asyncio.run(story())


def test_heartbeats_go_both_ways():
    """Without other messages both ends receive heartbeats."""

    async def story():
        async with running_driver(0.05) as driver:
            async with connected_client(driver, heartbeat=0.05) as worker:
                worker.send(MESSAGE)
                await until(lambda: PEER in driver.server.heard_at)
                at, worker_at = driver.server.heard_at[PEER], worker.heard_at
                await until(lambda: driver.server.heard_at[PEER] > at and worker.heard_at > worker_at)
                assert driver.received == [(PEER, MESSAGE)]

    asyncio.run(story())


def test_heard_at_shows_when_a_peer_was_lost():
    """`heard_at` grows while a peer is connected, and does not change after it was lost. `forget` removes it."""

    async def story():
        async with running_driver(0.05) as driver:
            async with connected_client(driver, heartbeat=0.05) as worker:
                worker.send(MESSAGE)
                await until(lambda: PEER in driver.server.heard_at)
                at = driver.server.heard_at[PEER]
                await until(lambda: driver.server.heard_at[PEER] > at)
            await until(lambda: is_silent(driver.server), what="its last messages to arrive")
            driver.server.forget(PEER)
            assert not driver.server.heard_at

    asyncio.run(story())
