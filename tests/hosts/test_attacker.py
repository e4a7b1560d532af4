"""Somebody on the network without any key finds every door, and changes nothing behind one."""

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
from nbelastic.provision.tcp_proxy_process import MOST_PER_PEER
from tests.hosts.cluster_checks import LONG, worker_on
from tests.hosts.network import DRIVER
from tests.process.training import in_one_generation
from tests.support.processes import agent_of_worker, controller_file, driver_pid, processes_of, run_folder
from tests.support.waiting import until

ATTACKER = Path(__file__).with_name("attacker.py")
DROPPED = "dropped a message"  # of who has the key, and speaks nonsense: the driver's link logs it
GROWTH = 50 << 20  # bytes that any of our processes may grow by under attack


class Doors:
    """What listens on the network: of each host and of the driver, without what is on loopback and without sshd."""

    def __init__(self, network, training):
        self.found = {}  # host -> (address, port) -> what listens there
        cluster = training.cluster
        here = processes_of(cluster) | {os.getpid()}
        workers = {name: worker_on(training, name).pid for name in network.hosts if name in hosts_of(training)}
        for name, worker in workers.items():
            agent = agent_of_worker(psutil.Process(worker)).pid
            self.found[name] = listening({worker: "worker", agent: "agent"}, agent)
        self.found[DRIVER] = listening(dict.fromkeys(here, "driver"), os.getpid())

    @property
    def open(self):
        return sorted(door for doors in self.found.values() for door in doors)

    def of(self, kind):
        return sorted(door for doors in self.found.values() for door, what in doors.items() if what == kind)


def hosts_of(training):
    return {worker.host for worker in training.cluster.workers}


def listening(processes, one):
    """Listening sockets of these processes, beyond loopback; they are all in the network namespace that `one` is in."""
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
                address, port = spelled(words[1])
                if not address.startswith("127.") and address != "::1":
                    found[address, port] = processes[pid]
    return found


def spelled(text):
    """ "0100007F:1F90", as the kernel writes it, is 127.0.0.1 and 8080."""
    digits, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8))
    address = socket.inet_ntop(socket.AF_INET6 if len(raw) == 16 else socket.AF_INET, raw)
    return address.removeprefix("::ffff:"), int(port, 16)


class Attacker:
    """A host of the network where attacker.py runs."""

    def __init__(self, network):
        self._network = network
        network.add("x", sshd=False)

    def _begin(self, do, doors, count):
        order = json.dumps({"do": do, "doors": doors, "count": count})
        command = [*self._network.inside("x"), sys.executable, str(ATTACKER), order]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def does(self, do, doors, count):
        """What came of it."""
        with self._begin(do, doors, count) as process:
            out, _ = process.communicate(timeout=LONG)
        return json.loads(out)

    @contextlib.contextmanager
    def floods(self, doors, count):
        """So many connections to each door are held, or were refused, while this lasts. Call it: how many stand by now."""
        with contextlib.ExitStack() as stack:  # several processes: each connection takes a descriptor
            begun = [
                stack.enter_context(self._begin("flood", doors[at : at + 8], count)) for at in range(0, len(doors), 8)
            ]
            for process in begun:
                assert json.loads(process.stdout.readline()) == {}
                stack.callback(process.stdin.close)

            def standing():
                found = {}
                for process in begun:
                    print("?", file=process.stdin, flush=True)
                    found |= {tuple(door): number for door, number in json.loads(process.stdout.readline())}
                return found

            yield standing


def attacked_processes(training):
    found = processes_of(training.cluster) | {os.getpid()}
    found |= {agent_of_worker(psutil.Process(w.pid)).pid for w in training.cluster.workers if w.pid}
    return {pid: psutil.Process(pid) for pid in found}


def sizes(training):
    """Resident bytes and open descriptors of each of our processes."""
    found = {}
    for pid, process in attacked_processes(training).items():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[pid] = (process.memory_info().rss, process.num_fds())
    return found


def the_gates(cluster):
    return [
        child
        for child in psutil.Process(driver_pid(cluster)).children()
        if "nbelastic.provision.tcp_proxy" in " ".join(child.cmdline())
    ]


def accepted(cluster):
    """How many connections the gates have taken, by door."""
    taken = [
        one.laddr for gate in the_gates(cluster) for one in gate.net_connections("tcp") if one.status == "ESTABLISHED"
    ]
    return Counter(door for door in taken if not door.ip.startswith("127."))


def grown(before, now):
    """Which processes have become how much larger, in bytes, and how many descriptors more they have."""
    shared = before.keys() & now.keys()
    return {pid: (now[pid][0] - before[pid][0], now[pid][1] - before[pid][1]) for pid in shared}


def test_what_listens_where(network, trains):
    """On a host the prober on each address, and the store and gloo on the one that it trains at; at the driver the gate.

    Nothing of ours listens on all interfaces, and the hub and ipyparallel's controller only on loopback.
    """
    training = trains()
    training.wait_for_world(2, timeout=LONG)
    doors = Doors(network, training)
    for name in ("h1", "h2"):
        host = network[name]
        addresses = {address for address, _ in doors.found[name]}
        assert addresses == {host.address, host.address6}
        assert {address for (address, _), what in doors.found[name].items() if what == "worker"} == {host.address}
        assert len({port for (_, port), what in doors.found[name].items() if what == "agent"}) == 1
    assert {address for address, _ in doors.found[DRIVER]} == {network[DRIVER].address}
    gates = set().union(*(listening({gate.pid: "gate"}, gate.pid) for gate in the_gates(training.cluster)))
    assert gates == doors.found[DRIVER].keys()
    training.finish()


