"""A new driver for a cluster whose driver is gone: the world as its agents and workers tell it.

Of what was saved only that counts which nobody else can know: the limits, which hosts are wanted, the job's name. Who lives,
who trains with whom and how far they are is what they say themselves. A world that is whole goes on undisturbed; one that is
not is broken like any other in which somebody has died, and its survivors gather.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import (
    generation_end,
    host_lifecycle,
    host_slots,
    jobs,
    losses,
    provisioning,
    setup_cells,
    takeover_hosts,
)
from nbelastic.core.cluster_snapshot import SavedCluster
from nbelastic.core.commands import Commands
from nbelastic.core.state import ClusterState, HostPhase, Stage, WorkerState, format_ids, with_members
from nbelastic.core.state_holders import delete_kept_state, state_lives
from nbelastic.core.step import step
from nbelastic.core.takeover_hosts import OFFLINE, Reports
from nbelastic.protocol import events as ev
from nbelastic.protocol.agent_messages import AgentHello
from nbelastic.protocol.ids import WorkerId


def resume(
    saved: SavedCluster,
    agents: Mapping[str, AgentHello],
    heard: Reports,
    now: float,
    *,
    problems: Mapping[str, str] | None = None,
    coming: Collection[str] = (),
) -> tuple[ClusterState, tuple[cmd.Command, ...]]:
    """The world at `now` and what is to be done. `problems`: of
    agents that cannot be used, why. `coming`: hosts that were to start, whose agents may still be on their way.
    """
    out: Commands = []
    cluster = takeover_hosts.restore_workers(
        takeover_hosts.restore_hosts(saved, agents, coming, now, out), agents, heard, dict(saved.ran), now
    )
    if saved.stopping:  # programs may still write a last checkpoint
        return _handle(_stop_old_programs(cluster, now, out), ev.StopRequested(saved.stopping), now, out), tuple(out)
    cluster = provisioning.stop_workers(cluster, saved.stopped, out)
    cluster = _presume_training(cluster, saved, heard)
    cluster = _lose_members(cluster, saved, heard, now, out)
    job = cluster.active
    inside = {}
    if job is not None:
        inside = {w: here for w, here in heard.items() if here.job == job.name and _is_there(cluster, w)}
        cluster = _restore_job(cluster, saved, inside, now, out)
    cluster = _stop_old_programs(cluster, now, out)
    cluster = provisioning.provision(_drain_surplus(cluster, now, out), now, out)
    if cluster.active is not None:
        cluster = _replay_messages(cluster, inside, now, out)
    for name, host in tuple(cluster.hosts.items()):
        if host.phase is HostPhase.STARTING and name in agents:
            agent, problem = agents[name], (problems or {}).get(name, "")
            ready = ev.AgentReady(name, agent.pid, agent.addresses, agent.port, problem)
            cluster = _handle(cluster, ready, now, out)
    return _handle(cluster, ev.Ticked(), now, out), tuple(out)


def _handle(cluster: ClusterState, event: ev.Event, now: float, out: Commands) -> ClusterState:
    cluster, commands = step(cluster, event, now)
    out.extend(commands)
    return cluster


def _is_there(cluster: ClusterState, w: WorkerId) -> bool:
    return w in cluster.workers and w not in cluster.stopped


def _presume_training(cluster: ClusterState, saved: SavedCluster, heard: Reports) -> ClusterState:
    """Members that were not heard, and whose processes live, train on where all the others train: nothing says otherwise.

    Only if the others are the saved members, by rank, in one whole world. Those not heard may hold the interpreter lock.
    """
    job, members = cluster.active, saved.members
    known = [heard[w] for w in members if w in heard and _is_there(cluster, w)]
    quiet = [w for w in members if w not in heard and _is_there(cluster, w)]
    if job is None or not known or not quiet or len(known) + len(quiet) < len(members):
        return cluster
    generation = max(here.generation for here in heard.values())
    for here in known:
        there = (here.job, here.generation, here.size) == (job.name, generation, len(members)) and here.formed
        if not there or members[here.rank] != here.worker or not _is_healthy(here.word) or here.stopped:
            return cluster
    ran = frozenset(cell.version for cell in cluster.setup)
    like = cluster.workers[known[0].worker]
    trains = {
        w: replace(like, id=w, pid=cluster.workers[w].pid, state=WorkerState.RUNNING, store="", ran=ran) for w in quiet
    }
    return replace(cluster, workers=cluster.workers | trains, starting=cluster.starting - trains.keys())


def _lose_members(
    cluster: ClusterState, saved: SavedCluster, heard: Reports, now: float, out: Commands
) -> ClusterState:
    """Members that are gone, or that do not answer though their processes live."""
    gone = frozenset(w for w in saved.members if w not in cluster.workers)
    if gone:
        out.append(cmd.Record("worker-lost", f"{format_ids(gone)} lost {OFFLINE}"))
    for w in saved.members:
        if _is_there(cluster, w) and w not in heard and cluster.workers[w].state is not WorkerState.RUNNING:
            out.append(cmd.StopWorker(w, kill=True))
            cluster = losses.worker_lost(cluster, w, f"{w} froze (it did not answer a new driver)", now, out)
    return cluster


def _restore_job(
    cluster: ClusterState, saved: SavedCluster, inside: Reports, now: float, out: Commands
) -> ClusterState:
    """Who trains with whom. `inside`: those in the job's program."""
    job = cluster.active
    assert job is not None
    holders = tuple(w for w in sorted(inside, key=lambda w: (inside[w].rank, w)) if cluster.workers[w].has_state)
    finished = frozenset(w for w in holders if isinstance(inside[w].word, ev.WorkerSucceeded))
    told = [w for w in inside if inside[w].stopped]
    if told and not finished:
        return _end_stopped_job(with_members(cluster, holders), inside, told, now, out)
    if not holders:
        if not state_lives(cluster):
            why = f"no worker is left that holds the training state: the last one was lost {OFFLINE}"
            return jobs.end(cluster, "failed", why, now, out)
        return _abort_strays(cluster, inside, out)
    if cluster.kept_state is not None and max(inside[w].commit for w in holders) > cluster.kept_state.commit:
        cluster = delete_kept_state(cluster, out)
    late = frozenset(told).intersection(holders)
    cluster = jobs.linger(cluster, now) if late else cluster
    job = replace(job, formed=True, succeeded=finished, asked_to_stop=late)
    members = _whole_world(inside)
    quiet = [w for w in saved.members if _is_there(cluster, w) and w not in inside]
    if not members and any(cluster.workers[w].state is WorkerState.RUNNING for w in quiet):
        members = saved.members  # as presumed
    if members:
        return _continue_world(replace(cluster, job=replace(job, ranks=members)), members, inside, out)
    ranks = saved.ranks if set(holders) <= set(saved.ranks) else holders
    cluster = replace(with_members(cluster, holders), job=replace(job, ranks=ranks), stage=Stage.RUNNING)
    cluster = _abort_strays(cluster, inside, out)
    why = "the world was no longer complete when a new driver took over"
    if not finished and (
        saved.gathering or not any(inside[w].generation for w in holders)
    ):  # it had been broken, or left
        return replace(jobs.abort_generation(cluster, why, out), stage=Stage.GATHERING, awaiting=cluster.member_set)
    return generation_end.break_generation(cluster, why, now, out)


