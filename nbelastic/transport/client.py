"""An agent's, worker's or node's end of the link: a ZeroMQ DEALER, served by a thread of its own.

Numbered messages wait here until the driver acknowledges them. Reports (`Client.report`) do not: a newer one replaces an
older one of its kind that was not sent, and none is sent while the driver is silent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
import zmq.auth
import zmq.auth.asyncio

from nbelastic.protocol import events as ev
from nbelastic.protocol import messages
from nbelastic.protocol.json_encoding import DECODE_ERRORS, encode
from nbelastic.system.fault_handling import guarded
from nbelastic.transport.delivery import RETRANSMIT_BATCH, Delivery
from nbelastic.transport.keys import Keys
from nbelastic.transport.relay import HOLD, Relay, is_bundle, opened
from nbelastic.transport.sockets import (
    BATCH,
    CLOSE_LINGER,
    DISCONNECTED,
    HEARD,
    HEARTBEAT,
    MAX_MESSAGE,
    RELAY,
    RETRANSMIT,
    SOCKET_OPTIONS,
    relay_endpoint,
)

log = logging.getLogger(__name__)

REPORT_SILENCE = 1.5  # heartbeats without a word of the driver after which a spoke keeps its reports to itself


class Client:
    """The end of an agent, worker or node, served by its own thread. It reconnects by itself.

    The thread calls `on_message(message)` for each message, and `tick()`, which returns the seconds until the next tick.
    `send` and `report` may be called from any thread and never block. `heard_at` is when the driver's last message came
    (monotonic seconds). `disconnected`: since then a message could not be sent. `address` is the driver's, with `keys`, or
    the folder of the agent that relays. While `may_send()` is false, also called in that thread, this end sends nothing;
    queued messages go out later.
    """

    def __init__(
        self,
        address: str | Path,
        keys: Keys | None,
        name: str,
        accepts: object,
        on_message: Callable[[messages.Message], None],
        *,
        tick: Callable[[], float] = lambda: HEARTBEAT,
        heartbeat: float = HEARTBEAT,
        may_send: Callable[[], bool] = lambda: True,
    ) -> None:
        self._may_send = may_send
        self._address, self._keys, self._name = address, keys, name
        self._decoder = msgspec.json.Decoder(accepts)
        self._on_message = on_message
        self._tick = tick
        self._heartbeat = heartbeat
        self._queue: deque[bytes] = deque()
        self._reports: dict[type, object] = {}
        self._delivery = Delivery(RETRANSMIT * heartbeat, secrets.randbits(64))
        self._closing = False
        self._blocked = False  # messages wait, and the socket takes none
        self._heartbeat_at = 0.0
        self._relay = Relay(min(HOLD, heartbeat / 4))
        self._relay_blocked = False  # relayed messages wait, and the socket takes none
        self._resources = contextlib.ExitStack()
        self._relay_socket: zmq.Socket[bytes] | None = None  # to the processes for which this end relays
        self._wake = -1
        self._thread = threading.Thread(target=self._run, name="nbelastic-link", daemon=True)
        self.heard_at = 0.0
        self.disconnected = False
        self.dropped = 0

    def start(self, relay: Path | None = None) -> None:
        """Connect and start the thread. `relay`: a private folder in which this end relays for its host's processes.

        OSError if the folder cannot be used.
        """
        with contextlib.ExitStack() as at_end:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            at_end.callback(context.term)
            self._socket = self._connect(context, at_end)
            if relay is not None:
                self._relay_socket = self._open_relay(context, relay, at_end)
            self._resources = at_end.pop_all()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.heard_at = time.monotonic()
        self._thread.start()

    def send(self, message: messages.Message | ev.Event) -> None:
        self._reports.pop(type(message), None)  # an older report must not follow this message
        frame = encode(message)
        if self._fits(frame, message):
            self._queue.append(frame)
            self.wake()

    def report(self, message: messages.Message | ev.Event) -> None:
        """Send the newest message of this kind, unless a newer one replaces it before it goes out. It may be lost."""
        self._reports[type(message)] = message
        self.wake()

    @property
    def congested(self) -> bool:
        """Whether so many messages are unacknowledged that output should wait at its source."""
        return self._delivery.congested

    def reset_session(self, introduce: Callable[[], messages.Message | ev.Event]) -> None:
        """Discard unsent and unacknowledged messages. Send the message that `introduce` returns, then later ones.

        If another thread sends in the same moment, its message may still go out first.
        """
        out: deque[bytes] = deque()
        self._queue = out
        self._reports.clear()
        out.appendleft(SessionReset(encode(introduce())))
        self.wake()

    def wake(self) -> None:
        """Make the thread tick now."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Tick once more, send queued messages, wait up to half a second for their acknowledgement, and end the thread."""
        self._closing = True
        self.wake()
        self._thread.join(timeout=2.0)
        wake, self._wake = self._wake, -1
        os.close(wake)

    def _run(self) -> None:
        with self._resources:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._wake, select.POLLIN)
            if self._relay_socket is not None:
                poller.register(self._relay_socket, zmq.POLLIN)
            self._serve(self._socket, poller)

    def _open_relay(
        self, context: zmq.Context[zmq.Socket[bytes]], folder: Path, at_end: contextlib.ExitStack
    ) -> zmq.Socket[bytes]:
        """The socket for this host's processes. It needs no keys: only this user can enter the folder."""
        others = at_end.enter_context(contextlib.closing(context.socket(zmq.ROUTER)))
        for option, value in SOCKET_OPTIONS.items():
            others.setsockopt(option, value)
        others.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            others.bind(relay_endpoint(folder, at_end))
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"{error.strerror}: {folder / RELAY}") from None
        (folder / RELAY).chmod(0o600)
        return others

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]], at_end: contextlib.ExitStack) -> zmq.Socket[bytes]:
        socket = at_end.enter_context(contextlib.closing(context.socket(zmq.DEALER)))
        for option, value in SOCKET_OPTIONS.items():
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.IDENTITY, self._name.encode())
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 300)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # a message that cannot go out stays in our queue
        if isinstance(self._address, Path):
            socket.connect(relay_endpoint(self._address, at_end))
            return socket
        assert self._keys is not None
        socket.curve_serverkey = self._keys.server_public.encode()
        socket.curve_publickey = self._keys.client_public.encode()
        socket.curve_secretkey = self._keys.client_secret.encode()
        socket.connect(self._address)
        return socket

    def _serve(self, socket: zmq.Socket[bytes], poller: zmq.Poller) -> None:
        while True:
            now, is_last = time.monotonic(), self._closing  # read before the tick: one follows every close()
            delay = min(guarded(self._tick) or HEARTBEAT, self._heartbeat)
            if not self._relay_blocked:
                delay = min(delay, self._relay.wait(now))
            self._flush(socket)
            if now >= self._heartbeat_at:
                self._send_all(socket, [(self._delivery.head(), b"")])
            if is_last:
                self._relay_messages(socket)
                self._drain(socket)
                return
            blocked = self._blocked or self._relay_blocked
            poller.modify(socket, zmq.POLLIN | zmq.POLLOUT if blocked else zmq.POLLIN)
            delay = min(delay, self._heartbeat_at - time.monotonic())
            ready = dict(poller.poll(int(max(0.0, delay) * 1000) + 1))
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            self._relay_messages(socket)
            if ready.get(socket, 0) & zmq.POLLIN:
                self._receive_batch(socket)

    def _relay_messages(self, socket: zmq.Socket[bytes]) -> None:
        """Receive a batch from this host's processes, and send the driver the bundles that are due."""
        if self._relay_socket is not None:
            guarded(self._receive_from_processes, self._relay_socket)
            guarded(self._send_to_driver, socket)

    def _receive_from_processes(self, others: zmq.Socket[bytes]) -> None:
        """Receive messages to relay. Answer DISCONNECTED while there is no connection to the driver."""
        now = time.monotonic()
        with contextlib.suppress(zmq.Again):
            for _ in range(BATCH):
                name, *frames = others.recv_multipart(zmq.NOBLOCK)
                self._relay.take(name, frames, now)
                if self._relay_blocked:
                    self._send_to_process([name, *DISCONNECTED])

    def _send_to_driver(self, socket: zmq.Socket[bytes]) -> None:
        now = time.monotonic()
        if self._relay.wait(now) > 0:
            self._relay_blocked = False
            return
        was_blocked, self._relay_blocked = self._relay_blocked, not socket.poll(0, zmq.POLLOUT)
        if self._relay_blocked:  # numbered messages wait here: a retransmission would take longer
            self.disconnected = True
            for name in self._relay.names if not was_blocked else ():
                self._send_to_process([name, *DISCONNECTED])
            return
        for bundle in self._relay.due(now):
            with contextlib.suppress(zmq.Again):
                socket.send_multipart(bundle, zmq.NOBLOCK)

    def _send_to_process(self, frames: list[bytes]) -> None:
        if self._relay_socket is not None:
            with contextlib.suppress(zmq.ZMQError):  # the process ended or does not read; the driver retransmits
                self._relay_socket.send_multipart(frames, zmq.NOBLOCK)

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        """Send and retransmit queued messages until all are acknowledged, or CLOSE_LINGER has passed."""
        end = time.monotonic() + CLOSE_LINGER / 1000
        while self._delivery.pending and (left := end - time.monotonic()) > 0:
            socket.poll(int(left * 1000) + 1, zmq.POLLOUT if self._blocked else zmq.POLLIN)
            self._receive_batch(socket)
            self._flush(socket)

    def _receive_batch(self, socket: zmq.Socket[bytes]) -> None:
        """Receive a batch of messages. Pass on those for other processes of this host."""
        for _ in range(BATCH):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if frames == DISCONNECTED:
                self.disconnected = True
                continue
            if is_bundle(frames):
                guarded(self._send_to_processes, frames)
                continue
            *heads, frame = frames
            self.heard_at = now = time.monotonic()
            self.disconnected = False
            if frames == [HEARD]:
                self._delivery.hear(now)
            elif (not heads or self._delivery.receive(heads[0], now)) and frame:
                self._handle_frame(frame)
        # Fewer are acknowledged by the next message or heartbeat.
        if self._delivery.received_since_head >= RETRANSMIT_BATCH:
            self._send_all(socket, [(self._delivery.head(), b"")])

    def _send_to_processes(self, bundle: list[bytes]) -> None:
        for name, message in opened(bundle):
            self._send_to_process([name, *message])

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        """Send messages that are due, and the newest reports if the driver is not silent."""
        delivery, out, now = self._delivery, self._queue, time.monotonic()
        while out:
            frame = out.popleft()
            if isinstance(frame, SessionReset):
                delivery.reset()
            delivery.enqueue(frame)
            if delivery.discarded == 1:
                log.warning("the driver acknowledges nothing: the oldest messages are discarded")
        self._blocked = bool(delivery.pending or self._reports) and not socket.poll(0, zmq.POLLOUT)
        if self._blocked:  # no driver is connected, or it does not read
            self.disconnected = True
            return
        self._send_all(socket, delivery.due(now))
        while self._reports and now - self.heard_at <= REPORT_SILENCE * self._heartbeat:
            try:
                _, message = self._reports.popitem()
            except KeyError:  # another thread has begun a new session
                break
            if self._fits(frame := encode(message), message):
                self._send_all(socket, [(delivery.head(), frame)])

    def _fits(self, frame: bytes, message: object) -> bool:
        """Whether the driver takes a message of this length; it would close the connection, and the next one too."""
        if len(frame) > MAX_MESSAGE:
            log.warning(
                "a message %s of %d bytes is too long for the driver, and is dropped",
                type(message).__name__,
                len(frame),
            )
        return len(frame) <= MAX_MESSAGE

    def _send_all(self, socket: zmq.Socket[bytes], messages: list[tuple[bytes, bytes]]) -> None:
        """Send messages that are kept here until acknowledged, or may be lost. Each is also a heartbeat."""
        for head, frame in messages:
            self._heartbeat_at = time.monotonic() + self._heartbeat
            if not self._may_send():
                return
            try:
                socket.send_multipart((head, frame), zmq.NOBLOCK)
            except zmq.Again:
                self.disconnected = True
                return

    def _handle_frame(self, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
        except DECODE_ERRORS as error:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("dropped a message of the driver: %.200s; later ones are only counted", error)
            return
        guarded(self._on_message, message)


class SessionReset(bytes):
    """The first message of a new session: unacknowledged older ones are discarded."""
