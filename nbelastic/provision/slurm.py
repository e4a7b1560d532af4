"""Hosts from a Slurm allocation: the nodes of the job that this process runs in, as `scontrol` tells them.

What `scontrol show job` prints, and the words in a node's state, are Slurm's own (its manual pages scontrol and sinfo).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import NamedTuple

from nbelastic.errors import DiscoveryError
from nbelastic.protocol.ids import HostSpec
from nbelastic.provision.discovery import finish

TIMEOUT = 20.0  # seconds that scontrol may take; it waits 10 s for a busy controller by itself
EVERY = 5.0  # seconds between questions to the controller, which many people share
AWAY = ("DOWN", "DRAIN", "FAIL", "ERROR", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN")  # how such words begin
_GPUS = re.compile(r"\bgpu(?::[^:,()\s]+)??:(\d+)(?=[(,\s]|$)")


class Share(NamedTuple):
    """What a job has of one node."""

    cpus: int
    gpus: int


class Job(NamedTuple):
    """What `scontrol -d show job` says of one (component of a) job. `shares` is by groups of nodes, as Slurm writes them."""

    state: str
    nodes: str
    node_count: int
    cpus: int
    tasks: int
    tasks_per_node: int  # 0: not asked for
    cpus_per_task: int
    shares: Mapping[str, Share]


class SlurmDiscovery:
    """The nodes of this Slurm job that can be used now.

    Each has `slots`, or if nobody says so: one per GPU of the job there; without GPUs one per task of the job
    (`--ntasks-per-node` or `--ntasks`); without either as many as the job has CPUs for
    (`--cpus-per-task` each). A node that is down, drained, failing or silent is left out until it is back; a job that
    shrinks takes its nodes along. The controller is asked once in `every` seconds.
    """

    def __init__(self, slots: int | None = None, *, every: float = EVERY) -> None:
        """DiscoveryError outside an allocation."""
        self._slots, self._every = slots, every
        job = os.environ.get("SLURM_JOB_ID", "")
        if not job:
            raise DiscoveryError(
                "this process is in no Slurm job (SLURM_JOB_ID is not set): start Jupyter in one, with salloc or sbatch, "
                'or let every host be a job of its own with launcher="slurm".'
            )
        self._job = job
        self._expanded: dict[str, tuple[str, ...]] = {}
        self._asked_at = float("-inf")
        self._answer: tuple[HostSpec, ...] | DiscoveryError = ()

    async def hosts(self) -> tuple[HostSpec, ...]:
        """DiscoveryError if the job has ended or Slurm does not answer."""
        if time.monotonic() >= self._asked_at + self._every:
            self._asked_at = time.monotonic()
            try:
                self._answer = await self._look()
            except DiscoveryError as error:
                self._answer = error
        if isinstance(self._answer, DiscoveryError):
            raise self._answer
        return self._answer

    async def _look(self) -> tuple[HostSpec, ...]:
        found: dict[str, int] = {}
        for job in jobs(await scontrol("-d", "show", "job", self._job)):
            if job.state != "RUNNING":
                raise DiscoveryError(
                    f"the Slurm job {self._job} of this process is {job.state}: it gives no nodes now."
                )
            shares = {name: share for group, share in job.shares.items() for name in await self._expand(group)}
            usable = states(await scontrol("-o", "show", "node", job.nodes))
            for name in await self._expand(job.nodes):
                if not away(usable.get(name, "")):
                    found[name] = found.get(name, 0) + slots_on(job, shares.get(name))
        if not self._slots:
            return tuple(HostSpec(name, slots, "") for name, slots in found.items())
        return tuple(HostSpec(name, self._slots, "") for name in found)

    async def _expand(self, nodes: str) -> tuple[str, ...]:
        """`gpu[1-3,7]` in full, in order."""
        if nodes not in self._expanded:
            self._expanded[nodes] = tuple((await scontrol("show", "hostnames", nodes)).split())
        return self._expanded[nodes]


async def scontrol(*words: str) -> str:
    """What it prints. DiscoveryError with its message if it fails."""
    code, out, err = await finish(["scontrol", *words], TIMEOUT)
    if code:
        raise DiscoveryError(f"scontrol {' '.join(words)} failed with exit code {code}: {(err or out).strip()[-500:]}")
    return out


def jobs(text: str) -> list[Job]:
    """The components of a job (one, if it is not heterogeneous), from `scontrol -d show job`."""
    return [_job(part) for part in re.split(r"\n\s*\n", text) if "JobState=" in part]


def _job(text: str) -> Job:
    def first(pattern: str, otherwise: str) -> str:
        match = re.search(pattern, text, re.MULTILINE)
        return match[1] if match else otherwise

    shares: dict[str, Share] = {}
    for group in re.finditer(r"^\s+Nodes=(\S+) CPU_IDs=(\S*)(.*)$", text, re.MULTILINE):
        shares[group[1]] = Share(_count(group[2]), sum(map(int, _GPUS.findall(group[3].partition("GRES=")[2]))))
    return Job(
        state=first(r"^\s+JobState=(\w+)", "UNKNOWN"),
        nodes=first(r"^\s+NodeList=(\S+)", ""),
        node_count=int(first(r"^\s+NumNodes=(\d+)", "1")),
        cpus=int(first(r"\bNumCPUs=(\d+)", "1")),
        tasks=int(first(r"\bNumTasks=(\d+)", "1")),
        tasks_per_node=int(first(r"\bNtasksPerN:B:S:C=(\d+)", "0")),
        cpus_per_task=int(first(r"\bCPUs/Task=(\d+)", "1")),
        shares=shares,
    )


def slots_on(job: Job, share: Share | None) -> int:
    """How many workers belong on a node of which the job has `share`; at least 1."""
    if share is not None and share.gpus:
        return share.gpus
    if job.tasks_per_node:
        return job.tasks_per_node
    room = max(1, share.cpus // max(1, job.cpus_per_task)) if share is not None else 1
    if job.node_count < job.tasks and job.tasks * job.cpus_per_task < job.cpus:
        return min(room, -(-job.tasks // job.node_count))  # it has more than its tasks need, whole nodes say
    return room  # for its tasks; as many tasks as nodes is what Slurm says if nobody asked for a number


def states(text: str) -> dict[str, str]:
    """State by name, from `scontrol -o show node`."""
    return {match[1]: match[2] for match in re.finditer(r"^NodeName=(\S+).*? State=(\S+)", text, re.MULTILINE)}


def away(state: str) -> bool:
    """Whether a node in this state (`MIXED+DRAIN`, `DOWN*`) is not to be used."""
    return "*" in state or any(word.startswith(AWAY) for word in state.split("+"))


def _count(ids: str) -> int:
    """How many numbers there are in `0-3,6`."""
    total = 0
    for part in filter(None, ids.split(",")):
        low, _, high = part.partition("-")
        total += int(high or low) - int(low) + 1
    return total
