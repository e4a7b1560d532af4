"""The state that `step` maps: hosts, slots, workers, the generation and the job. Immutable; replaced, never changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum
from heapq import nsmallest
from itertools import islice
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from nbelastic.core.commands import FormWorld
from nbelastic.core.halt import Halt
from nbelastic.core.persistent import EMPTY, NOTHING, PersistentDict, PersistentSet
from nbelastic.core.probes import Admission, PartitionCheck
from nbelastic.core.reasons import MOST, Reason, listed
from nbelastic.core.script_group import Group
from nbelastic.protocol.cluster_limits import NEVER, Limits
from nbelastic.protocol.events import PositionReported, ProgramEnded, WorkerSucceeded
from nbelastic.protocol.ids import Gpu, HostSpec, Interface, WorkerId
from nbelastic.protocol.messages import Pushed
from nbelastic.protocol.script_events import NodeReady

WorkerSet = Literal["awaiting", "newcomers", "starting", "unregistered", "leaving", "stopped", "failed", "suspects"]
NO_BREAKS = (0, -1)  # of `ClusterState.unexplained_breaks`


class Stage(StrEnum):
    """The stage of the present generation."""

    GATHERING = "gathering"  # no world: survivors leave the last generation, newcomers report ready
    FORMING = "forming"  # the members join their process group
    RUNNING = "running"
    PREPARING = "preparing"  # the members train; the next generation's process group is built beside the training
    ASKED = "asked"  # the members train; each was asked for its commit, to agree on the leave point
    LEAVING = "leaving"  # the members train up to the leave point
    HALTED = "halted"  # the members train up to a commit, and wait there: see `halts`


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
    """A place for one worker."""

    incarnation: int = 0
    restarts: int = 0
    failures: int = 0  # in a row, since the last clear
    backoff_until: float = 0.0
    busy: bool = False  # its worker's process lives
    reason: str = ""  # why it is in back-off, or was before its present worker started


class Host(Struct, frozen=True):
    """`slots` never gets shorter, so that no incarnation is used twice. Workers start only in the first `spec.slots`."""

    spec: HostSpec
    joined: int  # its seniority: the lowest number is the oldest host
    slots: tuple[Slot, ...]
    full: bool = False  # all slots in which workers may start are busy
    since: float = 0.0  # when the host came up or, before that, when its agent was started
    phase: HostPhase = HostPhase.STARTING
    reason: str = ""  # why it is in this phase, or why a slot is in back-off
    failures: int = 0  # in a row, since the last clear
    lost_for: str | None = None  # why it was lost last; None: it was not, since it was added
    prepares_by: float = 0.0  # when its environment must be made; 0.0: none is being made
    retry_at: float = 0.0  # when a lost host's agent is started again
    by_hand: bool = False  # a client added it, so discovery does not remove it
    addresses: tuple[Interface, ...] = ()  # in its agent's order of preference
    port: int = 0  # of its prober, on each of its addresses
    address: str = ""  # that other workers use to reach its workers; empty: its agent named none
    agreed_addresses: tuple[str, ...] = ()  # at which each prober so far reached it; empty: it was not probed yet
    moved_at: float = 0.0  # when its workers got another address; 0.0: never
    admitted: int = 0  # number of its latest admission; it grows over all hosts
    unreached_hosts: tuple[str, ...] = ()  # that it did not reach when it was left out
    gpus: tuple[Gpu, ...] = ()  # that its agent has found

    @property
    def is_up(self) -> bool:
        """Whether it was admitted and its agent lives."""
        return self.phase in (HostPhase.UP, HostPhase.DRAINING)


class Disconnected(Struct, frozen=True):
    """Since when a host receives no order, and why."""

    since: float
    reason: str


class Ending(Struct, frozen=True):
    """When a draining host ends. `save_at`: when a training is stopped whose state only such hosts hold; None: that is over."""

    at: float
    save_at: float | None
    successor: str = ""  # the host that takes its place: this one may train on until that is up, and drains then
    by: str = ""  # why it ends


class Stall(Struct, frozen=True):
    """A running world in which no commit is made, and the known causes."""

    generation: int
    seconds: float = 0.0  # without a commit
    unanswered: PersistentSet[WorkerId] = EMPTY  # members that were asked for their position and did not answer yet
    positions: PersistentDict[WorkerId, PositionReported] = NOTHING  # the newest of each member
    stragglers: dict[WorkerId, tuple[tuple[int, int], float]] = {}  # (collectives, commit), and since when
    reported: frozenset[tuple[WorkerId, int]] = frozenset()  # stragglers in the event log, by commit
    before: dict[WorkerId, tuple[int, int]] = {}  # (collectives, commit) of the answers before these `positions`
    text: str = ""  # for the status


class Wait(Struct, frozen=True):
    """The present stage waits for reports of the members in `ClusterState.awaiting`."""

    stage: Stage
    generation: int
    awaited: int  # how many members have not reported
    began: float
    since: float  # when the last report came
    until: float  # when the wait is judged
    ask_at: float  # when the awaited members are asked for their positions
    positions: PersistentDict[WorkerId, tuple[PositionReported, float]] = NOTHING  # newest answers, and their times
    worked_at: PersistentDict[WorkerId, float] = NOTHING  # when each was last known to compute
    irreplaceable: tuple[WorkerId, ...] = ()  # late members that are kept, as only they hold the training state
    why: str = ""  # they are late, for the status


class SetupCell(Struct, frozen=True):
    """A cell that each worker runs before it is ready. A changed cell has the same key and another version."""

    key: str
    source: str
    version: int
    pushed: Pushed | None = None  # values that the worker takes instead; then `source` only describes them


class SetupTrial(Struct, frozen=True):
    """A cell that is not kept yet, and its results so far."""

    cell: SetupCell
    running: PersistentSet[WorkerId] = EMPTY
    tried: int = 0  # on so many workers
    succeeded: int = 0  # on so many workers
    failed: PersistentDict[WorkerId, str] = NOTHING  # with this error


class Worker(Struct, frozen=True, gc=False):
    id: WorkerId
    state: WorkerState
    since: float  # when it was started or, later, when it became ready for the first time
    pid: int = 0
    gpu: str = ""  # the only one that it sees; empty: it was allotted none
    job: str = ""  # whose program runs on it
    generation: int = 0  # the last one that it has left
    commit: int = 0  # of its training state, counted from the beginning of the job
    clean: bool = True  # its live tensors are those of its last commit
    store: str = ""  # address of the store that it offers as rank 0; empty: none, or it was used
    has_state: bool = False  # it holds the job's training state, all of one commit
    program: int = 0  # of the job, that it runs or was asked to run
    failures: int = 0  # in a row, to join a process group
    reason: str = ""  # for the status: why it failed, was left out or is a straggler
    registered: bool = False  # it can run cells and programs
    was_ready: bool = False
    ran: frozenset[int] = frozenset()  # versions of the setup cells that succeeded on it
    running_cell: int = 0  # version of the setup cell that it runs now; 0: none
    cell_since: float = 0.0  # when it began to run that cell
    failed_cell: str = ""  # key of the setup cell that failed on it: it takes part in no job
    breakpoint_at: str = ""  # where its program waits in the debugger; empty: it does not
    unresponsive: str = ""  # for the status: since when the driver receives nothing from it; empty: it responds


class Job(Struct, frozen=True):
    name: str
    backend: str = ""  # nccl or gloo, of all its worlds; empty: none has been formed yet
    formed: bool = False  # a world of it has run
    succeeded: PersistentSet[WorkerId] = EMPTY  # members whose elastic function has returned
    ended: PersistentSet[WorkerId] = EMPTY  # workers whose program has ended without an error
    asked_to_stop: PersistentSet[WorkerId] = EMPTY  # members that cannot finish, as others have finished
    ranks: tuple[WorkerId, ...] = ()  # members of its last world, the lost ones included: results are given by rank
    at_once: int = 0  # without a world: how many workers ran or had run its program when one was lost last
    outcome: str = ""  # succeeded, failed, stopped
    reason: str = ""
    program: int = 0  # the number of its program: 0, or that of the last swap
    trial: int = 0  # the members try this new program: see `swaps`


class KeptState(Struct, frozen=True):
    """The hung worker `by`, the last that held the training state, has written it to its host's disk."""

    by: WorkerId
    commit: int
    reader: WorkerId | None = None  # the worker of that host which is to read it


