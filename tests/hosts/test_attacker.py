"""An attacker without any key finds every listening endpoint of a cluster, and changes nothing."""

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import msgspec
import psutil
import pytest

from nbelastic.driver.driver_snapshot import DriverSnapshot
from nbelastic.tunnel.tcp_proxy_process import MOST_PER_PEER
from tests.hosts.cluster_checks import LONG, worker_on
from tests.hosts.network import DRIVER
from tests.process import programs
from tests.process.training import Training, in_one_generation
from tests.support import soak
from tests.support.processes import agent_of_worker, controller_file, driver_pid, processes_of, run_folder
from tests.support.waiting import until

ATTACKER = Path(__file__).with_name("attacker.py")
DROPPED = "dropped a message"  # the driver logs this for a peer with a key that sends a broken message
GROWTH = 50 << 20  # bytes by which any process of the cluster may grow under attack


class Endpoints:
    """The listening endpoints of the cluster on each host and at the driver, except on loopback."""

    def __init__(self, network, training):
        self.found = {}  # host -> (address, port) -> "worker", "agent" or "driver"
        cluster = training.cluster
        here = processes_of(cluster) | {os.getpid()}
        workers = {name: worker_on(training, name).pid for name in network.hosts if name in hosts_of(training)}
        for name, worker in workers.items():
            agent = agent_of_worker(psutil.Process(worker)).pid
            self.found[name] = listening({worker: "worker", agent: "agent"}, agent)
        self.found[DRIVER] = listening(dict.fromkeys(here, "driver"), os.getpid())

    @property
    def open(self):
        return sorted(endpoint for endpoints in self.found.values() for endpoint in endpoints)

    def of(self, kind):
        return sorted(
            endpoint for endpoints in self.found.values() for endpoint, what in endpoints.items() if what == kind
        )


def hosts_of(training):
    return {worker.host for worker in training.cluster.workers}


def listening(processes, one):
    """The endpoints where these processes listen, except on loopback, in the network namespace of the process `one`."""
    inodes = {}
    for pid in processes:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                inodes[os.readlink(fd)] = pid
    found = {}
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/{one}/net/{family}").read_text().splitlines()[1:]:
            words = line.split()
            pid = inodes.get(f"socket:[{words[9]}]")
            if words[3] == "0A" and pid is not None:
                address, port = parse_endpoint(words[1])
                if not address.startswith("127.") and address != "::1":
                    found[address, port] = processes[pid]
    return found


def parse_endpoint(text):
    """Address and port as Linux writes them: "0100007F:1F90" is 127.0.0.1 and 8080."""
    digits, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8))
    address = socket.inet_ntop(socket.AF_INET6 if len(raw) == 16 else socket.AF_INET, raw)
    return address.removeprefix("::ffff:"), int(port, 16)


class Attacker:
    """A host of the network where attacker.py runs."""

    def __init__(self, network):
        self._network = network
        network.add("x", sshd=False)

    def _start(self, do, endpoints, count):
        options = json.dumps({"do": do, "endpoints": endpoints, "count": count})
        command = [*self._network.inside("x"), sys.executable, str(ATTACKER), options]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def result_of(self, do, endpoints, count):
        """Run the attack to its end, and return its result."""
        with self._start(do, endpoints, count) as process:
            out, _ = process.communicate(timeout=LONG)
        return json.loads(out)

    @contextlib.contextmanager
    def flooded(self, endpoints, count):
        """Hold `count` connections to each endpoint in this block. Its value counts the open ones per endpoint."""
        with contextlib.ExitStack() as stack:  # several processes: each connection takes a descriptor
            begun = [
                stack.enter_context(self._start("flood", endpoints[at : at + 8], count))
                for at in range(0, len(endpoints), 8)
            ]
            for process in begun:
                assert json.loads(process.stdout.readline()) == {}
                stack.callback(process.stdin.close)

            def count_open():
                found = {}
                for process in begun:
                    print("?", file=process.stdin, flush=True)
                    found |= {tuple(endpoint): number for endpoint, number in json.loads(process.stdout.readline())}
                return found

            yield count_open


def attacked_processes(training):
    found = processes_of(training.cluster) | {os.getpid()}
    found |= {agent_of_worker(psutil.Process(w.pid)).pid for w in training.cluster.workers if w.pid}
    return {pid: psutil.Process(pid) for pid in found}


