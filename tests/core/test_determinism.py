"""The core decides only by its input, and never by the order in which Python iterates over a set."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from nbelastic.core import commands as cmd
from tests.core.play import Play
from tests.core.story import Story

HOSTS = ("gpu7", "gpu1", "gpu4", "gpu3", "gpu9", "gpu2")


def a_long_story(seed: int) -> Story:
    """Six hosts with ten workers: hosts and workers come and go, networks are cut, jobs begin and end."""
    chance = random.Random(seed)
    story = Story(min=2, max=9, cooldown=(1.0, 4.0))
    for number, host in enumerate(HOSTS):
        story.add(f"{host}:{1 + number % 3}", f"10.0.0.{number}")
    story.run().commit(3).answer()
    for _ in range(40):
        match chance.randrange(7):
            case 0:
                story.kill(*chance.sample(story.names, min(2, len(story.names))))
            case 1:
                story.remove(chance.choice(HOSTS))
            case 2:
                story.add(f"{chance.choice(HOSTS)}:{chance.randint(1, 4)}")
            case 3:
                story.scale(2, chance.randint(3, 10))
            case 4:
                pairs = [chance.sample(range(len(HOSTS)), 2) for _ in range(3)]
                story.cut = {(HOSTS[one], f"10.0.0.{other}") for one, other in pairs}
                story.commit(2).stand_still(5.0)
            case 5:
                story.mute ^= set(chance.sample(HOSTS, 2))
                story.lose_host(chance.choice(HOSTS)) if story.cluster.hosts.keys() >= set(HOSTS) else story.wait(2.0)
            case 6 if story.cluster.active:
                story.stop_job(story.job.name)
            case _:
                story.submit(f"job-{len(story.said)}")
        story.quiet(chance.choice([0.0, 1.0, 6.0])).commit(3).answer()
    return story


def a_long_play(seed: int) -> Play:
    """A script whose hosts come, go and fail."""
    chance = random.Random(seed)
    play = Play(*HOSTS, max=8, max_restarts=20)
    for _ in range(40):
        there = chance.sample(HOSTS, chance.randint(1, 6))
        play.lost = tuple(host for host in HOSTS if host not in there)[:2]
        play.look(*(f"{host}:{chance.randint(1, 3)}" for host in there))
        assignments = [host for host, _ in play.assignments if host in play.inside]
        if assignments:
            play.fail(chance.choice(assignments), code=chance.choice([-9, 1]))
        play.wait(2.0)
    return play


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
    kinds = {type(command) for command in a_long_story(1).said}
    assert kinds > {cmd.StopWorker, cmd.Probe, cmd.AbortWorld, cmd.PrepareWorld, cmd.StopAgent}, (
        "the stories are long enough"
    )
    assert len(said) == 1


if __name__ == "__main__":
    for seed in (1, 2):
        print(*a_long_story(seed).said, *a_long_play(seed).said, sep="\n")
