"""A sender or receiver dies during the transfer of a large state: no rank goes on from a mixture of two commits."""

import contextlib
import os
import signal
import time

import pytest

import nbelastic as nbe
from tests.process import interrupted_transfer
from tests.process.training import by_rank
from tests.support import soak
from tests.support.nccl_double import CLUSTERS
from tests.support.waiting import until

pytestmark = pytest.mark.on_both


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, backend):
    """Four workers, each replaced when it is lost; the tests use the cluster one after another."""
    options = {
        "min": 1,
        "max": interrupted_transfer.SIZE,
        "cooldown": (0, 0),
        "log_dir": tmp_path_factory.mktemp("logs"),
        **CLUSTERS[backend],
    }
    with nbe.Cluster(f"localhost:{interrupted_transfer.SIZE}", **options) as one:
        yield one


@pytest.fixture
def run(cluster, tmp_path):
    """`run(ahead, dying)`: start the job when four workers are ready, and check at the end that every state is whole."""
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
    """The last step of each rank, and whether its state was whole then."""
    return {(seen[-1][2], seen[-1][3]) for seen in results}


@pytest.mark.parametrize("dying", ["sends", "receives", "both"])
@pytest.mark.soak(share=0.2)
def test_ranks_that_are_a_commit_behind_keep_theirs_until_the_newer_one_is_there(cluster, run, dying):
    """When the sender, a receiver or both die halfway through a transfer, the job goes on, and every state is whole."""
    known = len(cluster.events)
    assert last_of(run(1, dying).result(timeout=60)) == {(interrupted_transfer.LAST, True)}
    deaths = [event.text for event in cluster.events[known:] if event.kind == "worker-lost"]
    assert len(deaths) == (3 if dying == "both" else 2), deaths
    assert all("SIGKILL" in text for text in deaths), deaths  # no worker hung and was replaced


def test_without_memory_for_a_second_copy_a_whole_holder_sends_it_again(cluster, run):
    """A receiver that holds a mixture reports it, and another rank at the newer commit sends it the state."""
    assert last_of(run(2, "sends", scarce=True).result(timeout=60)) == {(interrupted_transfer.LAST, True)}


def test_without_memory_and_without_another_holder_the_job_fails_with_the_reason(cluster, run):
    """When only mixtures are left, the job fails with the reason that its state is lost."""
    error = str(run(1, "sends", scarce=True).exception(timeout=60))
    assert "no worker is left that holds the training state" in error


def test_without_memory_and_with_copies_the_ranks_go_on_from_the_older_commit(cluster, run):
    """With several steps per commit, a receiver of a mixture restores its snapshot and keeps its own commit."""
    assert last_of(run(1, "sends", scarce=True, steps=2).result(timeout=60)) == {(interrupted_transfer.LAST, True)}


@pytest.mark.soak(seconds=25)
@pytest.mark.timeout(600)
def test_a_sender_that_is_killed_or_stopped_at_any_moment_leaves_no_mixture(cluster, run):
    """When the sender is killed or stopped at any moment after a break, the job ends, and every state is whole."""
    chance = soak.chances("transfer")
    for attempt in range(soak.repetitions(20)):
        known = len(cluster.events)
        job = run(1, "", elements=interrupted_transfer.MANY)
        until(lambda known=known: any(event.kind == "world-broken" for event in cluster.events[known:]))
        (root, *_) = by_rank(cluster)
        time.sleep(chance.uniform(0.0, 0.35))  # the test tries different moments
        if attempt % 2:
            os.kill(root.pid, signal.SIGSTOP)
        with contextlib.suppress(ProcessLookupError):
            os.kill(root.pid, signal.SIGKILL)
        assert last_of(job.result(timeout=60)) == {(interrupted_transfer.LAST, True)}
