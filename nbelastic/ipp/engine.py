"""The worker as an ipyparallel engine, for `%px` and `Cluster.client`, in the main thread and namespace of programs and cells."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import zmq
from ipykernel.iostream import OutStream
from ipykernel.zmqshell import ZMQDisplayPublisher, ZMQInteractiveShell
from ipyparallel.controller import heartmonitor
from ipyparallel.engine import app as engine_app
from ipyparallel.engine.app import IPEngine
from zmq.utils.monitor import recv_monitor_message

REPEAT = 2.0  # seconds after which an unanswered request is sent again
OPTIONS = (
    "--IPEngine.timeout=1e6",  # no timeouts: the agent ends the worker when there is no driver
    "--IPEngine.max_heartbeat_misses=0",
    "--IPEngine.enable_nanny=False",
    "--IPKernelApp.hide_initial_ns=False",  # `%who` shows what earlier programs and cells have defined
    "--IPKernelApp.exec_PYTHONSTARTUP=False",  # it would set names that programs and cells have set before
    "--log-level=40",
)


class Stream(OutStream):  # type: ignore[misc]
    """A standard stream that goes to the client that runs code, and into this worker's log file."""

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
    """ipyparallel's engine without its signal handlers: the agent ends workers, which have nothing to clean up.

    The engine outlives its controller, and registers again when it is connected to the next one.
    """

    _heart: tuple[Any, ...] = ()  # the arguments with which its heartbeat is started
    _repeating: asyncio.Future[None]  # sends its registration
    registered: Callable[[str], object]  # called with the engine's id, in its event loop, when code can run in it
    streams: asyncio.Lock  # held while streams and displays are replaced

    out_stream_factory = Stream

    async def register(self) -> None:
        """Send the registration until it is answered: a controller may end before it answers."""
        self._repeating = asyncio.ensure_future(self._send_registrations())
        try:
            await super().register()
        finally:
            self._repeating.cancel()

    async def _send_registrations(self) -> None:
        while True:
            await asyncio.sleep(REPEAT)
            self._send_registration()

    def _send_registration(self) -> None:
        content = {"uuid": self.ident} if self.id is None else {"uuid": self.ident, "id": self.id}
        self.session.send(self.registrar, "registration_request", content=content)

    async def complete_registration(self, msg: Any, connect: Callable[..., None], *args: Any) -> None:
        """The controller knows the engine: let it run code in the IPython of this process."""
        self._repeating.cancel()  # a cell may delay the rest
        monitors: dict[zmq.Socket[bytes], str] = {}
        ports = {str(self.connection_info[name]) for name in ("mux", "iopub")}

        def watched(socket: Any, url: str, **options: Any) -> None:
            port = url.rpartition(":")[2]
            if port in ports:
                monitors[socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)] = port
            connect(socket, url, **options)

        shell = ZMQInteractiveShell.instance()  # the worker's, which the engine uses from here on
        async with self.streams:
            shell.display_pub = ZMQDisplayPublisher(shell=shell)
            await super().complete_registration(msg, watched, *args)
        shell.kernel = self.kernel
        self.kernel.control_handlers["signal_request"] = self._take_signal
        self.registered(self.ident)
        threading.Thread(target=self._watch, args=(monitors,), name="nbelastic-controller", daemon=True).start()

    def _take_signal(self, stream: Any, ident: Any, request: dict[str, Any]) -> None:
        """In the control thread: Ctrl-C in a client's `%px`. The client waits for the answer, which ipyparallel's nanny would give.

        SIGINT raises KeyboardInterrupt in code that runs for a client; at other times workers ignore it.
        """
        number = request["content"]["sig"]
        os.kill(os.getpid(), getattr(signal, number) if isinstance(number, str) else number)
        self.session.send(stream, "signal_reply", {"status": "ok"}, request, ident)

    def start_heartbeat(self, *args: Any) -> None:
        """Later, in `_watch`: for the controller, an engine with heartbeats is one whose channels are connected."""
        self._heart = args

    def _watch(self, monitors: dict[zmq.Socket[bytes], str]) -> None:
        """Register again whenever the channels for code and output are connected to a new controller.

        The channels connect one by one, and a message on one that is not connected yet is lost. From here on only this thread
        uses the registrar's socket.
        """
        poller = zmq.Poller()
        for monitor in monitors:
            poller.register(monitor, zmq.POLLIN)
        connected: set[str] = set()
        while True:
            for monitor, _ in poller.poll():
                event, port = recv_monitor_message(monitor), monitors[monitor]
                if event["endpoint"].decode().rpartition(":")[2] != port:  # another scheduler's
                    continue
                if event["event"] == zmq.EVENT_DISCONNECTED:
                    connected.discard(port)
                else:
                    connected.add(port)
                    if len(connected) == len(monitors):
                        self._send_registration()
                        heart, self._heart = self._heart, ()
                        if heart:
                            super().start_heartbeat(*heart)

    def init_signal(self) -> None:
        """The worker has set its signal handlers."""

    def exit(self, _: int = 0) -> NoReturn:
        """ipyparallel would end the worker here, and has logged why."""
        raise RuntimeError("ipyparallel's engine cannot be started: the worker's log has the error")

    def abort(self) -> NoReturn:
        """As `exit`."""
        self.exit()


async def connect_engine(
    connection: str, profile: str, registered: Callable[[str], object], streams: asyncio.Lock
) -> None:
    """Make this process an engine of the controller at `connection` (JSON), with the IPython that it has.

    Returns after `registered(engine)` was called: code can run in the engine `engine`, in this event loop. It holds `streams`
    while it replaces the standard streams and IPython's displays. After an error it can be called again.
    """
    # For all sockets of the engine. ZeroMQ and ipyparallel leave IPv6 off.
    zmq.Context.instance().setsockopt(zmq.IPV6, 1)
    engine_app.Heart = Heart
    Engine.registered, Engine.streams = staticmethod(registered), streams
    # Not by a variable, which processes of the user would inherit with its key.
    engine = Engine.instance(log_level=40, connection_info_env=connection)
    try:
        path = sys.path[:]
        engine.initialize([f"--profile-dir={profile}", *OPTIONS])
        sys.path[:] = path
        await engine.register()
    except BaseException:
        Engine.clear_instance()  # else the next call would get this one, with its connection
        raise
