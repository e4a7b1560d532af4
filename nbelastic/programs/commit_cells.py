"""Runs a cell in the middle of the program, at a commit at which all ranks stand still.

The cell sees the names of the elastic function: its local variables, those of the functions through which it has called
`commit()`, the values of the state, `state` and `nbe`. It draws no random number of the training.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import torch
from IPython.core.getipython import get_ipython
from msgspec.structs import replace

from nbelastic.errors import StateError, UsageError
from nbelastic.programs import cells, state_pull
from nbelastic.programs.cell_interrupts import CellInterrupts
from nbelastic.protocol import cell_messages
from nbelastic.state import rng
from nbelastic.state.state import State
from nbelastic.state.tensor_snapshot import hashes
from nbelastic.state.transfer import to_bytes
from nbelastic.worker.process_group import world_collectives
from nbelastic.worker.session import Session
from nbelastic.worker.user_stack import user_frames

SOME_RANKS = "was set on some ranks only, so it keeps its value"
UNSHARED = 3  # references to a frame's copy of its variables: by the frame, by a variable and by `getrefcount`


class CellTimeoutError(Exception):
    """A cell has run for longer than its time limit."""


class CommitCells:
    """Of one elastic loop. All methods but `interrupt` are for the main thread."""

    def __init__(self, session: Session, state: State) -> None:
        self._session, self._state = session, state
        self._unaccepted = 0  # generation whose last cell may have changed the state on all ranks
        self._interrupts = CellInterrupts()

    def run(self, cell: cell_messages.CommitCell) -> cell_messages.CellResult:
        """Run the cell, or send the state. An error of it ends nothing."""
        if cell.pull is not None:
            return state_pull.pull(self._session, cell.number, cell.pull, self._state)
        state, begun, put = self._state, world_collectives(), self._session.cell_pieces.put
        exact = not cell.everywhere or state._is_quickly_hashed()
        random, mark, before = rng.get_states(), state._mark(exact=exact), state._small_values()
        with _no_commits(state), torch.enable_grad(), _names(state) as notes:
            result = cells.run_at_commit(self._session.worker, cell, put, self._time_limit(cell))
        rng.set_states(random)
        has_changed, begun = state._mark(exact=exact) != mark, world_collectives() - begun
        values, error = _changed_values(state, before)
        state._cell_ended(accepted=False, changed=has_changed)
        if error or not cell.everywhere:
            state._set_small_values({name: before[name] for name in values})
            notes += [error] if error else [f"state.{name} {SOME_RANKS}" for name in values]
            values = {}
        if has_changed and not cell.everywhere:
            notes.append("the cell has changed tensors of the state on some ranks only, so they are received again")
        self._unaccepted = cell.generation if cell.everywhere else 0
        changed = _hash(values, state._equal_tensors()) if has_changed or values else ""
        said = "".join(f"nbelastic: {note}.\n" for note in notes)
        if said:
            put(cell.number, "err", said)
        return replace(result, stderr=result.stderr + said, begun=begun, changed=changed)

    def accept(self) -> None:
        """All ranks go on after the last cell: what it has changed belongs to the commit."""
        generation, self._unaccepted = self._unaccepted, 0
        formation = self._session.formation
        if formation is not None and formation.generation == generation:
            self._state._cell_ended(accepted=True, changed=False)

    def interrupt(self, number: int) -> None:
        """In any thread: interrupt this cell, if it runs."""
        self._interrupts.interrupt(number)

    def _time_limit(self, cell: cell_messages.CommitCell) -> contextlib.AbstractContextManager[None]:
        """Raise CellTimeoutError in the cell at its limit. A call that Python cannot interrupt is up to the driver."""

        def end(requested: bool) -> NoReturn:
            reason = f"a cell may run for {cell.limit:g} s at a commit"
            raise CellTimeoutError("the client has left that waited for this cell" if requested else reason)

        return self._interrupts.running(cell.number, end, cell.limit)


def _changed_values(state: State, before: dict[str, Any]) -> tuple[dict[str, bytes], str]:
    """The values that a cell has set, by name; or the names of all, and why the state cannot keep what it has set."""
    try:
        after = state._small_values()
        pairs = {name: (bytes(to_bytes(before[name])), bytes(to_bytes(after[name]))) for name in before}
    except StateError as error:
        return dict.fromkeys(before, b""), f"the state keeps its values: {str(error).rstrip('.')}"
    return {name: new for name, (old, new) in pairs.items() if old != new}, ""


def _hash(values: dict[str, bytes], tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(repr((sorted(values.items()), hashes(tensors))).encode()).hexdigest()


@contextlib.contextmanager
def _no_commits(state: State) -> Iterator[None]:
    """Refuse commits of the cell: the ranks stand at one."""

    def refuse() -> NoReturn:
        raise UsageError("a cell that runs at a commit cannot commit.")

    state.__dict__["commit"] = refuse
    try:
        yield
    finally:
        del state.__dict__["commit"]


@contextlib.contextmanager
def _names(state: State) -> Iterator[list[str]]:
    """Lend the program's names to the cell, and set globals of the program that it replaces.

    Yields a list. At the end it has a note on each other name that the cell has replaced.
    """
    shared, notes = get_ipython().user_ns, list[str]()
    lent = {"nbe": sys.modules["nbelastic"], **state._contents.values, "state": state}
    of_globals, owners = dict[str, dict[str, Any]](), dict[str, str]()  # by name
    for frame in user_frames():
        if frame.f_globals is not shared:
            of_globals |= dict.fromkeys(frame.f_globals.keys() - shared.keys() - lent.keys(), frame.f_globals)
            lent = {**{name: value for name, value in frame.f_globals.items() if name not in shared}, **lent}
        if frame.f_locals is not frame.f_globals:
            variables = _local_variables(frame)
            lent |= variables
            owners |= dict.fromkeys(variables, frame.f_code.co_name)
    before = {name: shared[name] for name in lent if name in shared}
    shared.update(lent)
    try:
        yield notes
    finally:
        for name, value in lent.items():
            if shared.get(name) is value:
                pass
            elif name in owners:
                notes.append(f"{name} is a local variable of {owners[name]}(), which keeps its own value")
            elif name in state._contents.values:
                notes.append(f"{name} is a value of the state, which keeps it: set state.{name}")
            elif name in of_globals and name in shared:
                of_globals[name][name] = shared[name]
            shared.pop(name, None)
        shared.update(before)


def _local_variables(frame: FrameType) -> dict[str, Any]:
    """The local variables of a function. Before Python 3.13 the frame keeps a copy of them, which would live as long as it."""
    found = frame.f_locals
    variables = {name: value for name, value in found.items() if name.isidentifier()}
    if isinstance(found, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(found) == UNSHARED:
        found.clear()  # else the program has called `locals()`, and uses the same dictionary
    return variables
