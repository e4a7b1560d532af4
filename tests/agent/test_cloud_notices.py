"""Notices of clouds, from stand-ins of their metadata servers that answer as the clouds' manuals say."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest

from nbelastic.agent import cloud_notices
from nbelastic.agent.cloud_notices import Aws, Azure, GoogleCloud, this_cloud
from nbelastic.protocol import agent_messages
from nbelastic.system.running_agents import Notice
from nbelastic.transport.keys import Keys
from nbelastic.transport.server import Server
from tests.agent.test_agent import configured
from tests.support.full_disk import FullDisk
from tests.support.waiting import until, until_async

WRONG = timedelta(hours=-5)  # by which the machine's own clock is wrong


class MetadataServer:
    """A cloud's metadata server. `values`: what it says at a path; other paths are unknown."""

    def __init__(self, address: str, changed: threading.Condition) -> None:
        self.address, self._changed = address, changed
        self.values: dict[str, str] = {}
        self.asked: list[str] = []
        self.allows: Callable[[str, Any], bool] = lambda _method, _headers: True
        self.now = datetime.now(UTC).replace(microsecond=0) + WRONG

    def set(self, path: str, value: str) -> None:
        with self._changed:
            self.values[path] = value
            self._changed.notify_all()

    def answer(self, method: str, target: str, headers: Any) -> tuple[int, str]:
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        self.asked.append(path)
        if not self.allows(method, headers):
            return 401, ""
        with self._changed:
            if "wait_for_change" in query:
                (tag,), (seconds,) = query["last_etag"], query["timeout_sec"]
                self._changed.wait_for(lambda: self.etag(path) != tag, float(seconds))
            return (200, self.values[path]) if path in self.values else (404, "")

    def etag(self, path: str) -> str:
        return f"tag-{self.values.get(path)}"


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with running_server() as server:
        yield server


@contextmanager
def running_server() -> Iterator[MetadataServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = found.answer(self.command, self.path, self.headers)
            self.send_response_only(status)
            self.send_header("Date", format_datetime(found.now, usegmt=True))
            self.send_header("ETag", found.etag(urlsplit(self.path).path))
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        found = MetadataServer(f"127.0.0.1:{http.server_address[1]}", threading.Condition())
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield found
        finally:
            http.shutdown()
            thread.join()


ACTION = "/latest/meta-data/spot/instance-action"
PREEMPTED, MAINTENANCE = (f"/computeMetadata/v1/instance/{name}" for name in ("preempted", "maintenance-event"))
SCHEDULED, NAME = "/metadata/scheduledevents", "/metadata/instance/compute/name"


def test_aws(server):
    """A spot instance is interrupted: the time that is left is that of the server's clock. Each question has a token."""
    server.values["/latest/api/token"] = "secret"
    server.allows = lambda method, headers: (
        headers["X-aws-ec2-metadata-token"] == "secret"
        if method == "GET"
        else int(headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
    )
    assert Aws().ask(server.address) is None
    end = (server.now + timedelta(seconds=120)).strftime("%Y-%m-%dT%H:%M:%SZ")
    server.values[ACTION] = json.dumps({"action": "terminate", "time": end})
    event = Aws().ask(server.address)
    assert (event.within, event.reason) == (120.0, "AWS (spot instance: terminate)")


def test_google_cloud(server):
    """A preemption is answered at once; a migration is not an end, and maintenance without one is."""
    server.allows = lambda _method, headers: headers["Metadata-Flavor"] == "Google"
    server.values.update({PREEMPTED: "FALSE", MAINTENANCE: "NONE"})
    cloud = GoogleCloud(gpus=False)
    assert cloud.ask(server.address) is None
    cloud.WAIT = 60
    threading.Timer(0.1, server.set, (PREEMPTED, "TRUE")).start()
    assert cloud.ask(server.address) == ("preempted", 30.0, "Google Cloud (preempted)")
    server.set(PREEMPTED, "FALSE")
    for value, within in (("MIGRATE_ON_HOST_MAINTENANCE", None), ("TERMINATE_ON_HOST_MAINTENANCE", 60.0)):
        server.set(MAINTENANCE, value)
        event = GoogleCloud(gpus=False).ask(server.address)
        assert (event and event.within) == within
    assert GoogleCloud(gpus=True).ask(server.address).within == 3600.0


def scheduled(server: MetadataServer, *events: tuple[str, str, str, str, float]) -> None:
    names = ("EventId", "EventType", "EventStatus", "Resources", "NotBefore")
    found = [
        dict(zip(names, (*event[:3], [event[3]], format_datetime(server.now + timedelta(seconds=event[4]), True))))
        for event in events
    ]
    server.values[SCHEDULED] = json.dumps({"DocumentIncarnation": 1, "Events": found})


def test_azure(server):
    """The earliest event that ends this machine counts: not another's, nor a pause, nor one that has begun."""
    server.allows = lambda _method, headers: headers["Metadata"] == "true"
    server.values[NAME] = "vm_1"
    scheduled(server)
    assert Azure().ask(server.address) is None
    scheduled(
        server,
        ("a", "Preempt", "Scheduled", "vm_2", 30),
        ("b", "Freeze", "Scheduled", "vm_1", 30),
        ("c", "Reboot", "Started", "vm_1", 0),
    )
    assert Azure().ask(server.address) is None
    scheduled(server, ("d", "Reboot", "Scheduled", "vm_1", 900), ("e", "Preempt", "Scheduled", "vm_1", 30))
    assert Azure().ask(server.address) == ("e", 30.0, "Azure (Preempt)")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"action": "stop"}', '{"action": 1, "time": "soon"}', "\xff"])
def test_answers_without_sense(server, text):
    """They are errors of the kinds that the thread expects."""
    server.values = {"/latest/api/token": "secret", ACTION: text, SCHEDULED: text}
    for cloud in (Aws(), Azure()):
        with pytest.raises(ValueError, match=r"."):
            cloud.ask(server.address)
    server.allows = lambda *_: False
    for cloud in (Aws(), Azure(), GoogleCloud(gpus=False)):
        with pytest.raises(HTTPException, match="401"):
            cloud.ask(server.address)


@pytest.mark.parametrize(
    ("files", "cloud"),
    [
        ({}, None),
        ({"sys_vendor": "Dell Inc.", "product_name": "PowerEdge"}, None),
        ({"sys_vendor": "Amazon EC2"}, Aws),
        ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, Aws),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, GoogleCloud),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "None"}, None),
        (
            {"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"},
            Azure,
        ),
    ],
)
def test_the_firmware_names_the_cloud(tmp_path, files, cloud):
    """Other machines have none, Hyper-V outside Azure too."""
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert type(this_cloud(tmp_path)) is (cloud or type(None))


