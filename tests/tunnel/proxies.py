"""A TCP proxy for a test, and connections to it."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import msgspec

from nbelastic.provision.tcp_proxy import TcpProxy
from nbelastic.tunnel import handshake
from nbelastic.tunnel.allowed_ports import Allowed

KEY = handshake.key_from("the client's secret")


@contextlib.contextmanager
def open_proxy(port, driver_lease, address="127.0.0.1", allowed=(), workers=lambda: 0, engines=0):
    """A TCP proxy for the server at `port` and hosts' `allowed` ports, and the address at which it listens."""
    ports = Path(driver_lease.file).with_name("ports")
    ports.write_bytes(msgspec.json.encode(Allowed(KEY.hex(), tuple(allowed), engines)))
    proxy = TcpProxy(address, port, ports, driver_lease, workers)
    try:
        proxy.start()
        yield proxy, (address, proxy.port)
    finally:
        proxy.close()


def connect(proxy_address, source=None):
    return socket.create_connection(proxy_address, timeout=20, source_address=(source, 0) if source else None)


def is_echoed(connection, data=b"there"):
    connection.sendall(data)
    return connection.recv(len(data), socket.MSG_WAITALL) == data


def is_closed(connection):
    """Whether the other side has closed the connection."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