def sizes_of(training):
    """Resident bytes and open descriptors of each process of the cluster."""
    found = {}
    for pid, process in attacked_processes(training).items():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[pid] = (process.memory_info().rss, process.num_fds())
    return found


def tcp_proxies(cluster):
    return [
        child
        for child in psutil.Process(driver_pid(cluster)).children()
        if "tcp_proxy_process" in " ".join(child.cmdline())
    ]


def accepted(cluster):
    """How many connections the TCP proxies have accepted, by endpoint."""
    taken = [
        one.laddr
        for proxy in tcp_proxies(cluster)
        for one in proxy.net_connections("tcp")
        if one.status == "ESTABLISHED"
    ]
    return Counter(endpoint for endpoint in taken if not endpoint.ip.startswith("127."))


def grown(before, now):
    """How many bytes and descriptors more each process has."""
    shared = before.keys() & now.keys()
    return {pid: (now[pid][0] - before[pid][0], now[pid][1] - before[pid][1]) for pid in shared}


@pytest.mark.soak(seconds=14)
def test_the_listening_endpoints(network, make, tmp_path):
    """On a host the prober listens on each address, and the store and gloo on one; on the driver's machine nothing listens.

    No process listens on all interfaces. The driver's server and ipyparallel's controller listen only on loopback. Once a
    terminal of another machine may join, a TCP proxy listens for it.
    """
    cluster = make()
    assert sorted(cluster.client[:].apply_sync(os.getpid)) == sorted(worker.pid for worker in cluster.workers)
    training = Training(cluster, tmp_path / "steps", programs.train, pause=0.05)
    training.wait_for_world(2, timeout=LONG)
    endpoints = Endpoints(network, training)
    for name in ("h1", "h2"):
        host = network[name]
        addresses = {address for address, _ in endpoints.found[name]}
        assert addresses == {host.address, host.address6}
        assert {address for (address, _), what in endpoints.found[name].items() if what == "worker"} == {host.address}
        assert len({port for (_, port), what in endpoints.found[name].items() if what == "agent"}) == 1
    assert endpoints.found[DRIVER] == {}
    training.cluster.connection_file("h1")
    endpoints = Endpoints(network, training)
    assert {address for address, _ in endpoints.found[DRIVER]} == {network[DRIVER].address}
    proxies = set().union(*(listening({proxy.pid: "proxy"}, proxy.pid) for proxy in tcp_proxies(training.cluster)))
    assert proxies == endpoints.found[DRIVER].keys()
    training.finish()


def check_more_steps(training, steps=20):
    """Wait until the training has made `steps` more steps."""
    last = training.cluster.status().step
    until(lambda: training.job.done() or training.cluster.status().step >= last + steps, LONG, "steps to be made")
    assert not training.job.done(), training.job.exception()


def under_attack(network, trains):
    """Start a training of two workers, which a terminal of another machine may join, and an attacker."""
    training = trains()
    training.cluster.connection_file("h1")
    training.wait_for_world(2, timeout=LONG)
    attacker = Attacker(network)
    check_more_steps(training)
    return training, attacker


@contextlib.contextmanager
def nothing_changes(training):
    """Check that the generation and the events stay the same, no process grows much, and all descriptors are closed."""
    check_more_steps(training)  # until the stores for the next generation listen
    before, events = sizes_of(training), len(training.cluster.events)
    with in_one_generation(training):
        yield
        check_more_steps(training)
        more = grown(before, sizes_of(training))
        assert max(size for size, _ in more.values()) < GROWTH, more
    assert len(training.cluster.events) == events
    assert DROPPED not in (training.cluster.log_dir / "driver.log").read_text()
    until(
        lambda: max(fds for _, fds in grown(before, sizes_of(training)).values()) <= 2, LONG, "descriptors to be closed"
    )


@pytest.mark.soak(seconds=30)
@pytest.mark.timeout(300)
def test_ten_thousand_broken_messages(network, trains):
    """Ten thousand broken messages to all endpoints change nothing; the workers' endpoints accept no connection."""
    training, attacker = under_attack(network, trains)
    with nothing_changes(training):
        endpoints = Endpoints(network, training)
        sent = attacker.result_of("junk", endpoints.open, 10_000)
        assert sent["sent"] > 3000
        assert {tuple(endpoint) for endpoint in sent["closed"]} == set(endpoints.of("worker"))
        assert attacker.result_of("store", endpoints.open, 5)["answered"] == []
        assert attacker.result_of("foreign_peers", endpoints.of("driver") + endpoints.of("agent"), 10)["answers"] == 0
    training.finish()


