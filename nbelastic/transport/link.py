"""The one wire: ZeroMQ ROUTER (the driver's `Hub`) and DEALER (a `Spoke` in every agent and terminal), CURVE, JSON.

The processes of a host come by their agent's unix socket (`transport.relay`), and hold no keys.

Every message is one msgspec struct of `protocol.events`, decoded against the union that the sender's role allows; an empty
one is a heartbeat. Before it goes a frame by which it is heard once and in order, though connections break in between
(`transport.delivery`). What does not decode is counted, logged once a peer, and dropped: nothing of it is executed.
Without the cluster's client key nobody gets past the CURVE handshake.

Reports (`Spoke.report`) are not kept: a newer report replaces one of its kind that has not gone out, and none goes out
while the driver is silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import secrets
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio
import zmq.auth
import zmq.auth.asyncio

from nbelastic.protocol import events as ev
from nbelastic.protocol import script_events as sev
from nbelastic.protocol import wire
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.wire import HEAD
from nbelastic.system import ports
from nbelastic.system.addresses import bracketed
from nbelastic.system.supervise import report_to_log, supervise
from nbelastic.transport.delivery import Delivery, number_of
from nbelastic.transport.relay import HOLD, KIND, Relay, bundles, is_bundle, opened

log = logging.getLogger("nbelastic.transport.link")
T = TypeVar("T")

HEARTBEAT = 1.0  # seconds between heartbeats, both ways, unless told otherwise
MAX_MESSAGE = 1 << 20  # bytes; a longer one is dropped
PARTING = 500  # milliseconds for the last words of an end that closes
AGAIN = 2.5  # heartbeats after which what nobody has confirmed is sent again
ASK_AGAIN = 0.25  # seconds between two welcomes for one who has not said who it is
PORTS = 20000  # the hub's are from here on: see `ports.chosen`
TRIES = 100  # of them
BATCH, TURN = 256, 0.01  # messages, and seconds, after which a reader lets others have their turn
RELAY = "relay"  # an agent's socket for the processes of its host
AWAY = [b""]  # what a relay sends instead of an answer: it has no connection to the driver
QUIET = 1.5  # heartbeats without a word of the driver after which a spoke keeps its reports to itself
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

    def for_clients(self) -> Keys:
        """What agents and terminals get: all but the driver's secret."""
        return msgspec.structs.replace(self, server_secret="")


