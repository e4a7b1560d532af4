"""Communicators of NCCL, as its double shows them: they are freed, and an error that no rank raises ends its world."""

from __future__ import annotations

import pytest

from tests.process import communicators
from tests.process.communicators import OF_A_WORLD
from tests.support.waiting import until

pytestmark = pytest.mark.parametrize("backend", ["nccl"], indirect=True)


@pytest.mark.soak(share=0.2)
def test_communicators_are_freed(trains):
    """After planned changes and losses, a survivor has the communicators of its world alone.

    Meanwhile it has those of the last world too, until the second commit after a planned change, and those of the next one.
    """
    training = trains("localhost:2", communicators.train_and_count, min=1)
    eldest = training.wait_for_world(2)[0].pid
    for _ in range(2):
        training.cluster.add_host("127.0.0.2:1")
        training.wait_for_world(3)
        training.cluster.remove_host("127.0.0.2")
        training.signal_worker(training.wait_for_world(2)[1])
        training.wait_for_world(2)
    generation = training.cluster.status().generation

    def counted():
        return [line for line in training.lines("communicators") if line["pid"] == eldest]

    until(lambda: (last := counted()[-1])["at"] == generation and last["communicators"] == OF_A_WORLD)
    assert len({line["at"] for line in counted()}) >= 5
    assert max(line["communicators"] for line in counted()) <= 3 * OF_A_WORLD
    training.finish()


def test_a_lost_connection_that_no_rank_raises_ends_the_world(trains):
    """All processes live, and NCCL makes a collective hang. What the watchdog saw of it reaches the driver.

    The world forms again with the same processes, and no step is lost.
    """
    training = trains("localhost:3", communicators.train_and_cut, min=3)
    pids = [member.pid for member in training.wait_for_world(3)]
    (training.folder / "cut").touch()

    def texts(kind):
        return [event.text for event in training.cluster.events if event.kind == kind]

    (text,) = until(lambda: texts("world-broken"), what="the world to end")
    assert "broke though every worker lives: remote error" in text
    assert [member.pid for member in training.wait_for_world(3)] == pids
    assert not texts("worker-lost")
    assert len(training.finish()) == 3