def _whole_world(inside: Reports) -> tuple[WorkerId, ...]:
    """The members, by rank, of the newest generation that stands, if all of them are in it; else nobody."""
    formed = [here for here in inside.values() if here.formed]
    generation = max((here.generation for here in formed), default=0)
    there = {here.rank: here for here in formed if here.generation == generation and _is_healthy(here.word)}
    whole = bool(there) and len(there) == next(iter(there.values())).size
    return tuple(there[rank].worker for rank in sorted(there)) if whole else ()


def _is_healthy(word: object) -> bool:
    """An error of the user's own takes nothing from a world."""
    return not isinstance(word, ev.WorkerReady) and (not isinstance(word, ev.WorkerRaised) or word.intact)


def _continue_world(
    cluster: ClusterState, members: tuple[WorkerId, ...], inside: Reports, out: Commands
) -> ClusterState:
    """Nobody of this world is disturbed. What was to follow it will not be."""
    known = [inside[w] for w in members if w in inside]
    generation = known[0].generation
    cluster = replace(delete_kept_state(cluster, out), last_formed=generation)
    cluster = _abort_strays(with_members(cluster, members), inside, out)
    for later in range(generation + 1, max(here.numbered for here in known) + 1):
        out.append(cmd.DropWorld(later, members))
    if any(here.bound for here in known):
        out.append(cmd.CancelLeave(generation, members))
    out.append(
        cmd.Record("world-found", f"{len(members)} workers train on in generation {generation}", generation=generation)
    )
    return replace(
        cluster, generation=generation, stage=Stage.RUNNING, formation=cmd.FormWorld(generation, members, "", 0, ())
    )


