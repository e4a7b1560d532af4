"""The process of a TCP proxy, on the driver's machine. It takes the connections to one port, and ends when the driver's lease expires.

A connection whose first byte is 0 is a host's tunnel: its channels lead to the loopback ports that the ports file lists. Any
other one is a terminal's: its bytes go to the driver's server. The servers behind the ports demand the cluster's CURVE key.

Until a peer has shown that it belongs to the cluster, it is a stranger: it costs this process some bytes, and the driver a
few kilobytes. A host shows it with the handshake of its tunnel. A terminal has shown it when the driver's server has sent more
than its part of the CURVE handshake.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import socket
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from nbelastic.system import open_files
from nbelastic.system.driver_lease import DriverLease, wait_for_lease_expiry
from nbelastic.system.log_line import log_line
from nbelastic.tunnel import allowed_ports, ended_tunnels, handshake
from nbelastic.tunnel.forwarder import Forwarder
from nbelastic.tunnel.frames import PREAMBLE, Frame, Kind
from nbelastic.tunnel.strangers import SERVER_PART, STRANGER_PART

MOST_PER_PEER = 128  # strangers' connections from one address; at least two per worker that the cluster wants
MOST = 4096  # strangers' connections; at least four per worker that the cluster wants
MOST_CHANNELS_PER_PEER = 512  # in the tunnels of one address; at least 16 per worker: an engine opens about six
FIRST_BYTE_TIMEOUT = 30.0  # seconds; a server of ZeroMQ waits as long
HANDSHAKE_TIMEOUT = 10.0  # seconds for a tunnel's preamble and answer
BUFFER = 1 << 13  # bytes that are read ahead of a terminal
IDLE = 60.0  # seconds after which a tunnel without channels is closed: a host's agent always has one
ACCEPT_PAUSE = 1.0  # seconds until the next try if this process has too many descriptors
CHUNK = 1 << 16  # bytes
REDIAL = 1.0  # seconds in which a host that lives has usually opened another tunnel; until then no end is reported
REPORT_PAUSE, REPORT_TRIES = 0.1, 100  # seconds between two tries to report the end of a tunnel
KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 60))  # seconds, seconds, times


class _Peer:
    """The connections from one address. `strangers`: those of them that have not shown yet that they belong to the cluster."""

    def __init__(self) -> None:
        self.connections: set[asyncio.Task[None]] = set()
        self.strangers: set[socket.socket] = set()
        self.tunnels: set[Forwarder] = set()

    @property
    def channels(self) -> int:
        return sum(tunnel.channels for tunnel in self.tunnels)


class _Proxy:
    """`server`: the loopback port for terminals. `ports`: the file that lists those for hosts."""

    def __init__(self, server: int, ports: Path, workers: int) -> None:
        self._server, self._ports = server, ports
        self._most_per_peer, self._most = max(MOST_PER_PEER, 2 * workers), max(MOST, 4 * workers)
        self._most_channels = max(MOST_CHANNELS_PER_PEER, 16 * workers)
        self._peers: defaultdict[str, _Peer] = defaultdict(_Peer)
        self._strangers = 0  # connections
        self._refused_peers: set[str] = set()
        self._newest: dict[bytes, Forwarder] = {}  # the newest tunnel with each name

    async def accept(self, listener: socket.socket) -> None:
        """Take connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (address, *_) = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            peer = self._peers[address]
            if len(peer.strangers) >= self._most_per_peer or self._strangers >= self._most:
                connection.close()
                self._print_refusal(address, f"{len(peer.strangers)} connections of it and {self._strangers} in all")
                if not peer.connections:
                    del self._peers[address]
                continue
            task = loop.create_task(self._serve(connection, peer, address))
            self._strangers += 1
            peer.strangers.add(connection)
            peer.connections.add(task)
            task.add_done_callback(partial(self._forget, address, connection))

    def _not_strange(self, peer: _Peer, connection: socket.socket) -> None:
        """The peer belongs to the cluster, or its connection has ended."""
        if connection in peer.strangers:
            peer.strangers.discard(connection)
            self._strangers -= 1

    def _forget(self, address: str, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._not_strange(self._peers[address], connection)
        self._peers[address].connections.discard(task)
        if not self._peers[address].connections:
            del self._peers[address]

    async def _serve(self, connection: socket.socket, peer: _Peer, address: str) -> None:
        """Forward what comes on a connection until it ends."""
        not_strange = partial(self._not_strange, peer, connection)
        with connection, suppress(OSError, TimeoutError):
            # While the peer trains the connection may be idle; without keepalive packets a firewall would drop it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option, value in KEEPALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            await _readable(connection)
            first = connection.recv(1, socket.MSG_PEEK)
            if first == PREAMBLE[:1]:
                if await self._is_host(connection):
                    not_strange()
                    await self._forward_tunnel(connection, peer, address)
            elif first:
                await self._forward_to_server(connection, not_strange)

    async def _is_host(self, connection: socket.socket) -> bool:
        """Whether the peer sends the preamble and knows the key of the cluster's tunnels."""
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            if await _receive(connection, len(PREAMBLE)) != PREAMBLE:
                return False
            challenge = secrets.token_bytes(handshake.SIZE)
            await asyncio.get_running_loop().sock_sendall(connection, challenge)
            answer = await _receive(connection, handshake.SIZE)
        allowed = allowed_ports.read(self._ports)
        return allowed is not None and hmac.compare_digest(
            answer, handshake.answer_to(challenge, bytes.fromhex(allowed.key))
        )

    async def _forward_tunnel(self, connection: socket.socket, peer: _Peer, address: str) -> None:
        loop, over, name = asyncio.get_running_loop(), asyncio.Event(), b""

        def on_frame(frame: Frame) -> None:
            nonlocal name
            if frame.kind is Kind.NAME and not name:
                name = frame.payload[: ended_tunnels.MOST]
                self._newest[name] = tunnel
            elif frame.kind is Kind.EXIT:  # the agent has ended by itself, as its batch system or Kubernetes reports
                self._newest.pop(name, None)

        tunnel = Forwarder(
            on_frame=on_frame,
            on_lost=lambda *_: over.set(),
            connect=partial(self._connect, peer, address),
        )
        peer.tunnels.add(tunnel)
        loop.add_reader(tunnel.fileno(), tunnel.turn, 0.0)
        try:
            writer = os.dup(connection.fileno())
            tunnel.attach(connection.detach(), writer)
            while not over.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), IDLE)
                if not tunnel.channels:
                    return
        finally:
            loop.remove_reader(tunnel.fileno())
            tunnel.close()
            peer.tunnels.discard(tunnel)
            if self._newest.get(name) is tunnel:
                del self._newest[name]
                loop.call_later(REDIAL, self._report_end, name)

    def _report_end(self, name: bytes, tries: int = REPORT_TRIES) -> None:
        """Report the end of a tunnel, unless its host has opened another one."""
        if name not in self._newest and not ended_tunnels.report(self._ports.parent, name) and tries:
            asyncio.get_running_loop().call_later(REPORT_PAUSE, self._report_end, name, tries - 1)

    def _connect(self, peer: _Peer, address: str, port: int, channels: int) -> socket.socket | None:
        if peer.channels >= self._most_channels:
            self._print_refusal(address, f"{peer.channels} channels of it")
            return None
        return allowed_ports.connect(self._ports, port, channels)

    async def _forward_to_server(self, connection: socket.socket, not_strange: Callable[[], None]) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._server)
        reader, writer = await asyncio.open_connection(sock=connection, limit=BUFFER)
        accepted = asyncio.Event()  # by the server, or its connection has ended
        await asyncio.gather(
            _copy_stranger(reader, inner_writer, accepted),
            _copy_from_server(inner_reader, writer, accepted, not_strange),
        )

    def _print_refusal(self, address: str, count: str) -> None:
        """Print once per address, for the first MOST_PER_PEER addresses."""
        if address not in self._refused_peers and len(self._refused_peers) < MOST_PER_PEER:
            self._refused_peers.add(address)
            log_line(f"nbelastic: a connection of {address} was refused: {count} are open")


