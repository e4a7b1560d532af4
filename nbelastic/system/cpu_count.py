"""The number of CPUs that this process may use: a batch job or a container has a part of its machine's."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def usable_cpus(cgroups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """At least 1. The affinity, which Slurm sets, and the limits of the control groups, which Kubernetes and Docker set.

    A group that may use 2.5 CPUs has 3. `cgroups`, `mount`: the list of this process's groups, and where they are.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *_limits(cgroups, mount)]))


def _limits(cgroups: Path, mount: Path) -> Iterator[int]:
    """The CPUs of each group, and of the groups around it, that has a limit."""
    groups = ""
    with suppress(OSError):
        groups = os.fsdecode(cgroups.read_bytes())  # a name may have any byte but the end of a line
    for line in filter(None, groups.split("\n")):
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mount / "cpu" if controllers else mount
        group = root / path.lstrip("/")
        # A container may see its own group as the root, although the list has the path outside.
        for folder in {group, *group.parents, root}:
            if folder.is_relative_to(root):
                with suppress(OSError, ValueError):
                    quota, period = _version_1(folder) if controllers else (folder / "cpu.max").read_text().split()
                    if int(quota) > 0:  # ValueError: `max`
                        yield math.ceil(int(quota) / int(period))


def _version_1(folder: Path) -> tuple[str, str]:
    return (folder / "cpu.cfs_quota_us").read_text(), (folder / "cpu.cfs_period_us").read_text()
