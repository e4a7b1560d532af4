"""What a view asks for beside the state that it is sent: older events, output, stacks, a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nbelastic.errors import NbelasticError, UsageError
from nbelastic.notebook.dashboard_state import entries
from nbelastic.notebook.log_folding import fold, packed
from nbelastic.protocol.status import WorkerStack

if TYPE_CHECKING:
    from nbelastic.client.cluster import Cluster

HISTORY = 400  # events an answer
LINES = 1000  # of output an answer, after equal ones of several workers were joined
FOLDED = 20_000  # lines that are looked at for that: those of many ranks alike leave enough

Json = dict[str, Any]


def answer(cluster: Cluster, question: Mapping[str, Any], reply: Callable[[Json], None]) -> None:
    """Answer one question by `reply(answer)`: at once, or from the driver's thread when all is known. Raises nothing."""
    try:
        match dict(question):
            case {"ask": "hello"}:
                reply({})
            case {"ask": "history", **rest}:
                before = rest.get("before")
                reply(_history(cluster, before if isinstance(before, int) else None))
            case {"ask": "logs", "since": int(since), **rest}:
                worker = rest.get("worker")
                reply(_logs(cluster, worker if isinstance(worker, str) else None, since))
            case {"ask": "stacks"}:
                cluster.ask_stacks(lambda found: reply(_stacks(found)))
            case {"ask": "trace"}:
                reply({"trace": cluster.trace()})
            case _:
                raise UsageError("this is no question.")
    except NbelasticError as error:
        reply({"error": str(error)})


def _history(cluster: Cluster, before: int | None) -> Json:
    events, count = cluster.numbered_events()
    oldest = count - len(events) + 1
    end = len(events) if before is None else max(0, min(len(events), before - oldest))
    start = max(0, end - HISTORY)
    return {"events": entries(events[start:end], oldest + start), "oldest": oldest}


def _logs(cluster: Cluster, worker: str | None, since: int) -> Json:
    job = cluster.job
    if job is None:
        return {"job": None, "speakers": [], "lines": [], "unfinished": [], "next": 0, "writers": []}
    found = job.lines_since(since, worker, FOLDED)
    speakers, (lines, unfinished) = packed((fold(found)[-LINES:], fold(job.unfinished_lines(worker))))
    return {
        "job": job.name,
        "speakers": speakers,
        "lines": lines,
        "unfinished": unfinished,
        "next": found[-1][1].number if found else since,
        "writers": job.writers,
    }


def _stacks(found: Iterable[WorkerStack]) -> Json:
    groups = [
        {
            "workers": [[stack.worker, stack.rank] for stack in group],
            "place": group[0].place,
            "text": group[0].text,
            "note": group[0].note,
        }
        for group in alike(found)
    ]
    return {
        "stacks": [group for group in groups if group["text"]],
        "silent": [pair for group in groups if not group["text"] for pair in group["workers"]],
    }


def alike(stacks: Iterable[WorkerStack]) -> list[list[WorkerStack]]:
    """Group stacks of equal text and note, in the order of their first worker."""
    groups: dict[tuple[str, str], list[WorkerStack]] = {}
    for stack in stacks:
        groups.setdefault((stack.text, stack.note), []).append(stack)
    return list(groups.values())
