"""The ports of ipyparallel's controller, to a connection that has no key."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from contextlib import ExitStack, closing, suppress

import pytest

from nbelastic.ipp.controller import HANDSHAKE
from nbelastic.ipp.supervisor import Supervisor
from tests.hosts.attacker import greeting
from tests.support.driver_lease import until_the_end
from tests.support.waiting import until_async

SOON = HANDSHAKE / 1000 + 5  # seconds
LARGE = ("mux", "task", "broadcast")  # ports for calls, whose messages contain the user's arrays


@pytest.mark.soak(seconds=12)
def test_a_connection_without_a_key_cannot_fill_the_controllers_memory(tmp_path):
    """Ports for requests close one that announces 4 GiB. The other ports close it after some seconds without a handshake.

    ZeroMQ forgets about one connection in forty then, whatever its time limit is: it stays open.
    """

    controller = Supervisor(tmp_path / "ipython", "flooded", 8.0, until_the_end(tmp_path))

    async def story() -> None:
        await controller.start()
        infos = {kind: controller.information(kind) for kind in ("client", "engine")}
        ports = {
            (kind, name, port)
            for kind, info in infos.items()
            for name, found in info.items()
            for port in (found if isinstance(found, list) else [found])
            if isinstance(port, int)
        }
        assert len(ports) >= 13
        with ExitStack() as closing_all:
            sockets = {}
            for port in ports:
                await until_async(lambda port=port: is_open(port[2]))  # its queues begin last
                sockets[port] = closing_all.enter_context(socket.create_connection(("127.0.0.1", port[2])))
                sockets[port].sendall(greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 1 << 32))
            large = {port for port in ports if port[1] in LARGE or port[:2] == ("engine", "iopub")}
            for port in ports - large:
                sockets[port].settimeout(2.0)
                await asyncio.to_thread(read_to_end, sockets[port])
            deadline, still_open = time.monotonic() + SOON, []
            for port in large:
                sockets[port].settimeout(max(0.1, deadline - time.monotonic()))
                try:
                    await asyncio.to_thread(read_to_end, sockets[port])
                except TimeoutError:
                    still_open.append(port)
            assert len(still_open) < len(large) / 2, still_open

    async def stopped_in_the_end() -> None:
        try:
            await story()
        finally:
            await controller.stop()

    asyncio.run(stopped_in_the_end())


def is_open(port: int) -> bool:
    with closing(socket.socket()) as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def read_to_end(connection: socket.socket) -> None:
    with suppress(ConnectionResetError):
        while connection.recv(1000):
            pass
