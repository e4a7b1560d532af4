"""Which GPU each worker gets, which GPUs are left out, and the back end that follows.

A GPU has the same id on all hosts, so two hosts of one machine share no GPU while another one is free.
"""

from __future__ import annotations

from collections import Counter
from math import ceil

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.commands import Commands
from nbelastic.core.host_slots import with_host
from nbelastic.core.state import ClusterState, Host
from nbelastic.protocol.events import GpusReported

SLICE = "MIG-"  # how the id of a slice of a GPU begins; NCCL takes two slices for one GPU that is used twice


class FreeGpus:
    """The GPUs on which further workers may start. O(workers)"""

    def __init__(self, cluster: ClusterState) -> None:
        self._used: Counter[str] = Counter()  # by GPU
        self._used_by: Counter[tuple[str, str]] = Counter()  # by host and GPU
        if any(host.gpus for host in cluster.hosts.values()):
            for w, worker in cluster.workers.items():
                self._use(w.host, worker.gpu)
        self._exclusive = uses_nccl(cluster) and not cluster.limits.shares_gpus

    def take(self, host: Host) -> str | None:
        """The GPU of the host's next worker: the least used one. Empty if the host has none; None if no worker may start.

        A GPU with a problem keeps its share of the slots out: they move to no GPU that another host uses. While a job uses
        NCCL, each worker needs a GPU of its own.
        """
        if not host.gpus:
            return None if self._exclusive else ""
        name, share = host.spec.name, ceil(host.spec.slots / len(host.gpus))
        healthy = [gpu.id for gpu in host.gpus if not gpu.problem]
        if self._exclusive:
            free = [gpu for gpu in healthy if not self._used[gpu] and not gpu.startswith(SLICE)]
        else:
            free = [gpu for gpu in healthy if self._used_by[name, gpu] < share]
            if len(healthy) < len(host.gpus):
                free = [gpu for gpu in free if self._used[gpu] == self._used_by[name, gpu]]
        if not free:
            return None
        gpu = min(free, key=self._used.__getitem__)
        self._use(name, gpu)
        return gpu

    def _use(self, host: str, gpu: str) -> None:
        if gpu:
            self._used[gpu] += 1
            self._used_by[host, gpu] += 1


def uses_nccl(cluster: ClusterState) -> bool:
    """Whether the present job uses NCCL."""
    return cluster.active is not None and cluster.active.backend == "nccl"


def problems(host: Host) -> str:
    """The problems of the host's GPUs, for the status; empty if there are none."""
    return "; ".join(f"GPU {gpu.id} is left out: {gpu.problem}" for gpu in host.gpus if gpu.problem)


def why_no_worker(cluster: ClusterState, host: Host) -> str:
    """Why the host starts no worker in a free slot."""
    if problems(host):
        return problems(host)
    what = "no GPU of its own is free here for another worker" if host.gpus else "this host has no GPU"
    return f"left out: the job uses NCCL, and {what}" if uses_nccl(cluster) else ""


def reported(cluster: ClusterState, event: GpusReported, out: Commands) -> ClusterState:
    """An agent has found other GPUs, or another health. Workers that run on a GPU with a problem go on."""
    host = cluster.hosts.get(event.host)
    if host is None or host.gpus == event.gpus:
        return cluster
    before = {gpu.id: gpu.problem for gpu in host.gpus}
    for gpu in event.gpus:
        old = before.get(gpu.id, "")
        if gpu.problem and gpu.problem != old:
            out.append(cmd.Record("gpu-left-out", f"{event.host}: GPU {gpu.id}: {gpu.problem}", host=event.host))
        elif old and not gpu.problem:
            out.append(cmd.Record("gpu-back", f"{event.host}: GPU {gpu.id} can be used again", host=event.host))
    old_text, host = problems(host), replace(host, gpus=event.gpus)
    if host.reason in ("", old_text):
        host = replace(host, reason=problems(host))
    return with_host(cluster, host)


def choose_back_end(cluster: ClusterState) -> tuple[str, str]:
    """The back end of a job, from the workers that live; or an empty text, and why the wanted one is not possible."""
    workers = [worker for w, worker in cluster.workers.items() if w not in cluster.stopped and w not in cluster.failed]
    gpus, wanted = len({worker.gpu for worker in workers if worker.gpu}), cluster.limits.backend
    if wanted == "nccl" and cluster.limits.shares_gpus and workers and all(worker.gpu for worker in workers):
        return "nccl", ""
    has_slices = any(worker.gpu.startswith(SLICE) for worker in workers)
    if wanted != "gloo" and workers and gpus == len(workers) and not has_slices:
        return "nccl", ""
    if wanted == "nccl" and has_slices:
        return "", "backend nccl cannot use slices of GPUs (MIG): use gloo or auto"
    if wanted == "nccl":
        return (
            "",
            f"backend nccl needs one GPU per worker: there are {gpus} for {len(workers)} workers; use gloo or auto",
        )
    return "gloo", ""
