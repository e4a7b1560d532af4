"""The process of ipyparallel's controller: its heart monitor, and engines whose first heartbeat is late."""

from __future__ import annotations

import os
from types import SimpleNamespace

from ipyparallel.controller import app, hub

from nbelastic.ipp.controller import Controller, Hub


class UnconnectedHub(Hub):
    """A hub that sends and receives nothing."""

    monitor = SimpleNamespace(flush=lambda: None)

    def __init__(self) -> None:
        super(hub.Hub, self).__init__()


def test_the_heart_monitor_is_forked_before_the_threads_start(monkeypatch):
    """A lock that a thread holds at the fork would never be free in the heart monitor, and no engine would be known."""
    started = []
    monkeypatch.setattr(app.IPController, "start", lambda _: started.append("threads"))
    controller = Controller()
    reading, controller.ready = os.pipe()
    controller.heartmonitor_process = SimpleNamespace(start=lambda: started.append("heart monitor"))
    controller.start()
    os.close(reading)
    assert started == ["heart monitor", "threads"]


def test_an_engine_is_known_however_late_its_first_heartbeat_is():
    """An engine may be stopped for more than 30 s just after it has registered, as on a laptop that sleeps."""
    waiting = UnconnectedHub()
    waiting.incoming_registrations[b"engine"] = hub.EngineConnector(id=0, uuid="engine", ident=b"engine")
    waiting._purge_stalled_registration(b"engine")
    waiting.handle_new_heart(b"engine")
    assert waiting.by_ident == {b"engine": 0}
