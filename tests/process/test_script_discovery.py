"""Discovery by a script or a third party's package: its hosts change, it fails, and the training goes on."""

import asyncio
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager

import pytest

import nbelastic as nbe
from nbelastic.protocol.ids import HostSpec
from nbelastic.provision import discovery
from tests.support import driver_thread
from tests.support.processes import alive
from tests.support.waiting import until


@pytest.fixture
def script(tmp_path):
    """A discovery script: `list_hosts(...)` sets the hosts that it prints, `fail()` and `hang()` break it."""

    class Script:
        path = tmp_path / "hosts.sh"
        pids = tmp_path / "pids"

        def hang(self):
            """Make the script wait for a child that never ends; if that is killed, it prints a host."""
            self.write(f"sleep 1000 & echo $$ $! > {self.pids}; wait; echo localhost:1")

        def processes(self):
            return [int(pid) for pid in self.pids.read_text().split()] if self.pids.exists() else []

        def write(self, text):
            other = self.path.with_suffix(".new")
            other.write_text(f"#!/bin/sh\n{text}\n")
            other.chmod(0o755)
            other.rename(self.path)

        def list_hosts(self, *hosts):
            self.write("\n".join(f"echo {host}" for host in hosts))

        def fail(self):
            self.write("echo 'the inventory is down' >&2; exit 7")

    return Script()


def test_hosts_follow_the_output_of_the_script(trains, script):
    """A new line adds a host, a missing one drains it, another number changes its slots."""
    script.list_hosts("localhost:1")
    training = trains(None, discovery=str(script.path), min=1)
    training.wait_for_world(1)
    script.list_hosts("localhost:1", "127.0.0.2")
    training.wait_for_world(1 + (os.cpu_count() or 1))
    script.list_hosts("localhost:1", "127.0.0.2:1")
    training.wait_for_world(2)
    script.list_hosts("127.0.0.2:1")
    training.wait_for_world(1)
    assert [w.host for w in training.cluster.workers if w.rank is not None] == ["127.0.0.2"]
    training.finish()
    assert not [event for event in training.cluster.events if event.kind in ("world-broken", "host-lost")]


@pytest.mark.soak(share=0.2)
def test_a_script_that_fails_later_makes_one_event_per_error(trains, script):
    """When the script fails, the cluster keeps the last good hosts, and runs the script again."""
    script.list_hosts("localhost:1", "127.0.0.2:1")
    training = trains(None, discovery=str(script.path), min=1)
    training.wait_for_world(2)
    failures = lambda: [event.text for event in training.cluster.events if event.kind == "discovery-failed"]
    script.fail()
    (text,) = until(failures)
    assert "exit code 7" in text
    assert "the inventory is down" in text
    script.write("echo localhost:x")
    until(lambda: len(failures()) == 2)
    assert "localhost:x" in failures()[1]
    training.wait_for_world(2)
    script.list_hosts("localhost:1")
    training.wait_for_world(1)
    assert len(failures()) == 2
    assert [e.kind for e in training.cluster.events if "discovery" in e.kind][-1] == "discovery-recovered"
    training.finish()


def test_a_script_that_fails_at_first(script):
    """`start()` raises at once, with the exit code and the stderr of the script."""
    script.fail()
    cluster = nbe.Cluster(discovery=str(script.path))
    with pytest.raises(nbe.ClusterStoppedError, match=r"exit code 7: the inventory is down"):
        cluster.start(timeout=20)
    cluster.stop()


@pytest.mark.parametrize(
    ("commands", "limit", "why"),
    [("sleep 1000", 0.5, "within 0.5 s"), ("echo a:1; echo b:x", discovery.SCRIPT_TIMEOUT, "line 2: 'b:x'")],
)
def test_a_script_that_hangs_or_prints_no_hosts_at_first(script, monkeypatch, commands, limit, why):
    """`start()` raises with the reason when the script does not answer in time or prints something else."""
    driver_thread.use_driver_threads(monkeypatch)
    monkeypatch.setattr(discovery, "SCRIPT_TIMEOUT", limit)
    script.write(commands)
    cluster = nbe.Cluster(discovery=str(script.path))
    with pytest.raises(nbe.ClusterStoppedError, match=why):
        cluster.start(timeout=20)
    cluster.stop()


