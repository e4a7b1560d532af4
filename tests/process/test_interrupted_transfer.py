"""A large state is on its way when its sender or a receiver dies: nobody goes on from a mixture of two commits."""

import contextlib
import os
import random
import signal
import time

import pytest

import nbelastic as nbe
from tests.process import interrupted_transfer
from tests.process.training import by_rank
from tests.support.waiting import until


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Four workers, and a new one for each that dies; the tests use it one after the other."""
    options = {
        "min": 1,
        "max": interrupted_transfer.SIZE,
        "cooldown": (0, 0),
        "log_dir": tmp_path_factory.mktemp("logs"),
    }
    with nbe.Cluster(f"localhost:{interrupted_transfer.SIZE}", **options) as one:
        yield one


@pytest.fixture
def run(cluster, tmp_path):
    """`run(ahead, dying)`: the job, begun when four workers are ready; and whatever became of it is whole."""
    jobs = []

    def start(*args, **options):
        until(lambda: sum(w.state == "ready" for w in cluster.workers) == interrupted_transfer.SIZE)
        folder = tmp_path / str(len(jobs))
        folder.mkdir()
        jobs.append(cluster.run(interrupted_transfer.train, str(folder), *args, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        assert "TORN" not in job.logs(tail=1000)
        assert "whole" in job.logs(tail=1000)


def last_of(results):
    """Of each rank: the step that it came to, and whether its state was whole."""
    return {(seen[-1][2], seen[-1][3]) for seen in results}


@pytest.mark.parametrize("dying", ["sends", "receives", "both"])
def test_ranks_that_are_a_commit_behind_keep_theirs_until_the_newer_one_is_there(cluster, run, dying):
    """The sender dies, a receiver, or both, with half of 240 MB sent: the job goes on, and every state is whole."""
    known = len(cluster.events)
    assert last_of(run(1, dying).result(timeout=60)) == {(interrupted_transfer.LAST, True)}
    deaths = [event.text for event in cluster.events[known:] if event.kind == "worker-lost"]
    assert len(deaths) == (3 if dying == "both" else 2), deaths
    assert all("SIGKILL" in text for text in deaths), deaths  # nobody hung, and had to be replaced


def test_without_memory_for_a_second_copy_a_whole_holder_sends_it_again(cluster, run):
    """The receiver holds a mixture and says so; another rank at the newer commit sends the state to it."""
    assert last_of(run(2, "sends", scarce=True).result(timeout=60)) == {(interrupted_transfer.LAST, True)}


def test_without_memory_and_without_another_holder_the_job_fails_in_words(cluster, run):
    """Nothing but mixtures is left: the job says that it has lost its state, and does not go on from one."""
    error = str(run(1, "sends", scarce=True).exception(timeout=60))
    assert "no worker is left that holds the training state" in error


def test_without_memory_and_with_copies_the_ranks_go_on_from_the_older_commit(cluster, run):
    """Several steps in each commit: who received a mixture puts its copies back, and still holds its commit."""
    assert last_of(run(1, "sends", scarce=True, steps=2).result(timeout=60)) == {(interrupted_transfer.LAST, True)}


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_sender_that_is_killed_or_stopped_at_any_moment_tears_nothing(cluster, run):
    """Twenty times, up to 0.35 s after the break: every job comes to its end, and every state is whole."""
    chance = random.Random(1)
    for attempt in range(20):
        known = len(cluster.events)
        job = run(1, "")
        until(lambda known=known: any(event.kind == "world-broken" for event in cluster.events[known:]))
        (root, *_) = by_rank(cluster)
        time.sleep(chance.uniform(0.0, 0.35))  # the moment is what is tested
        if attempt % 2:
            os.kill(root.pid, signal.SIGSTOP)
        with contextlib.suppress(ProcessLookupError):
            os.kill(root.pid, signal.SIGKILL)
        assert last_of(job.result(timeout=60)) == {(interrupted_transfer.LAST, True)}
