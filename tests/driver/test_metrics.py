"""The OpenMetrics endpoint: what it says, who may read it, and that no reader holds up the driver."""

from __future__ import annotations

import os
import re
import socket
import stat
import urllib.request
from contextlib import ExitStack, suppress

import pytest

import nbelastic as nbe
from nbelastic.core import commands as cmd
from nbelastic.driver import metrics_server
from nbelastic.driver.metrics import metrics
from nbelastic.protocol.status import GpuStatus, HostStatus, Status, WorkerStatus
from nbelastic.system.ports import random_ports
from nbelastic.system.private_sockets import bind_in
from tests.driver.raw_client import in_driver
from tests.support.processes import run_folder

NAME, LABELS = r"nbelastic_[a-z_]+", r'\{(?:[a-z_]+="(?:[^"\\\n]|\\[\\n"])*",?)+\}'
SAMPLE = re.compile(rf"({NAME})({LABELS})? (-?\d+(?:\.\d+)?(?:e[-+]?\d+)?|NaN|[+-]Inf)")


def families(text):
    """The samples by family, as a strict reader of the format sees them: {family: {labels: value}}."""
    lines = text.removesuffix("\n").split("\n")
    assert text.endswith("# EOF\n")
    found, family, kind = {}, "", ""
    for line in lines[:-1]:
        if line.startswith("# TYPE "):
            _, _, family, kind = line.split(" ")
            assert family not in found, "a family must be in one piece"
            found[family] = {}
        elif line.startswith("# HELP "):
            assert line.split(" ")[2] == family
        else:
            name, labels, value = SAMPLE.fullmatch(line).groups()
            assert name == family + ("_total" if kind == "counter" else "")
            assert labels not in found[family], "a sample must not come twice"
            found[family][labels or ""] = float(value)
    return found


def status(**more):
    workers = tuple(
        WorkerStatus(f"a/{slot}#1", "a", slot, rank, rank, 10, state, 7, slot, "", memory=2_000_000)
        for slot, rank, state in ((0, 0, "running"), (1, None, "starting"))
    )
    hosts = (
        HostStatus(
            "a",
            "127.0.0.1",
            2,
            "up",
            "",
            0.0,
            50.0,
            10,
            100,
            (GpuStatus("GPU-a", 30, 2, 8, 71), GpuStatus("MIG-b", None, 0, 8)),
        ),
        HostStatus('odd "\\\n', "", 1, "starting", "", 0.0),
    )
    given = {"job": "job-1", "outcome": "", "step": 7, "report": {"loss": float("nan"), "note": "text"}, **more}
    return Status("quiet", "training", "", 3, 1, 1, None, hosts, workers, **given)


def test_the_text_has_the_clusters_figures():
    """World, job, hosts, GPUs, workers, restarts and losses; what is not known is left out."""
    found = families(metrics(status(steps_per_second=2.5), {"worker-lost": 4}))
    assert found["nbelastic_phase"] == {'{phase="training"}': 1}
    assert found["nbelastic_world_size"] == {"": 1}
    assert found["nbelastic_generation"] == {"": 3}
    assert found["nbelastic_job_steps"] == {'{job="job-1"}': 7}
    assert found["nbelastic_job_steps_per_second"] == {'{job="job-1"}': 2.5}
    assert [*found["nbelastic_job_report"]] == ['{job="job-1",name="loss"}']
    assert found["nbelastic_host_cpu_ratio"] == {'{host="a"}': 0.5}
    assert found["nbelastic_host_workers"] == {
        '{host="a",state="running"}': 1,
        '{host="a",state="starting"}': 1,
    }
    assert found["nbelastic_gpu_temperature_celsius"] == {'{host="a",gpu="0"}': 71}, "a slice has no temperature"
    assert found["nbelastic_gpu_memory_bytes"] == {'{host="a",gpu="0"}': 2e6, '{host="a",gpu="1"}': 0}
    assert found["nbelastic_worker_rank"] == {'{host="a",slot="0"}': 0}
    assert found["nbelastic_slot_restarts"] == {'{host="a",slot="0"}': 0, '{host="a",slot="1"}': 1}
    assert found["nbelastic_events"] == {'{kind="worker-lost"}': 4}
    assert {"nbelastic_max_workers", "nbelastic_last_failure_seconds", "nbelastic_job_expected_steps"}.isdisjoint(found)


@pytest.mark.parametrize("more", [{"job": None, "report": {}}, {"report": {"x": float("inf"), "y": 1e-9, "z": -1e300}}])
def test_the_text_is_valid(more):
    """Without a job too, and with numbers and names of every kind."""
    families(metrics(status(**more), {}))


@pytest.fixture
def endpoint(start_hostless):
    """`endpoint(**options)`: a cluster without hosts, whose socket answers."""

    def start(**options):
        cluster = start_hostless(**options)
        cluster.scale(2, 3)  # the driver has begun to serve when it answers
        return cluster, run_folder(cluster) / metrics_server.SOCKET

    return start


