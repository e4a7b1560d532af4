"""Saving a state while the training goes on, loading the newest checkpoint that can be used, and a job's plan of both.

All ranks hold the same state, so one writes and the others need not wait: no collective, no abort and no change of the
world can hang a save. The tensors are copied at the call; a thread writes the copies, one checkpoint at a time.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from nbelastic.errors import StateError, UsageError, WaitTimeoutError
from nbelastic.state import checkpoint_files as checkpoint
from nbelastic.state.checkpoint_files import Snapshot, reason
from nbelastic.state.transfer import describe
from nbelastic.system.argument_types import PATH, WHOLE, check_kind, check_optional

KEEP = 3  # checkpoints
TURN = 2.0  # seconds that each rank has for the last one, if there is no driver
LOOK = 0.1  # seconds between looks for it


class State(Protocol):
    """What can be saved: see `state.State`."""

    commits: int

    @property
    def clean(self) -> bool: ...

    def _contents(self) -> dict[str, Any]: ...

    def _device(self) -> torch.device: ...

    def _accept(self, described: Any, where: torch.device, fill: Callable[[list[torch.Tensor]], object]) -> None: ...


class Copies:
    """Memory for copies of tensors, used again for the next ones: new memory takes longer than the copying."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []

    def take(self, state: State) -> tuple[Snapshot, list[Any]]:
        """A copy of `state`, and what to synchronise with before it is read: the GPU may still be at it.

        It has its place in the GPU's own order, so what the training does next does not overtake it.
        """
        tensors: list[torch.Tensor] = []
        described = describe(state._contents(), tensors)
        stream = io.BytesIO()
        try:
            torch.save(described, stream)
        except Exception as error:  # noqa: BLE001  (pickling fails in many ways)
            raise StateError(f"the state holds something that cannot be saved ({reason(error)}).") from None
        held = [*self._held, *[None] * len(tensors)]
        self._held = [_room(tensor, known) for tensor, known in zip(tensors, held, strict=False)]
        for copy, tensor in zip(self._held, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        events = []
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            events.append(torch.cuda.Event())
            events[-1].record(torch.cuda.current_stream(device))
        return Snapshot(state.commits, stream.getvalue(), checkpoint.names(described), tuple(self._held)), events


def _room(tensor: torch.Tensor, known: torch.Tensor | None) -> torch.Tensor:
    pinned = tensor.is_cuda
    wanted = (tensor.shape, tensor.dtype, pinned)
    if known is not None and (known.shape, known.dtype, known.is_pinned() if pinned else False) == wanted:
        return known
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)


class Saving:
    """A checkpoint that is being written. A failure is also said on stderr, as nobody may be waiting."""

    def __init__(self, folder: Path, keep: int, commits: int) -> None:
        self._folder, self._keep, self._commits = folder, keep, commits
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: StateError | None = None

    def begin(self, snapshot: Snapshot, events: list[Any], then: Callable[[Path], object]) -> None:
        """Write `snapshot` in a thread, which the end of the process waits for; call `then(path)` in it."""
        self._thread = threading.Thread(target=self._write, args=(snapshot, events, then), name="nbelastic-checkpoint")
        self._thread.start()

    def _write(self, snapshot: Snapshot, events: list[Any], then: Callable[[Path], object]) -> None:
        try:
            for event in events:
                event.synchronize()
            self._path = checkpoint.write(self._folder, snapshot, self._keep)
            then(self._path)
        except Exception as error:  # noqa: BLE001  (whatever it is: it must be seen, and the training goes on)
            text = f"the checkpoint of commit {self._commits} was not written to {self._folder}: {reason(error)}."
            self._error = StateError(text)
            _say(text)

    def done(self) -> bool:
        """Whether it has been written, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path | None:
        """Wait, and return where it is; None on a rank that does not write. StateError, or WaitTimeoutError."""
        if self._thread is not None:
            self._thread.join(timeout)
        if not self.done():
            raise WaitTimeoutError(f"{timeout:g} s were not enough to write a checkpoint to {self._folder}.")
        if self._error is not None:
            raise self._error
        return self._path

    def settle(self) -> None:
        """Wait until it is over, however it ends."""
        if self._thread is not None:
            self._thread.join()


_last: Saving | None = None


def save(state: State, path: str | Path, *, keep: int = KEEP, writes: bool = True) -> Saving:
    """Begin to write `state`, as it is now, into the folder `path`; returns when the tensors have been copied.

    It waits for a checkpoint that is still being written. `writes=False`: this rank leaves it to another.
    StateError if the folder cannot be written, or the state cannot be saved.
    """
    folder = _folder(path)
    check_optional("keep", keep, WHOLE)
    if keep is not None and keep < 1:
        raise UsageError(f"keep={keep}: at least 1.")
    if not writes:
        return Saving(folder, keep, state.commits)
    checkpoint.prepare(folder)
    return _save(state, folder, keep, Copies())


def _save(
    state: State, folder: Path, keep: int, copies: Copies, then: Callable[[Path], object] = lambda _: None
) -> Saving:
    global _last
    _settle()
    snapshot, events = copies.take(state)
    _last = Saving(folder, keep, state.commits)
    _last.begin(snapshot, events, then)
    return _last


def load(state: State, path: str | Path) -> Path:
    """Become the state of a checkpoint, or of the newest in a folder that can be used; which it was.

    What is wrong with newer ones is said on stderr. StateError if there is none, or none that can be used.
    """
    found = _load(state, _folder(path))
    if found is None:
        raise StateError(f"there is no checkpoint in {path}.")
    return found


def _load(state: State, path: Path) -> Path | None:
    try:
        known = [path] if checkpoint.is_one(path) else checkpoint.listed(path)
    except OSError as error:
        raise StateError(f"there is no checkpoint in {path} ({reason(error)}).") from None
    problems = []
    for candidate in known:
        try:
            _become(state, candidate)
        except StateError as error:
            problems.append(f"checkpoint {candidate.name} is not used: {str(error).rstrip('.')}")
            if candidate != known[-1]:
                _say(f"{problems[-1]}; the one before it is tried.")
        else:
            return candidate
    if problems:
        raise StateError(f"no checkpoint in {path} can be used: {'; '.join(problems)}.")
    return None


def _become(state: State, path: Path) -> None:
    manifest = checkpoint.verify(path)
    described = checkpoint.read_description(path, manifest)
    tensors = manifest.tensors[1:]
    try:
        state._accept(described, state._device(), lambda places: checkpoint.read_tensors(path, tensors, places))
    except Exception as error:  # noqa: BLE001  (a scheduler's own, for one: it is of another program)
        raise StateError(f"it does not fit this state: {reason(error)}") from None


def keep(state: State, folder: Path) -> None:
    """Write `state` into `folder`, this process's last deed. Raises what the disk raises, and StateError."""
    checkpoint.prepare(folder)
    snapshot, events = Copies().take(state)
    for event in events:
        event.synchronize()
    checkpoint.write(folder, snapshot, 1)


