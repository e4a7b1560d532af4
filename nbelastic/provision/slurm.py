"""Hosts from a Slurm allocation: the nodes of the job in which this process runs, as `scontrol` prints them.

The output of `scontrol show job` and the states of nodes are described in the manual pages scontrol and sinfo.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import NamedTuple

from nbelastic.errors import DiscoveryError
from nbelastic.protocol.ids import HostSpec
from nbelastic.provision.run_program import run_program

TIMEOUT = 20.0  # seconds that scontrol may take; it waits 10 s by itself for a busy controller
MOST_OUTPUT = 64 << 20  # bytes that scontrol may print; about 1.2 kB per node
POLL = 5.0  # seconds between two queries of Slurm's controller, which many users share
UNUSABLE = ("DOWN", "DRAIN", "FAIL", "ERROR", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN")  # beginnings of states
_GPUS = re.compile(r"\bgpu(?::[^:,()\s]+)??:(\d+)(?=[(,\s]|$)")


class Share(NamedTuple):
    """A job's share of one node."""

    cpus: int
    gpus: int


class Job(NamedTuple):
    """A job, or one component of a heterogeneous job, from `scontrol -d show job`. `shares`: by group of nodes."""

    state: str
    nodes: str  # as Slurm writes groups: `gpu[1-3,7]`
    node_count: int
    cpus: int
    tasks: int
    tasks_per_node: int  # 0: the user gave no number
    cpus_per_task: int
    shares: Mapping[str, Share]


class SlurmDiscovery:
    """The usable nodes of this Slurm job.

    Without `slots` a node has one slot per GPU of the job there; without GPUs one per task (`--ntasks-per-node` or
    `--ntasks`); without either as many as the job's CPUs there allow (`--cpus-per-task`). A node that is down, drained,
    failing or unresponsive is left out until it recovers. Nodes that the job gives back are left out. `every`: seconds
    between two queries of Slurm's controller.
    """

    def __init__(self, slots: int | None = None, *, every: float = POLL) -> None:
        """DiscoveryError outside an allocation."""
        self._slots, self._every = slots, every
        job = os.environ.get("SLURM_JOB_ID", "")
        if not job:
            raise DiscoveryError(
                "this process is not in a Slurm job (SLURM_JOB_ID is not set): start Jupyter in one with salloc or sbatch, "
                'or submit one job per host with launcher="slurm".'
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
                self._answer = await self._query()
            except DiscoveryError as error:
                self._answer = error
        if isinstance(self._answer, DiscoveryError):
            raise self._answer
        return self._answer

    async def _query(self) -> tuple[HostSpec, ...]:
        found: dict[str, int] = {}
        for job in jobs(await scontrol("-d", "show", "job", self._job), self._job):
            if job.state != "RUNNING":
                raise DiscoveryError(
                    f"the Slurm job {self._job} of this process is {job.state}: it has no usable nodes now."
                )
            shares = {name: share for group, share in job.shares.items() for name in await self._expand(group)}
            node_states = states(await scontrol("-o", "show", "node", job.nodes))
            for name in await self._expand(job.nodes):
                if not is_unusable(node_states.get(name, "")):
                    found[name] = found.get(name, 0) + slots_on(job, shares.get(name))
        if not self._slots:
            return tuple(HostSpec(name, slots, "") for name, slots in found.items())
        return tuple(HostSpec(name, self._slots, "") for name in found)

    async def _expand(self, nodes: str) -> tuple[str, ...]:
        """The names of the nodes in a group as `gpu[1-3,7]`, in order."""
        if nodes not in self._expanded:
            self._expanded[nodes] = tuple((await scontrol("show", "hostnames", nodes)).split())
        return self._expanded[nodes]


async def scontrol(*words: str) -> str:
    """The output of scontrol. DiscoveryError with its message if it fails."""
    code, out, err = await run_program(["scontrol", *words], TIMEOUT, most=MOST_OUTPUT)
    if code:
        raise DiscoveryError(f"scontrol {' '.join(words)} failed with exit code {code}: {(err or out).strip()[-500:]}")
    return out


def jobs(text: str, number: str) -> list[Job]:
    """The components of this job, from `scontrol -d show job`; one if the job is not heterogeneous.

    One task of an array has the array's number. For that Slurm also shows the other tasks, which are other jobs.
    """
    parts = (part for part in re.split(r"\n\s*\n", text) if "JobState=" in part)
    return [_job(part) for part in parts if " ArrayJobId=" not in part or re.match(rf"\s*JobId={number}\s", part)]


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
    """The slots of a node of which the job has `share`; at least 1."""
    if share is not None and share.gpus:
        return share.gpus
    if job.tasks_per_node:
        return job.tasks_per_node
    room = max(1, share.cpus // max(1, job.cpus_per_task)) if share is not None else 1
    if job.node_count < job.tasks and job.tasks * job.cpus_per_task < job.cpus:
        return min(room, -(-job.tasks // job.node_count))  # the job has more CPUs than its tasks need
    return room  # NumTasks equals NumNodes if the user gave no number of tasks


def states(text: str) -> dict[str, str]:
    """Each node's state, from `scontrol -o show node`."""
    return {match[1]: match[2] for match in re.finditer(r"^NodeName=(\S+).*? State=(\S+)", text, re.MULTILINE)}


def is_unusable(state: str) -> bool:
    """Whether a node in this state, as `MIXED+DRAIN` or `DOWN*`, cannot run workers."""
    return "*" in state or any(part.startswith(UNUSABLE) for part in state.split("+"))


def _count(ids: str) -> int:
    """The count of numbers in a list as `0-3,6`."""
    total = 0
    for part in filter(None, ids.split(",")):
        low, _, high = part.partition("-")
        total += int(high or low) - int(low) + 1
    return total
