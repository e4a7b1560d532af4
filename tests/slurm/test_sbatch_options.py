"""Options of sbatch as launcher options, and the jobs of a cluster whose hosts were not named; without a Slurm."""

from __future__ import annotations

import pytest

import nbelastic as nbe
from nbelastic.provision.sbatch_options import check_time_limit, gpus_of, split


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ({}, 0),
        ({"gres": "gpu"}, 1),
        ({"gres": "gpu:a100"}, 1),
        ({"gres": "gpu:4"}, 4),
        ({"gres": "nic:2,gpu:7g.80gb:2,gpu:1"}, 3),
        ({"gres": "shard:6"}, 0),
        ({"gpus_per_node": "4"}, 4),
        ({"gpus-per-node": "h100:8"}, 8),
        ({"gpus": 2}, 2),
        ({"options": "--exclusive --gres=gpu:4"}, 4),
        ({"options": "--gres gpu:2"}, 2),
        ({"options": "--exclusive -G 4"}, 4),
        ({"options": "-Ga100:2"}, 2),
        ({"options": "--comment='"}, 0),
    ],
    ids=str,
)
def test_gpus_of_a_job(options, gpus):
    """However the user asks for them."""
    assert gpus_of(options) == gpus


def test_options_of_sbatch():
    """They are words of one line; the launcher's own options stay."""
    given = {"queue": "gpu", "cpus_per_task": 8, "constraint": "a100|h100", "mem": "64G"}
    assert split(given) == ({"queue": "gpu"}, ["--cpus-per-task=8", "'--constraint=a100|h100'", "--mem=64G"])
    with pytest.raises(nbe.UsageError, match=r"slurm: mem='64G\\n#SBATCH': one line"):
        split({"mem": "64G\n#SBATCH"})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--exclusive --time=3", "options has --time=3: write it as the launcher option time="),
        ("--time 3", "options has --time: write it as the launcher option time="),
        ("-t3", "options has -t3: write it as the launcher option time="),
        ("--array=0-3", "options has --array=0-3: a host is one job. Raise --max"),
        ("-a 1", "options has -a: a host is one job"),
        ("--clusters=far", "options has --clusters=far: set SLURM_CLUSTERS"),
        ("-M far", "options has -M: set SLURM_CLUSTERS"),
    ],
)
def test_options_that_cannot_work_as_text(text, problem):
    """A time limit there would not be checked, an array is many jobs of one host, and another cluster has jobs of the same numbers.

    Other options stay.
    """
    with pytest.raises(nbe.UsageError, match=problem):
        nbe.Cluster(launcher="slurm", launcher_options={"options": text})
    others = {"options": "--exclusive --time-min=3 --account=-t -A me --comment='"}
    assert split(others) == (others, [])


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("7", 420),
        (7, 420),
        ("6:59", 419),
        ("0:07:00", 420),
        ("0:6:59", 419),
        ("1-0", 86400),
        ("0-0:06", 360),
        ("0-00:07:00", 420),
        ("UNLIMITED", None),
        ("0", None),
    ],
)
def test_a_time_limit_leaves_time_for_a_successor(limit, seconds):
    """In all of Slurm's formats. A shorter one is an error that says what to do; by default 420 s are needed."""
    for successor in (300.0, 301.0, 60.0):
        if seconds is not None and seconds < successor + 120.0:
            with pytest.raises(nbe.UsageError, match=rf"^time={limit}: .* at least {successor + 120:g} s, or a lower"):
                check_time_limit({"time": limit}, successor)
        else:
            check_time_limit({"timelimit": limit}, successor)


def test_a_cluster_checks_the_time_limit():
    """At once, before any job."""
    with pytest.raises(nbe.UsageError, match="timelimit=2: a job's successor is submitted 300 s before the time limit"):
        nbe.Cluster(launcher="slurm", launcher_options={"timelimit": "2"})


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ({"min": 2, "max": 3}, ["s0:1", "s1:1", "s2:1"]),
        ({"min": 2}, ["s0:1", "s1:1"]),
        ({"min": 2, "spares": 3}, ["s0:1", "s1:1"]),
        ({"min": 2, "max": 6, "spares": 1, "slots": 4}, ["s0:4", "s1:4"]),
        ({"min": 2, "max": 8, "launcher_options": {"gres": "gpu:4"}}, ["s0:4", "s1:4"]),
        ({"hosts": "a:2,b", "launcher_options": {"gres": "gpu:4"}}, ["a:2", "b:4"]),
        ({"hosts": "a:2,b"}, ["a:2", "b:1"]),
        ({"min": 3, "launcher": "pbs"}, ["s0:1", "s1:1", "s2:1"]),
        ({"max": 2, "launcher": "kubernetes", "launcher_options": {"image": "i", "gpus": "4"}}, ["s0:1", "s1:1"]),
        ({"max": 3, "slots": 2, "launcher": "kubernetes", "launcher_options": {"image": "i"}}, ["s0:2", "s1:2"]),
    ],
    ids=str,
)
def test_jobs_that_nobody_named(given, hosts):
    """There are as many as the greatest world and its spares need. A batch job has a slot for each GPU that it asks for; else it is one."""
    cluster = nbe.Cluster(**{"launcher": "slurm", **given})
    assert cluster._link.configuration.arguments["hosts"] == hosts
