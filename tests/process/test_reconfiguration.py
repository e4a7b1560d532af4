"""Planned changes of the world: hosts join and leave, limits change, and the training goes on."""

import os
import signal
import time

import pytest

import nbelastic as nbe
from tests.process import programs
from tests.process.training import Training
from tests.support.processes import alive
from tests.support.waiting import until

pytestmark = pytest.mark.on_both


def texts(cluster, kind):
    return [event.text for event in cluster.events if event.kind == kind]


def never_broken(training):
    """Check that no generation was broken, no host was lost, and no slot went into back-off."""
    kinds = {event.kind for event in training.cluster.events}
    assert not kinds & {"world-broken", "host-lost", "slot-backoff"}
    return True


@pytest.mark.on_both(always=True)
def test_a_host_joins_and_leaves(trains):
    """An added host joins as soon as it is ready; a removed one leaves at a commit, and its workers exit cleanly."""
    training = trains("localhost:2", min=1)
    old = [w.id for w in training.wait_for_world(2)]
    training.cluster.add_host("127.0.0.2:1")
    ranks = training.wait_for_world(3)
    assert [w.id for w in ranks[:2]] == old
    newcomer = ranks[2]
    training.cluster.remove_host("127.0.0.2")
    assert [w.id for w in training.wait_for_world(2)] == old
    until(lambda: not alive(newcomer.pid))
    until(lambda: [host.name for host in training.cluster.hosts] == ["localhost"])
    training.finish()
    assert never_broken(training)
    assert [w.restarts for w in training.cluster.workers] == [0, 0]


def test_a_newcomer_warms_up_beside_the_training(trains):
    """A newcomer's `@nbe.warmup` function runs while the others train, who do not wait for it; it changes no state."""
    training = trains("localhost:1", programs.train_after_warm_up, min=1)
    go = training.folder / "go"
    go.touch()
    training.wait_for_world(1)
    go.unlink()
    training.cluster.add_host("127.0.0.2:1")
    until(lambda: len(list(training.folder.glob("warm-*"))) == 2)
    before = training.lines()[-1]["step"]
    until(lambda: training.lines()[-1]["step"] > before + 20)
    assert training.cluster.status().world_size == 1
    assert not texts(training.cluster, "change-planned")
    go.touch()
    training.wait_for_world(2)
    training.finish()
    assert never_broken(training)


def test_the_oldest_host_is_removed(trains):
    """When the host of rank 0 is removed, the oldest survivor becomes rank 0 and holds the state."""
    training = trains("localhost:1,127.0.0.2:1,127.0.0.3:1", min=3)
    before = training.wait_for_world(3)
    training.cluster.scale(1)
    training.cluster.remove_host(before[0].host)
    assert [w.id for w in training.wait_for_world(2)] == [w.id for w in before[1:]]
    assert len(training.finish()) == 2
    assert never_broken(training)


def test_a_host_is_removed_at_once(trains):
    """`now=True` breaks the generation without counting a failure: the host's workers end at once, the others recover."""
    training = trains("localhost:2,127.0.0.2:1", min=1)
    (victim,) = [w for w in training.wait_for_world(3) if w.host == "127.0.0.2"]
    training.cluster.remove_host("127.0.0.2", now=True)
    until(lambda: not alive(victim.pid), 3)
    training.wait_for_world(2)
    training.finish()
    assert not texts(training.cluster, "slot-backoff")
    until(
        lambda: [host.name for host in training.cluster.hosts] == ["localhost"]
    )  # when its agent has reported the end


def test_added_and_removed_at_once(trains):
    """A host that is added and removed again at once changes nothing: the world keeps its generation."""
    training = trains("localhost:2", min=1)
    training.wait_for_world(2)
    generation = training.cluster.status().generation
    for _ in range(2):
        training.cluster.add_host("127.0.0.2:1")
        training.cluster.remove_host("127.0.0.2")
    until(lambda: len(training.cluster.hosts) == 1)
    steps = training.lines()[-1]["step"]
    until(lambda: training.lines()[-1]["step"] > steps + 50)
    assert training.cluster.status().generation == generation
    training.finish()
    assert never_broken(training)


