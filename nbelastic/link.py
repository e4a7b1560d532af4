"""The one wire: ZeroMQ ROUTER (the driver's `Hub`) and DEALER (a `Spoke` in every agent and worker), CURVE, JSON.

Every message is one msgspec struct of `core.messages`, decoded against the union that the sender's role allows; an empty
one is a heartbeat. Before it goes a frame by which it is heard once and in order, though connections break in between
(`core.delivery`). What does not decode is counted, logged once a peer, and dropped: nothing of it is executed.
Without the cluster's client key nobody gets past the CURVE handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import json
import logging
import os
import secrets
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio
import zmq.auth
import zmq.auth.asyncio
import zmq.error

from nbelastic import ports
from nbelastic.core import messages as m
from nbelastic.core import script_messages as s
from nbelastic.core import wire
from nbelastic.core.addresses import bracketed
from nbelastic.core.delivery import HEAD, KEPT, Delivery

log = logging.getLogger("nbelastic.link")
T = TypeVar("T")

HEARTBEAT = 1.0  # seconds between heartbeats, both ways, unless told otherwise
MAX_MESSAGE = 1 << 20  # bytes; a longer one is dropped
PARTING = 500  # milliseconds for the last words of an end that closes
AGAIN = 2.5  # heartbeats after which what nobody has confirmed is sent again
ASK_AGAIN = 0.25  # seconds between two welcomes for one who has not said who it is
PORTS = 20000  # the hub's are from here on: see `ports.chosen`
TRIES = 100  # of them
_FLOOD = 16 * MAX_MESSAGE  # a message of this size is not even read: it closes the sender's connection
_SETTINGS = {
    zmq.LINGER: PARTING,
    zmq.HANDSHAKE_IVL: 10000,
    zmq.MAXMSGSIZE: _FLOOD,
    zmq.HEARTBEAT_IVL: 2000,
    zmq.HEARTBEAT_TIMEOUT: 10000,
    zmq.SNDHWM: 10000,
    zmq.RCVHWM: 10000,
    zmq.IPV6: 1,
}


_encoder = msgspec.json.Encoder()


def encode(message: object) -> bytes:
    """As JSON. Text that is no Unicode (a lone surrogate of a strange file name) must not keep a message from going out."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(message), ensure_ascii=False).encode(errors="replace")


def machine() -> str:
    """Which machine this is, and which of its process tables is seen: the same text means that pids mean the same."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


class Keys(msgspec.Struct, frozen=True):
    """A cluster's CURVE key pairs (Z85 text). They never appear in argv, logs or `repr`."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    def __repr__(self) -> str:
        return "Keys(…)"

    @staticmethod
    def make() -> Keys:
        pairs = [key.decode() for _ in range(2) for key in zmq.curve_keypair()]
        return Keys(*pairs)

    def proof(self, term: int) -> str:
        """That one has the driver's secret, in words that say nothing of it."""
        return hmac.new(self.server_secret.encode(), f"driver {term}".encode(), hashlib.sha256).hexdigest()

    def for_clients(self) -> Keys:
        """What agents and workers get: all but the driver's secret."""
        return msgspec.structs.replace(self, server_secret="")


