"""The state that `step` maps: hosts, slots, workers, the generation and the job. Immutable; replaced, never changed."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from heapq import nsmallest

from msgspec import Struct
from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core.commands import FormWorld
from nbelastic.core.reasons import MOST, Reason, listed
from nbelastic.core.script_group import Group
from nbelastic.protocol.events import PositionReported, ProgramEnded, WorkerSucceeded
from nbelastic.protocol.ids import HostSpec, Interface, WorkerId
from nbelastic.protocol.limits import NEVER, Limits
from nbelastic.protocol.script_events import NodeReady

Commands = list[cmd.Command]


def rank_text(cluster: ClusterState, w: WorkerId) -> str:
    return f"rank {cluster.members.index(w)} ({w})" if w in cluster.member_set else str(w)


NO_BREAKS = (0, -1)  # how many, and at which commit


class Stage(StrEnum):
    """Where the current generation stands."""

    GATHERING = "gathering"  # no world: who is to be in the next one reports ready
    FORMING = "forming"  # the members are joining their process group
    RUNNING = "running"
    PREPARING = "preparing"  # running; the next world's process group is being built beside it
    ASKED = "asked"  # running; the members were asked where they are, to agree on the commit to leave at
    LEAVING = "leaving"  # running up to that commit


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    STOPPED = "stopped"


class HostPhase(StrEnum):
    STARTING = "starting"
    UP = "up"
    DRAINING = "draining"
    LOST = "lost"


class Slot(Struct, frozen=True, gc=False, omit_defaults=True):
    """A place for one process. `failures` are deaths not yet forgiven."""

    incarnation: int = 0
    restarts: int = 0
    failures: int = 0
    backoff_until: float = 0.0
    busy: bool = False  # a process of it lives
    reason: str = ""  # why it cools


class Host(Struct, frozen=True):
    """`slots` never gets shorter, so that no incarnation is used twice; only the first `spec.slots` are started."""

    spec: HostSpec
    joined: int  # its seniority
    slots: tuple[Slot, ...]
    full: bool = False  # every slot that may be started is busy
    since: float = 0.0  # when it came up or, before that, was started
    phase: HostPhase = HostPhase.STARTING
    reason: str = ""
    failures: int = 0
    retry_at: float = 0.0
    by_hand: bool = False
    addresses: tuple[Interface, ...] = ()  # in its agent's order of preference
    port: int = 0  # its prober's, on each of them
    address: str = ""  # where its workers are reached; empty: its agent named none
    agreed_addresses: tuple[str, ...] = ()  # where everybody who tried so far has reached it; empty: nobody has tried
    moved_at: float = 0.0  # when its workers were told of another address; 0.0: never
    admitted: int = 0  # a number that grows with every admission
    unreached_hosts: tuple[str, ...] = ()  # hosts that it did not reach when it was left out


class Admission(Struct, frozen=True):
    """A newcomer whose network is probed: its agent is ready, but nothing is started on it yet.

    A probe is (who tries, whom), by hosts.
    """

    number: int  # of its probes
    partners: tuple[str, ...]  # of the present round
    addresses: tuple[str, ...]  # its addresses at which all of the rounds before have reached it
    until: float  # who has not answered by then will not
    awaited: frozenset[tuple[str, str]]
    answers: dict[tuple[str, str], tuple[str, ...]] = {}  # where it was reached
    passed: frozenset[str] = frozenset()  # partners of the rounds before


class PartitionCheck(Struct, frozen=True):
    """A round of probes between the hosts of a world. A pair is (host, host), in the order of their names."""

    number: int = 0
    until: float = NEVER
    awaited: frozenset[tuple[str, str]] = frozenset()  # probes
    pairs: frozenset[tuple[str, str]] = frozenset()
    fully_probed: tuple[str, ...] = ()  # hosts that are all probed with one another
    unreached: frozenset[tuple[str, str]] = frozenset()  # pairs of which one did not reach the other
    failed_rounds: dict[tuple[str, str], int] = {}  # pairs, and in how many rounds in a row they were cut


class Stall(Struct, frozen=True):
    """A running world in which nobody commits, and what is known of why."""

    generation: int
    seconds: float = 0.0  # without a commit
    unanswered: frozenset[WorkerId] = frozenset()  # members that were asked where they are, and have not said
    positions: dict[WorkerId, PositionReported] = {}
    stragglers: dict[WorkerId, tuple[tuple[int, int], float]] = {}  # where they are, and since when they are seen there
    reported: frozenset[tuple[WorkerId, int]] = frozenset()  # of whom it was recorded, and at which commit
    text: str = ""


class Wait(Struct, frozen=True):
    """The present stage waits for the words of `ClusterState.awaiting`."""

    stage: Stage
    generation: int
    awaited: int  # how many words
    began: float
    since: float  # when the last word came
    until: float  # when it is judged
    ask_at: float  # when those who are waited for are asked where they are
    positions: dict[WorkerId, tuple[PositionReported, float]] = {}  # their last answers, and when these came
    worked_at: dict[WorkerId, float] = {}  # when they were last seen at work
    irreplaceable: tuple[WorkerId, ...] = ()  # they cannot be replaced
    why: str = ""


class SetupCell(Struct, frozen=True):
    """A cell that each worker runs before it is ready. A cell that is run again has the same key and another version."""

    key: str
    source: str
    version: int


class SetupTrial(Struct, frozen=True):
    """A cell that is not kept yet, and how it went so far."""

    cell: SetupCell
    running: frozenset[WorkerId] = frozenset()
    tried: int = 0  # workers
    succeeded: int = 0
    failed: dict[WorkerId, str] = {}  # and the error


class Worker(Struct, frozen=True, gc=False):
    id: WorkerId
    state: WorkerState
    since: float
    pid: int = 0
    job: str = ""  # the job whose program runs on it
    generation: int = 0  # the last generation that it has left
    commit: int = 0
    clean: bool = True
    store: str = ""  # for a generation in which it is rank 0; empty if it was used
    has_state: bool = False  # it holds the job's state, whole
    failures: int = 0  # in a row, to join a process group with the others
    reason: str = ""
    registered: bool = False  # its engine takes code
    was_ready: bool = False
    ran: frozenset[int] = frozenset()  # versions of setup cells that it has run well
    running_cell: int = 0  # the version of the one that it runs now; 0: none
    cell_since: float = 0.0
    failed_cell: str = ""  # the key of the one that failed on it: it takes part in no job
    unresponsive: str = ""  # why it is left alone although nothing is heard of it; empty: it is heard


class Job(Struct, frozen=True):
    name: str
    formed: bool = False  # a world of it has run
    succeeded: frozenset[WorkerId] = frozenset()
    ended: frozenset[WorkerId] = frozenset()  # whose program came to its end well
    asked_to_stop: frozenset[WorkerId] = frozenset()  # told to stop, as they cannot finish after others have
    ranks: tuple[WorkerId, ...] = ()  # the members of its last world, the dead included: results are given by rank
    outcome: str = ""  # succeeded, failed, stopped
    reason: str = ""


class KeptState(Struct, frozen=True):
    """The job's training state is on a disk: its last holder `by` was stuck, and wrote it there for a worker of its host."""

    by: WorkerId
    commit: int
    reader: WorkerId | None = None  # who is to read it


