"""ipyparallel's client for `%px`, which goes on with the next controller when one ends. Nothing of ours depends on it."""

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

RECONNECT = (10, 500)  # milliseconds after which it tries to connect again, first and at most; engines begin with 100
CONNECT = 10.0  # seconds that the controller may take to answer
ASK = 0.3  # seconds between two questions for engines that are waited for
LOOK = 1.0  # seconds between two looks at what is not answered
GONE = 5.0  # seconds within which engines that live have told the next controller who they are
LOST = "the answer was lost with ipyparallel's controller, or a connection to it: how far it ran is not known"


class ControllerLostError(Exception):
    """The answer to a call was lost, with the controller or on its way."""


def connect(information: dict[str, Any], name: str, profile_dir: str) -> Client:
    """A client of the controller that `information` leads to. TimeoutError if it does not answer."""
    client = Client(
        connection_info=information, timeout=CONNECT, cluster_id=name, profile_dir=profile_dir, context=Context()
    )
    client.begin()
    return client


class Context(zmq.Context[Any]):
    """The kernel's context for one client: of its sockets it is seen when they are connected, and they come back soon.

    A socket without an identity gets one from the controller, and from the next controller another: answers to it are lost.
    """

    watched: list[tuple[Any, Any]]  # sockets, and who reads of each; declared, as all else is an option to ZeroMQ

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
        """Before any of its sockets is closed: ZeroMQ's thread, which is the whole kernel's, waits for who does not read."""
        for socket, reader in self.watched:
            socket.disable_monitor()
            reader.close()
        self.watched = []


class Records(defaultdict[str, Any]):
    """ipyparallel's metadata of calls. Output that arrives after a call was purged does not make a new record of it."""

    def __init__(self, known: Container[str]) -> None:
        super().__init__(Metadata)
        self._known = known  # calls that have not been purged

    def __missing__(self, call: str) -> Any:
        return super().__missing__(call) if call in self._known else Metadata()