class _OnlyOurs:
    """The one client key that the handshake accepts (pyzmq's credentials provider)."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002  (pyzmq's signature)
        return bytes(key) == self._key


class Hub:
    """The driver's end. `on_message(peer, message)` is called in the loop's thread for every valid message.

    Peers are named `agent/<host>~<number>`, `worker/<WorkerId>`, `node/<host>~<number>` or `driver/<pid>`. `heard_at` is
    when each was last heard (monotonic seconds). With a `term` above 1 others have been here before: who is not known gets
    a welcome until it says who it is, and nothing else that it says is heard.
    """

    def __init__(
        self,
        keys: Keys,
        on_message: Callable[[str, wire.Message | m.Event], None],
        heartbeat: float = HEARTBEAT,
        term: int = 1,
    ) -> None:
        self._keys = keys
        self._term = term
        self._welcomed: dict[str, float] = {}  # when, by peer
        self._heartbeat = heartbeat
        self._me = secrets.randbits(64)
        self._deliveries: dict[str, Delivery] = {}  # by peer
        self._on_message = on_message
        self._decoders = {
            "agent": msgspec.json.Decoder(wire.FromAgent),
            "worker": msgspec.json.Decoder(wire.FromWorker),
            "node": msgspec.json.Decoder(wire.FromNode),
            "driver": msgspec.json.Decoder(wire.FromDriver),
        }
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self.heard_at: dict[str, float] = {}
        self.dropped: Counter[str] = Counter()
        self.address = ""

    async def start(self, interface: str = "127.0.0.1", port: int = 0) -> None:
        """Listen on this port, or a free one, of `interface` (an address, not a name). OSError if the port is taken."""
        self._context = zmq.asyncio.Context()
        self._auth = zmq.auth.asyncio.AsyncioAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(credentials_provider=_OnlyOurs(self._keys.client_public))
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in _SETTINGS.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # who reconnects takes its name over
        self._socket.curve_server = True
        self._socket.curve_secretkey = self._keys.server_secret.encode()
        self._socket.curve_publickey = self._keys.server_public.encode()
        try:
            self._bind(bracketed(interface), [port] if port else ports.chosen(TRIES, PORTS) or ["*"])
        except zmq.ZMQError as error:
            await self.stop()
            raise OSError(error.errno, f"{error.strerror}: {interface}, port {port}") from None
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]

    def _bind(self, host: str, ports: Sequence[int | str]) -> None:
        """To the first of these that is free; `*` is any."""
        for port in ports:
            try:
                self._socket.bind(f"tcp://{host}:{port}")
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE or port == ports[-1]:
                    raise
            else:
                chosen = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
                self.address = f"tcp://{host}:{chosen}"  # ZeroMQ would call it [::ffff:127.0.0.1]
                return

    async def stop(self) -> None:
        """Close; what was sent before has half a second to go out."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._auth.stop()
        await asyncio.sleep(0)  # its task ends now, and not when another socket has the number of its own
        self._socket.close()
        self._context.term()

    def send(self, peer: str, message: wire.Message) -> None:
        """Fire and forget; a peer gets it once it is connected again. One that was never heard has to be connected now."""
        frame = encode(message)
        if peer in self.heard_at:
            self._send(peer, self._delivery(peer).say(frame, time.monotonic()), frame)
        else:
            self._send(peer, frame)

    def _delivery(self, peer: str) -> Delivery:
        if peer not in self._deliveries:
            self._deliveries[peer] = Delivery(AGAIN * self._heartbeat, self._me, time.monotonic_ns())
        return self._deliveries[peer]

    def forget(self, peer: str) -> None:
        """It is gone for good."""
        for known in (self.heard_at, self.dropped, self._welcomed, self._deliveries):
            known.pop(peer, None)

    def _send(self, peer: str, *frames: bytes) -> None:
        if self._closing:
            return
        future: Any = self._socket.send_multipart([peer.encode(), *frames], flags=zmq.NOBLOCK)
        future.add_done_callback(_swallow_unreachable)

    async def _listen(self) -> None:
        while True:
            name, *frames = await self._socket.recv_multipart()
            peer, now = name.decode(errors="replace"), time.monotonic()
            known = peer in self.heard_at or self._term == 1
            head = frames.pop(0) if len(frames) == 2 and len(frames[0]) == HEAD.size else b""
            if frames == [b""]:
                if peer in self.heard_at:
                    self.heard_at[peer] = now
                    if head:
                        self._delivery(peer).hear(head, now)
                elif not known:
                    self._welcome(peer)
                continue
            message = self._decode(peer, frames)
            if not known and (message is None or not self._introduces(peer, head, message)):
                self._welcome(peer)
                continue
            fresh = not head or self._delivery(peer).hear(head, now)
            if not known and not fresh:  # something else comes first, which would be repeated until it was heard
                self._welcome(peer)
                continue
            if message is not None:
                self.heard_at[peer] = now
                if fresh:
                    _guarded(self._on_message, peer, message)

    def _welcome(self, peer: str) -> None:
        now = time.monotonic()
        if peer.partition("/")[0] in self._decoders and now - self._welcomed.get(peer, 0.0) > ASK_AGAIN:
            self._welcomed[peer] = now
            frame, delivery = encode(wire.Welcome(self._term)), self._delivery(peer)
            delivery.give_up()  # an earlier one
            self._send(peer, delivery.say(frame, now), frame)

    def _introduces(self, peer: str, head: bytes, message: wire.Message | m.Event) -> bool:
        """Whether it says to this driver who one is, and all that one is to be known for.

        A host's own node has nothing else to say. What was meant for the driver before this one is old news.
        """
        first = (wire.AgentHello, wire.WorkerHere, wire.NodeHello)
        says = isinstance(message, first) or (isinstance(message, s.NodeReady) and not message.guest)
        return isinstance(message, wire.TakeOver) or (says and bool(head) and self._delivery(peer).answers(head))

    def _decode(self, peer: str, frames: list[bytes]) -> wire.Message | m.Event | None:
        role, _, name = peer.partition("/")
        decoder = self._decoders.get(role)
        try:
            if decoder is None or len(frames) != 1 or len(frames[0]) > MAX_MESSAGE:
                raise msgspec.ValidationError("unknown role, several frames or too long")
            message: wire.Message | m.Event = decoder.decode(frames[0])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._drop(peer, str(error))
            return None
        if role == "driver":
            return message
        speaker = getattr(message, "worker", None) if role == "worker" else getattr(message, "host", None)
        if speaker is None:  # an agent's word on one of its workers
            speaker = getattr(message, "worker", m.WorkerId("", 0, 0)).host
        if str(speaker) != name.partition("~")[0]:  # of a host's agents one is the present one: they are numbered
            self._drop(peer, f"speaks for {str(speaker)[:80]!r}")
            return None
        return message

    def _drop(self, peer: str, why: str) -> None:
        key = peer if peer in self.heard_at else "strangers"
        self.dropped[key] += 1
        if self.dropped[key] == 1:
            log.warning("dropped a message of %.80s: %.200s; later ones are only counted", peer, why)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat)
            now = time.monotonic()
            for peer in list(self.heard_at):
                delivery = self._delivery(peer)
                for head, frame in delivery.again(now):
                    self._send(peer, head, frame)
                self._send(peer, delivery.head(), b"")