def test_a_script_that_is_not_there(tmp_path):
    """The error names the missing script and what to check."""
    with pytest.raises((nbe.ClusterStoppedError, nbe.UsageError), match=r"nowhere.sh.*check its path"):
        nbe.Cluster(discovery=str(tmp_path / "nowhere.sh")).start(timeout=20)


@pytest.mark.soak(share=0.2)
def test_a_script_that_hangs_later(trains, script, monkeypatch):
    """A script that hangs is reported and killed with its children; the training goes on."""
    driver_thread.use_driver_threads(monkeypatch)
    script.list_hosts("localhost:1")
    training = trains(None, discovery=str(script.path), min=1)
    training.wait_for_world(1)
    kinds = lambda: [event.kind for event in training.cluster.events if "discovery" in event.kind]
    script.hang()
    _, child = until(script.processes)
    monkeypatch.setattr(discovery, "SCRIPT_TIMEOUT", 1.0)  # only now: earlier answers may take longer
    os.kill(child, signal.SIGKILL)  # this run of the script still has the longer time, and answers; the next hangs too
    until(lambda: kinds() == ["discovery-failed"])
    (text,) = [event.text for event in training.cluster.events if event.kind == "discovery-failed"]
    assert "did not answer within 1 s" in text
    until(script.processes)
    script.list_hosts("localhost:1")
    until(lambda: kinds() == ["discovery-failed", "discovery-recovered"])
    until(lambda: not [pid for pid in script.processes() if alive(pid)])
    training.finish()


def test_a_stopped_cluster_leaves_no_script(make, script):
    """A script that runs when the cluster stops is killed with its children."""
    script.list_hosts("localhost:1")
    cluster = make(None, discovery=str(script.path))
    script.hang()
    until(script.processes)
    assert [pid for pid in script.processes() if alive(pid)]
    cluster.stop()
    until(lambda: not [pid for pid in script.processes() if alive(pid)])


class BlockingHosts:
    """A discovery that blocks its thread while `go_on` is clear, as no coroutine should."""

    def __init__(self):
        self.go_on = threading.Event()
        self.go_on.set()

    async def hosts(self):
        self.go_on.wait()
        return [HostSpec("localhost", 1, "")]


@pytest.mark.soak(share=0.2)
def test_a_third_partys_discovery_that_blocks(trains, monkeypatch):
    """A discovery that blocks is reported and asked again; the training and the driver go on meanwhile."""
    monkeypatch.setattr(discovery, "DISCOVERY_TIMEOUT", 0.5)
    found = BlockingHosts()
    training = trains(None, discovery=found, min=1)
    training.wait_for_world(1)
    kinds = lambda: [event.kind for event in training.cluster.events if "discovery" in event.kind]
    found.go_on.clear()
    try:
        until(lambda: kinds() == ["discovery-failed"])
        before = len(training.lines())
        until(lambda: len(training.lines()) > before + 5)
    finally:
        found.go_on.set()
    until(lambda: kinds()[-1] == "discovery-recovered")
    assert kinds().count("discovery-recovered") == 1
    training.finish()


# ---- without a cluster ----


def hosts_of(found):
    """The hosts that this discovery answers with, in the way that the driver asks it."""

    async def poll():
        thread = discovery.DiscoveryThread(found)
        try:
            return [f"{host.name}:{host.slots}" for host in await thread.hosts()]
        finally:
            await thread.close()

    return asyncio.run(poll())


def test_arguments_and_the_folder_of_the_start(script, monkeypatch):
    """`./hosts.sh gpu '2 3'` is a script with two arguments, found in the folder that was current then."""
    script.write("echo $1-$#; cat more")
    (script.path.parent / "more").write_text("c:3\n")
    monkeypatch.chdir(script.path.parent)
    found = discovery.find_discovery("./hosts.sh gpu '2 3'", None, 4)
    monkeypatch.chdir("/")
    assert hosts_of(found) == ["gpu-2:4", "c:3"]


