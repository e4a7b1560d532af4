"""The core decides only by its input, and never by the order in which Python iterates over a set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nbelastic.core import commands as cmd
from tests.core.long_play import LongPlay
from tests.core.long_story import LongStory

SEEDS, EVENTS = range(1001, 1009), 40


def test_the_same_events_give_the_same_commands_in_another_process():
    """Processes with different hash seeds play long stories: they give the same commands in the same order."""
    said = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said.add(done.stdout)
    kinds = {type(command) for seed in SEEDS for command in LongStory(seed).play(EVENTS).story.said}
    assert kinds > {cmd.StopWorker, cmd.Probe, cmd.AbortWorld, cmd.PrepareWorld, cmd.StopAgent, cmd.HaltAt}
    assert len(said) == 1


if __name__ == "__main__":
    for seed in SEEDS:
        print(*LongStory(seed).play(EVENTS).story.said, *LongPlay(seed).act(EVENTS).play.said, sep="\n")
