"""Serves the cluster's figures over HTTP: on a socket in the run folder, and on a port of this machine if asked for."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from nbelastic.driver.metrics import CONTENT_TYPE, metrics
from nbelastic.errors import HostError
from nbelastic.protocol.status import Status
from nbelastic.system.private_sockets import bind_in

LOOPBACK = "127.0.0.1"
SOCKET = "metrics"  # in the run folder
MAX_CONNECTIONS = 8  # of this user at the same time; more are closed
MAX_ON_PORT = 32  # of all users at the same time; for a new one, the oldest is closed
MAX_REQUEST = 8192  # bytes
TIMEOUT = 5.0  # seconds in which a connection must have sent its request and read the answer
MAX_AGE = 1.0  # seconds; scrapers that ask more often get the same text
_THIS_MACHINE = re.compile(rb"(?:localhost|127\.0\.0\.1|\[::1\])(?::\d+)?", re.IGNORECASE)


class MetricsServer:
    """Lives in the driver's thread. `events()` counts the records of the event log by kind."""

    def __init__(
        self, folder: Path, port: int | None, status: Callable[[], Status], events: Callable[[], Mapping[str, int]]
    ) -> None:
        self._folder, self._port = folder, port
        self._status, self._events = status, events
        self._open = 0  # connections of the socket in the run folder: other users must not count here
        self._on_port: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._text, self._made_at = b"", float("-inf")

    async def serve(self) -> None:
        """Serve until it is cancelled."""
        async with AsyncExitStack() as stack:
            listener = bind_in(self._folder, SOCKET)
            server: asyncio.Server = await asyncio.start_unix_server(self._on_socket, sock=listener, limit=MAX_REQUEST)
            await stack.enter_async_context(server)
            if self._port is not None:
                server = await asyncio.start_server(self._on_open_port, LOOPBACK, self._port, limit=MAX_REQUEST)
                await stack.enter_async_context(server)
            await asyncio.Event().wait()

    async def _on_socket(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= MAX_CONNECTIONS:
                await self._answer(reader, writer, is_port=False)
        finally:
            self._open -= 1
            writer.transport.abort()

    async def _on_open_port(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A scraper sends its request at once. So the oldest connection is one that sends nothing."""
        if len(self._on_port) >= MAX_ON_PORT:
            oldest = next(iter(self._on_port))
            del self._on_port[oldest]
            oldest.transport.abort()
        self._on_port[writer] = None
        try:
            await self._answer(reader, writer, is_port=True)
        finally:
            self._on_port.pop(writer, None)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_port: bool) -> None:
        with suppress(TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(TIMEOUT):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.transport.set_write_buffer_limits(high=0)  # `drain` waits until all is sent
                writer.write(_REFUSED if is_port and not _names_this_machine(request) else self._response(request))
                await writer.drain()
                writer.close()
                await writer.wait_closed()

    def _response(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _http("405 Method Not Allowed", b"use GET\n")
        if path not in (b"/", b"/metrics"):
            return _http("404 Not Found", b"the path is /metrics\n")
        return _http("200 OK", self._current(), CONTENT_TYPE, with_body=method == b"GET")

    def _current(self) -> bytes:
        now = asyncio.get_running_loop().time()
        if now - self._made_at >= MAX_AGE:
            self._text, self._made_at = metrics(self._status(), self._events()).encode(), now
        return self._text


def _names_this_machine(request: bytes) -> bool:
    """Whether the request is for a name of this machine.

    A web page may have its own name resolve to 127.0.0.1, so that the browser lets it read the answer (DNS rebinding).
    """
    lines = (line.partition(b":") for line in request.split(b"\r\n")[1:])
    hosts = [value.strip() for name, _, value in lines if name.lower() == b"host"]
    return len(hosts) == 1 and _THIS_MACHINE.fullmatch(hosts[0]) is not None


def check_port(port: int | None) -> None:
    """HostError if another process uses the port."""
    if port is None:
        return
    with socket.socket() as test:
        test.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            test.bind((LOOPBACK, port))
        except OSError as error:
            raise HostError(f"metrics_port={port} cannot be used: {error.strerror}; choose another one.") from None


def _http(status: str, body: bytes, kind: str = "text/plain; charset=utf-8", *, with_body: bool = True) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (body if with_body else b"")


_REFUSED = _http("403 Forbidden", b"the Host header must be localhost, 127.0.0.1 or [::1]\n")
