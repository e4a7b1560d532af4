"""Both ends of a tunnel as processes, with a shell instead of ssh and a small program instead of an agent."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nbelastic.protocol.exit_codes import AGENT_GONE, CONNECTION_LOST
from nbelastic.provision import ssh
from nbelastic.system import tunnel_folder
from nbelastic.system.process_identity import identity
from nbelastic.system.processes import children_of
from nbelastic.tunnel.frames import PREAMBLE
from tests.support.processes import alive
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
HOST = """
import json, os, pathlib, sys, time
def agent():
    config = json.loads(sys.stdin.readline())
    folder = pathlib.Path(config["notes"])
    (folder / f"agent-{config['number']}").write_text(f"{os.getpid()} {config['tunnel']}")
    print("agent", config["number"], "runs", flush=True)
    while not (folder / "end").exists() and not (folder / "read").exists():
        time.sleep(0.01)
    if (folder / "end").exists():
        print("agent", config["number"], "has its reason", flush=True)
        sys.exit(7)
    sys.stdin.read()
from nbelastic.tunnel.host import main
main(agent)
"""

SSH = """
import contextlib, os, socket, subprocess, sys, threading
ours, theirs = socket.socketpair()
host = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=theirs, stdout=theirs, start_new_session=True)
theirs.close()
def to_host():
    with contextlib.suppress(OSError):
        while data := os.read(0, 65536):
            ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
def close_input():
    host.wait()  # sshd closes the program's input when it has ended, though others may have its descriptors
    with contextlib.suppress(OSError):
        ours.shutdown(socket.SHUT_WR)
for each in (to_host, close_input):
    threading.Thread(target=each, daemon=True).start()
try:
    while data := ours.recv(65536):
        os.write(1, data)
except ConnectionError:
    pass
os.close(1)
sys.exit(host.wait())
"""


class Machines:
    """A driver's machine and a host, which are both this machine."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.tunnels = folder, []
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr("tempfile.tempdir", None)
        (folder / "ports").write_text("[]")
        (folder / "c.lock").write_text(f"{identity(os.getpid())} 1")

    def open(self, number=1, *, attach=False, before="", log=None):
        """Open a tunnel for this agent. `before`: code that the host runs first. `log`: the file for the agent's output."""
        client = [sys.executable, "-c", SSH, f"{before}\n{HOST}"]
        arguments = (
            json.dumps(client),
            str(self.folder / "ports"),
            json.dumps([str(self.folder / "c.lock"), 60, "", "1"]),
        )
        log = open(log or self.folder / f"log-{len(self.tunnels)}", "ab")  # noqa: SIM115
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        tunnel = subprocess.Popen(
            [sys.executable, "-c", ssh.TUNNEL, *arguments],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
        )
        log.close()
        with tunnel.stdin as stdin:
            stdin.write(self.config(number, attach=attach))
        self.tunnels.append(tunnel)
        return tunnel

    def config(self, number=1, *, attach=False):
        """The first line for the host's end of the tunnel."""
        config = {
            "environment": {},
            "cluster": "1",
            "host": "h",
            "number": number,
            "attach": attach,
            "eof_ends_agent": True,
        }
        config |= {"driver": "tcp://127.0.0.1:1", "towards": "", "notes": str(self.folder)}
        return json.dumps(config).encode() + b"\n"

    def agent(self, number=1):
        """The agent's process."""
        note = self.folder / f"agent-{number}"
        return int(until(lambda: note.exists() and note.read_text().split(), 20, "the agent to start")[0])

    def log(self, number=0):
        return (self.folder / f"log-{number}").read_text()

    def ssh_of(self, tunnel):
        """The process that stands for the ssh client."""
        children = Path(f"/proc/{tunnel.pid}/task/{tunnel.pid}/children")
        return int(until(lambda: children.read_text().split(), 20, "the client")[0])

    def close(self):
        for tunnel in self.tunnels:
            tunnel.terminate()
            tunnel.wait(20)
        for note in self.folder.glob("agent-*"):
            with contextlib.suppress(OSError):  # it has ended
                tunnel_folder.ask(Path(note.read_text().split()[1]), "end").close()
            (self.folder / "read").touch()
            until(lambda note=note: not alive(int(note.read_text().split()[0])), 20, "the agents to end")


@pytest.fixture
def machines(tmp_path, monkeypatch):
    made = Machines(tmp_path, monkeypatch)
    yield made
    made.close()
    monkeypatch.undo()
    until(lambda: not list(tmp_path.glob("nbelastic-*/run-*")), 20, "the folders to go")


