"""Serves the dashboard of a cluster as a page on this machine, for people at a terminal.

Files of the page are the same for all, and need no key. Everything about the cluster goes through one WebSocket per page,
whose first message must have the token. Browsers send the part of an address after # to no server.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream
from tornado.web import Application, HTTPError, RequestHandler
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from nbelastic.client.cluster import Cluster
from nbelastic.errors import ClusterStoppedError, UsageError
from nbelastic.notebook.dashboard_feed import DashboardFeed
from nbelastic.notebook.widget_files import widget_text
from nbelastic.protocol.json_encoding import DECODE_ERRORS
from nbelastic.protocol.status import Status
from nbelastic.system.terminal_text import remove_controls

ADDRESS = "127.0.0.1"
HOSTS = r"^(127\.0\.0\.1|localhost)$"  # other names mean that a web page has made its own name lead here
TOKEN_TIMEOUT = 2.0  # seconds for a page's first message
CLOSE_TIMEOUT = 2.0  # seconds in the end for pages that read slowly
MAX_PAGES = 64  # that have sent the token
MAX_UNKNOWN = 64  # that have not: any user of the machine can open them. For a new one, the oldest is closed
MAX_CONNECTIONS = 128  # other than those of pages that have sent the token. For a new one, the oldest is closed
MAX_MESSAGE = 1 << 16  # bytes of a page's message
MAX_ANSWERS = 64  # that a page has not read
TRY_AGAIN = 1013  # the standard code for "try again later": the page does so
WRONG_TOKEN = 4001  # why a WebSocket is closed; the page shows it
FILES = {
    "": ("page.html", "text/html"),
    "page.js": ("page.js", "text/javascript"),
    "dashboard.js": ("dashboard.js", "text/javascript"),
    "dashboard.css": ("dashboard.css", "text/css"),
}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def serve(cluster: Cluster, port: int) -> None:
    """Serve the dashboard until the cluster has stopped, or Ctrl-C. `port`: 0: the system picks one.

    UsageError if the port is not free. ClusterStoppedError if the driver is lost.
    """
    asyncio.run(serve_pages(cluster, port, _announce))
    if cluster.died:
        raise ClusterStoppedError(f"{cluster.status().reason}.")
    print(f"{cluster.name}: {remove_controls(cluster.status().reason)}.")


def _announce(address: str) -> None:
    print(address, flush=True)
    print("Open this address in a browser. Ctrl-C ends the page; the cluster goes on.", file=sys.stderr)


async def serve_pages(cluster: Cluster, port: int, announce: Callable[[str], object]) -> None:
    """Call `announce(address)`, with the token in the address, and serve pages until the cluster has stopped."""
    try:
        listener = socket.create_server((ADDRESS, port))
    except OSError as error:
        problem = os.strerror(error.errno or 0)
        raise UsageError(f"port {port} of {ADDRESS} cannot be used ({problem}): choose another --port.") from None
    listener.setblocking(False)
    token = secrets.token_urlsafe(32)
    pages = Pages(cluster, token)
    server = _Server(_application(pages), max_body_size=MAX_MESSAGE, idle_connection_timeout=60)
    server.on_connection = pages.take
    server.add_socket(listener)
    try:
        with pages:
            announce(f"http://{ADDRESS}:{listener.getsockname()[1]}/#{token}")
            await pages.finished.wait()
            await pages.close()
    finally:
        server.stop()
        await server.close_all_connections()


class _Server(HTTPServer):  # type: ignore[misc]  # tornado carries no types here
    """Calls `on_connection` with each new connection."""

    on_connection: Callable[[IOStream], object]

    def handle_stream(self, stream: IOStream, address: Any) -> None:
        self.on_connection(stream)
        super().handle_stream(stream, address)


def _application(pages: Pages) -> Application:
    settings = {
        "default_handler_class": _Missing,
        "log_function": lambda _: None,
        "websocket_max_message_size": MAX_MESSAGE,
        "websocket_ping_interval": 20,
    }
    application = Application(**settings)
    application.add_handlers(
        HOSTS, [(r"/socket", _Page, {"pages": pages}), *((rf"/({name})", _File) for name in FILES)]
    )
    return application


class _Missing(RequestHandler):  # type: ignore[misc]  # tornado carries no types here
    """Answers requests for other paths. Any user of the machine can send wrong ones: they print nothing at the terminal."""

    def prepare(self) -> None:
        raise HTTPError(404)

    def log_exception(self, *_: object) -> None:
        pass


class _File(RequestHandler):  # type: ignore[misc]  # as above
    """A file of the page."""

    def log_exception(self, *error: Any) -> None:
        if not isinstance(error[1], HTTPError):  # else the request was wrong
            super().log_exception(*error)

    def get(self, name: str) -> None:
        file, kind = FILES[name]
        for header, value in HEADERS.items():
            self.set_header(header, value)
        self.set_header("Content-Type", f"{kind}; charset=utf-8")
        self.finish(widget_text(file))


class Pages:
    """All open pages. Its methods are for the event loop's thread, except where noted. It is used in a `with` statement."""

    def __init__(self, cluster: Cluster, token: str) -> None:
        self.cluster, self._token = cluster, token.encode()
        self.feed = DashboardFeed(cluster, by="nbelastic dashboard")
        self.open: set[_Page] = set()  # they have sent the token
        self._unknown: dict[_Page, None] = {}  # oldest first
        self._connections: dict[IOStream, None] = {}  # all but those of `open`, oldest first; some have ended
        self.finished = asyncio.Event()  # the cluster has stopped
        self._loop = asyncio.get_running_loop()
        self._unsubscribe: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        self._unsubscribe = self.cluster.subscribe(self._update)

    def __exit__(self, *_: object) -> None:
        self._unsubscribe()

    def is_token(self, given: Any) -> bool:
        return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), self._token)

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the event loop's thread, unless the loop has ended. For any thread."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    def _update(self, status: Status) -> None:
        """Run in the subscribers' thread."""
        if self.feed.update(status):
            self.call(self._show, self.feed.newest)
        if status.phase == "finished":
            self.call(self.finished.set)

    def _show(self, newest: tuple[Any, Any]) -> None:
        for page in self.open:
            page.show(newest)

    def take(self, connection: IOStream) -> None:
        """Note a new connection. If there are too many, close the oldest: a browser sends its request at once."""
        if len(self._connections) >= MAX_CONNECTIONS:
            self._connections = {each: None for each in self._connections if not each.closed()}
        if len(self._connections) >= MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.close()
        self._connections[connection] = None

    def add(self, page: _Page) -> None:
        """Note a new page. If there are too many that have not sent the token, drop the oldest."""
        if len(self._unknown) >= MAX_UNKNOWN:
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            oldest.drop()
        self._unknown[page] = None

    def admit(self, page: _Page) -> bool:
        """Note that a page has sent the token. Returns whether there is room for it."""
        if len(self.open) >= MAX_PAGES:
            return False
        self._unknown.pop(page, None)
        self._connections.pop(page.ws_connection.stream, None)
        self.open.add(page)
        return True

    def remove(self, page: _Page) -> None:
        self.open.discard(page)
        self._unknown.pop(page, None)

    async def close(self) -> None:
        """Send the last state to all pages, and close them."""
        for page in list(self._unknown):
            page.drop()
        writers = [page.end() for page in self.open]
        if writers:
            await asyncio.wait(writers, timeout=CLOSE_TIMEOUT)


