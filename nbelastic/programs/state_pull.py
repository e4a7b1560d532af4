"""Sends the training state of this worker to a client: at a commit, or after the end of the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from nbelastic.errors import NbelasticError, StateError
from nbelastic.programs.tracebacks import summary
from nbelastic.protocol import cell_messages, messages
from nbelastic.state.state import State
from nbelastic.system import pickling
from nbelastic.system.private_files import replace_private
from nbelastic.worker.session import Session
from nbelastic.worker.threads import run_in_thread


def pull_kept(session: Session, number: int, request: cell_messages.Pull) -> cell_messages.CellResult:
    """Send the state as the elastic function has left it, or else as it was at its last commit."""
    try:
        state = _ended_state(session, request.job)
    except Exception as error:  # noqa: BLE001  (the client waits for an answer)
        return _result(session, number, error)
    return pull(session, number, request, state)


def _ended_state(session: Session, job: str) -> State:
    state = session.ended_state if session.facts.job == job else None
    if state is None:
        raise StateError("there is no training state: the job has run no elastic function, or a later one has begun")
    failed = session.facts.result is not None and session.facts.result.error
    if failed and state._small_names is None:
        state.undo()
        if not state.clean:
            raise StateError(
                "the program failed in the middle of a step, and its last commit was not copied: run it with checkpoint=FOLDER"
            )
    return state  # type: ignore[no-any-return]


def pull(session: Session, number: int, request: cell_messages.Pull, state: State) -> cell_messages.CellResult:
    """Copy the state, and let a thread send it. Returns the end of the cell, with an error in one line if there is one."""
    try:
        copied = b"".join(pickling.pack(values(state, request.name)))
    except Exception as error:  # noqa: BLE001  (pickling fails in many ways)
        return _result(session, number, error)
    run_in_thread(lambda: session.link.send(_send(session, request, copied)))
    return _result(session, number)


def _send(session: Session, request: cell_messages.Pull, copied: bytes) -> cell_messages.StatePulled:
    """Write a copied state into a file, or keep it until the driver has fetched it."""
    worker, size = session.worker, len(copied)
    if not request.folder:
        session.keep_state_value(request.key, copied)
        return cell_messages.StatePulled(worker, request.key, state=messages.Blob(size))
    path = Path(request.folder) / str(worker).replace("/", "-")
    try:
        replace_private(path, [copied])
    except Exception as error:  # noqa: BLE001  (the client waits for an answer)
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        text = f"the training state ({size / 1e6:,.1f} MB) cannot be saved in {request.folder}: {why}"
        return cell_messages.StatePulled(worker, request.key, text)
    return cell_messages.StatePulled(worker, request.key, state=messages.Blob(size, path=str(path)))


def _result(session: Session, number: int, error: Exception | None = None) -> cell_messages.CellResult:
    text = f"the training state cannot be sent: {summary(error)}" if error is not None else ""
    text = str(error).rstrip(".") if isinstance(error, NbelasticError) else text
    return cell_messages.CellResult(session.worker, number, "", "", text, "")


def values(state: State, name: str = "") -> Any:
    """The values of a state as plain data with tensors on the CPU: all by name, or this one. StateError if there is none."""
    held = state._contents.values
    if name and name not in held:
        raise StateError(f"this state has no {name!r}; it holds {', '.join(held) or 'nothing'}.")
    if state._small_names is not None and name not in state._small_names:
        raise StateError(f"the state is sharded, so no rank has all of it: {state._contents.user_words.save}.")
    found = {key: _plain(value) for key, value in held.items() if name in ("", key)}
    return found[name] if name else found


def _plain(value: Any) -> Any:
    plain = value.state_dict() if hasattr(value, "state_dict") else value
    return tree_map_only(torch.Tensor, _on_cpu, plain)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Without the memory around it, which a pickle would include."""
    if isinstance(tensor, DTensor):
        raise StateError("the state has sharded tensors, which no rank has as a whole.")
    tensor = tensor.detach()
    is_part = tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.cpu().contiguous().clone() if is_part else tensor.cpu()