class Client(ipp.Client):  # type: ignore[misc]
    """ipyparallel's, for which a lost answer is an error, and for which an engine is there as long as it lives.

    When all its connections are there again, so is another controller: it asks which engines that one knows. Those that do
    not come back to it have died. What an engine had answered meanwhile is lost. So is what a broken connection takes along.
    Engines answer in order: a call is lost if a later one is answered and it is not.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.metadata = Records(self._futures)
        self._up: set[int] = set()  # connections that are there
        self._met = False  # a controller
        self._doubted: set[str] = set()  # engines of the last controller that the next one does not know yet
        self._looking: PeriodicCallback | None = None
        self._dropping: object = None  # what drops them
        self._looks: dict[str, int] = {}  # engine -> for how many looks it has not answered

    def begin(self) -> None:
        """Watch its connections, and what is not answered, from now on."""
        self._registration_callbacks.append(lambda event: self._io_loop.add_callback(self._noticed, event))
        self._io_loop.add_callback(self._begin)

    def wait_for(self, engines: Collection[str], timeout: float) -> bool:
        """Wait until it knows these engines, by their uuids. Returns whether it does, after `timeout` seconds at most."""
        end = time.monotonic() + timeout
        asked = time.monotonic()
        while not set(engines) <= set(dict(self._engines).values()):
            now = time.monotonic()
            if now > end:
                return False
            if now - asked > ASK:  # what the controller has said before it knew of this client is not said again
                asked = now
                self._io_loop.add_callback(self._ask)
            time.sleep(0.01)
        return True

    def close(self, linger: int | None = None) -> None:
        if self._io_thread is None:
            self._context.unwatch()
        elif not self._closed:
            self._io_loop.add_callback(self._end)  # the last thing but one that its thread does
        super().close(linger)

    # ---- in its own thread ----

    def _begin(self) -> None:
        self._looking = PeriodicCallback(self._look, LOOK * 1000)
        self._looking.start()
        for number, (socket, monitor) in enumerate(self._context.watched):
            stream = ZMQStream(monitor, self._io_loop)
            stream.on_recv(partial(self._watch, number))
            self._context.watched[number] = (socket, stream)

    def _end(self) -> None:
        if self._looking is not None:
            self._looking.stop()
        self._context.unwatch()

    def _watch(self, number: int, message: list[bytes]) -> None:
        if parse_monitor_message(message)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._up.discard(number)
        elif number not in self._up:
            self._up.add(number)
            if len(self._up) < len(self._context.watched):
                return
            if self._met:
                self._meet_again()
            self._met = True
            self._ask()

    def _ask(self) -> None:
        """Which engines are there?"""
        known = self._send(self._query_socket, "connection_request")
        known.add_done_callback(lambda answer: self._io_loop.add_callback(self._know, answer))

    def _meet_again(self) -> None:
        """There is another controller."""
        self._fail_unbound()
        self._doubted = set(self._engines.values())
        if self._dropping is not None:
            self._io_loop.remove_timeout(self._dropping)
        self._dropping = self._io_loop.call_later(GONE, self._drop)

    def _know(self, answer: Future[Any]) -> None:
        if answer.exception() is None:
            engines = dict(answer.result()["content"]["engines"])
            self._update_engines(engines)
            for uuid in engines.values():
                self._back(uuid)

    def _noticed(self, event: dict[str, Any]) -> None:
        if event["event"] == "register":
            self._back(event["uuid"])

    def _back(self, uuid: str) -> None:
        if uuid in self._doubted:
            self._doubted.discard(uuid)
            self._sort_out(uuid)

    def _drop(self) -> None:
        """Engines that have died while there was no controller: the next one will never have heard of them."""
        self._dropping = None
        for number, uuid in list(self._engines.items()):
            if uuid in self._doubted:
                self._unregister_engine({"content": {"id": number, "uuid": uuid}})
        self._doubted.clear()

    def _look(self) -> None:
        for uuid, calls in list(self._outstanding_dict.items()):
            looks = self._looks[uuid] = self._looks.get(uuid, 0) + 1 if calls else 0
            if looks > 1 and looks & (looks - 1) == 0:  # more and more rarely: it may be at work for days
                self._sort_out(uuid)

    def _sort_out(self, uuid: str) -> None:
        """Fail the calls that are lost: those that have not been answered when one that is made now is."""
        calls = set(self._outstanding_dict.get(uuid, ()))
        number = next((number for number, engine in self._engines.items() if engine == uuid), None)
        if not calls or number is None:
            return
        last = self.direct_view(number).apply_async(len, "")
        printed = self._output_futures.get(last.msg_ids[0]) or last
        last.add_done_callback(lambda _: self._io_loop.add_callback(self._fail, calls))
        printed.add_done_callback(lambda _: self._io_loop.add_callback(self._end_output, calls))
        self._forget(last)

    def _forget(self, result: Any) -> None:
        """Forget a call once it is answered, in the thread in which its output arrives; its output may end before."""
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
        """No answer comes to these any more."""
        try:
            raise ControllerLostError(LOST)  # noqa: TRY301  (what is wrapped is the present exception)
        except ControllerLostError:
            content = ipp.error.wrap_exception()
        for call in set(calls) & self.outstanding:
            message = self.session.msg("apply_reply", content=content)
            message["parent_header"]["msg_id"] = call
            self._handle_apply_reply(message)

    def _fail_unbound(self) -> None:
        """The controller is gone, and with it what it kept itself: what was not for one engine, and questions."""
        bound: set[str] = set().union(*list(self._outstanding_dict.values()))
        self._fail(self.outstanding - bound)
        for call, future in list(self._futures.items()):
            if call not in bound and not future.done():
                future.set_exception(ControllerLostError(LOST))
        self._end_output(set(self._output_futures) - bound)

    def _end_output(self, calls: Iterable[str]) -> None:
        """No more output comes of these."""
        for call in calls:
            printed = self._output_futures.get(call)
            if printed is not None and not printed.done():
                printed.set_result(None)
