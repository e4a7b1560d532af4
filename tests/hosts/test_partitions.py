"""Hosts that die, are cut off or slow, and workers that hang: who is lost, why, and that no ghost comes back."""

import ctypes
import platform
import re
import threading
import time
from pathlib import Path

import pytest

from tests.hosts.cluster_checks import LONG, event_texts, wait_for_more_steps, worker_on
from tests.hosts.network import DRIVER
from tests.process import programs
from tests.process.training import in_one_generation
from tests.support.processes import alive
from tests.support.waiting import until

SILENCE = 2.0


def lost(training, host, known=0):
    """Wait until a host is lost (again); the last reason."""
    found = until(
        lambda: (said := event_texts(training.cluster, "host-lost", host))[known:] and said,
        LONG,
        f"{host} to be lost; {training.cluster.status().reason}",
    )
    return found[known]


def no_ghosts(training, worker, since):
    """After the first `since` events nothing was heard of a worker, it made no step in a later generation, and it is gone."""
    events = training.cluster.events
    assert not [event for event in events[since:] if event.worker == worker.id]
    last = max(event.generation for event in events[:since])
    assert all(line["generation"] <= last for line in training.lines() if line["pid"] == worker.pid)
    assert not alive(worker.pid)


def test_a_host_dies_and_comes_back(network, trains):
    """All its processes die at once: the others go on and lose no step; when it has booted it trains again by itself."""
    training = trains("h1:1,h2:1,h3:1", min=1)
    training.wait_for_world(3, timeout=LONG)
    network.kill("h3")
    assert re.match(r"h3: the ssh connection to h3 has ended \(.*\); tried again in", lost(training, "h3"))
    training.wait_for_world(2, timeout=LONG)
    wait_for_more_steps(training)
    network.reboot("h3")
    training.wait_for_world(3, timeout=LONG)
    assert len(training.finish(timeout=LONG)) == 3
    assert len(event_texts(training.cluster, "world-broken")) == 1


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_host_that_is_cut_off_leaves_no_ghosts(network, trains):
    """Cut off, both ways or one: lost after `silence`; the others go on. Its old worker never comes back, the host does by itself."""
    training = trains("h1:1,h2:1,h3:1", min=1, silence=SILENCE)
    faults = {
        "cut off": lambda: network.cut("h3"),
        "it is not heard": lambda: network.cut_between("h3", DRIVER, one_way=True),
        "it hears nothing": lambda: network.cut_between(DRIVER, "h3", one_way=True),
    }
    old, seen = [], []
    for fault in faults.values():
        training.wait_for_world(3, timeout=LONG)
        old.append(worker_on(training, "h3"))
        count = len(event_texts(training.cluster, "host-lost", "h3"))
        fault()
        said = lost(training, "h3", count)
        seen.append(len(training.cluster.events))
        assert re.match(r"h3: no message from it for [2-9] s; tried again in", said)
        training.wait_for_world(2, timeout=LONG)
        network.heal()
    training.wait_for_world(3, timeout=LONG)
    assert len({worker.id for worker in (*old, worker_on(training, "h3"))}) == 4
    until(lambda: not any(alive(worker.pid) for worker in old), LONG, "the old processes to end")
    for worker, since in zip(old, seen, strict=True):
        no_ghosts(training, worker, since)
    assert len(training.finish(timeout=LONG)) == 3


@pytest.mark.soak
def test_two_hosts_that_do_not_reach_each_other(network, trains):
    """The driver hears both, they do not hear one another: one is left out, and told why; healed, it joins again."""
    training = trains("h1:1,h2:1,h3:1", min=1, silence=SILENCE)
    training.wait_for_world(3, timeout=LONG)
    victim = worker_on(training, "h3")
    network.cut_between("h2", "h3")
    (said, *_) = until(lambda: event_texts(training.cluster, "host-unreachable"), LONG, "one to be left out")
    since = len(training.cluster.events)
    assert said.startswith("h3: h3 and h2 do not reach one another; h3 is left out, as it is younger; tried again in")
    training.wait_for_world(2, timeout=LONG)
    wait_for_more_steps(training)
    assert not event_texts(training.cluster, "host-lost")
    network.heal()
    training.wait_for_world(3, timeout=LONG)
    assert worker_on(training, "h3").id != victim.id
    no_ghosts(training, victim, since)
    assert len(training.finish(timeout=LONG)) == 3


