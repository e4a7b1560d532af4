"""With a fixed global batch the size of the world changes the speed, and not the losses."""

import pytest

from tests.process import global_batches
from tests.support.waiting import until


@pytest.mark.soak(share=0.2)
def test_the_losses_are_those_of_one_undisturbed_process(trains):
    """Through a kill, a newcomer and a drain, in worlds of 1 to 4, each step has the same loss as in one process."""
    training = trains("localhost:3", min=1, program=global_batches.train)

    def whole_epoch():
        """Train in this world past the last batch of an epoch, which has no samples for some ranks."""
        begun = max(line["step"] for line in training.lines())
        until(lambda: max(line["step"] for line in training.lines()) > begun + 12)

    victim = training.wait_for_world(3)[1]
    whole_epoch()
    training.signal_worker(victim)
    training.wait_for_world(3)
    training.cluster.add_host("127.0.0.2:1")
    training.wait_for_world(4)
    whole_epoch()
    training.cluster.remove_host("localhost")
    training.wait_for_world(1)
    whole_epoch()
    (training.folder / "finish").touch()
    (steps,) = training.job.result(timeout=60)

    lines = training.lines()
    assert {line["step"] for line in lines} == set(range(1, steps + 1))
    assert {1, 3, 4} <= {line["world"] for line in lines}
    expected = global_batches.losses_in_one_process(steps)
    for line in lines:  # also of the steps that were repeated after the kill
        assert line["loss"] == pytest.approx(expected[line["step"] - 1], rel=1e-7), line
