"""Telling a main thread that is stuck in a dead collective from one that is busy."""

import os
import threading
import time

import pytest

from nbelastic.worker.stuck import Blocked


def watched(main, seconds):
    """What the link's thread sees of the main thread while that runs `main()`: the longest it took it for stuck."""
    longest, over = [0.0], threading.Event()

    def look():
        blocked = Blocked(time.monotonic())
        while not over.wait(0.02):
            longest[0] = max(longest[0], blocked.stuck_for(time.monotonic()))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        main(seconds)
    finally:
        over.set()
        thread.join()
    return longest[0]


def wait_in(filename):
    """A function that sleeps, as if it stood in `filename`."""
    namespace = {"time": time}
    exec(compile("def wait(seconds):\n    time.sleep(seconds)", filename, "exec"), namespace)
    return namespace["wait"]


@pytest.mark.parametrize("where", ["torch/distributed/distributed_c10d.py", "torch/autograd/graph.py"])
def test_asleep_in_a_collective_is_stuck(where):
    """The thread sleeps inside torch's collectives and uses no processor: it is stuck, and for how long is told."""
    began = time.monotonic()
    assert 0.3 < watched(wait_in(f"/site-packages/{where}"), 1.0) <= time.monotonic() - began


def test_asleep_in_the_users_code_is_not():
    """Sleeping, reading, waiting elsewhere is the user's own business."""
    assert watched(wait_in("/home/me/train.py"), 0.3) == 0.0


def test_busy_in_a_collective_is_not():
    """As long as it computes, it moves."""

    def compute(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            os.getppid()

    namespace = {"compute": compute}
    code = "def work(seconds):\n    compute(seconds)"
    exec(compile(code, "/site-packages/torch/distributed/x.py", "exec"), namespace)
    assert watched(namespace["work"], 0.5) < 0.3


def test_it_starts_again_when_it_moves():
    """Two short waits are not one long one."""

    waits = []

    def twice(seconds):
        for _ in range(2):
            began = time.monotonic()
            wait_in("/site-packages/torch/distributed/x.py")(seconds)
            waits.append(time.monotonic() - began)
            end = time.monotonic() + 0.1
            while time.monotonic() < end:
                pass

    assert watched(twice, 0.3) < sum(waits)
