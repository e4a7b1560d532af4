"""What the doctor finds on hosts, and what it says about it."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack, suppress

import psutil
import pytest
from msgspec.structs import replace

from nbelastic.agent import host_facts
from nbelastic.cli.main import main
from nbelastic.client import doctor
from nbelastic.client.doctor import HERE, Examined, Finding, examine, findings
from nbelastic.protocol.host_facts import MARK, HostFacts, Reached, Target
from nbelastic.protocol.ids import Gpu
from tests.support.waiting import until

VERSIONS = {"Python": "3.11.9", "nbelastic": "0.1.0", "torch": "2.13.0", "ipyparallel": "9.2.0"}
FACTS = HostFacts(VERSIONS, "/usr/bin/python", {"eth0": ("10.0.0.1",)}, {"10.0.0.1": 4711}, "token", open_files=65536)
ALL_WELL = "Python 3.11.9, nbelastic 0.1.0, torch 2.13.0, ipyparallel 9.2.0; no GPU; eth0 10.0.0.1"


def problems(host: HostFacts) -> list[Finding]:
    """Problems of this host, which reaches this machine."""
    both = {HERE: Examined(FACTS, [Reached("gpu1", "10.0.0.2")]), "gpu1": Examined(host, [Reached(HERE, "10.0.0.1")])}
    return [finding for finding in findings(both) if finding.state != "ok"]


def test_hosts_that_fit_have_one_line_each():
    """With the versions, GPUs and addresses."""
    two_gpus = replace(FACTS, gpus=(Gpu("a"), Gpu("b")))
    both = {HERE: Examined(FACTS, [Reached("gpu1", "x")]), "gpu1": Examined(two_gpus, [Reached(HERE, "x")])}
    second = ALL_WELL.replace("no GPU", "2 GPUs")
    assert findings(both) == [Finding(HERE, "ok", ALL_WELL), Finding("gpu1", "ok", second)]


def test_each_problem_of_a_host_says_what_to_do():
    """Versions, GPUs, and the limit of open files."""
    other = replace(FACTS, versions={**VERSIONS, "torch": "2.12.0+cpu"}, gpus=(Gpu("a", "NVML has reported Xid 79"),))
    assert problems(replace(other, open_files=1024)) == [
        Finding(
            "gpu1",
            "wrong",
            "torch 2.12.0+cpu there, 2.13.0 here: install the same versions there, or name another Python with --python.",
        ),
        Finding(
            "gpu1", "warning", "torch 2.12.0+cpu: nbelastic was not tested with it, but with 2.11, 2.13, 2.14, 2.15."
        ),
        Finding("gpu1", "wrong", "GPU a: NVML has reported Xid 79: workers will not use it."),
        Finding(
            "gpu1", "wrong", "its torch is built without CUDA, so its GPUs stay unused: install a build with CUDA."
        ),
        Finding("gpu1", "warning", "1024 open files are enough for 618 workers, with %px for 149: raise `ulimit -Hn`."),
    ]


def test_a_host_is_reached_if_one_of_its_addresses_is():
    """Of a host that is not reached, all addresses are named, with each error."""
    half = [Reached("gpu1", "10.0.0.2"), Reached("gpu1", "172.17.0.1", "Connection refused")]
    none = [Reached(HERE, "10.0.0.1", "timed out"), Reached(HERE, "fd00::1", "Network is unreachable")]
    found = findings({HERE: Examined(FACTS, half), "gpu1": Examined(FACTS, none)})
    assert [finding for finding in found if finding.state != "ok"] == [
        Finding(
            "gpu1",
            "wrong",
            "it cannot connect to this machine (10.0.0.1: timed out; fd00::1: Network is unreachable): "
            "open all TCP ports between them in the firewall, or join them by a network.",
        )
    ]


def test_an_answer_begins_a_line(capsys):
    """Also where the login shell has printed the terminal's title, without the end of a line."""
    print("\x1b]0;me@gpu1\x07", end="")
    host_facts._print(["fact"])
    assert capsys.readouterr().out.splitlines()[-1] == f'{MARK}["fact"]'


TOKEN = "0123456789abcdef" * 2
REFUSED = "another host has this address"


