"""Saves a state beside the training, loads the newest usable checkpoint, and plans the checkpoints of a job.

All ranks hold the same state, so one rank writes and the others do not wait: no collective, abort or change of the world
can block a save. A save copies the tensors at once; a thread writes the copies, one checkpoint at a time.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from nbelastic.errors import StateError, UsageError, WaitTimeoutError
from nbelastic.protocol.worker_messages import Checkpoint
from nbelastic.state import checkpoint_files as checkpoint
from nbelastic.state.checkpoint_files import Snapshot, reason
from nbelastic.state.tensor_snapshot import CPU, allocate, copy_all, free_pinned
from nbelastic.state.transfer import describe
from nbelastic.system.argument_types import PATH, WHOLE, check_kind, check_optional, user_path
from nbelastic.system.log_line import print_line

T = TypeVar("T")

KEEP = 3  # checkpoints
TURN_TIMEOUT = 2.0  # seconds that each rank has to write the last checkpoint if there is no driver
POLL = 0.1  # seconds between two checks whether it is there
TRIES = 5  # to load from a folder in which a job writes


class State(Protocol):
    """The methods that saving and loading use: see `nbelastic.state.state.State`."""

    commits: int

    @property
    def clean(self) -> bool: ...

    def _live(self) -> dict[str, Any]: ...

    def _device(self) -> torch.device: ...

    def _accept(self, described: Any, where: torch.device, fill: Callable[[list[torch.Tensor]], object]) -> None: ...


class CopyMemory:
    """Memory for copies of tensors, used for each checkpoint: allocating it takes longer than copying."""

    def __init__(self, *, used_again: bool = True) -> None:
        self._held: list[torch.Tensor] = []
        self._pins = used_again  # pinning memory takes longer than one copy

    def copy(self, state: State) -> tuple[Snapshot, list[Any]]:
        """A copy of `state`, and the CUDA events to wait for before reading it.

        The copy is in the order of the GPU's stream, so later training steps do not change it.
        """
        tensors: list[torch.Tensor] = []
        described = describe(state._live(), tensors)
        stream = io.BytesIO()
        try:
            torch.save(described, stream)
        except Exception as error:  # noqa: BLE001  (pickling fails in many ways)
            raise StateError(f"the state holds something that cannot be saved ({reason(error)}).") from None
        known = [*self._held, *[None] * len(tensors)]
        self._held = [
            held for held, tensor in zip(known, tensors, strict=False) if held is not None and _fits(tensor, held)
        ]
        reused = {id(held) for held in self._held}
        new = [(i, t) for i, (t, held) in enumerate(zip(tensors, known, strict=False)) if id(held) not in reused]
        made = allocate([(tensor, CPU, bool(tensor.is_cuda) and self._pins) for _, tensor in new])
        for (index, _), memory in zip(new, made, strict=True):
            self._held.insert(index, memory)
        copy_all(tensors, to=self._held)
        events = []
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            events.append(torch.cuda.Event())
            events[-1].record(torch.cuda.current_stream(device))
        return Snapshot(state.commits, stream.getvalue(), checkpoint.names(described), tuple(self._held)), events

    def free(self) -> None:
        """Free the memory, after it was written."""
        pinned = any(tensor.is_pinned() for tensor in self._held)
        self._held = []
        if pinned:
            free_pinned()


def _fits(tensor: torch.Tensor, held: torch.Tensor) -> bool:
    return (tensor.shape, tensor.dtype) == (held.shape, held.dtype)


class Saving:
    """A checkpoint that is being written. A failure is also printed to stderr, as no caller may wait for it."""

    def __init__(self, folder: Path, commits: int) -> None:
        self._folder, self._commits = folder, commits
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: StateError | None = None

    def begin(self, write: Callable[[], Path | None]) -> None:
        """Call `write()` in a thread; it returns the path. The process does not end before the thread."""
        self._thread = threading.Thread(target=self._write, args=(write,), name="nbelastic-checkpoint")
        self._thread.start()

    def _write(self, write: Callable[[], Path | None]) -> None:
        try:
            self._path = write()
        except Exception as error:  # noqa: BLE001  (print any error, and let the training go on)
            text = f"the checkpoint of commit {self._commits} was not written to {self._folder}: {reason(error)}."
            self._error = StateError(text)
            print_line(text)

    def done(self) -> bool:
        """Whether it has been written, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path | None:
        """Wait, and return its path; None on a rank that does not write. StateError, or WaitTimeoutError."""
        if self._thread is not None:
            self._thread.join(timeout)
        if not self.done():
            raise WaitTimeoutError(f"the checkpoint was not written to {self._folder} within {timeout:g} s.")
        if self._error is not None:
            raise self._error
        return self._path

    def join(self) -> None:
        """Wait until it is written or has failed."""
        if self._thread is not None:
            self._thread.join()


