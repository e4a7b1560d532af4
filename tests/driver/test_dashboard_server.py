"""The page that `nbelastic dashboard` serves: who may see it, and what it sends. The cluster's driver runs in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest
from tornado.websocket import websocket_connect

from nbelastic.cli import dashboard_server
from nbelastic.cli.dashboard_server import serve_pages
from nbelastic.cli.main import main
from tests.support.waiting import until


class Site:
    """The served pages of a cluster."""

    def __init__(self, cluster, address):
        self.cluster = cluster
        self.connections = []
        self.port, self.token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/#([\w-]{40,})", address).groups()

    async def get(self, path, **headers):
        return await AsyncHTTPClient().fetch(f"http://127.0.0.1:{self.port}{path}", headers=headers)

    async def connect(self, **headers):
        """Open a WebSocket."""
        request = HTTPRequest(f"ws://127.0.0.1:{self.port}/socket", headers=headers)
        self.connections.append(await websocket_connect(request))
        return self.connections[-1]

    def close(self):
        for connection in self.connections:
            connection.close()

    async def page(self, token=None, **headers):
        """Open a WebSocket and send the token."""
        connection = await self.connect(**headers)
        await connection.write_message(json.dumps({"token": self.token if token is None else token}))
        return connection


async def read(page, wanted):
    """Read messages until `wanted(message)`; return that one."""
    async with asyncio.timeout(10):
        while True:
            data = await page.read_message()
            assert data is not None, "the server has closed the connection"
            message = json.loads(data)
            if wanted(message):
                return message


@pytest.fixture
def visit(start_hostless):
    """`visit(story)` serves the pages of a new cluster while `story(site)` runs."""

    def run(story):
        async def main():
            cluster, address = start_hostless(), asyncio.get_running_loop().create_future()
            server = asyncio.create_task(serve_pages(cluster, 0, address.set_result))
            site = Site(cluster, await address)
            await story(site)
            await asyncio.to_thread(cluster.stop)
            site.close()
            async with asyncio.timeout(10):
                await server

        asyncio.run(main())

    return run


def test_a_page_gets_the_state_and_its_own_answers(visit):
    """All pages get the state; an answer goes to the page that has asked. A request of one page changes all."""

    async def story(site):
        pages = [await site.page() for _ in range(2)]
        for page in pages:
            assert (await read(page, lambda m: "state" in m))["state"]["name"] == "quiet"
        await pages[0].write_message(json.dumps({"ask": "history", "id": "0-1"}))
        await pages[1].write_message(json.dumps({"order": "scale", "min": 1, "max": 3, "id": "1-1"}))
        answer = await read(pages[0], lambda m: m.get("reply") == "0-1")
        assert answer["oldest"] == 1
        for page in pages:
            await read(page, lambda m: m.get("state", {}).get("max") == 3)
        await pages[1].write_message(json.dumps({"ask": "hello", "id": "1-2"}))
        seen = []
        await read(pages[1], lambda m: seen.append(m.get("reply")) or m.get("reply") == "1-2")
        assert "0-1" not in seen
        until(lambda: any("nbelastic dashboard" in event.text for event in site.cluster.events))

    visit(story)


WRONG_REQUESTS = [
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\nContent-Length: 1\r\n\r\na",
    b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\nContent-Length: 1\r\n\r\na",
    b"GET /socket HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n%s"
    % (b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x\r\nOrigin: http://[::1\r\n\r\n"),
]


def test_wrong_requests_print_nothing_at_the_terminal(visit, caplog):
    """Any user of the machine can send them, without the token. A page that has it and sends nonsense goes on."""

    async def story(site):
        for request in WRONG_REQUESTS:
            reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
            writer.write(request)
            assert (await reader.readline()).split()[1] in (b"400", b"500")
            writer.close()
        for page in (await site.connect(), await site.page()):
            await page.write_message("[" * 60_000)
        unknown, known = site.connections
        assert await unknown.read_message() is None
        await known.write_message(json.dumps({"ask": "history", "id": "0-1"}))
        await read(known, lambda m: m.get("reply") == "0-1")

    visit(story)
    assert not caplog.records


def test_without_the_token_a_page_gets_nothing(visit):
    """A wrong token, none, or anything else closes the connection with a reason that the page shows."""

    async def story(site):
        for token in ("", "x" * len(site.token), site.token[:-1], 7, None.__class__.__name__):
            page = await site.page(token)
            assert await page.read_message() is None
            assert page.close_code == dashboard_server.WRONG_TOKEN
        page = await site.connect()
        await page.write_message(json.dumps({"order": "stop", "id": "1"}))
        assert await page.read_message() is None
        assert site.cluster.status().phase != "finished"

    visit(story)


def test_a_silent_connection_is_closed(visit, monkeypatch):
    """A connection without a token takes a place for some seconds only. A page that was too slow, as a frozen tab, tries again."""
    monkeypatch.setattr(dashboard_server, "TOKEN_TIMEOUT", 0.05)

    async def story(site):
        page = await site.connect()
        assert await page.read_message() is None
        assert page.close_code == dashboard_server.TRY_AGAIN

    visit(story)


def test_silent_connections_do_not_keep_a_page_out(visit, monkeypatch):
    """Any user of the machine can open connections without a token. For a new connection, the oldest of them is closed."""
    monkeypatch.setattr(dashboard_server, "MAX_UNKNOWN", 8)
    monkeypatch.setattr(dashboard_server, "MAX_PAGES", 2)

    async def story(site):
        silent = [await site.connect() for _ in range(8)]
        refused = await site.page("wrong")
        async with asyncio.timeout(1):  # the silent ones would be closed in 2 s
            assert await silent[0].read_message() is None
        assert await refused.read_message() is None
        for page in (await site.page(), await site.page()):
            await read(page, lambda m: "state" in m)
        late = await site.page()
        assert await late.read_message() is None
        assert late.close_code == dashboard_server.TRY_AGAIN

    visit(story)


def test_plain_connections_are_bounded_and_keep_no_page_out(visit, monkeypatch):
    """Any user of the machine can open them. A page that has sent the token stays, and another one gets in."""
    monkeypatch.setattr(dashboard_server, "MAX_CONNECTIONS", 8)

    async def story(site):
        first = await site.page()
        await read(first, lambda m: "state" in m)
        silent = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(30)]
        second = await site.page()
        await read(second, lambda m: "state" in m)
        async with asyncio.timeout(10):
            for reader, _ in silent[: 30 - 8]:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        assert not silent[-1][0].at_eof()
        await first.write_message(json.dumps({"ask": "history", "id": "0-1"}))
        await read(first, lambda m: m.get("reply") == "0-1")
        for _, writer in silent:
            writer.close()

    visit(story)


def test_other_names_and_origins_are_refused(visit):
    """Neither a web page whose name leads to this machine, nor a page of another server here, gets anything."""

    async def story(site):
        for path in ("/", "/dashboard.js"):
            with pytest.raises(HTTPClientError) as refused:
                await site.get(path, Host=f"evil.example:{site.port}")
            assert refused.value.code == 404
        wrong = [
            {"Host": f"evil.example:{site.port}"},
            {"Origin": "http://evil.example"},
            {"Origin": "http://127.0.0.1:1"},
        ]
        for headers in wrong:
            with pytest.raises(HTTPClientError):
                await site.page(**headers)
        assert (await site.get("/", Host=f"localhost:{site.port}")).code == 200
        page = await site.page(Origin=f"http://127.0.0.1:{site.port}")
        await read(page, lambda m: "state" in m)

    visit(story)


def test_the_files_have_no_secret_and_strict_headers(visit):
    """The page runs no script but its own, and no other page may frame it. Other paths do not exist."""

    async def story(site):
        for path in ("/", "/page.js", "/dashboard.js", "/dashboard.css"):
            answer = await site.get(path)
            assert site.token not in answer.body.decode()
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            assert "unsafe" not in answer.headers["Content-Security-Policy"]
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Cache-Control"] == "no-store"
        for path in ("/page.html", "/../main.py", "/LICENSE.uPlot", "/%2e%2e/main.py"):
            with pytest.raises(HTTPClientError) as missing:
                await site.get(path)
            assert missing.value.code == 404

    visit(story)


def test_broken_messages_change_nothing(visit):
    """Text without a meaning, unknown queries and requests; a huge message closes its page only."""

    async def story(site):
        page, other = await site.page(), await site.page()
        for data in ("{", "[]", '"x"', '{"order": "rm"}', '{"ask": [1]}', "7"):
            await page.write_message(data)
        assert (await read(page, lambda m: "error" in m))["error"] == "unknown query"
        await page.write_message("x" * (1 << 17))
        async with asyncio.timeout(10):
            while await page.read_message() is not None:
                pass
        await other.write_message(json.dumps({"ask": "hello", "id": "2"}))
        await read(other, lambda m: m.get("reply") == "2")

    visit(story)


def test_pages_get_the_end_of_the_cluster(start_hostless):
    """The last state, then the connection is closed, and the server ends."""

    async def story():
        cluster, address = start_hostless(), asyncio.get_running_loop().create_future()
        server = asyncio.create_task(serve_pages(cluster, 0, address.set_result))
        site = Site(cluster, await address)
        page = await site.page()
        await read(page, lambda m: "state" in m)
        stopping = asyncio.create_task(asyncio.to_thread(cluster.stop))
        await read(page, lambda m: m.get("state", {}).get("phase") == "finished")
        assert await page.read_message() is None
        async with asyncio.timeout(10):
            await asyncio.gather(server, stopping)
        site.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(site.port)), timeout=5)

    asyncio.run(story())


def test_a_port_in_use_is_refused_in_one_line(start_hostless, capsys):
    """So is a number beyond all ports."""
    start_hostless()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["dashboard", "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert (
        error
        == f"nbelastic: port {port} of 127.0.0.1 cannot be used (Address already in use): choose another --port.\n"
    )
    assert main(["dashboard", "--port", "99999"]) == 1
    assert "0 to 65535" in capsys.readouterr().err


def test_ctrl_c_ends_the_command_and_leaves_nothing(start_hostless):
    """The address is printed once, on one line. After Ctrl-C the cluster goes on without this client."""
    cluster = start_hostless()
    command = [sys.executable, "-m", "nbelastic", "dashboard", "quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            site = Site(cluster, process.stdout.readline().rstrip("\n"))
            with open(f"/proc/{process.pid}/cmdline", "rb") as file:
                assert site.token.encode() not in file.read()
            os.kill(process.pid, signal.SIGINT)
            out, error = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, out) == (130, "")
    assert error == "Open this address in a browser. Ctrl-C ends the page; the cluster goes on.\n"
    assert cluster.status().phase != "finished"