def test_a_path_with_blanks_needs_no_quotes(script, tmp_path):
    """A text that names an existing file is not split at its blanks."""
    script.list_hosts("a:1")
    other = tmp_path / "my hosts.sh"
    script.path.rename(other)
    assert hosts_of(discovery.find_discovery(str(other), 1)) == ["a:1"]


def test_a_program_on_the_path(script, monkeypatch):
    """`hosts.sh` without a folder is found on the PATH."""
    script.list_hosts("a:1")
    monkeypatch.setenv("PATH", str(script.path.parent), prepend=":")
    assert hosts_of(discovery.find_discovery("hosts.sh", 1)) == ["a:1"]


def test_a_script_gets_no_input(script):
    """A script cannot read the standard input of this process."""
    script.write("cat; echo a")
    assert hosts_of(discovery.ScriptDiscovery(str(script.path))) == ["a:1"]


def test_children_that_a_script_leaves_behind_are_killed(script):
    """A child in the background that keeps the output open neither delays the answer nor stays."""
    script.write(f"sleep 1000 & echo $! > {script.pids}; echo a:2")
    begun = time.monotonic()
    assert hosts_of(discovery.ScriptDiscovery(str(script.path))) == ["a:2"]
    assert time.monotonic() - begun < 60
    until(lambda: not alive(*script.processes()))


def test_a_child_that_leaves_the_group_does_not_delay_the_answer(script):
    """A child in another process group, like ssh's master, stays; the answer arrives without waiting for it."""
    leaves = f"setsid sh -c 'echo $$ > {script.pids}; exec sleep 1000'"
    script.write(f"{leaves} & until [ -s {script.pids} ]; do sleep 0.01; done; echo a:2")
    try:
        assert hosts_of(discovery.ScriptDiscovery(str(script.path))) == ["a:2"]
    finally:
        os.kill(*script.processes(), 9)


@pytest.mark.parametrize("where", ["", " >&2"])
def test_a_script_that_writes_without_end(script, where):
    """A script that writes more than 1 MiB is stopped with an error."""
    script.write(f"yes localhost:1{where}")
    with pytest.raises(nbe.DiscoveryError, match="wrote more than 1 MiB"):
        hosts_of(discovery.ScriptDiscovery(str(script.path)))


def test_much_output_below_the_limit_is_read(script):
    """Output that is more than a pipe holds is read, on both streams."""
    script.write("yes localhost:1 | head -n 60000; yes x | head -n 300000 >&2")
    assert hosts_of(discovery.ScriptDiscovery(str(script.path))) == ["localhost:1"]


@pytest.mark.parametrize(
    ("output", "hosts"),
    [
        ("", []),
        ("h", ["h:4"]),
        ("h:2\n\n\n  \nh:2\n", ["h:2"]),
        ("[fe80::1]:2\nme@h:1\n", ["fe80::1:2", "h:1"]),
    ],
    ids=["nothing", "one without slots", "blank lines and a line twice", "IPv6 and a user"],
)
def test_what_scripts_may_print(script, output, hosts):
    """Each of these outputs of a script is a valid list of hosts."""
    script.write(f"cat <<END\n{output}\nEND")
    assert hosts_of(discovery.ScriptDiscovery(str(script.path), 4)) == hosts


@pytest.mark.parametrize("bad_line", ["h:x", "h:-1", "h:1:2", "h:0", "-oProxyCommand=x", "<html>"])
def test_a_bad_line_is_named_with_its_number(script, bad_line):
    """The error of a script's output has the bad line and its number."""
    script.write(f"cat <<END\na:1\n{bad_line}\nEND")
    with pytest.raises(nbe.DiscoveryError, match=r"hosts\.sh did not print a list of hosts: line 2: .*") as caught:
        hosts_of(discovery.ScriptDiscovery(str(script.path)))
    assert bad_line in str(caught.value)


@pytest.mark.parametrize("text", ["nowhere.sh", "./nowhere.sh", "/etc/passwd", "/tmp", "slurn"])
def test_a_name_that_is_not_found(text):
    """The error of an unknown name lists the installed discoveries."""
    with pytest.raises(nbe.UsageError, match=r"is neither an executable file nor an installed discovery \(.*slurm.*\)"):
        discovery.find_discovery(text, 1)