def take_kept(state: State, folder: Path, commit: int) -> None:
    """Become what `keep` has written into `folder`. StateError if that is not this commit, or not whole."""
    load(state, folder)
    if state.commits != commit:
        raise StateError(f"commit {state.commits} was kept in {folder}, and commit {commit} is wanted.")


class Plan:
    """A job's checkpoints: the newest is where it begins; every so many commits, and at the end, rank 0 writes one."""

    def __init__(self, folder: str, every: int, keep: int, speaks: Callable[[], bool]) -> None:
        self._folder, self._every, self._keep, self._speaks = _folder(folder), every, keep, speaks
        self._copies = Copies()
        self._next = 0  # the commit at which the next one is due; 0: not known yet
        self._saved = 0  # the commit of the last one
        self._wrote = False
        self._late = False  # it has been said that there are fewer than planned
        self.begun = False  # a world has been formed: from then on the ranks hold the state

    def prepare(self) -> None:
        """StateError if checkpoints cannot be written there."""
        checkpoint.prepare(self._folder)

    def resume(self, state: State) -> None:
        """Before the first world of a job, on the rank that the others receive the state from."""
        if self.begun:
            return
        found = _load(state, self._folder)
        if found is not None:
            self._saved = state.commits
            _say(f"the training goes on at commit {state.commits}, from {found}.")

    def committed(self, state: State) -> None:
        """At each commit. If a checkpoint is due while one is still being written, it is written when that is done."""
        if state.commits >= self._next:
            self._due(state)

    def _due(self, state: State) -> None:
        every, commits = self._every, state.commits
        if self._next == 0 and commits % every:  # a newcomer, or the beginning: not before the next multiple
            self._next = commits - commits % every + every
            return
        if self._speaks():
            if _last is not None and not _last.done():
                self._say_late()
                return
            self._write(state)
        self._next = commits - commits % every + every

    def ended(self, state: State, alone: int = 0) -> None:
        """The elastic function has returned, or was stopped: what it committed last is kept too.

        `alone`: the rank, if there is no driver. Then rank 0 may have died, and the next one writes instead, and so on: each
        after it has seen that none of those before has.
        """
        if state.clean and (self._speaks() or (alone and self._missed(state.commits, alone * TURN))):
            _settle()
            if state.commits > self._saved:
                self._write(state)

    def _missed(self, commits: int, patience: float) -> bool:
        """Whether nobody has written a checkpoint of this commit, or a later one, after so many seconds."""
        end = time.monotonic() + patience
        while not any(checkpoint.commits_of(path) >= commits for path in checkpoint.listed(self._folder)[:1]):
            if time.monotonic() > end:
                return True
            time.sleep(LOOK)
        return False

    def finish(self) -> None:
        """The program has ended: wait for the checkpoint that is being written, and give the memory back."""
        _settle()
        self._copies = Copies()

    def _write(self, state: State) -> None:
        begin, commits = time.monotonic(), state.commits
        try:
            _save(state, self._folder, self._keep, self._copies, lambda path: self._written(path, commits, begin))
        except Exception as error:  # noqa: BLE001  (out of memory, for one)
            _say(f"there is no checkpoint of commit {commits}: {reason(error)}.")

    def _written(self, path: Path, commits: int, begin: float) -> None:
        """The first is told of, so that one sees where they are and what they take."""
        if not self._wrote:
            size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
            _say(f"the first checkpoint, {path}, has {size:.1f} MB and took {time.monotonic() - begin:.1f} s.")
        self._wrote, self._saved = True, commits

    def _say_late(self) -> None:
        if not self._late:
            _say(f"writing a checkpoint takes longer than {self._every} commits: there are fewer than asked for.")
        self._late = True


def _settle() -> None:
    if _last is not None:
        _last.settle()


def _folder(path: str | Path) -> Path:
    check_kind("path", path, PATH)
    return Path(path).expanduser().absolute()


def _say(text: str) -> None:
    print(f"nbelastic: {text}", file=sys.stderr, flush=True)
