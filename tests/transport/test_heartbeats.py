"""The driver's heartbeats go on whatever fails; those of its hosts stop when nobody works there."""

from __future__ import annotations

import asyncio

from nbelastic.protocol import events as ev
from nbelastic.protocol import worker_messages
from nbelastic.system import fault_handling
from nbelastic.transport.client import Client
from nbelastic.transport.keys import Keys
from nbelastic.transport.server import Server
from tests.transport.test_link import NAME, W, silent, until


def test_heartbeats_go_on_after_a_fault(monkeypatch, caplog):
    """Without them every agent on another machine ends, and its workers with it."""
    beats = []

    async def beat(self):
        beats.append(self)
        if len(beats) < 3:
            raise KeyError("a fault")
        again.set()
        await asyncio.Event().wait()

    async def story():
        server = Server(Keys.make(), lambda *_: None)
        await server.start()
        await asyncio.wait_for(again.wait(), 20)
        await server.stop()

    again = asyncio.Event()
    monkeypatch.setattr(Server, "_send_heartbeats", beat)
    monkeypatch.setattr(fault_handling, "FIRST_PAUSE", 0.0)
    asyncio.run(story())
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        "nbelastic has a fault: the driver's heartbeats (it is started again)"
    ] * 2


def test_an_end_that_does_not_work_is_not_heard():
    """Its owner hangs: nothing goes out, neither heartbeats nor words, until it works again; then all words arrive."""

    async def story():
        heard, may_send = [], False
        server = Server(Keys.make(), lambda _, message: heard.append(message), 0.05)
        await server.start()
        keys = server._keys.for_clients()
        one = Client(
            server.address,
            keys,
            NAME,
            worker_messages.ToWorker,
            lambda _: None,
            heartbeat=0.05,
            may_send=lambda: may_send,
        )
        one.start()
        try:
            one.send(ev.WorkerFormed(W, 1))
            await asyncio.sleep(0.4)
            assert (heard, server.heard_at) == ([], {})
            may_send = True
            await until(lambda: heard)
            one.send(ev.WorkerFormed(W, 2))
            await until(lambda: len(heard) == 2)
            may_send = False
            await until(lambda: silent(server), what="what was on its way to have come")
        finally:
            await asyncio.to_thread(one.close)
            await server.stop()
        assert heard == [ev.WorkerFormed(W, 1), ev.WorkerFormed(W, 2)]

    asyncio.run(story())
