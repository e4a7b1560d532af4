"""In a Slurm job: SIGUSR1 announces the time limit. Slurm says when that really is, as an administrator may have changed it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping

from nbelastic.system import slurm_time
from nbelastic.system.running_agents import Notice

SPARE = 15.0  # seconds between the end that the agent announces and its job's time limit
QUERY_TIMEOUT = 5.0  # seconds in which the controller must answer; then the configured time counts


def watch(successor: float, on_notice: Callable[[Notice], None]) -> None:
    """Call `on_notice` after each SIGUSR1, which comes about `successor` seconds before the limit. For the main thread.

    Slurm is asked in another thread. A job that ends sooner than `successor` says has a limit that nbelastic did not set.
    """

    def report() -> None:
        left = seconds_left(os.environ)
        within = successor if left is None else min(left, successor)
        on_notice(Notice(max(0.0, within - SPARE), "the time limit of its job"))

    signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=report, name="time-limit", daemon=True).start())


def seconds_left(environment: Mapping[str, str]) -> float | None:
    """Seconds until this job's time limit; None if they are not known, or if there is no limit."""
    job, end = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_END_TIME", "")
    if not job:
        return None
    try:
        command = ["squeue", "--noheader", "--format=%L", f"--jobs={job}"]
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=QUERY_TIMEOUT, check=False
        )
        text = answer.stdout.decode(errors="replace").strip()
    except (OSError, subprocess.TimeoutExpired):  # a node without Slurm's commands, or a busy controller
        text = ""
    if (left := slurm_time.seconds_left(text)) is not None:
        return left
    return float(end) - time.time() if end.isdigit() and not text else None
