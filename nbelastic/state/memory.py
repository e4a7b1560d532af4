"""Finds out whether there is memory for a second copy of a state."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

MAX_SHARE = 0.5  # of the free memory: the program needs memory too
CGROUPS = Path("/sys/fs/cgroup")


def fits(tensors: Iterable[torch.Tensor], device: torch.device, processes: int) -> bool:
    """Whether each of `processes` processes on this machine can copy these tensors."""
    needed: dict[str, int] = {}
    for tensor in tensors:
        needed[tensor.device.type] = needed.get(tensor.device.type, 0) + tensor.nbytes
    try:
        enough = needed.get("cpu", 0) * processes <= free_on_machine() * MAX_SHARE
    except (OSError, ValueError, KeyError):  # this machine does not show its memory
        return False
    return enough and (device.type != "cuda" or needed.get("cuda", 0) <= _free_on_gpu(device) * MAX_SHARE)


def _free_on_gpu(gpu: torch.device) -> int:
    unused = torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
    free: int = torch.cuda.mem_get_info(gpu)[0]
    return free + int(unused)


def free_on_machine() -> int:
    """Bytes that are free on this machine and in this process's control groups (version 2). Raises OSError or ValueError."""
    found = [_read_table(Path("/proc/meminfo"))["MemAvailable:"] * 1024]
    own = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
    for group in (CGROUPS / own, *(CGROUPS / own).parents):
        try:
            limit = int((group / "memory.max").read_text())  # ValueError: "max" means no limit
            used = int((group / "memory.current").read_text())
            found.append(
                limit - used + _read_table(group / "memory.stat")["inactive_file"]
            )  # the kernel frees inactive files first
        except (OSError, ValueError, KeyError):
            continue
    return max(0, min(found))


def _read_table(table: Path) -> dict[str, int]:
    rows = (line.split() for line in table.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
