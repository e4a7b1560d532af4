"""Hosts that die, are cut off or slow, and workers that hang: what is lost, why, and that no stale worker returns."""

import ctypes
import os
import platform
import re
import signal
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


def wait_for_loss(training, host, known=0):
    """Wait until a host is lost for the time number `known`, counted from 0; return the reason."""
    found = until(
        lambda: (reason := event_texts(training.cluster, "host-lost", host))[known:] and reason,
        LONG,
        f"{host} to be lost; {training.cluster.status().reason}",
    )
    return found[known]


def check_no_trace(training, worker, since):
    """Check that a worker has ended, with no event after the first `since`, and no step in a later generation."""
    events = training.cluster.events
    assert not [event for event in events[since:] if event.worker == worker.id]
    last = max(event.generation for event in events[:since])
    assert all(line["generation"] <= last for line in training.lines() if line["pid"] == worker.pid)
    assert not alive(worker.pid)


@pytest.mark.soak(share=0.2)
def test_a_host_dies_and_comes_back(network, trains):
    """When all processes of a host are killed, the others lose no step; after its reboot the host joins by itself."""
    training = trains("h1:1,h2:1,h3:1", min=1)
    training.wait_for_world(3, timeout=LONG)
    network.kill("h3")
    assert re.match(r"h3: the ssh connection to h3 has ended \(.*\); tried again in", wait_for_loss(training, "h3"))
    training.wait_for_world(2, timeout=LONG)
    wait_for_more_steps(training)
    network.reboot("h3")
    training.wait_for_world(3, timeout=LONG)
    assert len(training.finish(timeout=LONG)) == 3
    assert len(event_texts(training.cluster, "world-broken")) == 1


@pytest.mark.soak(seconds=40)
@pytest.mark.timeout(300)
def test_a_host_that_is_cut_off_leaves_no_stale_worker(network, trains):
    """A host that is cut off from all, twice, is lost after `silence`; healed, it joins with a new worker."""
    training = trains("h1:1,h2:1,h3:1", min=1, silence=SILENCE)
    old, seen = [], []
    for _ in range(2):
        training.wait_for_world(3, timeout=LONG)
        old.append(worker_on(training, "h3"))
        count = len(event_texts(training.cluster, "host-lost", "h3"))
        network.cut("h3")
        reason = wait_for_loss(training, "h3", count)
        seen.append(len(training.cluster.events))
        assert re.match(r"h3: no message from it for [2-9] s; tried again in", reason)
        training.wait_for_world(2, timeout=LONG)
        network.heal()
    training.wait_for_world(3, timeout=LONG)
    assert len({worker.id for worker in (*old, worker_on(training, "h3"))}) == 3
    until(lambda: not any(alive(worker.pid) for worker in old), LONG, "the old processes to end")
    for worker, since in zip(old, seen, strict=True):
        check_no_trace(training, worker, since)
    assert len(training.finish(timeout=LONG)) == 3


@pytest.mark.soak(seconds=30)
def test_two_hosts_that_do_not_reach_each_other(network, trains):
    """When two hosts reach the driver but not each other, one is left out with that reason; healed, it joins again."""
    training = trains("h1:1,h2:1,h3:1", min=1, silence=SILENCE)
    training.wait_for_world(3, timeout=LONG)
    victim = worker_on(training, "h3")
    network.cut_between("h2", "h3")
    (reason, *_) = until(lambda: event_texts(training.cluster, "host-unreachable"), LONG, "one to be left out")
    since = len(training.cluster.events)
    assert reason.startswith("h3: h3 and h2 do not reach one another; h3 is left out, as it is younger; tried again in")
    training.wait_for_world(2, timeout=LONG)
    wait_for_more_steps(training)
    assert not event_texts(training.cluster, "host-lost")
    network.heal()
    training.wait_for_world(3, timeout=LONG)
    assert worker_on(training, "h3").id != victim.id
    check_no_trace(training, victim, since)
    assert len(training.finish(timeout=LONG)) == 3


@pytest.mark.soak(seconds=25)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cut", ["a pair", "one way", "a host", "the driver"])
def test_a_cut_while_a_world_forms(network, trains, cut):
    """A worker is killed, and the network is cut at that moment for longer than `silence`. Healed, all three train, and no step is lost."""
    training = trains("h1:1,h2:1,h3:1", min=1, silence=SILENCE)
    training.wait_for_world(3, timeout=LONG)
    for victim in ("h3", "h1"):
        first, second = sorted({"h1", "h2", "h3"} - {victim})
        os.kill(worker_on(training, victim).pid, signal.SIGKILL)
        if cut == "a host":
            network.cut(second)
        elif cut == "the driver":
            network.cut_between(DRIVER, second)
        else:
            network.cut_between(first, second, one_way=cut == "one way")
        healed = time.monotonic() + 3 * SILENCE
        until(lambda healed=healed: time.monotonic() > healed, LONG, "the cut to last")
        network.heal()
        training.wait_for_world(3, timeout=LONG)
        wait_for_more_steps(training, 5)
    assert len(training.finish(timeout=LONG)) == 3


