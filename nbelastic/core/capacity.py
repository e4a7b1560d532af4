"""More workers than the open files on the driver's machine allow."""

from __future__ import annotations

from nbelastic.core import commands as cmd
from nbelastic.core.commands import Commands
from nbelastic.core.state import ClusterState, HostPhase


def too_many_text(asked: int, room: int) -> str:
    """The error for more workers than the driver's machine has open files for."""
    return (
        f"{asked} workers are asked for, and only {room} fit: each needs 6 open files in ipyparallel's controller. "
        "Raise the hard limit of open files here (ulimit -Hn; LimitNOFILE= in systemd; --ulimit nofile= in a container), "
        "then start the cluster again."
    )


def record_shortage(before: ClusterState, cluster: ClusterState, out: Commands) -> None:
    """Record that more workers are wanted than before, and than the machine has open files for."""
    room, asked = cluster.limits.room, _asked(cluster)
    if room is not None and asked > max(room, _asked(before)):
        out.append(cmd.Record("no-room", too_many_text(asked, room)))


def _asked(cluster: ClusterState) -> int:
    slots = sum(host.spec.slots for host in cluster.hosts.values() if host.phase is not HostPhase.DRAINING)
    return int(min(slots, cluster.limits.asked))