class ExternalNode(Struct, frozen=True):
    """A node that has come by itself, from a terminal. `here`: it is on the driver's machine."""

    pid: int
    is_local: bool
    ready: NodeReady | None = None  # what it has said last of that it waits


class ClusterState(Struct, frozen=True):
    """All that the driver knows and decides from. `members` are the current generation's (or its survivors), by rank."""

    limits: Limits
    hosts: dict[str, Host] = {}  # in order of seniority
    workers: dict[WorkerId, Worker] = {}
    removed_workers: int = 0  # workers that were taken out of `workers` so far
    generation: int = 0
    stage: Stage = Stage.GATHERING
    members: tuple[WorkerId, ...] = ()
    member_set: frozenset[WorkerId] = frozenset()  # the members as a set
    formation: FormWorld | None = None  # by which the generation was formed
    next_formation: FormWorld | None = (
        None  # the next one, for which the process group is or was built beside the training
    )
    entered_next: frozenset[WorkerId] = (
        frozenset()
    )  # who is in the planned generation already, before all have left this one
    cancelled_formation: FormWorld | None = (
        None  # a plan called off when its members were leaving for it: they may be in it
    )
    deferred_events: tuple[
        WorkerSucceeded | ProgramEnded, ...
    ] = ()  # of those ahead: that they have finished, which is heard when all have left this one
    last_formed: int = 0  # the last generation of which a world has formed
    highest_generation: int = 0  # the highest number that a generation was given; a planned one may come to nothing
    prepare_by: float = NEVER
    change_after: float = 0.0  # before that no change is tried again
    postponed_because: str = ""  # what kept the last one from being made
    postponements: int = 0  # times in a row
    unanswered: dict[WorkerId, int] = {}  # members that did not say where they are, and how many times in a row
    failed_formations: int = 0  # worlds in a row that did not form in time
    wait: Wait | None = None
    skip_preparing: bool = False  # the next change is made without preparation, as that failed
    awaiting: frozenset[WorkerId] = frozenset()  # members whose word the present stage waits for
    prepare_errors: dict[WorkerId, str] = {}  # why some could not prepare
    newcomers: frozenset[WorkerId] = frozenset()  # newcomers that wait in the elastic loop for a world
    held_back: dict[
        WorkerId, float
    ] = {}  # of those, who is left out because it could not join the others, and until when
    starting: frozenset[WorkerId] = frozenset()  # workers of which one can expect that they soon will
    leaving: frozenset[WorkerId] = frozenset()  # members that are to leave: drained or above max
    stopped: frozenset[WorkerId] = frozenset()  # alive, but told to end: in no other of these sets
    end_deadlines: dict[WorkerId, float] = {}  # of those: when each counts as ended, whatever is reported
    failed: frozenset[WorkerId] = frozenset()  # alive, but of no use to this job
    suspects: frozenset[WorkerId] = frozenset()  # members that lost a connection while nobody is known dead
    ask_number: int = 0  # how often members were asked to leave so far
    acknowledged_commits: tuple[int, ...] = ()
    broken_at: float = 0.0  # when the newest broken generation broke, and all its members were sent the abort
    job: Job | None = None
    kept_state: KeptState | None = None  # until a world has formed with it
    hung: frozenset[WorkerId] = frozenset()  # members that no abort wakes
    script: Group | None = None  # that runs or, if no job came after it, has run last
    external_nodes: dict[str, ExternalNode] = {}
    resets: int = 0
    setup: tuple[SetupCell, ...] = ()  # in the order in which workers run them
    trial: SetupTrial | None = None
    setup_outdated: bool = False  # a worker that is busy has not run all setup cells
    setup_by: float = NEVER  # when a worker will have run a setup cell for too long
    hosts_joined: int = 0  # hosts so far
    discovered: bool = False  # the host discovery has answered once, under this driver or an earlier one
    hosts_admitted: int = 0  # hosts that have come up so far
    driver_address: str = ""  # where hosts on other machines come to the driver's machine
    external_address: str = ""  # where terminals of other machines come to the driver's machine, if they are let in
    probing: dict[str, Admission] = {}  # newcomers, by name
    last_probe: int = 0  # the last number that probes were given
    partition_check: PartitionCheck = PartitionCheck()
    stall: Stall | None = None
    removed_hosts: frozenset[str] = frozenset()  # hosts removed by hand, which discovery may still list
    incarnations: dict[str, int] = {}  # the newest ones of hosts that have left; see `provisioning.NAMES`
    reason: Reason = Reason("no-hosts")
    stopping: str = ""
    settling_since: float = 0.0  # since when ready newcomers, or leavers, wait for those that are starting
    suspect_since: float = 0.0
    suspect_error: str = ""  # what the first of the suspects raised
    unexplained_breaks: tuple[int, int] = (
        NO_BREAKS  # breaks of the job in a row that no death explains, and their commit
    )
    reason_until: float = NEVER  # when the wait that `reason` names ends by itself
    wake_at: float = NEVER  # when a cooling slot or a lost host is to be tried again
    linger_until: float = 0.0  # until when a program of an ended job may still run
    linger_last: float = 0.0  # and until when one that holds the training state
    ending_hosts: frozenset[str] = frozenset()  # hosts whose agents were told to end, as the cluster is stopped
    agents_end_by: float = NEVER  # who of them has not ended then is not waited for
    too_few_since: float | None = None  # since when there have been fewer than min in the elastic loop, less the pauses
    timeout_paused_since: float | None = (
        None  # since when as many as min are there, whose programs have not come to that loop
    )

    @property
    def phase(self) -> str:
        """waiting, forming, running, stopping or finished: what people are shown."""
        if self.stopping:
            return "stopping" if self.hosts else "finished"
        if self.stage is Stage.GATHERING:
            return "waiting"
        return "forming" if self.stage is Stage.FORMING else "running"

    @property
    def size(self) -> int:
        """How many members the job has, or had when its world broke; 0 without a job."""
        return len(self.members) if self.active is not None else 0

    @property
    def active(self) -> Job | None:
        """The job that still has to run, if any and if it is no script."""
        return self.job if self.job is not None and not self.job.outcome else None

    @property
    def present_job(self) -> str:
        """The name of the job or script that still has to run; empty: none."""
        if self.active is not None:
            return self.active.name
        return self.active_script.job if self.active_script is not None else ""

    @property
    def active_script(self) -> Group | None:
        """The script that still has to run, if any."""
        return self.script if self.script is not None and not self.script.outcome else None


