"""ipyparallel's client, which knows what to do when its controller ends and another one comes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any
from uuid import uuid4

import ipyparallel as ipp
import zmq
from ipyparallel.client.client import Metadata
from zmq.eventloop.zmqstream import ZMQStream
from zmq.utils.monitor import parse_monitor_message

SOON = (
    10  # milliseconds after which it tries to connect again; engines, whose answers it wants, wait for ten times that
)
LOST = "the answer was lost with ipyparallel's controller, or a connection to it: how far it ran is not known"


class ControllerLostError(Exception):
    """The answer to a call was lost, with the controller or on its way."""


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
            made.setsockopt(zmq.RECONNECT_IVL, SOON)
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
    """ipyparallel's, which prints what comes too late."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.metadata = Records(self._futures)

    def purge(self, result: Any) -> None:
        """Forget a call once it is answered, in the thread in which its output arrives; its output may end before."""
        result.add_done_callback(lambda _: self._io_loop.add_callback(self.purge_local_results, result))

    def watch(self, changed: Callable[[bool], object]) -> None:
        """Have `changed(whether all is connected)` called in its thread."""
        self._io_loop.add_callback(self._watch, changed)

    def _watch(self, changed: Callable[[bool], object]) -> None:
        there: set[int] = set()
        of = len(self._context.watched)

        def heard(number: int, message: list[bytes]) -> None:
            up = parse_monitor_message(message)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            (there.add if up else there.discard)(number)
            changed(len(there) == of)

        for number, (socket, monitor) in enumerate(self._context.watched):
            stream = ZMQStream(monitor, self._io_loop)
            stream.on_recv(partial(heard, number))
            self._context.watched[number] = (socket, stream)

    def close(self, linger: int | None = None) -> None:
        if self._io_thread is None:
            self._context.unwatch()
        elif not self._closed:
            self._io_loop.add_callback(self._context.unwatch)  # the last thing but one that its thread does
        super().close(linger)

    def _handle_apply_reply(self, msg: dict[str, Any]) -> None:
        if self._waits_for(msg):
            super()._handle_apply_reply(msg)

    def _handle_execute_reply(self, msg: dict[str, Any]) -> None:
        if self._waits_for(msg):
            super()._handle_execute_reply(msg)

    def _waits_for(self, msg: dict[str, Any]) -> bool:
        coalesced = self._should_use_metadata_msg_id(msg)
        return (msg["metadata"]["original_msg_id"] if coalesced else msg["parent_header"]["msg_id"]) in self.outstanding

    def fail(self, calls: Iterable[str]) -> None:
        """In its thread: no answer comes to these any more."""
        try:
            raise ControllerLostError(LOST)  # noqa: TRY301  (what is wrapped is the present exception)
        except ControllerLostError:
            content = ipp.error.wrap_exception()
        for call in set(calls) & self.outstanding:
            message = self.session.msg("apply_reply", content=content)
            message["parent_header"]["msg_id"] = call
            self._handle_apply_reply(message)

    def fail_unbound(self) -> None:
        """In its thread: the controller is gone, and with it what it kept itself: what was not for one engine, and questions."""
        bound: set[str] = set().union(*list(self._outstanding_dict.values()))
        self.fail(self.outstanding - bound)
        for call, future in list(self._futures.items()):
            if call not in bound and not future.done():
                future.set_exception(ControllerLostError(LOST))
        self.end_output(set(self._output_futures) - bound)

    def end_output(self, calls: Iterable[str]) -> None:
        """No more output comes of these."""
        for call in calls:
            printed = self._output_futures.get(call)
            if printed is not None and not printed.done():
                printed.set_result(None)
