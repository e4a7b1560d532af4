"""Answers the queries of a dashboard view: older events, output, stacks, a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from nbelastic.errors import UsageError
from nbelastic.notebook.dashboard_contract import (
    AnyAnswer,
    AnyQuery,
    FrameQuery,
    HelloQuery,
    HistoryAnswer,
    HistoryQuery,
    LogsAnswer,
    LogsQuery,
    ReportsAnswer,
    ReportsQuery,
    StackGroup,
    StacksAnswer,
    StacksQuery,
    StepTimesAnswer,
    StepTimesQuery,
    StepTimesRow,
    TraceQuery,
    Writer,
)
from nbelastic.notebook.dashboard_state import event_entries, five_digits
from nbelastic.notebook.log_folding import fold_lines, pack_lines
from nbelastic.notebook.stack_groups import group_equal_stacks
from nbelastic.protocol.report_history import PLACE
from nbelastic.protocol.status import StepTimes, WorkerStack

if TYPE_CHECKING:
    from nbelastic.client.cluster import Cluster

MAX_EVENTS = 400  # in one answer
MAX_LINES = 2000  # of output in one answer, after equal lines of several workers were folded
MAX_CELLS, LEAST_COLUMNS = 20_000, 24  # of step times in one answer, and of each rank
MAX_LINES_TO_FOLD = 20_000  # so many that enough are left after folding equal lines of many ranks


def decode_query(message: Any) -> AnyQuery:
    """Return a view's message as a query. UsageError if it is not one."""
    try:
        query: AnyQuery = msgspec.convert(message, AnyQuery)
    except msgspec.ValidationError as error:
        raise UsageError("unknown query") from error
    return query


def answer_query(cluster: Cluster, query: AnyQuery, reply: Callable[[AnyAnswer], None]) -> None:
    """Call `reply(answer)`, at once or later from the connection's thread."""
    match query:
        case HelloQuery() | FrameQuery():
            reply({})
        case HistoryQuery(before=before):
            reply(_history(cluster, before))
        case LogsQuery(worker=worker, since=since):
            reply(_logs(cluster, worker, since))
        case ReportsQuery(version=version, count=count):
            reply(_reports(cluster, version, count))
        case StacksQuery():
            cluster.ask_stacks(lambda stacks: reply(_stacks(stacks)))
        case StepTimesQuery():
            cluster.ask_step_times(
                lambda times: reply(
                    _step_times(times) if times is not None else {"error": "the driver does not answer"}
                )
            )
        case TraceQuery():
            reply({"trace": cluster.trace()})
        case _:
            assert_never(query)


def _history(cluster: Cluster, before: int | None) -> HistoryAnswer:
    events, count = cluster.numbered_events()
    oldest = count - len(events) + 1
    end = len(events) if before is None else max(0, min(len(events), before - oldest))
    start = max(0, end - MAX_EVENTS)
    return {"events": event_entries(events[start:end], oldest + start), "oldest": oldest}


def _logs(cluster: Cluster, worker: str | None, since: int) -> LogsAnswer:
    job = cluster.job
    if job is None:
        return {"job": None, "speakers": [], "lines": [], "unfinished": [], "next": 0, "more": False, "writers": []}
    lines_since = job.lines_since(since, worker, MAX_LINES_TO_FOLD)
    folded = fold_lines(lines_since, MAX_LINES)
    count = sum(len(line.writers) for line in folded)
    speakers, (lines, unfinished) = pack_lines((folded, fold_lines(job.unfinished_lines(worker))))
    return {
        "job": job.name,
        "speakers": speakers,
        "lines": lines,
        "unfinished": unfinished,
        "next": lines_since[count - 1][1].number if count else since,
        "more": count < len(lines_since),
        "writers": [Writer(*writer) for writer in job.writers],
    }


def _reports(cluster: Cluster, version: str, count: int) -> ReportsAnswer:
    new = cluster.report_history().since(version, max(0, count))
    first = len(PLACE)
    rows = [
        [*row[:1], round(row[1] or 0, 1), *row[2:first], *(None if x is None else five_digits(x) for x in row[first:])]
        for row in new.rows
    ]
    return {"version": new.version, "start": new.start, "names": list(new.names), "rows": rows}


def _stacks(stacks: Iterable[WorkerStack]) -> StacksAnswer:
    groups: list[StackGroup] = [
        {
            "workers": [Writer(stack.worker, stack.rank) for stack in group],
            "place": group[0].place,
            "text": group[0].text,
            "note": group[0].note,
        }
        for group in group_equal_stacks(stacks)
    ]
    return {
        "stacks": [group for group in groups if group["text"]],
        "silent": [pair for group in groups if not group["text"] for pair in group["workers"]],
    }


def _step_times(times: StepTimes) -> StepTimesAnswer:
    columns = max(LEAST_COLUMNS, MAX_CELLS // max(1, len(times.ranks)))
    rows = [
        StepTimesRow(rank.worker, [None if x is None else five_digits(x) for x in rank.times[-columns:]])
        for rank in times.ranks
    ]
    return {
        "span": times.span,
        "end": times.end,
        "rows": rows,
        "texts": {str(r.rank): r.text for r in times.ranks if r.text},
    }