def _swallow_unreachable(future: asyncio.Future[object]) -> None:
    if not future.cancelled():
        error = future.exception()
        if error is not None and not isinstance(error, zmq.error.ZMQError):
            log.error("send failed: %r", error)


class Spoke:
    """An agent's or worker's end, served by a thread of its own; it reconnects by itself.

    `on_message(message)` and `tick() -> seconds until the next tick` run in that thread. `send` may be called from any
    thread and never blocks. `heard_at` is when the driver was last heard (monotonic seconds).
    """

    def __init__(
        self,
        address: str,
        keys: Keys,
        name: str,
        accepts: object,
        on_message: Callable[[wire.Message], None],
        *,
        tick: Callable[[], float] = lambda: HEARTBEAT,
        heartbeat: float = HEARTBEAT,
    ) -> None:
        self._address, self._keys, self._name = address, keys, name
        self._decoder = msgspec.json.Decoder(accepts)
        self._on_message = on_message
        self._tick = tick
        self._heartbeat = heartbeat
        self._out: deque[bytes] = deque()
        self._delivery = Delivery(AGAIN * heartbeat, secrets.randbits(64))
        self._closing = False
        self._wake = -1
        self._thread = threading.Thread(target=self._run, name="nbelastic-link", daemon=True)
        self.heard_at = 0.0
        self.away = False
        self.dropped = 0

    def start(self) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.heard_at = time.monotonic()
        self._thread.start()

    def send(self, message: wire.Message | m.Event) -> None:
        self._out.append(encode(message))
        self.wake()

    def begin_again(self, say: Callable[[], wire.Message | m.Event]) -> None:
        """Forget what has not gone out, or not arrived. First goes what `say` returns, then what was said meanwhile.

        From a thread other than the link's, what a third one says in that very moment may still go out before it.
        """
        out: deque[bytes] = deque()
        self._out = out
        out.appendleft(_Anew(encode(say())))
        self.wake()

    def wake(self) -> None:
        """Make the thread tick now."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send what is queued and end the thread."""
        self._closing = True
        self.wake()
        self._thread.join(timeout=2.0)
        wake, self._wake = self._wake, -1
        os.close(wake)

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        for option, value in _SETTINGS.items():
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.IDENTITY, self._name.encode())
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 300)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # what cannot go out stays with us, and we know that it did not
        socket.curve_serverkey = self._keys.server_public.encode()
        socket.curve_publickey = self._keys.client_public.encode()
        socket.curve_secretkey = self._keys.client_secret.encode()
        socket.connect(self._address)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, select.POLLIN)
        try:
            self._serve(socket, poller)
        finally:
            socket.close()
            context.term()

    def _serve(self, socket: zmq.Socket[bytes], poller: zmq.Poller) -> None:
        beat_at = 0.0
        while True:
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + self._heartbeat
                again = self._delivery.again(now)
                if again or not self._out:  # anything is a sign of life
                    self._send_all(socket, again or [(self._delivery.head(), b"")])
            delay = min(_guarded(self._tick) or HEARTBEAT, beat_at - now)
            self._flush(socket)
            if self._closing:
                if self._out and socket.poll(PARTING, zmq.POLLOUT):
                    self._flush(socket)
                return
            poller.modify(socket, zmq.POLLIN | zmq.POLLOUT if self._out else zmq.POLLIN)
            ready = dict(poller.poll(int(max(0.0, delay) * 1000) + 1))
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            while ready.get(socket, 0) & zmq.POLLIN:
                try:
                    *heads, frame = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self.heard_at = now = time.monotonic()
                self.away = False
                if (not heads or self._delivery.hear(heads[0], now)) and frame:
                    self._receive(frame)

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        now = time.monotonic()
        while out := self._out:
            if not socket.poll(0, zmq.POLLOUT):  # there is no driver; or it does not read, and thousands are queued
                self.away = True
                while len(out) > KEPT:
                    out.popleft()
                return
            frame = out.popleft()
            if isinstance(frame, _Anew):
                self._delivery.give_up()
            self._send_all(socket, [(self._delivery.say(frame, now), frame)])

    def _send_all(self, socket: zmq.Socket[bytes], messages: list[tuple[bytes, bytes]]) -> None:
        """What is kept here anyway, or need not be."""
        for head, frame in messages:
            try:
                socket.send_multipart((head, frame), zmq.NOBLOCK)
            except zmq.Again:
                self.away = True
                return

    def _receive(self, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
        except (msgspec.DecodeError, RecursionError) as error:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("dropped a message of the driver: %.200s; later ones are only counted", error)
            return
        _guarded(self._on_message, message)


class _Anew(bytes):
    """A message before which nothing is to be heard that was not heard yet."""


def _guarded(call: Callable[..., T], *args: Any) -> T | None:
    """A bug in what is done with one message must not end the link: heartbeats, and all other messages, depend on it."""
    try:
        return call(*args)
    except Exception:
        log.exception("%s failed", getattr(call, "__qualname__", call))
        return None