def steps_go_on(training, steps=20):
    """The training makes these many steps more."""
    last = training.cluster.status().step
    until(lambda: training.job.done() or training.cluster.status().step >= last + steps, LONG, "steps to be made")
    assert not training.job.done(), training.job.exception()


def under_attack(network, trains):
    """A training of two that has got going, and an attacker beside it."""
    training = trains()
    training.wait_for_world(2, timeout=LONG)
    attacker = Attacker(network)
    steps_go_on(training)
    return training, attacker


@contextlib.contextmanager
def nothing_changes(training):
    """The training goes on in its generation; nothing is taken in, nobody grows much, and in the end no descriptor is left over."""
    steps_go_on(training)  # until what is offered ahead is there
    before, events = sizes(training), len(training.cluster.events)
    with in_one_generation(training):
        yield
        steps_go_on(training)
        more = grown(before, sizes(training))
        assert max(size for size, _ in more.values()) < GROWTH, more
    assert len(training.cluster.events) == events
    assert DROPPED not in (training.cluster.log_dir / "driver.log").read_text()
    until(lambda: max(fds for _, fds in grown(before, sizes(training)).values()) <= 2, LONG, "descriptors to be closed")


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_ten_thousand_broken_messages(network, trains):
    """Noise, half a greeting, other mechanisms, endless frames, HTTP, keys of another cluster, words of torch's store: at
    each door that opens at all. Those of the workers do not.
    """
    training, attacker = under_attack(network, trains)
    with nothing_changes(training):
        doors = Doors(network, training)
        sent = attacker.does("junk", doors.open, 10_000)
        assert sent["sent"] > 3000
        assert {tuple(door) for door in sent["shut"]} == set(doors.of("worker"))
        assert attacker.does("store", doors.open, 5)["answered"] == []
        assert attacker.does("strangers", doors.of("driver") + doors.of("agent"), 10)["heard"] == 0
    training.finish()


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_two_thousand_connections_at_each_door(network, trains):
    """They are refused or held, and do no harm; a host joins meanwhile, and a death is recovered from."""
    training, attacker = under_attack(network, trains)
    with nothing_changes(training):
        doors = Doors(network, training)
        with attacker.floods(doors.open, 2000) as standing:
            until(
                lambda: max(accepted(training.cluster).values(), default=0) <= MOST_PER_PEER,
                LONG,
                "gates to refuse the rest",
            )
            found = standing()
            assert not any(found[door] for door in doors.of("worker"))
            steps_go_on(training)
    with attacker.floods(Doors(network, training).open, 400):
        training.cluster.add_host("h3:1")
        training.wait_for_world(3, timeout=LONG)
        training.signal_worker(worker_on(training, "h2"))
        training.wait_for_world(3, timeout=LONG)
        steps_go_on(training)
    assert DROPPED not in (training.cluster.log_dir / "driver.log").read_text()
    training.finish()


@pytest.mark.cold  # it reads what the system shows of processes
def test_keys_are_kept_on_hosts(network, make, temporary):
    """No key in a command line or an environment on any host, in a log, an event or a `repr`; files are their owner's alone."""
    cluster = make(min=2, keep=True)  # it is saved, and its keys with it
    keys = DriverSnapshot.read(run_folder(cluster)).keys
    rows = cluster.execute("import os, subprocess; p = subprocess.Popen(['sleep', '1000']); print(p.pid)", timeout=LONG)
    engines = json.loads(controller_file(cluster, "-engine.json"))
    secrets = [key for key in msgspec.structs.astuple(keys) if key]
    secrets += [value for name, value in engines.items() if name == "key" or name.startswith("curve_")]
    assert len(set(secrets)) >= 6
    everybody = (
        processes_of(cluster) | network.processes("h1") | network.processes("h2") | {int(row[1]) for row in rows}
    )
    assert len(everybody) > 15
    for pid in everybody:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
            assert not [secret for secret in secrets if secret.encode() in shown], psutil.Process(pid).cmdline()
    inside = cluster.execute("print(dict(os.environ))", timeout=LONG)
    said = [repr(row) for row in inside] + [repr(thing) for thing in (cluster, keys)]
    said += [repr(event) for event in cluster.events] + [repr(cluster.status())]
    files = [file for folder in (cluster.log_dir, *temporary.glob("nbelastic-*")) for file in folder.rglob("*")]
    assert {"events.jsonl"} < {file.name for file in files}
    for file in files:
        mode, private = stat.S_IMODE(file.stat().st_mode), 0o700 if file.is_dir() else 0o600
        assert mode == private or "profile" in file.parts[:-1], file  # IPython's own lie in a private folder
        said += [file.read_text(errors="replace")] if file.is_file() else []
    assert not [text[:200] for text in said for secret in secrets if secret in text]


NOBODY = """
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
    """Neither the driver's folder nor the hosts' nor the logs, nor a process's environment or descriptors."""
    cluster = make(min=2)
    places = [run_folder(cluster).parent, run_folder(cluster), cluster.log_dir]
    places += temporary.glob("nbelastic-*")
    for folder in {network.folder, temporary, *tmp_path.parents, tmp_path, Path(tempfile.gettempdir())}:
        if not folder.stat().st_mode & stat.S_IXOTH:  # the tests' own folders would keep others out
            folder.chmod(0o711)
    places += [f"/proc/{pid}/{what}" for pid in processes_of(cluster) for what in ("environ", "fd")]
    command = [sys.executable, "-c", NOBODY, *map(str, places)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""