async def _readable(connection: socket.socket) -> None:
    """Wait for the first byte. TimeoutError if none comes."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), ready.set)
    try:
        await asyncio.wait_for(ready.wait(), FIRST_BYTE_TIMEOUT)
    finally:
        loop.remove_reader(connection.fileno())


async def _receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes; fewer if the connection ends before."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size and (more := await loop.sock_recv(connection, size - len(data))):
        data += more
    return data


async def _copy_stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, accepted: asyncio.Event) -> None:
    """As `_copy`, but only STRANGER_PART bytes until the server has accepted the terminal."""
    left = STRANGER_PART
    with suppress(OSError):
        while left and not accepted.is_set():
            data = await reader.read(left)
            if not data:
                break
            left -= len(data)
            writer.write(data)
    if not left:
        await accepted.wait()
    await _copy(reader, writer)


async def _copy_from_server(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, accepted: asyncio.Event, not_strange: Callable[[], None]
) -> None:
    """As `_copy`, and note when the server has accepted the terminal: it has sent more than SERVER_PART bytes."""
    sent = 0
    try:
        while sent <= SERVER_PART and (data := await reader.read(CHUNK)):
            sent += len(data)
            writer.write(data)
        if sent > SERVER_PART:
            not_strange()
            accepted.set()
        await _copy(reader, writer)
    except OSError:
        writer.close()
    finally:
        accepted.set()  # the terminal's bytes meet a closed connection


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until either side ends, then close the other."""
    try:
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def _run(fd: int, server: int, ports: str, workers: int, driver_lease: DriverLease) -> None:
    loop, listener = asyncio.get_running_loop(), socket.socket(fileno=fd)
    listener.setblocking(False)
    accepting = loop.create_task(_Proxy(server, Path(ports), workers).accept(listener))
    await loop.run_in_executor(None, wait_for_lease_expiry, driver_lease)
    accepting.cancel()
    from nbelastic.protocol.local_clusters import remove_without_driver  # only needed here

    remove_without_driver(driver_lease)  # other processes of the cluster on this machine may be dead


def main() -> None:
    """`argv[1]`, JSON: the listener's descriptor, the server's port, the ports file, the wanted workers, and the DriverLease."""
    open_files.raise_limit()
    fd, server, ports, workers, driver_lease = json.loads(sys.argv[1])
    asyncio.run(_run(fd, server, ports, workers, DriverLease(*driver_lease)))
