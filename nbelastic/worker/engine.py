"""The worker as an ipyparallel engine: `%px` works on it between jobs."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import zmq
from ipykernel.iostream import OutStream
from ipyparallel.controller import heartmonitor
from ipyparallel.engine import app as engine_app
from ipyparallel.engine.app import IPEngine

from nbelastic.worker.session import current


class Stream(OutStream):  # type: ignore[misc]
    """What is printed goes to the client that asked and into this worker's log file."""

    def __init__(self, session: Any, thread: Any, name: str) -> None:
        super().__init__(
            session, thread, name, echo=sys.__stdout__ if name == "stdout" else sys.__stderr__, watchfd=False
        )


class Heart(heartmonitor.Heart):  # type: ignore[misc]
    """ipyparallel's answer to the controller's heartbeats, to a controller with an IPv6 address too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.device.setsockopt_in(zmq.IPV6, 1)
        self.device.setsockopt_out(zmq.IPV6, 1)


class Engine(IPEngine):  # type: ignore[misc]
    """ipyparallel's engine without its signal handling: the agent ends workers, and a worker has nothing to tidy up."""

    out_stream_factory = Stream

    def init_signal(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _leave)


def _leave(*_: object) -> None:
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    os._exit(0)


def serve(profile: str) -> None:
    """Register with the ipyparallel controller that the environment names, and take code for ever."""
    signal.signal(signal.SIGTERM, _leave)
    zmq.Context.instance().setsockopt(zmq.IPV6, 1)  # of all sockets of the engine; ZeroMQ and ipyparallel leave it off
    engine_app.Heart = Heart
    app = Engine.instance(log_level=40)
    app.initialize([f"--profile-dir={profile}", "--IPEngine.enable_nanny=False", "--log-level=40"])
    del os.environ["IPP_CONNECTION_INFO"]  # it holds a key: nothing that the user starts shall inherit it
    current().hello(app.ident)
    app.start()