def break_ssh(machines, tunnel):
    """Kill ssh once the agent runs: both ends see that the connection is broken."""
    agent = machines.agent()
    os.kill(machines.ssh_of(tunnel), signal.SIGKILL)
    assert tunnel.wait(20) == CONNECTION_LOST
    return agent


def test_an_agent_s_output_and_exit_code_arrive(machines):
    """What the agent prints is in the log on the driver's machine, also its last line; the tunnel ends with its exit code."""
    tunnel = machines.open(before="print('Welcome')")
    machines.agent()
    (machines.folder / "end").touch()
    assert tunnel.wait(20) == 7
    assert machines.log().split("\n") == ["Welcome", "agent 1 runs", "agent 1 has its reason", ""]


ADOPTS = """
import ctypes, subprocess
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: as the first process of a container is one
subprocess.run(["sh", "-c", "sleep 0.1 & sleep 0.2 &"])
"""


def test_a_container_keeps_no_ended_processes(machines):
    """Processes that lost workers have started become children of the container's first one. Too many would forbid new ones."""
    machines.open(before=ADOPTS)
    agent = machines.agent()
    host = psutil.Process(agent).ppid()
    until(lambda: children_of(host) == [agent], 20, "no other child")


def test_a_full_disk_ends_no_host(machines):
    """What a host prints may find no room on the driver's machine. The tunnel lasts until the agent ends."""
    tunnel = machines.open(log="/dev/full")
    machines.agent()
    (machines.folder / "end").touch()
    assert tunnel.wait(20) == 7


def test_an_agent_outlives_ssh_and_is_reached_again(machines):
    """Without ssh the agent runs on. In another ssh connection its output since then arrives, and its exit code."""
    agent = break_ssh(machines, machines.open())
    again = machines.open(attach=True)
    until(lambda: machines.ssh_of(again), 20, "the client")
    for _ in range(3):
        break_ssh(machines, again)
        again = machines.open(attach=True)
    until(lambda: "reached again" in machines.log(len(machines.tunnels) - 1), 20, "the agent to be reached")
    assert alive(agent)
    (machines.folder / "end").touch()
    assert again.wait(20) == 7
    assert "agent 1 has its reason" in machines.log(len(machines.tunnels) - 1)


def test_an_agent_that_ends_without_ssh_is_found_gone(machines):
    """A further ssh connection finds that the agent has ended meanwhile, and reports it."""
    break_ssh(machines, machines.open())
    (machines.folder / "end").touch()
    until(lambda: not alive(machines.agent()), 20, "the agent to end")
    late = machines.open(attach=True)
    assert late.wait(20) == AGENT_GONE
    assert "the agent has ended while there was no ssh connection" in machines.log(1)


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_the_end_of_the_tunnel_s_process_ends_the_agent(machines, how):
    """SIGTERM to the tunnel ends the agent in order; SIGKILL closes ssh's input, which ends the agent as well."""
    tunnel = machines.open()
    agent = machines.agent()
    until(lambda: "agent 1 runs" in machines.log(), 20, "the tunnel to work")
    (machines.folder / "read").touch()  # it waits for the end of its input
    tunnel.send_signal(signal.Signals[how])
    until(lambda: not alive(agent), 20, "the agent to end")
    tunnel.wait(20)


def test_a_new_agent_ends_the_earlier_one(machines):
    """An agent that the driver could not reach is ended by the host's next one, before that starts."""
    first = break_ssh(machines, machines.open(1))
    (machines.folder / "read").touch()
    machines.open(2)
    assert machines.agent(2) != first
    assert not alive(first)


IMPATIENT = "from nbelastic.system import tunnel_folder; tunnel_folder.ANSWER_TIMEOUT = 0.2"


@contextlib.contextmanager
def stopped_host_end(agent):
    """Stop the host's end of the tunnel, which is the agent's parent, in this block."""
    end = psutil.Process(agent).parent()
    end.suspend()
    try:
        yield end
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            end.resume()


def test_an_ssh_connection_that_came_to_a_stopped_host_does_not_end_the_agent(machines):
    """The host's end of the tunnel is stopped while a further ssh connection comes and goes; the next one reaches the agent."""
    agent = break_ssh(machines, machines.open())
    (machines.folder / "read").touch()
    with stopped_host_end(agent):
        late = machines.open(attach=True, before=IMPATIENT)
        client = psutil.Process(machines.ssh_of(late))
        (there,) = until(client.children, 20, "the program on the host")
        until(lambda: not alive(there.pid), 20, "it to give up")
    assert late.wait(20) == CONNECTION_LOST
    machines.open(attach=True)
    until(lambda: "reached again" in machines.log(2), 20, "the agent to be reached")
    assert alive(agent)