def test_removed_and_added_again(trains):
    """A host that is added again before it has left stays; after it has left, it comes back with new workers."""
    training = trains("localhost:1,127.0.0.2:1", min=1)
    training.wait_for_world(2)
    training.cluster.remove_host("127.0.0.2")
    training.cluster.add_host("127.0.0.2:1")
    training.wait_for_world(2)
    training.cluster.remove_host("127.0.0.2")
    training.wait_for_world(1)
    until(lambda: len(training.cluster.hosts) == 1)
    training.cluster.add_host("127.0.0.2:1")
    training.wait_for_world(2)
    training.finish()
    assert never_broken(training)


def test_two_hosts_within_a_moment_make_one_change(tmp_path):
    """Newcomers that are ready within a moment of each other join in one change."""
    soon = {"settle": 30}  # seconds: what counts as soon does not depend on the load of this machine
    with nbe.Cluster("localhost:1", min=1, cooldown=(0, 0), timeouts=soon, log_dir=tmp_path / "logs") as cluster:
        training = Training(cluster, tmp_path / "steps", programs.train)
        training.wait_for_world(1)
        generation = training.cluster.status().generation
        training.cluster.add_host("127.0.0.2:1")
        training.cluster.add_host("127.0.0.3:1")
        training.wait_for_world(3)
        assert training.cluster.status().generation == generation + 1
        training.finish()


def test_a_change_while_another_is_under_way(trains):
    """Requests in quick succession end in the state that the last one asks for."""
    training = trains("localhost:3", min=1, max=3)
    training.wait_for_world(3)
    for high in (2, 3, 1, 2, 3, 2):
        training.cluster.scale(max=high)
        time.sleep(0.05)  # in the middle of the change before
    training.wait_for_world(2)
    training.finish()
    assert never_broken(training)


def test_scaling(trains):
    """A lower `max` makes the youngest workers leave, a higher one brings them back. A host's slots can change too."""
    training = trains("localhost:3", min=1)
    before = training.wait_for_world(3)
    training.cluster.scale(max=1)
    assert [w.id for w in training.wait_for_world(1)] == [before[0].id]
    training.cluster.scale(max=2)
    training.wait_for_world(2)
    training.cluster.scale(max=4)
    training.wait_for_world(3)
    training.cluster.add_host("localhost:4")
    training.wait_for_world(4)
    training.cluster.add_host("localhost:2")
    training.wait_for_world(2)
    training.finish()
    assert never_broken(training)


def test_a_spare_replaces_a_lost_worker(trains):
    """A spare worker waits without a rank, and takes the place of a lost one."""
    training = trains("localhost:3", min=1, max=2, spares=1)
    training.wait_for_world(2)
    (spare,) = [w.id for w in training.cluster.workers if w.rank is None]
    waits = "in gather"  # it has reached the elastic loop
    until(lambda: any(stack.worker == spare and waits in stack.text for stack in training.cluster.stacks()))
    training.signal_worker(training.wait_for_world(2)[0])
    ranks = training.wait_for_world(2)
    assert spare in {w.id for w in ranks}
    assert len([text for text in texts(training.cluster, "world-formed") if "world of 2" in text]) == 2
    training.finish()


def test_setup_cells_run_on_newcomers(make, tmp_path):
    """A setup cell runs on every worker at once, and on each newcomer before its first job."""
    cluster = make("localhost:1", min=1)
    rows = cluster.execute("word = 'hello'", setup=True, timeout=20)
    assert [row[3] for row in rows] == [None]
    cluster.add_host("127.0.0.2:1")
    cluster.wait(2, timeout=20)
    assert [row[1] for row in cluster.execute("print(word)", timeout=20)] == ["hello\n"] * 2
    assert cluster.run_cell("word * 2").result(timeout=20) == ["hellohello"] * 2


def test_a_newcomer_that_fails_in_setup(make, tmp_path):
    """A newcomer whose setup cell fails is shown with the reason; jobs run without it until the cell is corrected."""
    cluster, there = make("localhost:1", min=1), tmp_path / "there"
    there.touch()
    rows = cluster.execute("import nosuchmodule", setup=True, key="imports", timeout=20)
    assert "ModuleNotFoundError" in rows[0][3]
    cell = f"from pathlib import Path\nassert Path({str(there)!r}).exists(), 'not here'\nVALUE = 42"
    assert [row[3] for row in cluster.execute(cell, setup=True, key="value", timeout=20)] == [None]
    assert cluster.setup_cells == {"value": cell}
    there.unlink()
    cluster.add_host("127.0.0.2:1")
    failed = until(lambda: [w for w in cluster.workers if w.state == "failed"])[0]
    assert failed.reason == "setup cell value failed: AssertionError: not here"
    for _ in range(2):
        assert cluster.run_cell("VALUE").result(timeout=20) == [42]
    assert [w.state for w in cluster.workers if w.id == failed.id] == ["failed"]

    there.touch()
    assert [row[3] for row in cluster.execute(cell, setup=True, key="value", timeout=20)] == [None, None]
    cluster.wait(2, timeout=20)
    os.kill(next(w.pid for w in cluster.workers if w.id == failed.id), signal.SIGKILL)
    until(lambda: [w for w in cluster.workers if w.id != failed.id and w.host == failed.host and w.state == "ready"])
    assert cluster.run_cell("VALUE").result(timeout=20) == [42, 42]


