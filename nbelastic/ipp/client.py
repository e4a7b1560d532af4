"""ipyparallel's client for `%px`, which continues with a restarted controller. Only `%px` and `Cluster.client` use it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Container, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any
from uuid import uuid4

import ipyparallel as ipp
import zmq
from ipyparallel.client.client import Metadata
from tornado.ioloop import PeriodicCallback
from zmq.eventloop.zmqstream import ZMQStream
from zmq.utils.monitor import parse_monitor_message

RECONNECT = (10, 500)  # milliseconds between attempts to reconnect, at first and at most; engines begin with 100
CONNECT_TIMEOUT = 10.0  # seconds that the controller may take to answer
QUERY_INTERVAL = 0.3  # seconds between two queries for missing engines
CHECK_INTERVAL = 1.0  # seconds between two checks for lost answers
REGISTER_TIMEOUT = 5.0  # seconds in which live engines register at a restarted controller
LOST = "the answer was lost with ipyparallel's controller, or a connection to it: completion status unknown"


class ControllerLostError(Exception):
    """The answer to a call was lost, with the controller or on its way."""


def connect(information: dict[str, Any], name: str, profile_dir: str) -> Client:
    """A client of the controller at `information`. TimeoutError if it does not answer."""
    client = Client(
        connection_info=information,
        timeout=CONNECT_TIMEOUT,
        cluster_id=name,
        profile_dir=profile_dir,
        context=Context(),
    )
    client.start_watching()
    return client


class Context(zmq.Context[Any]):
    """The kernel's context for one client: it monitors the client's connections, and makes them reconnect soon.

    Each controller would give a socket without an identity a new one, and answers to the old one would be lost.
    """

    # (socket, reader of its monitor). Declared, as ZeroMQ takes other attributes for options.
    watched: list[tuple[Any, Any]]

    def __init__(self) -> None:
        super().__init__(shadow=zmq.Context.instance())
        self.watched = []

    def socket(self, socket_type: int, *args: Any, **options: Any) -> Any:
        made = super().socket(socket_type, *args, **options)
        if socket_type != zmq.PAIR:  # a monitor
            made.setsockopt(zmq.RECONNECT_IVL, RECONNECT[0])
            made.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT[1])
            if socket_type == zmq.DEALER:
                made.setsockopt(zmq.IDENTITY, uuid4().bytes)
            monitor = made.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            self.watched.append((made, monitor))
        return made

    def unwatch(self) -> None:
        """Call this before a socket is closed: ZeroMQ's thread, which the whole kernel shares, waits for monitors' readers."""
        for socket, reader in self.watched:
            socket.disable_monitor()
            reader.close()
        self.watched = []


class Records(defaultdict[str, Any]):
    """ipyparallel's metadata of calls. Output that arrives after a call was purged makes no new record."""

    def __init__(self, known: Container[str]) -> None:
        super().__init__(Metadata)
        self._known = known  # calls that have not been purged

    def __missing__(self, call: str) -> Any:
        return super().__missing__(call) if call in self._known else Metadata()


