"""The event log as input: steps the core again through what a driver has decided on.

An event log has lines of three kinds that matter here: `begins` (the state from which a driver starts), `event` (the input of
`step`) and `record` (for users). What only the driver carries out, such as the source of a cell, is not in the log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple, Union

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import takeover
from nbelastic.core.cluster_snapshot import SavedCluster
from nbelastic.core.reasons import in_words
from nbelastic.core.state import ClusterState, SetupCell
from nbelastic.core.step import step
from nbelastic.errors import UsageError
from nbelastic.protocol import connection_events, program_events, script_events
from nbelastic.protocol import events as ev
from nbelastic.protocol.agent_messages import AgentHello
from nbelastic.protocol.cluster_limits import Limits
from nbelastic.protocol.messages import Blob, Pushed
from nbelastic.protocol.worker_messages import WorkerReport

REMOVED = "removed"
# Fields with text of the user's program, or about the user.
PRIVATE = (
    "error",
    "reason",
    "text",
    "place",
    "traceback",
    "target",
    "stop_reason",
    "stopping",
    "problem",
    "user",
    "last_line",
)
EMPTIED = ("packages",)
DIGESTED = ("key", "changed")  # names of variables; the core only compares them
# Events of the core to a script, which `step` makes itself.
_TO_SCRIPTS = (
    *(script_events.HostsChanged, script_events.ScriptStopped),
    *(script_events.Ticked, script_events.NodeMoved),
)


class Started(Struct, frozen=True, tag=True):
    """The first driver of a cluster begins with no hosts. `version`: of nbelastic."""

    version: str
    limits: Limits


class TakenOver(Struct, frozen=True, tag=True):
    """Another driver begins with these reports: see `takeover.resume`."""

    version: str
    cluster: SavedCluster
    agents: dict[str, AgentHello]
    workers: tuple[WorkerReport, ...]
    problems: dict[str, str]
    coming: tuple[str, ...]

    def resume(self, now: float) -> tuple[ClusterState, tuple[cmd.Command, ...]]:
        """The state with which this driver begins, and its first commands."""
        reports = {report.worker: report for report in self.workers}
        return takeover.resume(
            self.cluster, self.agents, reports, now, problems=self.problems, coming=frozenset(self.coming)
        )


Begins = Started | TakenOver


class LoggedRecord(Struct, frozen=True):
    """A record for users, as far as `step` decides it."""

    kind: str
    text: str


class Line(Struct, frozen=True):
    """One line of the event log: it has one of the last three. `at`: seconds of the driver's monotonic clock."""

    at: float
    begins: Begins | None = None
    event: ev.Event | None = None
    record: LoggedRecord | None = None


class _Encoded(Struct, frozen=True):
    at: float
    begins: Begins | None = None
    event: msgspec.Raw = msgspec.Raw()
    record: LoggedRecord | None = None


def _events_of(module: ModuleType) -> list[type[ev.Event]]:
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, ev.Event)]
    return [kind for kind in kinds if kind.__module__ == module.__name__ and kind not in (ev.Event, *_TO_SCRIPTS)]


_MODULES = (ev, program_events, script_events, connection_events)
_ANY_EVENT: Any = Union[tuple(kind for module in _MODULES for kind in _events_of(module))]  # noqa: UP007  (made at run time)
_LINE = msgspec.json.Decoder(_Encoded)
_EVENT = msgspec.json.Decoder(_ANY_EVENT)


def line_of(at: float, entry: ev.Event | Begins) -> dict[str, object]:
    """The line for an event or a beginning, without what only the driver needs."""
    if isinstance(entry, ev.Event):
        return {"at": at, "event": msgspec.to_builtins(loggable(entry))}
    if isinstance(entry, TakenOver):
        cells = tuple(_without_source(cell) for cell in entry.cluster.setup)
        workers = tuple(replace(report, reports=()) for report in entry.workers)
        entry = replace(entry, cluster=replace(entry.cluster, setup=cells), workers=workers)
    return {"at": at, "begins": msgspec.to_builtins(entry)}


def parse(text: str | bytes) -> Line:
    """The inverse of `line_of`. UsageError if it is not a line of an event log."""
    try:
        line = _LINE.decode(text)
        event = _EVENT.decode(line.event) if line.event else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"it is not a line of an event log of this version ({error})") from None
    if line.begins is None and event is None and line.record is None:
        raise UsageError("it is not a line of an event log")
    return Line(line.at, line.begins, event, line.record)