_last: Saving | None = None


def save(state: State, path: str | Path, *, keep: int = KEEP, writes: bool = True) -> Saving:
    """Begin to write `state`, as it is now, into the folder `path`; returns when the tensors are copied.

    Waits for a checkpoint that is still being written. With `writes=False` another rank writes.
    StateError if the folder cannot be written, or the state cannot be saved.
    """
    folder = as_folder(path)
    check_optional("keep", keep, WHOLE)
    if keep is not None and keep < 1:
        raise UsageError(f"keep={keep}: at least 1.")
    if not writes:
        return Saving(folder, state.commits)
    checkpoint.prepare(folder)
    return _save(state, folder, keep, CopyMemory())


def _save(
    state: State, folder: Path, keep: int, copies: CopyMemory, then: Callable[[Path], object] = lambda _: None
) -> Saving:
    global _last
    _join_last()
    snapshot, events = copies.copy(state)
    _last = Saving(folder, state.commits)

    def write() -> Path:
        for event in events:
            event.synchronize()
        path = checkpoint.write(folder, snapshot, keep)
        then(path)
        return path

    _last.begin(write)
    return _last


def load(state: State, path: str | Path) -> Path:
    """Load a checkpoint, or the newest usable one of a folder; returns its path.

    Prints to stderr why newer ones are not usable. StateError if none is usable, or there is none.
    """
    found = _load(state, as_folder(path))
    if found is None:
        raise StateError(f"there is no checkpoint in {path}.")
    return found


def _load(state: State, path: Path) -> Path | None:
    """If a job writes to the folder, and has removed the newest checkpoint since, there are newer ones by now."""
    for left in reversed(range(TRIES)):
        try:
            known = [path] if checkpoint.is_checkpoint(path) else checkpoint.listed(path)
        except OSError as error:
            raise StateError(f"there is no checkpoint in {path} ({reason(error)}).") from None
        try:
            return first_usable(path, known, lambda candidate: _load_one(state, candidate))
        except StateError:
            if not left or path in known or known[0].exists():
                raise
    return None


def first_usable(path: Path, known: Sequence[Path], use: Callable[[Path], T]) -> T | None:
    """What `use(checkpoint)` returns for the first of `known` for which it raises no StateError; None if there are none.

    Prints to stderr why those before it are not used. StateError if none can be used. `path`: their folder, for that text.
    """
    problems = []
    for candidate in known:
        try:
            return use(candidate)
        except StateError as error:
            problems.append(f"checkpoint {candidate.name} is not used: {str(error).rstrip('.')}")
            if candidate != known[-1]:
                print_line(f"{problems[-1]}; the one before it is tried.")
    if problems:
        raise StateError(f"no checkpoint in {path} can be used: {'; '.join(problems)}.")
    return None


def _load_one(state: State, path: Path) -> Path:
    manifest = checkpoint.verify(path)
    try:
        described = checkpoint.read_description(path, manifest)
    except OSError as error:  # it has been removed since
        raise StateError(reason(error)) from None
    tensors, mine = manifest.tensors[1:], state._live()
    try:
        state._accept(described, state._device(), lambda places: checkpoint.read_tensors(path, tensors, places))
    except Exception as error:  # noqa: BLE001  (of the user's scheduler, for example)
        raise StateError(f"it does not fit this state: {reason(error)}") from None
    now = state._live()
    tell_other_requires_grad(mine["requires_grad"], now["requires_grad"], path)
    for name, contents in mine["optimizers"].items():
        for group in contents["names"][len(now["optimizers"][name]["names"]) :]:
            more = f" and {len(group) - 1} more" if group[1:] else ""
            print_line(f"{name} does not train {''.join(group[:1])}{more}: it has no such group in {path.name}.")
    return path


def tell_other_requires_grad(before: Mapping[str, bool], now: Mapping[str, bool], path: Path) -> None:
    """Print a line if the checkpoint `path` has changed which parameters are trained."""
    other = [name for name, value in now.items() if value != before.get(name)]
    if other:
        more = f" and of {len(other) - 1} more" if other[1:] else ""
        print_line(f"requires_grad of {other[0]}{more} is as in {path.name}, and not as the program has set it.")


def write_kept(state: State, folder: Path) -> None:
    """Write `state` into `folder` before this process ends. Raises OSError and StateError."""
    checkpoint.prepare(folder)
    snapshot, events = CopyMemory(used_again=False).copy(state)
    for event in events:
        event.synchronize()
    checkpoint.write(folder, snapshot, 1)


def load_kept(state: State, folder: Path, commit: int) -> None:
    """Load what `write_kept` wrote into `folder`. StateError if it is not this commit, or not complete."""
    load(state, folder)
    if state.commits != commit:
        raise StateError(f"{folder} has commit {state.commits} instead of commit {commit}.")