class _Page(WebSocketHandler):  # type: ignore[misc]  # as above
    """The WebSocket of one page. It receives nothing before it has sent the token.

    A page that reads slowly gets the newest state only.
    """

    def initialize(self, pages: Pages) -> None:
        self._pages = pages
        self._is_known = False
        self._newest: tuple[Any, Any] | None = None  # the key frame and the change to send
        self._key_frame: Any = None  # the last one that was sent
        self._answers: deque[Any] = deque(maxlen=MAX_ANSWERS)
        self._news = asyncio.Event()
        self._is_ending = False
        self._writer: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def open(self, *_: str, **__: str) -> None:
        self.set_nodelay(True)
        self._pages.add(self)
        self._timer = asyncio.get_running_loop().call_later(TOKEN_TIMEOUT, self.close, TRY_AGAIN)

    def log_exception(self, *error: Any) -> None:
        if self._is_known:  # else any user of the machine could print at the terminal
            super().log_exception(*error)

    def on_close(self) -> None:
        self._pages.remove(self)
        for each in (self._timer, self._writer):
            if each is not None:
                each.cancel()

    def on_message(self, data: str | bytes) -> None:
        try:
            content = msgspec.json.decode(data)
        except DECODE_ERRORS:
            return
        if self._is_known:
            self._pages.feed.handle(content, lambda answer: self._pages.call(self._answer, answer))
        elif isinstance(content, dict) and self._pages.is_token(content.get("token")):
            if self._timer is not None:
                self._timer.cancel()
            if not self._pages.admit(self):
                self.close(TRY_AGAIN)
                return
            self._is_known = True
            self._writer = asyncio.get_running_loop().create_task(self._write())
            self.show(self._pages.feed.newest)
        else:
            self._refuse()

    def _refuse(self) -> None:
        self.close(WRONG_TOKEN)

    def drop(self) -> None:
        """Close the connection at once: this page may not answer the close of a WebSocket."""
        if self.ws_connection is not None:
            self.ws_connection.stream.close()

    def show(self, newest: tuple[Any, Any]) -> None:
        """Send this key frame and this change."""
        if self._is_known:
            self._newest = newest
            self._news.set()

    def _answer(self, answer: Any) -> None:
        self._answers.append(answer)
        self._news.set()

    def end(self) -> asyncio.Task[None]:
        """Send the last state, and close. Returns the task that does it."""
        self._is_ending = True
        self._news.set()
        assert self._writer is not None, "only pages that have sent the token are ended"
        return self._writer

    async def _write(self) -> None:
        try:
            while not self._is_ending or self._news.is_set():
                await self._news.wait()
                self._news.clear()
                while self._answers:
                    await self._send(self._answers.popleft())
                newest, self._newest = self._newest, None
                if newest is not None:
                    key_frame, change = newest
                    is_new, self._key_frame = key_frame is not self._key_frame, key_frame
                    await self._send({"state": key_frame, "change": change} if is_new else {"change": change})
            self.close()
        except WebSocketClosedError:
            pass

    async def _send(self, message: Any) -> None:
        await self.write_message(msgspec.json.encode(message).decode())
