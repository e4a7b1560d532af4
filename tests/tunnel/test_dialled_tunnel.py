"""A host that opens the TCP connection of its tunnel itself, as batch jobs and pods do, with a small program instead of an agent."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nbelastic.provision.tcp_proxy import TcpProxy
from nbelastic.provision.tunnel_ports import TunnelPorts, ports_file
from nbelastic.system.process_identity import pid_of
from nbelastic.tunnel import ended_tunnels
from tests.support.driver_lease import until_the_end
from tests.support.processes import alive
from tests.support.waiting import until
from tests.tunnel.echo_server import echo_server

ROOT = Path(__file__).parents[2]
HOST = """
import json, os, pathlib, signal, socket, sys, time
def agent():
    config = json.loads(sys.stdin.readline())
    folder = pathlib.Path(config["notes"])
    caught = []
    for sig in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(sig, lambda number, _: caught.append(number))
    print("the agent runs", flush=True)
    (folder / "agent").write_text(str(os.getpid()))
    (folder / "input").write_text(json.dumps(config))
    fd = os.open(config["tunnel"], os.O_RDONLY | os.O_DIRECTORY)
    port = config["driver"].rpartition(":")[2]
    while not (folder / "end").exists():
        time.sleep(0.01)
        (folder / "caught").write_text(json.dumps(caught))
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(f"/proc/self/fd/{fd}/port:{port}")
                while not (folder / "end").exists():
                    connection.sendall(b"x")
                    if connection.recv(1) != b"x":
                        break
                    with open(folder / "echoes", "ab") as echoes:
                        echoes.write(b"x")
                    (folder / "caught").write_text(json.dumps(caught))
                    time.sleep(0.01)
        except OSError:
            pass
    sys.exit(7)
from nbelastic.tunnel.host import main
main(agent)
"""


class Host:
    """The process that a batch system starts, and what its agent notes."""

    def __init__(self, folder, port, proxy_port):
        self.folder = folder
        config = {"environment": {}, "cluster": "1", "host": "h", "number": 1, "towards": "127.0.0.1"}
        config |= {"driver": f"tcp://127.0.0.1:{port}", "dial": ["127.0.0.1", proxy_port], "notes": str(folder)}
        config |= {"keys": {"client_secret": "a secret"}}
        self.file = folder / "agent.json"
        self.file.write_text(json.dumps(config))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "NBELASTIC_AGENT": str(self.file)}
        with open(folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", HOST], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def agent(self):
        note = self.folder / "agent"
        return int(until(lambda: note.exists() and note.read_text(), 20, "the agent to start"))

    def caught(self):
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / "caught").read_text())

    def echoes(self):
        with contextlib.suppress(OSError):
            return (self.folder / "echoes").stat().st_size
        return 0

    def more_echoes(self):
        """Wait until the tunnel carries something."""
        seen = self.echoes()
        until(lambda: self.echoes() > seen + 5, 30, "the tunnel to carry bytes")

    def close(self):
        (self.folder / "end").touch()
        self.process.wait(20)


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A host, and the TCP proxy to which it connects."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "proxy").mkdir()
    with echo_server() as port:
        TunnelPorts(tmp_path / "proxy", "a secret").open([port])
        proxy = TcpProxy("127.0.0.1", port, ports_file(tmp_path / "proxy"), until_the_end(tmp_path / "proxy"))
        proxy.start()
        host = Host(tmp_path, port, proxy.port)
        try:
            host.agent()
            yield host, proxy
        finally:
            host.close()
            proxy.close()
    until(lambda: not list(tmp_path.glob("nbelastic-*/run-*")), 20, "the folders to go")


def test_one_connection_carries_a_host(parts):
    """The configuration's file is gone, one TCP connection is open, and the process ends with the agent's output and exit code."""
    host, proxy = parts
    host.more_echoes()
    assert not host.file.exists()
    config = json.loads((host.folder / "input").read_text())
    assert "dial" not in config
    assert config["towards"] == "127.0.0.1"  # whatever SSH_CONNECTION a batch system passes on
    tcp = [one for one in psutil.Process(host.process.pid).net_connections("tcp") if one.raddr]
    assert [one.raddr.port for one in tcp] == [proxy.port]
    (host.folder / "end").touch()
    assert host.process.wait(20) == 7
    assert (host.folder / "log").read_text() == "the agent runs\n"


def test_the_end_of_a_host_is_reported(parts):
    """With the host's name and the number of its agent."""
    host, _ = parts
    with ended_tunnels.listen(host.folder / "proxy") as listener:
        host.more_echoes()
        host.process.kill()
        assert until(lambda: ended_tunnels.read(listener), 20, "the report") == ("h", 1)
        host.process.wait()
    for folder in host.folder.glob("nbelastic-*/run-*"):
        shutil.rmtree(folder)


def test_a_broken_connection_is_opened_again(parts):
    """The proxy is killed three times: once it is there again, the host connects, and the agent has run on."""
    host, proxy = parts
    for _ in range(3):
        host.more_echoes()
        os.kill(pid_of(proxy.saved.process), signal.SIGKILL)
        until(lambda: proxy.restart_if_dead(time.monotonic()), 40, "the proxy's restart")
    host.more_echoes()
    assert alive(host.agent())


def test_the_agent_gets_the_job_s_signals(parts):
    """SIGTERM announces the end, and SIGUSR1 the time limit: both reach the agent, and end nothing."""
    host, _ = parts
    for sig in (signal.SIGUSR1, signal.SIGTERM):
        host.process.send_signal(sig)
        until(lambda sig=sig: sig in (host.caught() or ()), 20, "the agent to get the signal")
    host.more_echoes()


def test_an_agent_without_its_host_s_process_ends(parts):
    """The agent's input ends when the process that forwards is killed: that ends an agent."""
    host, _ = parts
    agent = host.agent()
    pipe = os.readlink(f"/proc/{agent}/fd/0")
    host.process.kill()
    host.process.wait()
    holders = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            holders += [
                process.pid
                for fd in os.listdir(f"/proc/{process.pid}/fd")
                if os.readlink(f"/proc/{process.pid}/fd/{fd}") == pipe
            ]
    assert set(holders) == {agent}  # so its end is there: no other process keeps it open
    for folder in host.folder.glob("nbelastic-*/run-*"):
        for each in sorted(folder.rglob("*"), reverse=True):
            each.rmdir() if each.is_dir() else each.unlink()
        folder.rmdir()
