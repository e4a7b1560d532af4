"""Groups the stacks of workers that are at the same place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nbelastic.protocol.status import WorkerStack


def group_equal_stacks(stacks: Iterable[WorkerStack]) -> list[list[WorkerStack]]:
    """Group stacks of equal text and note, in the order of their first worker."""
    groups: dict[tuple[str, str], list[WorkerStack]] = {}
    for stack in stacks:
        groups.setdefault((stack.text, stack.note), []).append(stack)
    return list(groups.values())


def group_title(group: Sequence[WorkerStack]) -> str:
    """Return one line with the group's ranks, workers, place and note."""
    ranks = [str(stack.rank) for stack in group if stack.rank is not None]
    word = "rank" if len(ranks) == 1 else "ranks"
    parts = [f"{word} {', '.join(ranks)}"] if ranks else []
    parts.append(", ".join(stack.worker for stack in group))
    no_answer = "no answer: its process is suspended, or C code holds the GIL"
    parts += [group[0].place if group[0].text else no_answer, group[0].note]
    return " · ".join(filter(None, parts))
