"""Slurm's nodes that an administrator drains: jobs there may run to their ends, and others do not start.

The host's successor is a job elsewhere. The host trains on until that is up, and leaves its node then.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from nbelastic.core.requests import FAR
from nbelastic.errors import DiscoveryError
from nbelastic.protocol import events as ev
from nbelastic.provision.run_program import run_program
from nbelastic.provision.slurm import TIMEOUT, scontrol, states
from nbelastic.system.slurm_time import seconds_left

POLL = 10.0  # seconds between two queries of Slurm's controller, for all jobs
DRAINED = ("DRAIN", "FAIL")  # beginnings of states in which a node gets no more jobs; those that run may end


class DrainedNodes:
    """Finds the jobs of one cluster that run on such nodes."""

    def __init__(self) -> None:
        self._asked_at = float("-inf")

    async def announced_ends(self, jobs: Mapping[str, str]) -> list[ev.HostRemoved]:
        """The hosts whose nodes are drained. `jobs`: by host, the number of its job.

        Empty if Slurm does not answer: it is asked again.
        """
        hosts = {job: host for host, job in jobs.items() if job}
        if not hosts or time.monotonic() < self._asked_at + POLL:
            return []
        self._asked_at = time.monotonic()
        try:
            running = await _running(hosts)
            drained = await _drained({node for node, _ in running.values()})
        except DiscoveryError:
            return []
        found = {job: (node, left) for job, (node, left) in running.items() if node in drained}
        return [
            ev.HostRemoved(hosts[job], by=f"the drain of its node {node}", within=left, replaced=True)
            for job, (node, left) in found.items()
        ]


async def _running(jobs: Collection[str]) -> dict[str, tuple[str, float]]:
    """By job that runs: its node, and the seconds until its time limit. Without a limit those are very many."""
    command = ["squeue", "--noheader", "--states=RUNNING", "--format=%i %N %L", f"--jobs={','.join(sorted(jobs))}"]
    _, out, _ = await run_program(command, TIMEOUT)
    lines = [words for line in out.splitlines() if len(words := line.split()) == 3 and words[0] in jobs]
    return {job: (node, 10 * FAR if (left := seconds_left(text)) is None else left) for job, node, text in lines}


async def _drained(nodes: Collection[str]) -> set[str]:
    if not nodes:
        return set()
    found = states(await scontrol("-o", "show", "node", ",".join(sorted(nodes))))
    return {node for node, state in found.items() if any(part.startswith(DRAINED) for part in state.split("+"))}