class Scripted:
    """A cloud with these answers; then it says that all were asked for."""

    pause = 0.0

    def __init__(self, *answers: Any) -> None:
        self._answers, self.done = list(answers), threading.Event()

    def ask(self, _server: str) -> cloud_notices.Event | None:
        if not self._answers:
            self.done.set()
            threading.Event().wait()  # the server never answers
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_each_event_is_a_notice_once(monkeypatch, capsys):
    """Failures are printed once until the next answer. A notice leaves some time, however late it is."""
    monkeypatch.setattr(cloud_notices, "FIRST_PAUSE", 0.001)
    notices: list[Notice] = []
    one, late = cloud_notices.Event("1", 60.0, "x"), cloud_notices.Event("2", -3.0, "y")
    cloud = Scripted(OSError("no route"), OSError("no route"), None, one, one._replace(within=50.0), late, one)
    threading.Thread(target=cloud_notices.watch, args=(cloud, notices.append), daemon=True).start()
    assert cloud.done.wait(10)
    assert notices == [(60.0, "x"), (cloud_notices.LEAST, "y")]
    assert capsys.readouterr().err.count("no route") == 1


def test_a_full_disk_does_not_hide_the_next_notice(monkeypatch):
    """That the server fails cannot be printed then. The machine's end is announced nonetheless."""
    monkeypatch.setattr(cloud_notices, "FIRST_PAUSE", 0.001)
    notices: list[Notice] = []
    cloud = Scripted(OSError("no route"), cloud_notices.Event("1", 60.0, "x"), None)
    monkeypatch.setattr(sys, "stderr", FullDisk())
    threading.Thread(target=cloud_notices.watch, args=(cloud, notices.append), daemon=True).start()
    assert cloud.done.wait(10)
    assert notices == [(60.0, "x")]


AGENT = """
import sys
from pathlib import Path
from nbelastic.agent import agent, cloud_notices
cloud_notices.DMI, cloud_notices.SERVER = Path(sys.argv[1]), sys.argv[2]
agent.run(sys.stdin.buffer.readline(), -1)
"""


def test_an_agent_announces_the_end_of_its_machine(server, tmp_path: Path) -> None:
    """The driver learns who ends the machine, and when; the metadata server may hang."""
    (tmp_path / "product_name").write_text("Google Compute Engine\n")
    server.values.update({PREEMPTED: "FALSE", MAINTENANCE: "NONE"})

    async def story() -> None:
        link = Server(Keys.make(), lambda _, message: received.append(message), 0.1)
        await link.start()
        config = configured(tmp_path, driver=link.address, keys=link._keys.for_clients())
        command = [sys.executable, "-c", AGENT, tmp_path, server.address]
        agent = subprocess.Popen(command, stdin=subprocess.PIPE)  # noqa: ASYNC220
        try:
            agent.stdin.write(msgspec.json.encode(config) + b"\n")
            agent.stdin.flush()
            await until_async(lambda: server.asked.count(MAINTENANCE) and server.asked[-1] == PREEMPTED)
            server.set(PREEMPTED, "TRUE")
            (ending,) = await until_async(
                lambda: [m for m in received if isinstance(m, agent_messages.AgentEnding)], what="the announcement"
            )
            assert 25.0 < ending.within <= 30.0
            assert ending.reason == "Google Cloud (preempted)"
            link.send("agent/a~1", agent_messages.StopAgent())
            await until_async(lambda: agent.poll() is not None)
            assert agent.returncode == 0
        finally:
            agent.kill()
            agent.communicate()
            await link.stop()

    received: list[object] = []
    asyncio.run(story())


def test_other_machines_ask_nobody(monkeypatch, tmp_path):
    """Without a known cloud there is no thread."""
    monkeypatch.setattr(cloud_notices, "DMI", tmp_path)
    before = threading.active_count()
    cloud_notices.start(print)
    assert threading.active_count() == before
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    monkeypatch.setattr(cloud_notices, "watch", lambda *_: started.set())
    started = threading.Event()
    cloud_notices.start(print)
    until(started.is_set)
