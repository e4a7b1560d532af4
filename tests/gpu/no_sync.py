"""A rank is killed while the others are in a long backward pass that no collective ends: healthy ranks stay."""

from __future__ import annotations

import random
import signal
import time

from tests.gpu import programs
from tests.gpu.bench import Bench
from tests.gpu.faults import TIMEOUT, by_signal, finish, lose


def run(bench: Bench) -> None:
    """Survivors finish their pass, leave, and lose no step; none is taken for a hung one."""
    seconds = bench.choose(1.0, 1.0, 0.5)
    options = {"min": 1, "max": 3, "backend": "gloo"}
    with bench.training("localhost:3", 3, programs.accumulate, options, seconds=seconds) as training:
        with bench.results.case(f"killed during a backward pass of {seconds:g} s") as case:
            for _ in range(bench.choose(5, 3, 1)):
                training.wait_for_world(3, TIMEOUT)
                time.sleep(random.uniform(0, seconds))
                lose(training, case, 3, by_signal(training, signal.SIGKILL))
        finish(bench, training)