def _abort_strays(cluster: ClusterState, inside: Reports, out: Commands) -> ClusterState:
    """Who is no member and has heard of a generation that will not be: an abort counts for all up to its number."""
    those = (w for w, here in inside.items() if w not in cluster.member_set and here.busy)
    away = tuple(w for w in those if inside[w].generation or inside[w].numbered > inside[w].left)
    if away:
        out.append(cmd.AbortWorld(cluster.highest_generation, away, "a new driver forms another world"))
    return cluster


def _end_stopped_job(
    cluster: ClusterState, inside: Reports, told: list[WorkerId], now: float, out: Commands
) -> ClusterState:
    """Some were told that the job is over, by a driver that could not write that down any more."""
    for w in cluster.members:
        word = inside[w].word
        if isinstance(word, ev.WorkerRaised) and word.intact:
            why = f"rank {inside[w].rank} ({w}) raised {word.error}"
            return jobs.end(cluster, "failed", why, now, out, culprit=w)
    return jobs.end(cluster, "stopped", inside[told[0]].stopped, now, out)


def _drain_surplus(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Workers for which there is no place any more leave, and hosts that have none of them."""
    for name, host in tuple(cluster.hosts.items()):
        surplus = [
            w
            for w in host_slots.workers_on(cluster, name)
            if host.phase is HostPhase.DRAINING or w.slot >= host.spec.slots
        ]
        cluster = host_lifecycle.remove_if_empty(provisioning.drain_workers(cluster, surplus, now, out), name, out)
    return cluster


def _replay_messages(cluster: ClusterState, inside: Reports, now: float, out: Commands) -> ClusterState:
    """Their last words are heard now: errors, then newcomers, then members. Who has not heard of the job yet is told."""
    job = cluster.active
    assert job is not None
    there = [w for w in inside if _is_there(cluster, w)]
    words = {w: inside[w].word for w in sorted(there, key=lambda w: (w in cluster.member_set, inside[w].rank, w))}
    cluster = provisioning.expect_workers(cluster, [w for w in there if inside[w].busy and w not in cluster.member_set])
    for word in words.values():
        if isinstance(word, ev.WorkerRaised):
            cluster = _handle(cluster, word, now, out)
    if all(here.busy or (job.formed and not here.holds) for here in inside.values()):  # else it comes to its end
        for w, worker in tuple(cluster.workers.items()):
            if worker.state is WorkerState.READY and not worker.job:
                cluster = setup_cells.run_next(cluster, w, now, out)
    for w, word in words.items():
        if isinstance(word, ev.WorkerReady) and (
            w not in cluster.member_set or word.generation >= cluster.generation
        ):  # else it says it anew
            cluster = _handle(cluster, word, now, out)
    return cluster


def _stop_old_programs(cluster: ClusterState, now: float, out: Commands) -> ClusterState:
    """Programs of a job that is over."""
    name = cluster.active.name if cluster.active else ""
    late = tuple(w for w, worker in cluster.workers.items() if worker.job and worker.job != name)
    for w in late:
        out.append(cmd.StopProgram(cluster.workers[w].job, (w,), "its job is over"))
    return jobs.linger(cluster, now) if late else cluster
