"""Is there memory for a second copy of a state?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

SHARE = 0.5  # of what is free: the program goes on needing memory
GROUPS = Path("/sys/fs/cgroup")


def fits(tensors: Iterable[torch.Tensor], device: torch.device, processes: int) -> bool:
    """Whether each of so many processes on this machine can make a copy of such tensors."""
    needed: dict[str, int] = {}
    for tensor in tensors:
        needed[tensor.device.type] = needed.get(tensor.device.type, 0) + tensor.nbytes
    try:
        there = needed.get("cpu", 0) * processes <= _free_here() * SHARE
    except (OSError, ValueError, KeyError):  # a machine without these tables: it is not known
        return False
    return there and (device.type != "cuda" or needed.get("cuda", 0) <= _free_on(device) * SHARE)


def _free_on(gpu: torch.device) -> int:
    unused = torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
    free: int = torch.cuda.mem_get_info(gpu)[0]
    return free + int(unused)


def _free_here() -> int:
    """Bytes that this machine and this process's control groups (version 2) still give."""
    found = [_numbers(Path("/proc/meminfo"))["MemAvailable:"] * 1024]
    own = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
    for group in (GROUPS / own, *(GROUPS / own).parents):
        try:
            limit = int((group / "memory.max").read_text())  # ValueError: "max", there is no limit
            used = int((group / "memory.current").read_text())
            found.append(limit - used + _numbers(group / "memory.stat")["inactive_file"])  # the last is given back
        except (OSError, ValueError, KeyError):
            continue
    return max(0, min(found))


def _numbers(table: Path) -> dict[str, int]:
    rows = (line.split() for line in table.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