@pytest.mark.soak(share=0.2)
def test_a_newcomer_that_does_not_reach_one_member(network, trains):
    """A newcomer that does not reach one member is left out with that reason, and changes nothing; healed, it joins."""
    network.add("h4")
    training = trains("h1:1,h2:1,h3:1", min=1)
    training.wait_for_world(3, timeout=LONG)
    up = [event.host for event in training.cluster.events if event.kind == "host-up"]
    middle = up[1]  # neither the first nor the last host
    network.cut_between("h4", middle)
    changes = lambda: event_texts(training.cluster, "change-planned") + event_texts(training.cluster, "world-broken")
    before = changes()
    with in_one_generation(training):
        training.cluster.add_host("h4:1")
        (reason, *_) = until(lambda: event_texts(training.cluster, "host-unreachable", "h4"), LONG, "h4 to be left out")
        assert re.match(rf"h4: reaches the driver but not its peers \({middle} at \S+\); tried again in", reason)
        wait_for_more_steps(training)
    assert changes() == before
    network.heal()
    training.wait_for_world(4, timeout=LONG)
    assert len(training.finish(timeout=LONG)) == 4


@pytest.mark.soak(seconds=35)
@pytest.mark.timeout(300)
def test_a_slow_host_is_not_lost(network, trains):
    """With a delay of 200 ms and a loss of one packet in twenty, the training is slow, and no worker is lost."""
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
    assert not {event.kind for event in training.cluster.events} & {
        "host-lost",
        "worker-lost",
        "world-broken",
    }
    assert len(training.finish(timeout=LONG)) == 2


def train_and_hold_lock(folder, **options):
    """Train; on the host h of a file `hold-h`, a thread holds the interpreter lock and sleeps: the worker sends nothing."""

    def hold():
        file = Path(folder) / f"hold-{platform.node()}"
        while not file.exists():
            time.sleep(0.05)
        file.unlink()
        ctypes.PyDLL(None).sleep(1000)

    threading.Thread(target=hold, daemon=True).start()
    return programs.train(folder, **options)


@pytest.mark.soak(seconds=40)
@pytest.mark.timeout(300)
def test_failures_of_workers_have_different_reasons(network, trains):
    """A stopped worker, an unresponsive worker and a hung worker are each reported with their reason."""
    kwargs = {"slow": {"hang": 1000.0}}
    training = trains("h1:1,h2:1,h3:1", min=1, silence=SILENCE, stall=3, program=train_and_hold_lock, kwargs=kwargs)
    cluster = training.cluster

    stopped = training.wait_for_world(3, timeout=LONG)[1]
    training.signal_worker(stopped, 19)
    training.wait_for_world(3, timeout=LONG)
    assert event_texts(cluster, "worker-lost")[-1] == f"{stopped.id} froze (stopped)"

    silent = worker_on(training, "h2")
    (training.folder / "hold-h2").touch()
    until(lambda: all(w.id != silent.id for w in cluster.workers), LONG, "the unresponsive worker to be lost")
    training.wait_for_world(3, timeout=LONG)
    reason = event_texts(cluster, "worker-lost")[-1]
    assert re.fullmatch(
        rf"{silent.id} froze \(no message from it for [3-9] s though its host answers; its process (runs|uses no CPU time)\)",
        reason,
    )

    (training.folder / "hang").touch()
    pid = int(until(lambda: (f := training.folder / "hang.begun").exists() and f.read_text(), LONG, "one to hang"))
    (hung,) = [w for w in cluster.workers if w.pid == pid]
    status = until(lambda: "behind" in (s := cluster.status()).reason and s, LONG, "the hung rank to be reported")
    where = rf"{hung.id}\) is \d+ s behind at commit \d+, in programs.py:\d+ in _sleep_once"
    assert re.search(rf"rank {hung.rank} \({where}", status.reason)
    until(lambda: all(w.id != hung.id for w in cluster.workers), LONG, "the hung rank to be replaced")
    training.wait_for_world(3, timeout=LONG)
    reason = event_texts(cluster, "worker-lost")[-1]
    assert re.fullmatch(
        rf"{hung.id} stalled \(\d+ s behind at commit \d+, in programs.py:\d+ in _sleep_once; stall is 3 s\)", reason
    )
    assert not event_texts(cluster, "host-lost")
    assert len(training.finish(timeout=LONG)) == 3
