"""How many CPUs a process may use."""

import os
import subprocess
import sys

import pytest

from nbelastic.agent import start
from nbelastic.client import configuration
from nbelastic.system.cpu_count import usable_cpus


@pytest.fixture
def many_cpus(monkeypatch):
    """A machine with 64 CPUs, all of which this process may use."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


@pytest.mark.usefixtures("many_cpus")
@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        ("0::/\n", {"cpu.max": "400000 100000"}, 4),
        ("0::/\n", {"cpu.max": "250000 100000"}, 3),
        ("0::/\n", {"cpu.max": "1000 100000"}, 1),
        ("0::/\n", {"cpu.max": "max 100000"}, 64),
        ("0::/pod/a\n", {"pod/cpu.max": "200000 100000", "pod/a/cpu.max": "max 100000"}, 2),
        ("0::/outside/pod\n", {"cpu.max": "800000 100000"}, 8),
        ("4:cpu,cpuacct:/a\n0::/\n", {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"}, 3),
        ("4:cpu,cpuacct:/a\n", {"cpu/cpu.cfs_quota_us": "500000", "cpu/cpu.cfs_period_us": "100000"}, 5),
        ("4:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 64),
        ("3:cpuset:/a\n", {"cpu.max": "100000 100000"}, 64),
        ("", {}, 64),
    ],
    ids=repr,
)
def test_a_container_has_its_limit(tmp_path, groups, files, cpus):
    """Both versions of control groups, a limit of an outer group, and a container that sees its group as the root."""
    (tmp_path / "cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "mount" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert usable_cpus(tmp_path / "cgroup", tmp_path / "mount") == cpus
    assert usable_cpus(tmp_path / "missing", tmp_path / "mount") == 64


@pytest.mark.usefixtures("many_cpus")
@pytest.mark.parametrize("name", [b"gr\xfcn", "a\u2028b".encode(), b"a\x0cb"], ids=repr)
def test_a_group_may_have_any_name(tmp_path, name):
    """A control group whose name is not UTF-8, or has another sign for the end of a line, has its limit."""
    (tmp_path / "cgroup").write_bytes(b"1:name=systemd:/" + name + b"\n0::/" + name + b"\n")
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    (folder / "cpu.max").write_text("400000 100000")
    assert usable_cpus(tmp_path / "cgroup", tmp_path) == 4


def test_a_job_has_the_cpus_of_its_affinity():
    """Slurm gives a job some CPUs of its node."""
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nfrom nbelastic.system.cpu_count import *\nprint(usable_cpus())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"1\n"


def test_a_job_with_two_of_64_cpus_has_two_slots(monkeypatch):
    """Without GPUs, a cluster has as many workers on this machine as CPUs that the notebook may use."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5})
    monkeypatch.setattr(configuration, "visible_gpus", lambda: 0)
    assert configuration._default_slots({"launcher": "ssh", "min": 1}) == 2


def test_workers_of_a_job_share_its_cpus(monkeypatch):
    """Two workers of a job that has four of 64 CPUs compute with two threads each, not with 32."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7})
    monkeypatch.setattr(os, "environ", {})
    order = {"defaults": {}, "environment": {}, "preload": (), "threads": "", "settings": {"slots": "2"}}
    start._set_up_process({**order, "run_folder": "/run/of/a/cluster", "cwd": "", "path": []})
    assert os.environ["OMP_NUM_THREADS"] == "2"