class Plan:
    """A job's checkpoints: it begins from the newest; rank 0 writes one every `every` commits, and one at the end."""

    def __init__(self, folder: str, every: int, keep: int, is_rank_0: Callable[[], bool]) -> None:
        self.folder, self.every, self.keep, self._is_rank_0 = as_folder(folder), every, keep, is_rank_0
        self._copies = CopyMemory()
        self._next = 0  # the commit at which the next one is due; 0: not known yet
        self.saved = 0  # the commit of the last one
        self._newest: tuple[int, int, float] | None = None  # commit, bytes, and when it was complete (monotonic)
        self._wrote = False
        self._warned = False  # that there are fewer checkpoints than requested
        self.begun = False  # a world was formed: the ranks hold the state from then on

    def prepare(self) -> None:
        """StateError if checkpoints cannot be written there."""
        checkpoint.prepare(self.folder)

    def resume(self, state: State) -> None:
        """Load the newest checkpoint before the job's first world, on the rank that sends the state to the others."""
        if self.begun:
            return
        found = _load(state, self.folder)
        if found is not None:
            self.found(found, state.commits)
            print_line(f"the training continues at commit {state.commits}, from {found}.")

    def found(self, path: Path, commits: int) -> None:
        """The job goes on from this checkpoint, of so many commits."""
        self.saved = commits
        age = max(0.0, time.time() - path.stat().st_mtime)
        self._newest = commits, _size(path), time.monotonic() - age

    def report(self, now: float) -> Checkpoint:
        """What clients see of the checkpoints at the monotonic time `now`."""
        if self._newest is None:
            return Checkpoint(self.every)
        commits, size, at = self._newest
        return Checkpoint(self.every, commits, max(0.0, now - at), size)

    def committed(self, state: State) -> None:
        """Called at each commit. A checkpoint that is due while one is being written waits for that."""
        if state.commits >= self._next:
            self._write_if_free(state)

    def _write_if_free(self, state: State) -> None:
        every, commits = self.every, state.commits
        if self._next == 0 and commits % every:  # a newcomer, or the job's start: wait for the next multiple
            self._next = commits - commits % every + every
            return
        if self._is_rank_0():
            if _last is not None and not _last.done():
                self.warn()
                return
            self._write(state)
        self._next = commits - commits % every + every

    def ended(self, state: State, turn: int | None) -> None:
        """The elastic function has returned or was stopped: write the last commit.

        `turn`: 0: at once; n: as n-th rank, only if there is none of this commit or a later one by then; None: not here.
        """
        if turn is None or not state.clean:
            return
        if turn == 0 or self._is_missing_after(state.commits, (turn - 1) * TURN_TIMEOUT):
            _join_last()
            if state.commits > self.saved:
                self._write(state)

    def _is_missing_after(self, commits: int, timeout: float) -> bool:
        """Whether, after `timeout` seconds, there is no checkpoint of this commit or a later one."""
        end = time.monotonic() + timeout
        while not any(checkpoint.commits_of(path) >= commits for path in checkpoint.listed(self.folder)[:1]):
            if time.monotonic() > end:
                return True
            time.sleep(POLL)
        return False

    def finish(self) -> None:
        """The program has ended: wait for the checkpoint that is being written, and free the memory."""
        _join_last()
        self._copies.free()

    def _write(self, state: State) -> None:
        begin, commits = time.monotonic(), state.commits
        try:
            _save(state, self.folder, self.keep, self._copies, lambda path: self.written(path, commits, begin))
        except Exception as error:  # noqa: BLE001  (out of memory, for example)
            print_line(f"there is no checkpoint of commit {commits}: {reason(error)}.")

    def written(self, path: Path, commits: int, begin: float) -> None:
        """A checkpoint is complete. Print the path, size and duration of the first one."""
        size, now = _size(path), time.monotonic()
        if not self._wrote:
            print_line(f"the first checkpoint, {path}, has {size / 1e6:.1f} MB and took {now - begin:.1f} s.")
        self._wrote, self.saved, self._newest = True, commits, (commits, size, now)

    def warn(self) -> None:
        """A checkpoint that was due is left out: print that once."""
        if not self._warned:
            print_line(f"writing a checkpoint takes longer than {self.every} commits: there are fewer than requested.")
        self._warned = True


def _size(path: Path) -> int:
    """The bytes of a checkpoint."""
    return sum(file.stat().st_size for file in path.iterdir())


def _join_last() -> None:
    if _last is not None:
        _last.join()


def as_folder(path: str | Path) -> Path:
    """The absolute path of a folder that the user has given."""
    check_kind("path", path, PATH)
    return user_path(path).absolute()