def ask(path, request=b"GET /metrics HTTP/1.1\r\n\r\n"):
    """Send a request, and read until the end."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(path))
        client.sendall(request)
        answer = b""
        while data := client.recv(1 << 16):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.decode(), body.decode()


def test_the_socket_serves_the_metrics(endpoint):
    """Only the user may open it; it answers with the format's type and the figures of now."""
    cluster, path = endpoint()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    in_driver(cluster, lambda driver: driver.record(cmd.Record("worker-lost", "a test")))
    head, body = ask(path)
    assert head.startswith("HTTP/1.1 200 OK\r\nContent-Type: application/openmetrics-text; version=1.0.0;")
    assert f"Content-Length: {len(body.encode())}" in head
    found = families(body)
    assert found["nbelastic_min_workers"] == {"": 2}
    assert found["nbelastic_events"]['{kind="worker-lost"}'] == 1
    assert ask(path, b"HEAD /metrics HTTP/1.1\r\n\r\n")[1] == ""


def answers(path, request=b"GET /metrics HTTP/1.1\r\n\r\n"):
    """The status line of an answer; empty if the connection was closed without one."""
    try:
        return ask(path, request)[0].partition("\r\n")[0]
    except ConnectionError:
        return ""


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (b"POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405"),
        (b"GET /other HTTP/1.1\r\n\r\n", "HTTP/1.1 404"),
        (b"nonsense\r\n\r\n", "HTTP/1.1 405"),
        (b"x" * 100_000, ""),
    ],
)
def test_other_requests_are_refused(endpoint, request_, answer):
    """Another method, another path, or no HTTP: the next reader is served."""
    _, path = endpoint()
    assert answers(path, request_).startswith(answer)
    assert ask(path)[0].startswith("HTTP/1.1 200")


def test_slow_readers_do_not_hold_up_the_driver(endpoint, monkeypatch):
    """Only a few connections are open at a time, and one that sends nothing is closed at its deadline."""
    monkeypatch.setattr(metrics_server, "TIMEOUT", 0.5)
    cluster, path = endpoint()
    idle = [socket.socket(socket.AF_UNIX) for _ in range(metrics_server.MAX_CONNECTIONS)]
    for client in idle:
        client.settimeout(10)
        client.connect(str(path))
    assert not answers(path)
    cluster.scale(1, 4)
    assert cluster.status().max == 4
    for client in idle:
        assert client.recv(1) == b""
        client.close()
    assert ask(path)[0].startswith("HTTP/1.1 200")


def test_a_scraper_that_asks_often_gets_the_same_text(endpoint):
    """At most once a second the driver makes the text."""
    cluster, path = endpoint()
    made = []
    in_driver(
        cluster, lambda driver: setattr(driver._components.metrics, "_status", lambda: made.append(1) or status())
    )
    for _ in range(20):
        ask(path)
    assert len(made) <= 3


def test_a_port_if_asked_for(endpoint):
    """`metrics_port` serves the same on the loopback interface."""
    (port,) = random_ports(1, 10_000)
    endpoint(metrics_port=port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert "nbelastic_world_size" in families(answer.read().decode())
    with socket.socket() as other:  # every address of 127.0.0.0/8 is this machine's
        assert other.connect_ex(("127.0.0.2", port)) != 0


def test_the_port_answers_only_requests_for_this_machine(endpoint):
    """A web page whose name resolves to 127.0.0.1 must not read the figures. The socket, which no browser reaches, asks no name."""
    (port,) = random_ports(1, 10_000)
    _, path = endpoint(metrics_port=port)

    def status_and_body(*hosts):
        head = "".join(["GET /metrics HTTP/1.1\r\n", *(f"Host: {host}\r\n" for host in hosts), "\r\n"])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(head.encode())
            head, _, body = client.makefile("rb").read().decode().partition("\r\n\r\n")
        return head.split()[1], body

    for host in ("localhost", "LOCALHOST:9", "127.0.0.1:9", "[::1]", "[::1]:9"):
        assert status_and_body(host)[0] == "200", host
    for hosts in (["attacker.example:9"], ["localhost.attacker.example"], ["attacker.example", "localhost"], []):
        assert status_and_body(*hosts) == ("403", "the Host header must be localhost, 127.0.0.1 or [::1]\n"), hosts
    assert ask(path, b"GET /metrics HTTP/1.1\r\nHost: attacker.example\r\n\r\n")[0].startswith("HTTP/1.1 200")


def test_a_port_that_is_in_use(start_hostless):
    """The cluster does not start, and the error says what to change."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(nbe.HostError, match=f"metrics_port={port} cannot be used: .*choose another one"):
            start_hostless(metrics_port=port)
    with pytest.raises(nbe.UsageError, match="metrics_port=70000: 1 to 65535"):
        nbe.Cluster(metrics_port=70_000)


def test_the_socket_of_a_killed_driver_is_replaced(endpoint, tmp_path):
    """A socket file that is left over does not stop the next driver."""
    _, path = endpoint()
    assert os.path.exists(path)
    with bind_in(path.parent, path.name) as listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        listener.listen()


def test_silent_connections_of_others_keep_nobody_out(endpoint):
    """Other users may open the port. They take no place of the socket, and for a new connection the oldest one is closed."""
    (port,) = random_ports(1, 10_000)
    _, path = endpoint(metrics_port=port)
    with ExitStack() as stack:

        def connect():
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))

        silent = [connect() for _ in range(3 * metrics_server.MAX_ON_PORT)]
        assert answers(path).startswith("HTTP/1.1 200")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
            assert "nbelastic_world_size" in families(answer.read().decode())
        with suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""
        silent[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            silent[-1].recv(1)
