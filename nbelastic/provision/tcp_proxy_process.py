"""The process of a TCP proxy: it forwards connections to loopback ports, and ends when the driver's lease expires."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections import Counter

from nbelastic.system import open_files
from nbelastic.system.driver_lease import DriverLease, wait_for_lease_expiry

MOST_PER_PEER = 128  # connections from one address to one port; at least two per worker that the cluster wants
MOST = 4096  # connections to one port; at least four per worker that the cluster wants
CHUNK = 1 << 16  # bytes
KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 60))  # seconds, seconds, times


class _Forwarder:
    """Forwards the connections to one listener to a loopback port."""

    def __init__(self, port: int, workers: int) -> None:
        self._port = port
        self._most_per_peer, self._most = max(MOST_PER_PEER, 2 * workers), max(MOST, 4 * workers)
        self._refused_peers: set[str] = set()
        self._open: Counter[str] = Counter()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str((writer.get_extra_info("peername") or ("?",))[0])
        if self._open[peer] >= self._most_per_peer or self._open.total() >= self._most:
            writer.transport.abort()
            self._print_refusal(peer)
            return
        self._open[peer] += 1
        # While the peer trains the connection may be idle; without keepalive packets a firewall would drop it.
        outer: socket.socket = writer.get_extra_info("socket")
        outer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            outer.setsockopt(socket.IPPROTO_TCP, option, value)
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._port)
            await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))
        except OSError:
            writer.transport.abort()
        finally:
            self._open[peer] -= 1
            self._open += Counter()  # drops peers without connections

    def _print_refusal(self, peer: str) -> None:
        """Print once per address, for the first MOST_PER_PEER addresses."""
        if peer not in self._refused_peers and len(self._refused_peers) < MOST_PER_PEER:
            self._refused_peers.add(peer)
            text = f"{self._open[peer]} connections of it and {self._open.total()} in all are open"
            print(f"nbelastic: a connection of {peer} was refused: {text}", file=sys.stderr, flush=True)


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


async def _serve(fds: dict[int, int], workers: int, driver_lease: DriverLease) -> None:
    for fd, port in fds.items():
        await asyncio.start_server(_Forwarder(port, workers).forward, sock=socket.socket(fileno=fd))
    await asyncio.get_running_loop().run_in_executor(None, wait_for_lease_expiry, driver_lease)
    if driver_lease.owner_has_ended:  # ssh clients must end, and the controller, which would do this, may be dead
        from nbelastic.protocol.local_clusters import remove_dead_cluster  # only needed here

        remove_dead_cluster(driver_lease.name, driver_lease.number, kill=True)


def main() -> None:
    """Serve `argv[1]`, a JSON list of (listener's descriptor, loopback port), for `argv[2]` workers and DriverLease `argv[3]`."""
    open_files.raise_limit()
    asyncio.run(_serve(dict(json.loads(sys.argv[1])), int(sys.argv[2]), DriverLease(*json.loads(sys.argv[3]))))