class Client(ipp.Client):  # type: ignore[misc]
    """ipyparallel's client, for which a lost answer is an error and a live engine stays known.

    When all its connections are made again, there is a restarted controller: the client queries its engines. Engines that do
    not register there have died. Answers from the time between are lost, as are those on a broken connection. Engines answer
    in order: a call is lost if a later call is answered first.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        try:
            super().__init__(*args, **options)
        except BaseException:  # after Ctrl-C ipyparallel leaves its sockets open
            self._context.unwatch()
            super().close(linger=0)
            raise
        self.metadata = Records(self._futures)
        self._open_connections: set[int] = set()  # numbers of connections
        self._has_connected = False  # to a controller
        self._unconfirmed: set[str] = set()  # engines of the last controller that have not registered at the next one
        self._checks: PeriodicCallback | None = None
        self._drop_timer: object = None  # drops them
        self._unanswered: dict[str, int] = {}  # engine -> number of checks since its last answer
        self._sent: set[str] = set()  # calls; ipyparallel counts them as outstanding before it sends them

    def start_watching(self) -> None:
        """Watch the connections and unanswered calls from now on."""
        send = self.session.send

        def recorded(*args: Any, **options: Any) -> Any:
            message = send(*args, **options)
            self._sent.add(message["header"]["msg_id"])
            return message

        self.session.send = recorded
        self._registration_callbacks.append(lambda event: self._io_loop.add_callback(self._on_registration, event))
        self._io_loop.add_callback(self._start_watching)

    @property
    def is_connected(self) -> bool:
        """Whether all its connections are open."""
        return len(self._open_connections) == len(self._context.watched)

    def wait_for(self, engines: Collection[str], timeout: float) -> set[str]:
        """Wait until all connections are open and these engines (uuids) are known. Returns those that are not after `timeout` s.

        Without a connection for output, the output of the first call would be lost.
        """
        end = time.monotonic() + timeout
        asked = time.monotonic()
        while True:
            unknown = set(engines) - set(dict(self._engines).values())
            is_connected, now = self.is_connected, time.monotonic()
            if (is_connected and not unknown) or now > end:
                return unknown if is_connected else set(engines)
            if now - asked > QUERY_INTERVAL:  # the controller does not repeat what it sent before this client connected
                asked = now
                self._io_loop.add_callback(self._query_engines)
            time.sleep(0.01)

    def close(self, linger: int | None = None) -> None:
        if self._io_thread is None:
            self._context.unwatch()
        elif not self._closed:
            self._io_loop.add_callback(self._stop_watching)  # just before its thread ends
        super().close(linger)

    # ---- in its own thread ----

    def _start_watching(self) -> None:
        self._checks = PeriodicCallback(self._check_unanswered, CHECK_INTERVAL * 1000)
        self._checks.start()
        for number, (socket, monitor) in enumerate(self._context.watched):
            stream = ZMQStream(monitor, self._io_loop)
            stream.on_recv(partial(self._watch, number))
            self._context.watched[number] = (socket, stream)

    def _stop_watching(self) -> None:
        if self._checks is not None:
            self._checks.stop()
        self._context.unwatch()

    def _watch(self, number: int, message: list[bytes]) -> None:
        if parse_monitor_message(message)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._open_connections.discard(number)
        elif number not in self._open_connections:
            self._open_connections.add(number)
            if not self.is_connected:
                return
            if self._has_connected:
                self._on_new_controller()
            self._has_connected = True
            self._query_engines()

    def _query_engines(self) -> None:
        answered = self._send(self._query_socket, "connection_request")
        answered.add_done_callback(lambda answer: self._io_loop.add_callback(self._on_engines, answer))

    def _on_new_controller(self) -> None:
        self._fail_unbound()
        self._unconfirmed = set(self._engines.values())
        if self._drop_timer is not None:
            self._io_loop.remove_timeout(self._drop_timer)
        self._drop_timer = self._io_loop.call_later(REGISTER_TIMEOUT, self._drop_unconfirmed)

    def _on_engines(self, answer: Future[Any]) -> None:
        if answer.exception() is None:
            engines = dict(answer.result()["content"]["engines"])
            self._update_engines(engines)
            for uuid in engines.values():
                self._confirm(uuid)

    def _on_registration(self, event: dict[str, Any]) -> None:
        if event["event"] == "register":
            self._confirm(event["uuid"])

    def _confirm(self, uuid: str) -> None:
        if uuid in self._unconfirmed:
            self._unconfirmed.discard(uuid)
            self._fail_lost_calls(uuid)

    def _drop_unconfirmed(self) -> None:
        """Drop engines that died while there was no controller: they will not register at the new one."""
        self._drop_timer = None
        for number, uuid in list(self._engines.items()):
            if uuid in self._unconfirmed:
                self._unregister_engine({"content": {"id": number, "uuid": uuid}})
        self._unconfirmed.clear()

    def _check_unanswered(self) -> None:
        self._sent &= self.outstanding
        for uuid, calls in list(self._outstanding_dict.items()):
            checks = self._unanswered[uuid] = self._unanswered.get(uuid, 0) + 1 if calls else 0
            if checks > 1 and checks & (checks - 1) == 0:  # less and less often: it may compute for days
                self._fail_lost_calls(uuid)

    def _fail_lost_calls(self, uuid: str) -> None:
        """Make a call now. When it is answered, fail the earlier calls of this engine that are not."""
        calls = self._sent.intersection(self._outstanding_dict.get(uuid, ()))
        number = next((number for number, engine in self._engines.items() if engine == uuid), None)
        if not calls or number is None:
            return
        last = self.direct_view(number).apply_async(len, "")
        output = self._output_futures.get(last.msg_ids[0]) or last
        last.add_done_callback(lambda _: self._io_loop.add_callback(self._fail, calls))
        output.add_done_callback(lambda _: self._io_loop.add_callback(self._end_output, calls))
        self._forget(last)

    def _forget(self, result: Any) -> None:
        """Drop the record of a call when it is answered, in the thread that receives its output."""
        result.add_done_callback(lambda _: self._io_loop.add_callback(self.purge_local_results, result))

    def _handle_apply_reply(self, msg: dict[str, Any]) -> None:
        if self._waits_for(msg):
            super()._handle_apply_reply(msg)

    def _handle_execute_reply(self, msg: dict[str, Any]) -> None:
        if self._waits_for(msg):
            super()._handle_execute_reply(msg)

    def _waits_for(self, msg: dict[str, Any]) -> bool:
        coalesced = self._should_use_metadata_msg_id(msg)
        return (msg["metadata"]["original_msg_id"] if coalesced else msg["parent_header"]["msg_id"]) in self.outstanding

    def _fail(self, calls: Iterable[str]) -> None:
        """Fail these calls: their answers are lost."""
        try:
            raise ControllerLostError(LOST)  # noqa: TRY301  (ipyparallel wraps the present exception)
        except ControllerLostError:
            content = ipp.error.wrap_exception()
        for call in set(calls) & self.outstanding:
            message = self.session.msg("apply_reply", content=content)
            message["parent_header"]["msg_id"] = call
            self._handle_apply_reply(message)

    def _fail_unbound(self) -> None:
        """The controller has died: fail what it had not passed to an engine yet, and queries."""
        bound: set[str] = set().union(*list(self._outstanding_dict.values()))
        self._fail(self.outstanding - bound)
        for call, future in list(self._futures.items()):
            if call not in bound and not future.done():
                future.set_exception(ControllerLostError(LOST))
        self._end_output(set(self._output_futures) - bound)

    def _end_output(self, calls: Iterable[str]) -> None:
        """End the output of these calls: no more arrives."""
        for call in calls:
            output = self._output_futures.get(call)
            if output is not None and not output.done():
                output.set_result(None)