def test_a_newcomer_that_does_not_reach_one_member(network, trains):
    """The training goes on as if nobody had come; the newcomer is told which host it does not reach. Healed, it joins."""
    network.add("h4")
    training = trains("h1:1,h2:1,h3:1", min=1)
    training.wait_for_world(3, timeout=LONG)
    up = [event.host for event in training.cluster.events if event.kind == "host-up"]
    middle = up[1]  # neither the first nor the last that was admitted
    network.cut_between("h4", middle)
    changes = lambda: event_texts(training.cluster, "change-planned") + event_texts(training.cluster, "world-broken")
    before = changes()
    with in_one_generation(training):
        training.cluster.add_host("h4:1")
        (said, *_) = until(lambda: event_texts(training.cluster, "host-unreachable", "h4"), LONG, "h4 to be left out")
        assert re.match(rf"h4: reaches the driver but not its peers \({middle} at \S+\); tried again in", said)
        wait_for_more_steps(training)
    assert changes() == before
    network.heal()
    training.wait_for_world(4, timeout=LONG)
    assert len(training.finish(timeout=LONG)) == 4


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_slow_host_is_not_a_lost_one(network, trains):
    """200 ms there and back and every twentieth packet lost, for 20 s: the training is slow, and nobody is lost."""
    training = trains("h1:1,h2:1", min=2, kwargs={"pause": 0.0})
    training.wait_for_world(2, timeout=LONG)
    with in_one_generation(training):
        network.slow("h2", delay=0.2, loss=0.05)
        begun = time.time()
        steps = training.lines()[-1]["step"]
        until(lambda: training.lines()[-1]["t"] > begun + 20.0, LONG, "steps for 20 s")
        assert training.lines()[-1]["step"] > steps
        network.heal()
        wait_for_more_steps(training)
    assert not {event.kind for event in training.cluster.events} & {"host-lost", "worker-lost", "world-broken"}
    assert len(training.finish(timeout=LONG)) == 2


def holding(folder, **options):
    """Train; on the host named by the file `hold` a thread takes the interpreter's lock and sleeps: the process says nothing."""

    def hold():
        file = Path(folder) / f"hold-{platform.node()}"
        while not file.exists():
            time.sleep(0.05)
        file.unlink()
        ctypes.PyDLL(None).sleep(1000)

    threading.Thread(target=hold, daemon=True).start()
    return programs.train(folder, **options)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_failures_of_workers_are_told_apart(network, trains):
    """A worker that is stopped, one that is silent though its host is not, one that hangs: each is told as what it is."""
    kwargs = {"slow": {"hang": 1000.0}}
    training = trains("h1:1,h2:1,h3:1", min=1, silence=SILENCE, stall=3, program=holding, kwargs=kwargs)
    cluster = training.cluster

    stopped = training.wait_for_world(3, timeout=LONG)[1]
    training.signal_worker(stopped, 19)
    training.wait_for_world(3, timeout=LONG)
    assert event_texts(cluster, "worker-lost")[-1] == f"{stopped.id} froze (stopped)"

    silent = worker_on(training, "h2")
    (training.folder / "hold-h2").touch()
    until(lambda: all(w.id != silent.id for w in cluster.workers), LONG, "the silent worker to be missed")
    training.wait_for_world(3, timeout=LONG)
    said = event_texts(cluster, "worker-lost")[-1]
    assert re.fullmatch(
        rf"{silent.id} froze \(no message from it for [3-9] s though its host answers; its process (runs|uses no CPU time)\)",
        said,
    )

    (training.folder / "hang").touch()
    pid = int(until(lambda: (f := training.folder / "hang.begun").exists() and f.read_text(), LONG, "one to hang"))
    (hung,) = [w for w in cluster.workers if w.pid == pid]
    told = until(lambda: "behind" in (s := cluster.status()).reason and s, LONG, "the hanging rank to be named")
    where = rf"{hung.id}\) is \d+ s behind at commit \d+, in programs.py:\d+ in _sleep_once"
    assert re.search(rf"rank {hung.rank} \({where}", told.reason)
    until(lambda: all(w.id != hung.id for w in cluster.workers), LONG, "the hanging rank to be replaced")
    training.wait_for_world(3, timeout=LONG)
    said = event_texts(cluster, "worker-lost")[-1]
    assert re.fullmatch(
        rf"{hung.id} stalled \(\d+ s behind at commit \d+, in programs.py:\d+ in _sleep_once; stall is 3 s\)", said
    )
    assert not event_texts(cluster, "host-lost")
    assert len(training.finish(timeout=LONG)) == 3
