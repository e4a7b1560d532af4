"""The process of a gate: it passes bytes on from its doors, and ends when no driver comes any more."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections import Counter

from nbelastic.system import open_files
from nbelastic.system.driver_lease import DriverLease, wait_for_lease_expiry

MOST_OF_A_PEER = 128  # connections of one address through one door, or twice as many as workers are asked for
MOST = 4096  # through one door, or four times as many as workers are asked for
CHUNK = 1 << 16  # bytes
ALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 60))  # seconds, seconds, times


class _Door:
    """One listener and where it leads."""

    def __init__(self, port: int, workers: int) -> None:
        self._port = port
        self._most_of_a_peer, self._most = max(MOST_OF_A_PEER, 2 * workers), max(MOST, 4 * workers)
        self._refused: set[str] = set()
        self._open: Counter[str] = Counter()

    async def pass_through(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str((writer.get_extra_info("peername") or ("?",))[0])
        if self._open[peer] >= self._most_of_a_peer or self._open.total() >= self._most:
            writer.transport.abort()
            self._say_refused(peer)
            return
        self._open[peer] += 1
        # It is silent while the peer trains, and firewalls forget such connections.
        outer: socket.socket = writer.get_extra_info("socket")
        outer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ALIVE:
            outer.setsockopt(socket.IPPROTO_TCP, option, value)
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._port)
            await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))
        except OSError:
            writer.transport.abort()
        finally:
            self._open[peer] -= 1
            self._open += Counter()  # forget who has none

    def _say_refused(self, peer: str) -> None:
        """Once for an address, and for at most so many addresses."""
        if peer not in self._refused and len(self._refused) < MOST_OF_A_PEER:
            self._refused.add(peer)
            text = f"{self._open[peer]} connections of it and {self._open.total()} in all are open"
            print(f"nbelastic: a connection of {peer} was refused: {text}", file=sys.stderr, flush=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All that comes, until either side ends; then both do."""
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
        await asyncio.start_server(_Door(port, workers).pass_through, sock=socket.socket(fileno=fd))
    await asyncio.get_running_loop().run_in_executor(None, wait_for_lease_expiry, driver_lease)
    if driver_lease.owner_has_ended:  # the lines of ssh are to end; the controller may be dead, too
        from nbelastic.protocol.local_clusters import remove_dead_cluster  # a gate that goes on has no use for it

        remove_dead_cluster(driver_lease.name, driver_lease.number, kill=True)


def main() -> None:
    """The process: `argv[1]` is a list of (descriptor of a listener, port that it leads to), `argv[2]` how many workers are
    asked for, `argv[3]` a `DriverLease`.
    """
    open_files.raise_limit()
    asyncio.run(_serve(dict(json.loads(sys.argv[1])), int(sys.argv[2]), DriverLease(*json.loads(sys.argv[3]))))
