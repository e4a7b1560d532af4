"""The status of a cluster that runs a script: its round, ranks and external nodes. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from nbelastic.core.reasons import in_words
from nbelastic.core.script_group import Group, GroupState, Stage
from nbelastic.core.state import ExternalNode
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.status import HostStatus, Status, WorkerStatus

_STATES = {
    GroupState.HEALTHY: "running",
    GroupState.UNHEALTHY: "failed",
    GroupState.SUCCEEDED: "succeeded",
    GroupState.STOPPED: "stopped",
    GroupState.INIT: "starting",
}


def with_script(
    status: Status,
    group: Group | None,
    external_nodes: Mapping[str, ExternalNode],
    now: float,
    *,
    samples: Mapping[WorkerId, tuple[float, int]],
    log_dir: str,
) -> Status:
    """`status` with the script's worker group in it, if the script is the present or last job.

    `now`: seconds of the driver's clock. `external_nodes`: by host. `samples`: for each worker the CPU (percent of a core) and
    memory (bytes).
    """
    if group is None:
        return replace(status, hosts=status.hosts + _external_rows(None, external_nodes))
    if group.stage is Stage.ENDED:
        hosts = status.hosts + _external_rows(None, external_nodes)
        return replace(status, job=group.job, outcome=group.outcome, hosts=hosts)
    running = group.stage is Stage.RUNNING
    return replace(
        status,
        phase=status.phase if status.phase in ("stopping", "finished") else "running" if running else "waiting",
        reason=in_words(group.reason, now),
        generation=group.round,
        world_size=group.size if running else 0,
        hosts=tuple(_with_group_state(host, group) for host in status.hosts) + _external_rows(group, external_nodes),
        workers=_worker_rows(group, samples, f"{log_dir}/{group.job}") if running else (),
        job=group.job,
        outcome="",
    )


def _external_rows(group: Group | None, external_nodes: Mapping[str, ExternalNode]) -> tuple[HostStatus, ...]:
    rows = []
    for host, external in external_nodes.items():
        node = group.nodes.get(host) if group is not None else None
        waiting = external.ready.workers if external.ready is not None else 0
        slots = node.slots if node is not None else waiting
        reason = f"torchrun: worker group {node.state}" if node is not None else "torchrun: waits for a script"
        rows.append(HostStatus(host, "", slots, "up", reason, 0.0))
    return tuple(rows)


def _worker_rows(group: Group, samples: Mapping[WorkerId, tuple[float, int]], log_dir: str) -> tuple[WorkerStatus, ...]:
    rows = []
    for rank, w in enumerate(workers_of(group.assignments, group.round)):
        node = group.nodes.get(w.host)
        pids = node.pids if node is not None else ()
        pid = pids[w.slot] if w.slot < len(pids) else 0
        state = _STATES.get(node.state, "lost") if node is not None else "lost"
        cpu, memory = samples.get(w, (None, None))
        rows.append(
            WorkerStatus(
                str(w), w.host, w.slot, rank, w.slot, pid, state, 0, group.restarts, log_dir, cpu=cpu, memory=memory
            )
        )
    return tuple(rows)


def workers_of(assignments: tuple[sev.Assignment, ...], number: int) -> tuple[WorkerId, ...]:
    """The workers of round `number`, by rank. Each round has workers of its own."""
    return tuple(WorkerId(node.host, local, number) for node in assignments for local in range(node.workers))


def _with_group_state(host: HostStatus, group: Group) -> HostStatus:
    node = group.nodes.get(host.name)
    return host if node is None or host.reason else replace(host, reason=f"worker group {node.state}")