class ExternalNode(Struct, frozen=True):
    """A node that a user's torchrun has started in a terminal."""

    pid: int
    is_local: bool  # it runs on the driver's machine
    ready: NodeReady | None = None  # its newest report that it waits for a round


class ClusterState(Struct, frozen=True):
    """All that the core decides from. Times are in seconds, of the driver's monotonic clock."""

    limits: Limits
    # hosts and workers
    hosts: dict[str, Host] = {}  # in order of seniority
    workers: PersistentDict[WorkerId, Worker] = NOTHING  # that live
    starting: PersistentSet[WorkerId] = EMPTY  # workers that are expected to become newcomers
    unregistered: PersistentSet[WorkerId] = EMPTY  # of `starting`: they cannot run cells yet
    stopped: PersistentSet[WorkerId] = EMPTY  # workers that were asked to end; they are in no other of these sets
    failed: PersistentSet[WorkerId] = EMPTY  # workers that live but cannot take part in this job
    end_deadlines: dict[WorkerId, float] = {}  # when each worker of `stopped` counts as ended
    removed_workers: int = 0  # how many were taken out of `workers` so far
    hosts_joined: int = 0  # number of the newest host
    hosts_admitted: int = 0  # number of the newest admission
    discovered: bool = False  # the discovery has answered once, under this driver or an earlier one
    disconnected: dict[str, Disconnected] = {}  # hosts that receive no order, but whose workers may train on
    ending: dict[str, Ending] = {}  # hosts that were announced to end: they drain, or wait for a successor
    removed_hosts: frozenset[str] = frozenset()  # that a client removed and discovery may still list
    incarnations: dict[str, int] = {}  # highest ones of removed hosts; see `host_lifecycle.NAMES`
    wake_at: float = NEVER  # when a back-off or a start's deadline ends

    # the generation
    generation: int = 0  # number of the present or last one
    stage: Stage = Stage.GATHERING
    members: tuple[WorkerId, ...] = ()  # of the present generation, or survivors of the last one, by rank
    member_set: PersistentSet[WorkerId] = EMPTY  # the same as a set
    formation: FormWorld | None = None  # of the present generation
    awaiting: PersistentSet[WorkerId] = EMPTY  # workers whose report the present stage waits for
    newcomers: PersistentSet[WorkerId] = EMPTY  # workers that are ready and in no world
    held_back: dict[WorkerId, float] = {}  # newcomers that are left out for a while, and until when
    leaving: PersistentSet[WorkerId] = EMPTY  # members that have to leave: drained, or above max
    settling_since: float = 0.0  # since when newcomers or leavers wait for workers that are starting
    highest_generation: int = 0  # that was given to a generation, prepared ones included
    last_formed: int = 0  # generation of the last world that formed
    failed_formations: int = 0  # generations in a row that did not form in time
    wait: Wait | None = None  # of the present stage for reports of members
    broken_at: float = 0.0  # when the last generation broke and its abort was sent
    resets: int = 0  # broken generations of this job

    # the reconfiguration
    next_formation: FormWorld | None = None  # of the next generation, whose process group is prepared
    entered_next: PersistentSet[WorkerId] = EMPTY  # workers in the next generation while others leave the present one
    cancelled_formation: FormWorld | None = None  # of a cancelled next generation that leaving members may have entered
    deferred_events: tuple[WorkerSucceeded | ProgramEnded, ...] = ()  # of the next generation; handled when it begins
    prepare_by: float = NEVER  # when preparing ends without the missing reports
    prepare_errors: dict[WorkerId, str] = {}  # of workers that could not prepare
    skip_preparing: bool = False  # the next change is made without preparing, as that is not possible
    ask_number: int = 0  # of the newest `AskLeave`
    highest_acknowledged: int = 0  # commit that a member has reported since that `AskLeave`
    postponements: int = 0  # of changes in a row, as a member did not answer
    postponed_because: str = ""
    change_after: float = 0.0  # no change is tried before
    unanswered: dict[WorkerId, int] = {}  # how many `AskLeave` in a row each member did not answer

    halt: Halt = Halt()

    # failures without a lost worker
    suspects: PersistentSet[WorkerId] = EMPTY  # members that lost a connection
    suspect_since: float = 0.0
    first_suspect: WorkerId | None = None  # the suspect that raised first
    suspect_error: str = ""  # the error that it raised
    unexplained_breaks: tuple[int, int] = NO_BREAKS  # how many in a row, and at which commit
    stall: Stall | None = None
    hung: PersistentSet[WorkerId] = EMPTY  # members that an abort does not wake
    kept_state: KeptState | None = None  # until a world has formed with it

    # networks
    driver_address: str = ""  # at which hosts on other machines reach the driver's machine
    external_address: str = ""  # at which terminals of other machines reach the driver's machine; empty: not allowed
    probing: dict[str, Admission] = {}  # by host
    last_probe: int = 0  # number of the newest round of probes
    partition_check: PartitionCheck = PartitionCheck()

    # jobs, scripts and setup cells
    job: Job | None = None  # that runs, or that ran last
    linger_until: float = 0.0  # when programs of an ended job are killed; 0.0: none runs
    linger_last: float = 0.0  # when those of them that hold the training state are killed
    script: Group | None = None  # that runs, or that ran last if no job came after it
    external_nodes: dict[str, ExternalNode] = {}
    ending_nodes: dict[str, float] = {}  # hosts whose nodes end their workers, and when they count as ended
    setup: tuple[SetupCell, ...] = ()  # in the order in which workers run them
    trial: SetupTrial | None = None
    setup_by: float = NEVER  # when the next setup cell will have run for too long

    # the reason to wait, and the end
    reason: Reason = Reason("no-hosts")  # why the next thing has not happened yet
    reason_until: float = NEVER  # when that wait ends by itself
    too_few_since: float | None = None  # since when fewer than min are in the elastic loop, without the pauses
    timeout_paused_since: float | None = None  # since when enough workers live but have not come to the elastic loop
    stopping: str = ""  # why the cluster stops; empty: it does not
    ending_hosts: frozenset[str] = frozenset()  # whose agents were asked to end, as the cluster stops
    agents_end_by: float = NEVER  # when agents that have not ended count as ended

    @property
    def phase(self) -> str:
        """waiting, forming, running, paused, stopping or finished, for the status."""
        if self.stopping:
            return "stopping" if self.hosts else "finished"
        if self.stands_still and self.halt.paused_by:
            return "paused"
        if self.stage is Stage.GATHERING:
            return "waiting"
        return "forming" if self.stage is Stage.FORMING else "running"

    @property
    def has_world(self) -> bool:
        """Whether the members train, or have stopped at a commit."""
        return self.phase in ("running", "paused")

    @property
    def stands_still(self) -> bool:
        """Whether all members have stopped at a commit, as planned."""
        return self.stage is Stage.HALTED and not self.awaiting

    @property
    def size(self) -> int:
        """How many members the job has, or had when its world broke; 0 without a job."""
        return len(self.members) if self.active is not None else 0

    @property
    def active(self) -> Job | None:
        """The job that has not ended. A script is not one."""
        return self.job if self.job is not None and not self.job.outcome else None

    @property
    def present_job(self) -> str:
        """The name of the job or script that has not ended; empty: none."""
        if self.active is not None:
            return self.active.name
        return self.active_script.job if self.active_script is not None else ""

    @property
    def active_script(self) -> Group | None:
        """The script that has not ended."""
        return self.script if self.script is not None and not self.script.outcome else None


