"""The driver's heartbeats go on whatever fails."""

from __future__ import annotations

import asyncio

from nbelastic import supervision
from nbelastic.link import Hub, Keys


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
        hub = Hub(Keys.make(), lambda *_: None)
        await hub.start()
        await asyncio.wait_for(again.wait(), 20)
        await hub.stop()

    again = asyncio.Event()
    monkeypatch.setattr(Hub, "_beat", beat)
    monkeypatch.setattr(supervision, "FIRST_PAUSE", 0.0)
    asyncio.run(story())
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        "nbelastic has a fault: the driver's heartbeats (it is started again)"
    ] * 2