@pytest.mark.soak(seconds=60)
@pytest.mark.timeout(300)
def test_thousands_of_connections_to_each_endpoint(network, trains):
    """Under two thousand connections to each endpoint, or 400 without `-m soak`, the training goes on.

    Under 400 a host joins and a worker is replaced.
    """
    training, attacker = under_attack(network, trains)
    with nothing_changes(training):
        endpoints = Endpoints(network, training)
        with attacker.flooded(endpoints.open, soak.repetitions(2000)) as count_open:
            until(
                lambda: max(accepted(training.cluster).values(), default=0) <= MOST_PER_PEER,
                LONG,
                "the TCP proxies to refuse the other connections",
            )
            found = count_open()
            assert not any(found[endpoint] for endpoint in endpoints.of("worker"))
            check_more_steps(training)
    with attacker.flooded(Endpoints(network, training).open, 400):
        training.cluster.add_host("h3:1")
        training.wait_for_world(3, timeout=LONG)
        training.signal_worker(worker_on(training, "h2"))
        training.wait_for_world(3, timeout=LONG)
        check_more_steps(training)
    assert DROPPED not in (training.cluster.log_dir / "driver.log").read_text()
    training.finish()


def test_keys_are_kept_on_hosts(network, make, temporary):
    """No command line, environment, log, event or `repr` has a key, and only the owner can read the files."""
    cluster = make(min=2, keep=True)  # so that the driver snapshot has the keys
    keys = DriverSnapshot.read(run_folder(cluster)).keys
    assert len(cluster.client.ids) == 2
    rows = cluster.execute("import os, subprocess; p = subprocess.Popen(['sleep', '1000']); print(p.pid)", timeout=LONG)
    engines = json.loads(controller_file(cluster, "-engine.json"))
    secrets = [key for key in msgspec.structs.astuple(keys) if key]
    secrets += [value for name, value in engines.items() if name == "key" or name.startswith("curve_")]
    assert len(set(secrets)) >= 6
    pids = processes_of(cluster) | network.processes("h1") | network.processes("h2") | {int(row[1]) for row in rows}
    assert len(pids) > 15
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
            assert not [secret for secret in secrets if secret.encode() in shown], psutil.Process(pid).cmdline()
    inside = cluster.execute("print(dict(os.environ))", timeout=LONG)
    texts = [repr(row) for row in inside] + [repr(thing) for thing in (cluster, keys)]
    texts += [repr(event) for event in cluster.events] + [repr(cluster.status())]
    files = [file for folder in (cluster.log_dir, *temporary.glob("nbelastic-*")) for file in folder.rglob("*")]
    assert {"events.jsonl"} < {file.name for file in files}
    for file in files:
        mode, private = stat.S_IMODE(file.stat().st_mode), 0o700 if file.is_dir() else 0o600
        assert mode == private or "profile" in file.parts[:-1], file  # the files of IPython are in a private folder
        texts += [file.read_text(errors="replace")] if file.is_file() else []
    assert not [text[:200] for text in texts for secret in secrets if secret in text]


OTHER_USER = """
import os, sys
from pathlib import Path
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for place in sys.argv[1:]:
    for file in (Path(place), Path(place, "ipython"), Path(place, "events.jsonl")):
        try:
            os.close(os.open(file, os.O_RDONLY))
            print("read", file)
        except OSError:
            pass
"""


def test_another_user_reads_nothing(network, make, temporary, tmp_path):
    """Another user can read no folder of the driver or the hosts, no log, and no environment or descriptor of a process."""
    cluster = make(min=2)
    places = [run_folder(cluster).parent, run_folder(cluster), cluster.log_dir]
    places += temporary.glob("nbelastic-*")
    for folder in {network.folder, temporary, *tmp_path.parents, tmp_path, Path(tempfile.gettempdir())}:
        if not folder.stat().st_mode & stat.S_IXOTH:  # else the folders of the tests would already keep other users out
            folder.chmod(0o711)
    places += [f"/proc/{pid}/{what}" for pid in processes_of(cluster) for what in ("environ", "fd")]
    command = [sys.executable, "-c", OTHER_USER, *map(str, places)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""
