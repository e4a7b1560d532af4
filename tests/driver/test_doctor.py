"""What the doctor finds on hosts, and what it says about it."""

from __future__ import annotations

from msgspec.structs import replace

from nbelastic.cli.main import main
from nbelastic.client.doctor import HERE, Examined, Finding, examine, findings
from nbelastic.protocol.host_facts import HostFacts, Reached
from nbelastic.protocol.ids import Gpu

VERSIONS = {"Python": "3.11.9", "nbelastic": "0.1.0", "torch": "2.13.0", "ipyparallel": "9.2.0"}
FACTS = HostFacts(VERSIONS, "/usr/bin/python", {"eth0": ("10.0.0.1",)}, 4711, "token", open_files=65536)
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
        Finding("gpu1", "look", "torch 2.12.0+cpu: nbelastic was not tested with it, but with 2.11, 2.13, 2.14."),
        Finding("gpu1", "wrong", "GPU a: NVML has reported Xid 79: workers will not use it."),
        Finding(
            "gpu1", "wrong", "its torch is built without CUDA, so its GPUs stay unused: install a build with CUDA."
        ),
        Finding("gpu1", "look", "1024 open files are enough for 149 workers: raise `ulimit -Hn`."),
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
