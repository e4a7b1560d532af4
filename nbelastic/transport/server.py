"""The driver's end of the link: a ZeroMQ ROUTER on loopback, CURVE keys, JSON.

Processes of a host connect to their agent, which relays and bundles their messages (`transport.relay`). Only agents and
terminals hold keys. Without the cluster's client key no peer passes the CURVE handshake.

Each message is one msgspec struct, decoded against the union of what the sender's role may send. An empty message is a
heartbeat. The frame before it makes it arrive once and in order (`transport.delivery`). A message that does not decode is
counted, logged once for each peer, and dropped; nothing of it is executed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec
import zmq
import zmq.asyncio
import zmq.auth
import zmq.auth.asyncio

from nbelastic.protocol import agent_messages, messages, node_messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.connection_events import EnvironmentReported
from nbelastic.protocol.host_texts import cleaned
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.json_encoding import DECODE_ERRORS, decode, encode
from nbelastic.protocol.messages import HEAD
from nbelastic.system import ports
from nbelastic.system.addresses import bracketed
from nbelastic.system.fault_handling import guarded, report_to_log, supervise
from nbelastic.transport.backlog import Backlog, read_turn
from nbelastic.transport.delivery import Delivery, number_of
from nbelastic.transport.keys import Keys, OneClientKey
from nbelastic.transport.relay import KIND, bundles, is_bundle, opened
from nbelastic.transport.sockets import (
    BATCH,
    HEARD,
    HEARTBEAT,
    MAX_MESSAGE,
    MAX_TO_DRIVER,
    MAX_UNREAD,
    RETRANSMIT,
    SOCKET_OPTIONS,
    TURN,
    bind,
)

log = logging.getLogger(__name__)

WELCOME_PAUSE = 0.25  # seconds between two welcomes for one who has not said who it is
PORTS, TRIES = 20000, 100  # the server tries so many ports from here on: see `ports.random_ports`


class Server:
    """The driver's end. It calls `on_message(peer, message)` in the loop's thread for each valid message.

    Peers are named `agent/<host>~<number>`, `worker/<WorkerId>` or `node/<host>~<number>`. `heard_at` has the time
    (monotonic seconds) of each peer's last message. For a new peer the server asks `is_known(peer)`: messages of an unknown
    peer are handled, but the server keeps nothing of it. `term` counts the cluster's drivers. With a term above 1 the server
    sends a new peer a Welcome until it introduces itself, and ignores its other messages. Unknown workers get none.
    """

    def __init__(
        self,
        keys: Keys,
        on_message: Callable[[str, messages.Message | ev.Event], None],
        heartbeat: float = HEARTBEAT,
        term: int = 1,
        is_known: Callable[[str], bool] = lambda peer: True,  # noqa: ARG005
    ) -> None:
        self._keys = keys
        self._term = term
        self._is_known = is_known
        self._welcomed: dict[str, float] = {}  # when a Welcome was sent, by peer
        self._heartbeat = heartbeat
        self._session = secrets.randbits(64)
        self._deliveries: dict[str, Delivery] = {}  # by peer
        self._on_message = on_message
        self._decoders = {
            "agent": msgspec.json.Decoder(agent_messages.FromAgent),
            "worker": msgspec.json.Decoder(worker_messages.FromWorker),
            "node": msgspec.json.Decoder(node_messages.FromNode),
        }
        self._heartbeats: asyncio.Task[None] | None = None
        self._next_read: asyncio.Handle | None = None  # the next read of a batch
        self.backlog = Backlog(SOCKET_OPTIONS[zmq.RCVHWM])
        self._to_acknowledge: set[str] = set()  # peers whose messages to acknowledge
        self._routes: dict[str, str] = {}  # the agent that relays a peer
        self._outgoing: dict[str, list[tuple[bytes, bytes, bytes]]] = {}  # messages to send in one bundle, by agent
        self._reports: dict[tuple[str, bytes], bytes] = {}  # the newest of each peer and kind, not handled yet
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
        self._auth.configure_curve_callback(credentials_provider=OneClientKey(self._keys.client_public))
        # A plain socket, read in batches: zmq.asyncio costs five times as much, and never yields while messages wait.
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context)
        self._socket = plain.socket(zmq.ROUTER)
        for option, value in (SOCKET_OPTIONS | {zmq.MAXMSGSIZE: MAX_TO_DRIVER}).items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects takes over its name
        self._socket.curve_server = True
        self._socket.curve_secretkey = self._keys.server_secret.encode()
        self._socket.curve_publickey = self._keys.server_public.encode()
        try:
            chosen = [one for one in ports.random_ports(TRIES, PORTS) if ports.is_free(interface, one)]
            self.address = bind(self._socket, bracketed(interface), [port] if port else chosen or ["*"])
        except zmq.ZMQError as error:
            await self.stop()
            raise OSError(error.errno, f"{error.strerror}: {interface}, port {port}") from None
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._schedule_read)
        self._schedule_read()
        self._heartbeats = asyncio.create_task(
            supervise("the driver's heartbeats", self._send_heartbeats, report_to_log)
        )

    async def stop(self) -> None:
        """Close. Messages sent before have half a second to go out."""
        self._closing = True
        if self._heartbeats is not None:
            self._loop.remove_reader(self._fd)
            self._heartbeats.cancel()
            await asyncio.gather(self._heartbeats, return_exceptions=True)
        if self._next_read is not None:
            self._next_read.cancel()
        self._auth.stop()
        await asyncio.sleep(0)  # its task ends now, before another socket reuses its descriptor
        self._socket.close()
        self._context.term()

    def send(self, peer: str, message: messages.Message) -> None:
        """Send without waiting. A known peer receives it once it is connected again; a new one must be connected now."""
        self.send_to_all((peer,), message)

    def send_to_all(self, peers: Iterable[str], message: messages.Message) -> None:
        """Send the same message to several peers. It is encoded once."""
        frame, now = encode(message), time.monotonic()
        for peer in peers:
            if peer in self.heard_at:
                self._enqueue(peer, frame, now)
            else:
                self._send_or_bundle(peer, frame)
        self._send_bundles()

    def _enqueue(self, peer: str, frame: bytes, now: float) -> None:
        delivery = self._delivery_of(peer)
        delivery.enqueue(frame)
        if delivery.discarded == 1:
            log.warning("%.80s acknowledges nothing: its oldest messages are discarded", peer)
        self._send_due(peer, delivery, now)

    def _send_due(self, peer: str, delivery: Delivery, now: float, unread: float = math.inf) -> None:
        for head, frame in delivery.due(now, unread):
            self._send_or_bundle(peer, head, frame)

    def _delivery_of(self, peer: str) -> Delivery:
        if peer not in self._deliveries:
            self._deliveries[peer] = Delivery(RETRANSMIT * self._heartbeat, self._session, time.monotonic_ns())
        return self._deliveries[peer]

    def has_acknowledged(self, peer: str) -> bool:
        """Whether the peer has received all messages for it."""
        return peer in self._deliveries and not self._deliveries[peer].pending

    def forget(self, peer: str) -> None:
        """Forget a peer that will not come back."""
        for known in (self.heard_at, self.dropped, self._welcomed, self._deliveries, self._routes):
            known.pop(peer, None)

    def _send_or_bundle(self, peer: str, *frames: bytes) -> None:
        """Send a message, with its head if it has one: directly, or in the next bundle for the agent that relays the peer."""
        if self._closing:
            return
        route = self._routes.get(peer)
        if route is None:
            self._send_frames(peer, frames)
            return
        head = frames[0] if len(frames) == 2 else b""
        self._outgoing.setdefault(route, []).append((peer.encode(), head, frames[-1]))

    def _send_bundles(self) -> None:
        """Send each agent its bundle. Called before any other send, so that messages to one host arrive in order."""
        bundled, self._outgoing = self._outgoing, {}
        for agent, waiting in bundled.items():
            for frames in bundles(waiting):
                self._send_frames(agent, frames)

    def _send_frames(self, peer: str, frames: Iterable[bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the peer is not connected
            self._socket.send_multipart([peer.encode(), *frames], zmq.NOBLOCK)
        self._schedule_read()  # a send may have cleared the descriptor's readiness

    def _schedule_read(self) -> None:
        if self._next_read is None and not self._closing:
            self._next_read = self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Receive one batch of messages, then yield to other callbacks.

        ZeroMQ's descriptor signals changes only, so the socket must be read until it is empty.
        """
        self._next_read = None
        self.backlog.begin()
        end = time.monotonic() + TURN
        for _ in range(BATCH):
            try:
                name, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self.backlog.end(time.monotonic())
                self._handle_reports()
                break
            now = time.monotonic()
            self.backlog.note_read(name, now)
            take = self._receive_bundle if is_bundle(frames) else self._receive
            guarded(take, name.decode(errors="replace"), frames, now)  # a fault must not end the reading
            if now > end:
                self._schedule_read()
                break
        else:
            self._schedule_read()
        self._acknowledge()

    def _acknowledge(self) -> None:
        """Acknowledge the messages received, so that their senders neither keep nor retransmit them."""
        heard, now, self._to_acknowledge = self._to_acknowledge, time.monotonic(), set()
        unread = self._unread(now)
        for peer in heard & self._deliveries.keys():
            delivery = self._deliveries[peer]
            if delivery.pending:
                self._send_due(peer, delivery, now, unread)
            if delivery.must_acknowledge:
                self._send_or_bundle(peer, delivery.head(), b"")
        self._send_bundles()

    def _unread(self, now: float) -> float:
        """Seconds for which messages may wait unread. Only after reading: after a long turn it is not known."""
        return min(now - self.backlog.messages.read_up_to(now), MAX_UNREAD * self._heartbeat)

    def _receive(self, peer: str, frames: list[bytes], now: float) -> None:
        head = frames.pop(0) if len(frames) == 2 and len(frames[0]) == HEAD.size else b""
        if peer not in self.heard_at:
            self._receive_first(peer, head, frames, now)
            return
        if head:
            delivery = self._delivery_of(peer)
            fresh = delivery.receive(head, now)
            if delivery.received_since_head or delivery.pending:
                self._to_acknowledge.add(peer)
            if not fresh:  # a heartbeat, a report, or a duplicate
                self.heard_at[peer] = now
                if frames[0] and not number_of(head):
                    self._reports[peer, frames[0][:KIND]] = frames[0]
                return
            if self._reports:
                # An older report must not be handled after this message.
                self._reports.pop((peer, frames[0][:KIND]), None)
        elif frames == [b""]:
            self.heard_at[peer] = now
            return
        self._handle(peer, frames, now)

    def _receive_bundle(self, agent: str, frames: list[bytes], now: float) -> None:
        """Receive the messages that an agent relays. It may relay only for processes of its own host."""
        role, _, rest = agent.partition("/")
        theirs = (f"worker/{rest.rpartition('~')[0]}/", f"node/{rest.rpartition('~')[0]}~")
        for name, message in opened(frames):
            peer = name.decode(errors="replace")
            if role == "agent" and peer.startswith(theirs):
                self._routes[peer] = agent
                try:
                    self._receive(peer, message, now)
                except Exception:
                    log.exception("a message of %.80s could not be received", peer)
                if peer not in self.heard_at and peer not in self._deliveries:  # no caller will forget this peer
                    self._send_bundles()
                    self._routes.pop(peer, None)
            else:
                self._drop(agent, f"relays for {peer[:80]!r}")

    def _handle(self, peer: str, frames: list[bytes], now: float) -> None:
        message = self._decode(peer, frames)
        if message is not None:
            self.heard_at[peer] = now
            guarded(self._on_message, peer, message)

    def _handle_reports(self) -> None:
        """Handle the newest reports: when no message is left to read, or with each heartbeat."""
        reports, self._reports = self._reports, {}
        now = time.monotonic()
        for (peer, _), frame in reports.items():
            if peer in self.heard_at:
                self._handle(peer, [frame], now)

    def _receive_first(self, peer: str, head: bytes, frames: list[bytes], now: float) -> None:
        """Handle the first messages of a peer, which must introduce itself first if this driver has taken over."""
        if frames == [b""]:
            if self._term > 1:
                self._send_welcome(peer)
            return
        message = self._decode(peer, frames)
        if self._term > 1 and (message is None or not self._is_introduction(peer, head, message)):
            self._send_welcome(peer)
            return
        if not self._is_known(peer):
            if message is not None:
                guarded(self._on_message, peer, message)
            return
        fresh = not head or self._delivery_of(peer).receive(head, now) or not number_of(head)
        if not fresh and self._term > 1:  # an earlier message is missing, and would be retransmitted
            self._send_welcome(peer)
            return
        self._to_acknowledge.add(peer)
        if message is not None:
            self.heard_at[peer] = now
            if fresh:
                guarded(self._on_message, peer, message)

    def _send_welcome(self, peer: str) -> None:
        now, role = time.monotonic(), peer.partition("/")[0]
        if role == "worker" and not self._is_known(peer):  # it was lost: its lease must run, and nothing is kept of it
            return
        if role in self._decoders and now - self._welcomed.get(peer, 0.0) > WELCOME_PAUSE:
            self._welcomed[peer] = now
            delivery = self._delivery_of(peer)
            delivery.reset()  # an earlier Welcome
            self._enqueue(peer, encode(messages.NewDriver(self._term)), now)
            self._send_bundles()

    def _is_introduction(self, peer: str, head: bytes, message: messages.Message | ev.Event) -> bool:
        """Whether this message introduces the peer to this driver.

        For a host's own node `NodeReady` is the introduction. A message meant for an earlier driver is stale.
        """
        first = (agent_messages.AgentHello, EnvironmentReported, worker_messages.WorkerReport, node_messages.NodeHello)
        says = isinstance(message, first) or (isinstance(message, sev.NodeReady) and not message.external)
        return says and bool(head) and self._delivery_of(peer).is_addressed_here(head)

    def _decode(self, peer: str, frames: list[bytes]) -> messages.Message | ev.Event | None:
        role, _, name = peer.partition("/")
        decoder = self._decoders.get(role)
        try:
            if decoder is None or not name.isprintable() or len(frames) != 1 or len(frames[0]) > MAX_MESSAGE:
                raise msgspec.ValidationError("unknown role, several frames or too long")
            message: messages.Message | ev.Event = decode(decoder, frames[0])
        except DECODE_ERRORS as error:
            self._drop(peer, str(error))
            return None
        speaker = getattr(message, "worker", None) if role == "worker" else getattr(message, "host", None)
        if speaker is None:  # an agent reports about one of its workers
            speaker = getattr(message, "worker", WorkerId("", 0, 0)).host
        if str(speaker) != name.partition("~")[0]:  # agents of one host are numbered
            self._drop(peer, f"speaks for {str(speaker)[:80]!r}")
            return None
        return cleaned(message)

    def _drop(self, peer: str, why: str) -> None:
        key = peer if peer in self.heard_at else "strangers"
        self.dropped[key] += 1
        if self.dropped[key] == 1:
            log.warning("dropped a message of %.80s: %.200s; later ones are only counted", peer, why)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat)
            await read_turn()
            now = time.monotonic()
            unread = self._unread(now)
            self._handle_reports()
            only_heard = []
            for peer in list(self.heard_at):
                delivery = self._delivery_of(peer)
                if delivery.pending:
                    self._send_due(peer, delivery, now, unread)
                if delivery.must_acknowledge or peer not in self._routes:
                    self._send_or_bundle(peer, delivery.head(), b"")
                else:
                    only_heard.append(peer)
            for peer in only_heard:  # side by side, so that a bundle has this frame once
                self._send_or_bundle(peer, HEARD)
            self._send_bundles()