def is_same(before: ClusterState, cluster: ClusterState, *, but: Collection[str] = ()) -> bool:
    """Whether nothing has changed `but` these fields. What is equal and another object counts as changed. O(1)"""
    return all(getattr(before, f) is getattr(cluster, f) for f in ClusterState.__struct_fields__ if f not in but)


def host_backoff_until(host: Host, now: float) -> float:
    """Until when no slot of it may start a worker; 0.0 if one may now."""
    ends = [slot.backoff_until for slot in host.slots[: host.spec.slots]]
    until = max(min(ends, default=0.0), host.retry_at if host.phase is HostPhase.LOST else 0.0)
    return until if until > now else 0.0


def with_members(cluster: ClusterState, members: tuple[WorkerId, ...]) -> ClusterState:
    """These are the members now, by rank."""
    return replace(cluster, members=members, member_set=frozenset(members))


def with_worker(cluster: ClusterState, worker: Worker) -> ClusterState:
    """With `worker` in the place of what was known of it."""
    return replace(cluster, workers={**cluster.workers, worker.id: worker})


def difference(ids: frozenset[WorkerId], gone: frozenset[WorkerId]) -> frozenset[WorkerId]:
    """`ids - gone`, for nothing where nothing changes: these sets can hold 10,000."""
    return ids if ids.isdisjoint(gone) else ids - gone


def with_reason(cluster: ClusterState, reason: Reason, until: float = NEVER) -> ClusterState:
    """Not yet, and why; and when the wait ends by itself."""
    return (
        cluster
        if cluster.reason == reason and cluster.reason_until == until
        else replace(cluster, reason=reason, reason_until=until)
    )


def first_names(ids: frozenset[WorkerId]) -> tuple[str, ...]:
    """The first of them, as `Reason.names`."""
    return tuple(map(str, nsmallest(MOST + 1, ids)))


def format_ids(ids: frozenset[WorkerId]) -> str:
    """The first three, as text."""
    return listed(first_names(ids))