def is_same(before: ClusterState, cluster: ClusterState) -> bool:
    """Whether all fields hold the same objects. Equal objects count as changed. O(1)"""
    return all(getattr(before, f) is getattr(cluster, f) for f in ClusterState.__struct_fields__)


def with_members(cluster: ClusterState, members: tuple[WorkerId, ...]) -> ClusterState:
    """The state with these members, by rank."""
    return replace(cluster, members=members, member_set=PersistentSet(members))


def with_worker(cluster: ClusterState, worker: Worker) -> ClusterState:
    """The state with this record of a worker."""
    return replace(cluster, workers=cluster.workers | {worker.id: worker})


def with_reason(cluster: ClusterState, reason: Reason, until: float = NEVER) -> ClusterState:
    """The state with this reason to wait. The wait ends by itself at `until`."""
    is_known = (cluster.reason, cluster.reason_until) == (reason, until)
    return cluster if is_known else replace(cluster, reason=reason, reason_until=until)


def without(cluster: ClusterState, ids: Collection[WorkerId], *fields: WorkerSet) -> ClusterState:
    """The state without these workers in these sets."""
    changed = {field: after for field in fields if (after := (before := getattr(cluster, field)) - ids) is not before}
    return replace(cluster, **changed) if changed else cluster


def first_names(ids: Iterable[WorkerId]) -> tuple[str, ...]:
    """As many as a `Reason` shows, and one more."""
    return tuple(map(str, islice(ids, MOST + 1)))


def format_ids(ids: Collection[WorkerId]) -> str:
    """The first three by name, as text."""
    return listed(first_names(nsmallest(MOST + 1, ids)))


def rank_text(cluster: ClusterState, w: WorkerId) -> str:
    """Its rank and name; only its name if it is not a member."""
    return f"rank {cluster.members.index(w)} ({w})" if w in cluster.member_set else str(w)