def test_a_newcomer_that_fails_in_its_program(make, tmp_path):
    """An error before the elastic loop on a newcomer fails that newcomer alone; the job goes on without it."""
    cluster = make("localhost:1", min=1)

    def program(folder, old):
        import os

        if os.getpid() != old:
            raise LookupError("not me")
        return programs.train(folder)

    training = Training(cluster, tmp_path / "steps", _run_with_folder, cluster.workers[0].pid, program)
    training.wait_for_world(1)
    cluster.add_host("127.0.0.2:1")
    until(lambda: texts(cluster, "worker-failed"))
    assert "LookupError: not me" in texts(cluster, "worker-failed")[0]
    assert len(training.finish()) == 1


def _run_with_folder(folder, old, program):
    return program(folder, old)


def test_a_newcomer_dies_while_it_joins(trains):
    """A newcomer that is killed before or while it joins costs the others at most one recovery."""
    import os
    import signal

    training = trains("localhost:2", min=1)
    training.wait_for_world(2)
    for pause in (0.05, 0.3):
        training.cluster.add_host("127.0.0.2:1")
        newcomer = until(lambda: [w for w in training.cluster.workers if w.host == "127.0.0.2" and w.pid])[0]
        time.sleep(pause)  # between its fork and its first step
        os.kill(newcomer.pid, signal.SIGKILL)
        training.wait_for_world(3)
        training.cluster.remove_host("127.0.0.2")
        training.wait_for_world(2)
        until(lambda: len(training.cluster.hosts) == 1)
    assert len(training.finish()) == 2


def test_reset_callbacks(trains):
    """Reset callbacks run on every member after each change, before training resumes, and not at the start."""
    training = trains("localhost:2", min=2)
    training.wait_for_world(2)
    assert training.lines("reset") == []
    training.cluster.add_host("127.0.0.2:1")
    training.wait_for_world(3)
    training.signal_worker(training.wait_for_world(3)[2])
    training.wait_for_world(3)
    training.finish()
    first = min(line["generation"] for line in training.lines("begin"))
    for pid in {line["pid"] for line in training.lines("begin")}:
        begun = [line["generation"] for line in training.lines("begin") if line["pid"] == pid]
        reset = [line["reset"] for line in training.lines("reset") if line["pid"] == pid]
        assert reset[-len(begun) + 1 :] == begun[1:] if len(begun) > 1 else reset == []
        assert first not in reset


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param(0, id="loaded in the loop"),
        pytest.param(1, id="loaded ahead by another process", marks=pytest.mark.soak),
    ],
)
def test_samples_are_used_once(trains, workers):
    """Through kills, a newcomer and a drain, each pass uses every sample exactly once, except for padding at its end."""
    samples, batch = 400, 4
    kwargs = {"samples": samples, "batch": batch, "workers": workers}
    training = trains("localhost:3", min=1, program=programs.use_samples, kwargs=kwargs)
    training.signal_worker(training.wait_for_world(3)[0])
    training.cluster.add_host("127.0.0.2:1")
    training.wait_for_world(4)
    training.signal_worker(training.wait_for_world(4)[2])
    training.wait_for_world(4)
    training.cluster.remove_host("127.0.0.2")
    training.wait_for_world(3)
    (training.folder / "finish").touch()
    training.job.result(timeout=60)
    done = {}
    for line in training.lines("done"):
        done[line["step"]] = max(line["generation"], done.get(line["step"], 0))
    assert sorted(done) == list(range(1, len(done) + 1))
    used = {}
    for line in training.lines("meant"):
        if done.get(line["step"]) == line["generation"]:
            used.setdefault(line["pass"], []).extend(line["meant"])
    assert sorted(used) == list(range(len(used)))
    for indices in used.values():
        assert set(indices) == set(range(samples))
        assert len(indices) - samples < 4 * batch