class Played(NamedTuple):
    """One step of a replay: what came in, what was decided, and the state after it.

    `number`: of the event, from 1; a driver's beginning has that of the event before it. `error`: what the core raised; then
    the state is that before this step, and the replay is over.
    """

    number: int
    at: float
    entry: ev.Event | Begins
    commands: tuple[cmd.Command, ...]
    cluster: ClusterState
    error: Exception | None = None


def play(lines: Iterable[Line]) -> Iterator[Played]:
    """Step the core through the lines of an event log. UsageError if they do not begin with a driver's beginning."""
    cluster: ClusterState | None = None
    number = 0
    for line in lines:
        entry: ev.Event | Begins | None = line.begins or line.event
        if entry is None:
            continue
        if isinstance(entry, Started):
            cluster = ClusterState(entry.limits)
            yield Played(number, line.at, entry, (), cluster)
            continue
        if isinstance(entry, TakenOver):
            before = cluster or ClusterState(entry.cluster.limits)
        elif cluster is None:
            raise UsageError("its first events are missing, so that no state is known from which to replay.")
        else:
            before, number = cluster, number + 1
        try:
            cluster, commands = entry.resume(line.at) if isinstance(entry, TakenOver) else step(before, entry, line.at)
        except Exception as error:  # noqa: BLE001  (a bug of ours: the replay is there to show it)
            yield Played(number, line.at, entry, (), before, error)
            return
        yield Played(number, line.at, entry, commands, cluster)
    if cluster is None:
        raise UsageError("it has no driver's beginning, so that no state is known from which to replay.")


def summary(cluster: ClusterState, now: float) -> str:
    """The state in one line: phase, generation, members, job, and the reason to wait."""
    members = ", ".join(map(str, cluster.members)) or "none"
    job = cluster.job
    script = cluster.script
    run = f"{job.name} {job.outcome or 'running'}" if job is not None else "no job"
    if script is not None:
        run = f"{script.job} {script.outcome or 'running'}"
    place = f"{cluster.phase} ({cluster.stage}) · generation {cluster.generation} · members {members}"
    return f"{place} · {run} · {in_words(cluster.reason, now)}"


def shared(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """A decoded line of the log for others: without texts of the user's program. None: it has nothing that a replay needs."""
    return None if "record" in line else _without_texts(line)


def _without_texts(found: Any) -> Any:
    match found:
        case dict():
            return {name: _without_text(name, value) for name, value in found.items()}
        case list() | tuple():
            return [_without_texts(each) for each in found]
    return found


def _without_text(name: str, value: Any) -> Any:
    if name in PRIVATE and isinstance(value, str):
        return value and REMOVED  # whether there is one matters
    if name in DIGESTED and isinstance(value, str):
        return value and _digest(value)
    if name in ("by", "paused_by") and isinstance(value, str):
        return value.partition(" (")[0]  # without the notebook's or terminal's name
    if name == "pushed" and isinstance(value, dict):
        return {**value, "names": [_digest(each) for each in value["names"]]}
    if name in EMPTIED and value:
        return [] if isinstance(value, list | tuple) else {}
    return _without_texts(value)


def loggable(event: ev.Event) -> ev.Event:
    """The event as the event log has it, without what only the driver needs."""
    if isinstance(event, ev.WorkerReady | ev.WorkerFormed):  # they come in thousands
        return event
    match event:
        case ev.SetupSubmitted(source=source, pushed=pushed):
            return replace(event, source=_digest(source), pushed=_without_values(pushed))
        case program_events.BreakpointReached():
            return replace(event, text="")
        case script_events.NodeFailed(failures=failures):
            return replace(event, failures=tuple(replace(failure, traceback="") for failure in failures))
    return event


def _without_source(cell: SetupCell) -> SetupCell:
    return replace(cell, source=_digest(cell.source), pushed=_without_values(cell.pushed))


def _without_values(pushed: Pushed | None) -> Pushed | None:
    return None if pushed is None else replace(pushed, values=Blob(pushed.values.size))


def _digest(source: str) -> str:
    """In place of a cell's source or a name: the core only compares them."""
    return f"sha256 {hashlib.sha256(source.encode(errors='replace')).hexdigest()[:16]}"