class _OnlyOurs:
    """The one client key that the handshake accepts (pyzmq's credentials provider)."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002  (pyzmq's signature)
        return bytes(key) == self._key


class Hub:
    """The driver's end. `on_message(peer, message)` is called in the loop's thread for every valid message.

    Peers are named `agent/<host>~<number>`, `worker/<WorkerId>` or `node/<host>~<number>`. `heard_at` is when
    each was last heard (monotonic seconds). Who is not heard yet is asked about: of a peer for which `is_known(peer)`
    is false messages are passed on, and nothing is kept. With a `term` above 1 others have been here before: who is not
    known gets a welcome until it says who it is, and nothing else that it says is heard.
    """

    def __init__(
        self,
        keys: Keys,
        on_message: Callable[[str, wire.Message | ev.Event], None],
        heartbeat: float = HEARTBEAT,
        term: int = 1,
        is_known: Callable[[str], bool] = lambda peer: True,  # noqa: ARG005
    ) -> None:
        self._keys = keys
        self._term = term
        self._is_known = is_known
        self._welcomed: dict[str, float] = {}  # when, by peer
        self._heartbeat = heartbeat
        self._me = secrets.randbits(64)
        self._deliveries: dict[str, Delivery] = {}  # by peer
        self._on_message = on_message
        self._decoders = {
            "agent": msgspec.json.Decoder(wire.FromAgent),
            "worker": msgspec.json.Decoder(wire.FromWorker),
            "node": msgspec.json.Decoder(wire.FromNode),
        }
        self._beating: asyncio.Task[None] | None = None
        self._turn: asyncio.Handle | None = None  # when the rest is read
        self._heard: set[str] = set()  # peers whose messages are to be confirmed
        self._routes: dict[str, str] = {}  # of those whom an agent relays: which one
        self._bundled: dict[str, list[tuple[bytes, bytes, bytes]]] = {}  # what goes out next, by agent
        self._reports: dict[tuple[str, bytes], bytes] = {}  # the newest of each peer and kind, not looked at yet
        self._closing = False
        self.heard_at: dict[str, float] = {}
        self.dropped: Counter[str] = Counter()
        self.address = ""

    async def start(self, interface: str = "127.0.0.1", port: int = 0) -> None:
        """Listen on this port, or a free one, of `interface` (an address, not a name). OSError if the port is taken."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._auth = zmq.auth.asyncio.AsyncioAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(credentials_provider=_OnlyOurs(self._keys.client_public))
        # A plain socket, read in batches: zmq.asyncio costs five times as much, and never yields while messages wait.
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context)
        self._socket = plain.socket(zmq.ROUTER)
        for option, value in _SETTINGS.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # who reconnects takes its name over
        self._socket.curve_server = True
        self._socket.curve_secretkey = self._keys.server_secret.encode()
        self._socket.curve_publickey = self._keys.server_public.encode()
        try:
            chosen = [one for one in ports.chosen(TRIES, PORTS) if ports.is_free(interface, one)]
            self._bind(bracketed(interface), [port] if port else chosen or ["*"])
        except zmq.ZMQError as error:
            await self.stop()
            raise OSError(error.errno, f"{error.strerror}: {interface}, port {port}") from None
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._read_on)
        self._read_on()
        self._beating = asyncio.create_task(supervise("the driver's heartbeats", self._beat, report_to_log))

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
        if self._beating is not None:
            self._loop.remove_reader(self._fd)
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        if self._turn is not None:
            self._turn.cancel()
        self._auth.stop()
        await asyncio.sleep(0)  # its task ends now, and not when another socket has the number of its own
        self._socket.close()
        self._context.term()

    def send(self, peer: str, message: wire.Message) -> None:
        """Fire and forget; a peer gets it once it is connected again. One that was never heard has to be connected now."""
        self.send_to_all((peer,), message)

    def send_to_all(self, peers: Iterable[str], message: wire.Message) -> None:
        """The same to several peers; it is encoded once."""
        frame, now = encode(message), time.monotonic()
        for peer in peers:
            if peer in self.heard_at:
                self._say(peer, frame, now)
            else:
                self._send(peer, frame)
        self._send_bundles()

    def _say(self, peer: str, frame: bytes, now: float) -> None:
        delivery = self._delivery(peer)
        delivery.say(frame)
        if delivery.given_up == 1:
            log.warning("%.80s confirms nothing: its oldest messages are given up", peer)
        self._send_due(peer, delivery, now)

    def _send_due(self, peer: str, delivery: Delivery, now: float) -> None:
        for head, frame in delivery.due(now):
            self._send(peer, head, frame)

    def _delivery(self, peer: str) -> Delivery:
        if peer not in self._deliveries:
            self._deliveries[peer] = Delivery(AGAIN * self._heartbeat, self._me, time.monotonic_ns())
        return self._deliveries[peer]

    def forget(self, peer: str) -> None:
        """It is gone for good."""
        for known in (self.heard_at, self.dropped, self._welcomed, self._deliveries, self._routes):
            known.pop(peer, None)

    def _send(self, peer: str, *frames: bytes) -> None:
        """`frames`: a head, or none, and a message."""
        if self._closing:
            return
        route = self._routes.get(peer)
        if route is None:
            self._send_now(peer, frames)
            return
        head = frames[0] if len(frames) == 2 else b""
        self._bundled.setdefault(route, []).append((peer.encode(), head, frames[-1]))

    def _send_bundles(self) -> None:
        """Before anything else is sent: what is sent to one host arrives in order."""
        bundled, self._bundled = self._bundled, {}
        for agent, messages in bundled.items():
            for frames in bundles(messages):
                self._send_now(agent, frames)

    def _send_now(self, peer: str, frames: Iterable[bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it is not connected
            self._socket.send_multipart([peer.encode(), *frames], zmq.NOBLOCK)
        self._read_on()  # sending may have taken the sign that something can be read off the descriptor

    def _read_on(self) -> None:
        if self._turn is None and not self._closing:
            self._turn = self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Take a batch of what has come, then let others have their turn.

        ZeroMQ's descriptor tells of changes only, so the socket is read until nothing is left.
        """
        self._turn = None
        end = time.monotonic() + TURN
        for _ in range(BATCH):
            try:
                name, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._take_reports()
                break
            now = time.monotonic()
            take = self._take_bundle if is_bundle(frames) else self._take
            _guarded(take, name.decode(errors="replace"), frames, now)  # a fault must not end the reading
            if now > end:
                self._read_on()
                break
        else:
            self._read_on()
        self._confirm()

    def _confirm(self) -> None:
        """Whoever has said something that is kept until it is confirmed need not keep it, nor send it again."""
        heard, self._heard = self._heard, set()
        now = time.monotonic()
        for peer in heard & self._deliveries.keys():
            delivery = self._deliveries[peer]
            self._send_due(peer, delivery, now)
            if delivery.to_confirm:
                self._send(peer, delivery.head(), b"")
        self._send_bundles()

    def _take(self, peer: str, frames: list[bytes], now: float) -> None:
        head = frames.pop(0) if len(frames) == 2 and len(frames[0]) == HEAD.size else b""
        if peer not in self.heard_at:
            self._meet(peer, head, frames, now)
            return
        if head:
            delivery = self._delivery(peer)
            fresh = delivery.hear(head, now)
            if delivery.to_confirm or delivery.waiting:
                self._heard.add(peer)
            if not fresh:  # a heartbeat, a report, or something that was heard before
                self.heard_at[peer] = now
                if frames[0] and not number_of(head):
                    self._reports[peer, frames[0][:KIND]] = frames[0]
                return
            self._reports.pop((peer, frames[0][:KIND]), None)  # an older one, which is not to come after this
        elif frames == [b""]:
            self.heard_at[peer] = now
            return
        self._pass_on(peer, frames, now)

    def _take_bundle(self, agent: str, frames: list[bytes], now: float) -> None:
        """What an agent relays. It speaks for processes of its own host alone."""
        role, _, rest = agent.partition("/")
        host = rest.rpartition("~")[0]
        theirs = (f"worker/{host}/", f"node/{host}~")
        for name, message in opened(frames):
            peer = name.decode(errors="replace")
            if role == "agent" and peer.startswith(theirs):
                self._routes[peer] = agent
                _guarded(self._take, peer, message, now)
                if peer not in self.heard_at and peer not in self._deliveries:  # nobody will forget it
                    self._send_bundles()
                    self._routes.pop(peer, None)
            else:
                self._drop(agent, f"relays for {peer[:80]!r}")

    def _pass_on(self, peer: str, frames: list[bytes], now: float) -> None:
        message = self._decode(peer, frames)
        if message is not None:
            self.heard_at[peer] = now
            _guarded(self._on_message, peer, message)

    def _take_reports(self) -> None:
        """When there is time for them, that is when nothing else is left to be read, or with every heartbeat."""
        reports, self._reports = self._reports, {}
        now = time.monotonic()
        for (peer, _), frame in reports.items():
            if peer in self.heard_at:
                self._pass_on(peer, [frame], now)

    def _meet(self, peer: str, head: bytes, frames: list[bytes], now: float) -> None:
        """One that is not heard yet says something."""
        if frames == [b""]:
            if self._term > 1:
                self._welcome(peer)
            return
        message = self._decode(peer, frames)
        if self._term > 1 and (message is None or not self._introduces(peer, head, message)):
            self._welcome(peer)
            return
        if not self._is_known(peer):
            if message is not None:
                _guarded(self._on_message, peer, message)
            return
        fresh = not head or self._delivery(peer).hear(head, now) or not number_of(head)
        if not fresh and self._term > 1:  # something else comes first, which would be repeated until it was heard
            self._welcome(peer)
            return
        self._heard.add(peer)
        if message is not None:
            self.heard_at[peer] = now
            if fresh:
                _guarded(self._on_message, peer, message)

    def _welcome(self, peer: str) -> None:
        now = time.monotonic()
        if peer.partition("/")[0] in self._decoders and now - self._welcomed.get(peer, 0.0) > ASK_AGAIN:
            self._welcomed[peer] = now
            delivery = self._delivery(peer)
            delivery.give_up()  # an earlier one
            self._say(peer, encode(wire.Welcome(self._term)), now)
            self._send_bundles()

    def _introduces(self, peer: str, head: bytes, message: wire.Message | ev.Event) -> bool:
        """Whether it says to this driver who one is, and all that one is to be known for.

        A host's own node has nothing else to say. What was meant for the driver before this one is old news.
        """
        first = (wire.AgentHello, wire.WorkerReport, wire.NodeHello)
        says = isinstance(message, first) or (isinstance(message, sev.NodeReady) and not message.external)
        return says and bool(head) and self._delivery(peer).answers(head)

    def _decode(self, peer: str, frames: list[bytes]) -> wire.Message | ev.Event | None:
        role, _, name = peer.partition("/")
        decoder = self._decoders.get(role)
        try:
            if decoder is None or len(frames) != 1 or len(frames[0]) > MAX_MESSAGE:
                raise msgspec.ValidationError("unknown role, several frames or too long")
            message: wire.Message | ev.Event = decoder.decode(frames[0])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._drop(peer, str(error))
            return None
        speaker = getattr(message, "worker", None) if role == "worker" else getattr(message, "host", None)
        if speaker is None:  # an agent's word on one of its workers
            speaker = getattr(message, "worker", WorkerId("", 0, 0)).host
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
            self._take_reports()
            for peer in list(self.heard_at):
                delivery = self._delivery(peer)
                self._send_due(peer, delivery, now)
                self._send(peer, delivery.head(), b"")
            self._send_bundles()


class Spoke:
    """An agent's or worker's end, served by a thread of its own; it reconnects by itself.

    `on_message(message)` and `tick() -> seconds until the next tick` run in that thread. `send` and `report` may be called
    from any thread and never block. `heard_at` is when the driver was last heard (monotonic seconds), `away` whether
    something could not be sent since, as there is no connection. With a folder instead of an address and keys, messages go
    by the agent that relays there; an agent is started with the folder, this user's alone, where it shall `relay`. While
    `works()` is false, which is called in that thread, nothing of its own is sent: to the driver this end is silent, and
    what was said meanwhile arrives later.
    """

    def __init__(
        self,
        address: str | Path,
        keys: Keys | None,
        name: str,
        accepts: object,
        on_message: Callable[[wire.Message], None],
        *,
        tick: Callable[[], float] = lambda: HEARTBEAT,
        heartbeat: float = HEARTBEAT,
        works: Callable[[], bool] = lambda: True,
    ) -> None:
        self._works = works
        self._address, self._keys, self._name = address, keys, name
        self._decoder = msgspec.json.Decoder(accepts)
        self._on_message = on_message
        self._tick = tick
        self._heartbeat = heartbeat
        self._out: deque[bytes] = deque()
        self._reports: dict[type, object] = {}
        self._delivery = Delivery(AGAIN * heartbeat, secrets.randbits(64))
        self._closing = False
        self._blocked = False  # something is to be sent, and cannot be
        self._beat_at = 0.0
        self._relay = Relay(min(HOLD, heartbeat / 4))
        self._relay_blocked = False  # something is to be passed on, and cannot be
        self._at_end = contextlib.ExitStack()
        self._others: zmq.Socket[bytes] | None = None  # for which this end relays
        self._wake = -1
        self._thread = threading.Thread(target=self._run, name="nbelastic-link", daemon=True)
        self.heard_at = 0.0
        self.away = False
        self.dropped = 0

    def start(self, relay: Path | None = None) -> None:
        """OSError if the folder cannot be used."""
        with contextlib.ExitStack() as at_end:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            at_end.callback(context.term)
            self._socket = self._connect(context, at_end)
            if relay is not None:
                self._others = self._open_relay(context, relay, at_end)
            self._at_end = at_end.pop_all()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.heard_at = time.monotonic()
        self._thread.start()

    def send(self, message: wire.Message | ev.Event) -> None:
        self._reports.pop(type(message), None)  # an older one, which is not to come after this
        self._out.append(encode(message))
        self.wake()

    def report(self, message: wire.Message | ev.Event) -> None:
        """Send the newest message of this kind, unless a newer one replaces it before it goes out. It may be lost."""
        self._reports[type(message)] = message
        self.wake()

    @property
    def crowded(self) -> bool:
        """Whether the driver has confirmed so little that output should wait where it comes from."""
        return self._delivery.crowded

    def begin_again(self, say: Callable[[], wire.Message | ev.Event]) -> None:
        """Forget what has not gone out, or not arrived. First goes what `say` returns, then what was said meanwhile.

        From a thread other than the link's, what a third one says in that very moment may still go out before it.
        """
        out: deque[bytes] = deque()
        self._out = out
        self._reports.clear()
        out.appendleft(_Anew(encode(say())))
        self.wake()

    def wake(self) -> None:
        """Make the thread tick now."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send what is queued, wait up to half a second until the driver confirms it, and end the thread."""
        self._closing = True
        self.wake()
        self._thread.join(timeout=2.0)
        wake, self._wake = self._wake, -1
        os.close(wake)

    def _run(self) -> None:
        with self._at_end:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._wake, select.POLLIN)
            if self._others is not None:
                poller.register(self._others, zmq.POLLIN)
            self._serve(self._socket, poller)

    def _open_relay(
        self, context: zmq.Context[zmq.Socket[bytes]], folder: Path, at_end: contextlib.ExitStack
    ) -> zmq.Socket[bytes]:
        """Where the processes of this host come. Who can enter the folder is this user: no keys are needed."""
        others = at_end.enter_context(contextlib.closing(context.socket(zmq.ROUTER)))
        for option, value in _SETTINGS.items():
            others.setsockopt(option, value)
        others.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            others.bind(_endpoint(folder, at_end))
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"{error.strerror}: {folder / RELAY}") from None
        (folder / RELAY).chmod(0o600)
        return others

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]], at_end: contextlib.ExitStack) -> zmq.Socket[bytes]:
        socket = at_end.enter_context(contextlib.closing(context.socket(zmq.DEALER)))
        for option, value in _SETTINGS.items():
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.IDENTITY, self._name.encode())
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 300)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # what cannot go out stays with us, and we know that it did not
        if isinstance(self._address, Path):
            socket.connect(_endpoint(self._address, at_end))
            return socket
        assert self._keys is not None
        socket.curve_serverkey = self._keys.server_public.encode()
        socket.curve_publickey = self._keys.client_public.encode()
        socket.curve_secretkey = self._keys.client_secret.encode()
        socket.connect(self._address)
        return socket

    def _serve(self, socket: zmq.Socket[bytes], poller: zmq.Poller) -> None:
        while True:
            now = time.monotonic()
            delay = min(_guarded(self._tick) or HEARTBEAT, self._heartbeat)
            if not self._relay_blocked:
                delay = min(delay, self._relay.wait(now))
            self._flush(socket)
            if now >= self._beat_at:
                self._send_all(socket, [(self._delivery.head(), b"")])
            if self._closing:
                self._pass_on_all(socket)
                self._part(socket)
                return
            blocked = self._blocked or self._relay_blocked
            poller.modify(socket, zmq.POLLIN | zmq.POLLOUT if blocked else zmq.POLLIN)
            delay = min(delay, self._beat_at - time.monotonic())
            ready = dict(poller.poll(int(max(0.0, delay) * 1000) + 1))
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            self._pass_on_all(socket)
            if ready.get(socket, 0) & zmq.POLLIN:
                self._take_in(socket)

    def _pass_on_all(self, socket: zmq.Socket[bytes]) -> None:
        """Take a batch of what this host's processes have sent, and send the driver what is due of it."""
        if self._others is not None:
            _guarded(self._collect, self._others)
            _guarded(self._pass_up, socket)

    def _collect(self, others: zmq.Socket[bytes]) -> None:
        """Who sends something while there is no connection hears so."""
        now = time.monotonic()
        with contextlib.suppress(zmq.Again):
            for _ in range(BATCH):
                name, *frames = others.recv_multipart(zmq.NOBLOCK)
                self._relay.take(name, frames, now)
                if self._relay_blocked:
                    self._hand_on([name, *AWAY])

    def _pass_up(self, socket: zmq.Socket[bytes]) -> None:
        now = time.monotonic()
        if self._relay.wait(now) > 0:
            self._relay_blocked = False
            return
        was_blocked, self._relay_blocked = self._relay_blocked, not socket.poll(0, zmq.POLLOUT)
        if self._relay_blocked:  # what is numbered waits here: it would take long to be sent again
            self.away = True
            for name in self._relay.names if not was_blocked else ():
                self._hand_on([name, *AWAY])
            return
        for bundle in self._relay.due(now):
            with contextlib.suppress(zmq.Again):
                socket.send_multipart(bundle, zmq.NOBLOCK)

    def _hand_on(self, frames: list[bytes]) -> None:
        if self._others is not None:
            with contextlib.suppress(zmq.ZMQError):  # it has ended, or does not read: it is sent again
                self._others.send_multipart(frames, zmq.NOBLOCK)

    def _part(self, socket: zmq.Socket[bytes]) -> None:
        """The last words go out, and again if need be, until they are confirmed or their time is up."""
        end = time.monotonic() + PARTING / 1000
        while self._delivery.waiting and (left := end - time.monotonic()) > 0:
            socket.poll(int(left * 1000) + 1, zmq.POLLOUT if self._blocked else zmq.POLLIN)
            self._take_in(socket)
            self._flush(socket)

    def _take_in(self, socket: zmq.Socket[bytes]) -> None:
        """Take a batch of what has come, and confirm it. What is for others is handed on to them."""
        for _ in range(BATCH):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if frames == AWAY:
                self.away = True
                continue
            if is_bundle(frames):
                _guarded(self._hand_out, frames)
                continue
            *heads, frame = frames
            self.heard_at = now = time.monotonic()
            self.away = False
            if (not heads or self._delivery.hear(heads[0], now)) and frame:
                self._receive(frame)
        if self._delivery.to_confirm:
            self._send_all(socket, [(self._delivery.head(), b"")])

    def _hand_out(self, bundle: list[bytes]) -> None:
        for name, message in opened(bundle):
            self._hand_on([name, *message])

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        """Send what is due, and the newest reports if the driver hears them."""
        delivery, out, now = self._delivery, self._out, time.monotonic()
        while out:
            frame = out.popleft()
            if isinstance(frame, _Anew):
                delivery.give_up()
            delivery.say(frame)
            if delivery.given_up == 1:
                log.warning("the driver confirms nothing: the oldest messages to it are given up")
        self._blocked = bool(delivery.waiting or self._reports) and not socket.poll(0, zmq.POLLOUT)
        if self._blocked:  # there is no driver; or it does not read, and thousands are queued
            self.away = True
            return
        self._send_all(socket, delivery.due(now))
        while self._reports and now - self.heard_at <= QUIET * self._heartbeat:
            _, message = self._reports.popitem()
            self._send_all(socket, [(delivery.head(), encode(message))])

    def _send_all(self, socket: zmq.Socket[bytes], messages: list[tuple[bytes, bytes]]) -> None:
        """What is kept here anyway, or need not be. All of it is a sign of life."""
        for head, frame in messages:
            self._beat_at = time.monotonic() + self._heartbeat
            if not self._works():
                return
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


def _endpoint(folder: Path, at_end: contextlib.ExitStack) -> str:
    """The relay's in this folder: the full path may be longer than a socket's may be."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    at_end.callback(os.close, fd)
    return f"ipc:///proc/self/fd/{fd}/{RELAY}"


class _Anew(bytes):
    """A message before which nothing is to be heard that was not heard yet."""


def _guarded(call: Callable[..., T], *args: Any) -> T | None:
    """A bug in what is done with one message must not end the link: heartbeats, and all other messages, depend on it."""
    try:
        return call(*args)
    except Exception:
        log.exception("%s failed", getattr(call, "__qualname__", call))
        return None