def test_a_new_agent_ends_an_earlier_one_whose_tunnel_is_stopped(machines):
    """The host's end of the earlier tunnel does not answer: it is killed, and its agent ends with it."""
    first = break_ssh(machines, machines.open(1))
    (machines.folder / "read").touch()
    with stopped_host_end(first):
        machines.open(2, before=IMPATIENT)
        assert machines.agent(2) != first
        until(lambda: not alive(first), 20, "the earlier agent to end")


def test_a_tunnel_ends_with_its_cluster(machines):
    """When the cluster has ended, which the missing lock file shows, the tunnel ends its agent."""
    tunnel = machines.open()
    agent = machines.agent()
    (machines.folder / "read").touch()
    (machines.folder / "c.lock").unlink()
    assert tunnel.wait(20) == 0
    until(lambda: not alive(agent), 20, "the agent to end")


def test_a_start_that_the_driver_s_machine_did_not_see_leaves_no_agent(machines):
    """If ssh breaks before the driver's machine knows that the host's program runs, no agent starts, as none would end it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        host = subprocess.Popen([sys.executable, "-c", HOST], stdin=theirs, stdout=theirs, env=environment)
        theirs.close()
        ours.sendall(machines.config())
        ours.settimeout(20)
        assert ours.recv(100) == PREAMBLE
    assert host.wait(20) != 0
    assert not list(machines.folder.glob("agent-*"))


def test_a_host_whose_program_fails_is_reported_with_its_exit_code(machines):
    """If no agent has started, the tunnel ends with ssh's exit code, which `explain_exit` explains."""
    tunnel = machines.open(before="import sys; print('This account is not available'); sys.exit(127)")
    assert tunnel.wait(20) == 127
    assert machines.log() == "This account is not available\n"


PRINTS = """
import os, sys
from nbelastic.tunnel.frames import *
def write(text):
    data = memoryview(text if {fd} == 2 else encode(Frame(Kind.OUTPUT, 0, text)))
    while data:
        data = data[os.write({fd}, data):]
os.write(1, PREAMBLE)
for _ in range(1000):
    write(b"x" * 65535 + b"\\n")
write(b"the end\\n")
sys.exit(3)
"""


@pytest.mark.parametrize("fd", [1, 2], ids=["as frames", "as errors"])
def test_a_host_that_prints_without_end_does_not_fill_the_disk(machines, fd):
    """The log on the driver's machine begins anew when it is long. It ends with what the host has printed last."""
    tunnel = machines.open(before=PRINTS.format(fd=fd))
    assert tunnel.wait(60) == CONNECTION_LOST
    assert (machines.folder / "log-0").stat().st_size < 20_000_000  # of 65 MB
    assert machines.log().endswith("\nthe end\n")


PRINTS_LAST = """
import os, sys
from nbelastic.tunnel.frames import PREAMBLE
os.write(1, PREAMBLE)
os.close(0)
os.close(1)
for _ in range(10):
    sys.stderr.write("x" * 65535 + "\\n")
sys.stderr.write("the end\\n")
sys.stderr.flush()
os._exit(3)
"""


def test_what_ssh_prints_last_is_read_to_its_end(machines):
    """More than a pipe holds comes after the tunnel has ended: ssh is not blocked by it, and the log has its last line."""
    tunnel = machines.open(before=PRINTS_LAST)
    assert tunnel.wait(60) == CONNECTION_LOST
    assert machines.log().endswith("\nthe end\n")


def test_ssh_to_a_host_that_hangs_is_killed(machines, monkeypatch):
    """A login that hangs does not see the end of its input. The tunnel ends without it, and ssh some time later."""
    code = "from nbelastic.tunnel import driver_end; driver_end.ORPHAN_TIMEOUT = 0.5; driver_end.main()"
    monkeypatch.setattr(ssh, "TUNNEL", code)
    tunnel = machines.open(before="import time; time.sleep(1000)")
    client = machines.ssh_of(tunnel)
    (there,) = until(psutil.Process(client).children, 20, "the program on the host")
    tunnel.terminate()
    assert tunnel.wait(20) == 0
    until(lambda: not alive(client), 10, "ssh to end")
    there.kill()


@pytest.mark.soak(seconds=9)
def test_a_stopped_host_is_given_up_after_some_seconds(machines, monkeypatch):
    """If nothing comes any more, as from a cut network, the tunnel ends; the agent may run on."""
    tunnel = machines.open()
    machines.agent()
    until(lambda: "agent 1 runs" in machines.log(), 20, "the tunnel to work")
    client = machines.ssh_of(tunnel)
    os.kill(client, signal.SIGSTOP)
    assert tunnel.wait(30) == CONNECTION_LOST
    assert "nothing has come for 8 s" in machines.log()
