"""The ranks of this worker in its present world: `nbe.rank()`, `nbe.size()` and the like, its device and its groups."""

from __future__ import annotations

import torch
import torch.distributed as dist

from nbelastic.system.addresses import split_endpoint
from nbelastic.worker import device as _device
from nbelastic.worker import session


def rank() -> int:
    """The rank of this worker in the present world, 0 to size() - 1. NoWorldError outside an elastic function."""
    return session.world().rank


def size() -> int:
    """The number of workers in the present world (world size). NoWorldError outside an elastic function."""
    return session.world().world_size


def local_rank() -> int:
    """The rank among the workers of this host. It is not the GPU's number: that is `device()`."""
    return session.world().local_rank


def local_size() -> int:
    """The number of workers of this host in the present world."""
    return session.world().local_size


def cross_rank() -> int:
    """The position of this host among the hosts that have a worker of this local rank (Horovod's meaning)."""
    return session.world().cross_rank


def cross_size() -> int:
    """The number of hosts that have a worker of this local rank."""
    return session.world().cross_size


def device() -> torch.device:
    """The device of this worker: `cuda:0`, as it sees only its own GPU, or the CPU."""
    return _device.device()


def environment() -> dict[str, str]:
    """The variables that torchrun would set for this rank in the present world: RANK, WORLD_SIZE, MASTER_ADDR and the like.

    They are not in `os.environ`, as they change with each world. A host is a group in torchrun's sense. MASTER_ADDR and
    MASTER_PORT are those of the store of this generation. The dict is a copy. NoWorldError outside an elastic function.
    """
    formation = session.world()
    counts = [count for _, count in formation.hosts]
    group = next(number for number in range(len(counts)) if sum(counts[: number + 1]) > formation.rank)
    address, port = split_endpoint(formation.store)
    numbers = {
        "RANK": formation.rank,
        "WORLD_SIZE": formation.world_size,
        "LOCAL_RANK": formation.local_rank,
        "LOCAL_WORLD_SIZE": formation.local_size,
        "GROUP_RANK": group,
        "GROUP_WORLD_SIZE": len(counts),
        "ROLE_RANK": formation.rank,
        "ROLE_WORLD_SIZE": formation.world_size,
        "MASTER_PORT": port,
    }
    return {name: str(number) for name, number in numbers.items()} | {"ROLE_NAME": "default", "MASTER_ADDR": address}


def local_group() -> dist.ProcessGroup:
    """The process group of this host's workers. Collective on first use in each world: all ranks must call it."""
    return _groups()[0]


def cross_group() -> dist.ProcessGroup:
    """The process group of the workers with this local rank, one per host. Collective on first use, as `local_group`."""
    return _groups()[1]


def _groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Make both at once, so that all ranks make them in the same order, whichever they ask for first."""
    formation, group = session.world(), session.current().groups.present
    assert group is not None
    if group.subgroups is None:
        by_host, start = [], 0
        for _, count in formation.hosts:
            by_host.append(list(range(start, start + count)))
            start += count
        longest = max(len(ranks) for ranks in by_host)
        across = [[ranks[i] for ranks in by_host if i < len(ranks)] for i in range(longest)]
        local, _ = dist.new_subgroups_by_enumeration(by_host)
        cross, _ = dist.new_subgroups_by_enumeration(across)
        group.subgroups = (local, cross)
    found: tuple[dist.ProcessGroup, dist.ProcessGroup] = group.subgroups
    return found