@pytest.mark.parametrize(("token", "error"), [(TOKEN, ""), ("f" * 32, REFUSED), (TOKEN[:16] + "f" * 16, REFUSED)])
def test_a_host_answers_only_who_knows_its_token(token, error):
    """Each end shows the other one half of it."""
    (port,) = host_facts._listen(["127.0.0.1"], TOKEN.encode()).values()
    assert host_facts._reach(Target("h", "127.0.0.1", port, token)) == Reached("h", "127.0.0.1", error)


@pytest.mark.parametrize("sent", [b"f" * 16, b"GET / HTTP/1.1\r\n\r\n", TOKEN[:15].encode()])
def test_a_stranger_gets_no_answer(sent):
    """Its connection is closed, and delays no other one."""
    ((address, port),) = host_facts._listen(["127.0.0.1"], TOKEN.encode()).items()
    with socket.create_connection((address, port), 10), socket.create_connection((address, port), 10) as other:
        other.sendall(sent)
        with suppress(OSError):  # it was closed with unread bytes, perhaps already now
            other.shutdown(socket.SHUT_WR)
            assert other.recv(64) == b""
        assert host_facts._reach(Target("h", address, port, TOKEN)).error == ""


def test_strangers_do_not_keep_a_host_out():
    """Silent connections beyond a bound cost the oldest ones their place. Where no descriptor is free, it waits for one."""
    code = f"""
import resource, sys, time
from nbelastic.agent import host_facts
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
host_facts.MOST_CALLERS = int(sys.argv[1])
((_, port),) = host_facts._listen(["127.0.0.1"], {TOKEN.encode()!r}).items()
print(port, flush=True)
sys.stdin.read()
"""
    for most in (8, 256):
        command = [sys.executable, "-c", code, str(most)]
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
            ExitStack() as stack,
        ):
            stack.callback(process.stdin.close)
            target = Target("h", "127.0.0.1", int(process.stdout.readline()), TOKEN)
            silent = ExitStack()
            stack.callback(silent.close)
            for _ in range(100):
                silent.enter_context(socket.create_connection((target.address, target.port), 10))
            if most == 256:
                silent.close()
            until(lambda target=target: host_facts._reach(target).error == "", 10)


def test_ctrl_c_ends_the_processes_of_the_doctor(monkeypatch):
    """The call returns at once, also if a host does not answer."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = psutil.Process().children()
    monkeypatch.setattr(doctor, "CODE", "import time; time.sleep(600)")
    monkeypatch.setattr(doctor, "wait_for_result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        examine([])
    assert [child for child in psutil.Process().children() if child not in before] == []


def test_a_machine_without_ssh_is_a_finding(monkeypatch):
    """It says which program is missing."""
    monkeypatch.setattr(doctor.ssh, "command", lambda *_: ["no-such-ssh"])
    found = [finding for finding in examine(["no-such-host.invalid"]) if finding.host != HERE]
    text = "no-such-ssh cannot be started here: No such file or directory."
    assert found == [Finding("no-such-host.invalid", "wrong", text)]


def test_what_a_host_answers_is_shown_as_printable_lines(monkeypatch):
    """Control characters of a host do not reach the terminal, and its texts are cut."""
    code = """
import msgspec
from nbelastic.protocol.host_facts import MARK, HostFacts
versions = {"torch": "\\x1b]0;title\\x07" + 10_000 * "x"}
print(MARK + msgspec.json.encode(HostFacts(versions, "", {"e\\nth0": ("\\x9b2J",)}, {}, "")).decode())
"""
    monkeypatch.setattr(doctor, "CODE", code)
    (found,) = [finding for finding in examine([]) if finding.state == "ok"]
    assert found.text.isprintable()
    assert found.text.startswith("torch xxx")
    assert len(found.text) < 1100


def test_this_machine_is_examined_with_all_its_names():
    """Loopback addresses are names of this machine. It has one line."""
    (found,) = [finding for finding in examine(["localhost", "127.0.0.2"]) if finding.state == "ok"]
    assert found.host == HERE
    assert "nbelastic 0.1.0" in found.text


def test_an_unknown_host_is_named(capsys):
    """The terminal's command prints the table, and fails with one line."""
    assert main(["doctor", "no-such-host.invalid"]) == 1
    printed = capsys.readouterr()
    assert "no-such-host.invalid is an unknown name (ssh: " in printed.out
    assert printed.err == "nbelastic: not all is well: the lines marked `wrong` say what to do.\n"