@pytest.mark.parametrize("text", ["", "  ", "it's"])
def test_a_text_that_is_not_a_command(text):
    """An empty text, or one with an open quote, raises UsageError."""
    with pytest.raises(nbe.UsageError, match=r"is empty|is not a valid command"):
        discovery.find_discovery(text, 1)


# ---- third parties ----


@contextmanager
def installed_discoveries(monkeypatch, folder, **modules):
    """Write packages as pip installs them, with a discovery each: `installed_discoveries(…, cloud="def find(slots): …")`."""
    for name, code in modules.items():
        (folder / f"their_{name}.py").write_text(code)
        info = folder / f"their_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: their-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[nbelastic.discovery]\n{name} = their_{name}:find\n")
    with monkeypatch.context() as here:
        here.syspath_prepend(folder)
        yield


CLOUD = """
from nbelastic.protocol.ids import HostSpec
class Cloud:
    def __init__(self, slots):
        self.slots = slots
    async def hosts(self):
        return [HostSpec("cloud1", self.slots or 8, "")]
find = Cloud
"""


def test_an_installed_discovery_by_its_name(monkeypatch, tmp_path, script):
    """An installed discovery gets the slots, or None without a number. A script of the same name does not hide it."""
    script.list_hosts("a:1")
    script.path.rename(tmp_path / "cloud")
    monkeypatch.chdir(tmp_path)
    with installed_discoveries(monkeypatch, tmp_path, cloud=CLOUD):
        assert hosts_of(discovery.find_discovery("cloud", 2)) == ["cloud1:2"]
        assert hosts_of(discovery.find_discovery("cloud", None, 4)) == ["cloud1:8"]
        assert hosts_of(discovery.find_discovery("./cloud", None, 4)) == ["a:1"]
        with pytest.raises(nbe.UsageError, match=r"\(cloud, kubernetes, slurm\)"):
            discovery.find_discovery("clod", 1)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("def find(slots): return 1 / 0", "ZeroDivisionError"),
        ("def find(slots): return 'a:1'", "has no hosts"),
    ],
)
def test_an_installed_discovery_that_does_not_work(monkeypatch, tmp_path, code, why):
    """An installed discovery that does not work raises one error that names its package."""
    with installed_discoveries(monkeypatch, tmp_path, broken=code):
        monkeypatch.delitem(sys.modules, "their_broken", raising=False)
        with pytest.raises(nbe.UsageError, match=rf"'broken' \(their_broken:find\) .*{why}"):
            discovery.find_discovery("broken", 1)


class FixedAnswer:
    """A third party's discovery that returns or raises one answer."""

    def __init__(self, answer):
        self.answer = answer

    async def hosts(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (KeyError("x"), r"raised KeyError\('x'\)"),
        (TimeoutError(), "raised TimeoutError"),
        (None, "raised TypeError"),
        (["a:1"], "returned 'a:1'"),
        ([HostSpec("a", 0, "")], "at least 1 slot"),
        ([HostSpec("-oProxyCommand=x", 1, "")], "is not a valid host"),
        ([HostSpec("a", 1, ""), HostSpec("a", 2, "")], "'a' more than once"),
    ],
)
def test_wrong_answers_of_third_parties(answer, why):
    """Each wrong answer or exception of a third party's discovery becomes an NbelasticError."""
    with pytest.raises(nbe.NbelasticError, match=why):
        hosts_of(FixedAnswer(answer))


def test_errors_that_differ_in_numbers_are_one(script):
    """Two errors that differ only in the time of day are one error to the driver."""
    script.write("echo down at $(date +%H:%M:%S.%N) >&2; exit 1")
    texts = set()
    for _ in range(2):
        with pytest.raises(nbe.DiscoveryError) as caught:
            hosts_of(discovery.ScriptDiscovery(str(script.path)))
        texts.add((str(caught.value), discovery.without_numbers(caught.value)))
    assert len(texts) == 2
    assert len({text for _, text in texts}) == 1
