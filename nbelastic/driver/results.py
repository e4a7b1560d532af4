"""The return values of a job's ranks, received as bytes from the workers. The driver never unpickles them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nbelastic.protocol import messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.system import pickling
from nbelastic.system.private_files import replace_private

Send = Callable[[WorkerId, messages.Message], object]


class Outcome(NamedTuple):
    """How a program ended on one worker: its pickled value, or an error (one line, with its traceback)."""

    error: str = ""
    traceback: str = ""
    value: messages.Blob | None = None


class _Fetch(NamedTuple):
    """A value that is being fetched from another machine."""

    job: str
    size: int
    data: bytearray
    done: Callable[[Outcome], None]


class Results:
    """Lives in the driver's thread.

    A value is in the message, or in a file under `folder`, or must be fetched in pieces with `send(worker, message)`. One value
    per worker is fetched at a time. `what` names a value in errors.
    """

    def __init__(self, folder: Path, send: Send, what: str = "the result") -> None:
        self._folder, self._send, self._what = folder, send, what
        self._fetches: dict[WorkerId, _Fetch] = {}

    def receive(self, result: worker_messages.ProgramResult, done: Callable[[Outcome], None]) -> None:
        """Call `done(outcome)` as soon as the value is available, which may be at once."""
        value = result.value
        self._fetches.pop(result.worker, None)
        if value is None:
            done(Outcome(result.error or "an error without a message", result.traceback))
        elif (
            result.job in ("", "..") or Path(result.job).name != result.job
        ):  # the name of a folder: it must not lead elsewhere
            done(Outcome(f"{self._what} of {result.worker} belongs to no job: {result.job[:80]!r}"))
        elif value.data:
            done(Outcome(value=value))
        elif value.path:
            done(self._in_file(result, value))
        else:
            why = self._no_space(result, value.size)
            if why:
                done(Outcome(why))
                return
            self._fetches[result.worker] = _Fetch(result.job, value.size, bytearray(), done)
            self._send(result.worker, worker_messages.FetchResult(result.job, 0))

    def _in_file(self, result: worker_messages.ProgramResult, value: messages.Blob) -> Outcome:
        path = Path(value.path)
        if path.parent != self.folder(result.job):  # the workers' key must not open any file of the notebook's user
            return Outcome(f"{self._what} of {result.worker} is outside the folder for results: {path}")
        try:
            complete = path.stat().st_size == value.size
        except (OSError, ValueError) as error:  # it may hold a NUL
            return Outcome(f"{self._what} of {result.worker} cannot be read: {error}")
        return Outcome(value=value) if complete else Outcome(f"{self._what} of {result.worker} is incomplete: {path}")

    def folder(self, job: str) -> Path:
        """Where the job's workers on this machine write long values."""
        return self._folder / job

    def remove_all_but(self, jobs: Collection[str]) -> None:
        """Remove the values of other jobs that the previous driver has left."""
        with suppress(FileNotFoundError):
            for folder in self._folder.iterdir():
                if folder.name not in jobs:
                    self.remove(folder.name)

    def remove(self, job: str) -> None:
        """Remove the values of a job. Clients that use them have mapped the files."""
        shutil.rmtree(self.folder(job), ignore_errors=True)

    def receive_piece(self, piece: worker_messages.ResultPiece) -> None:
        """Take the next bytes of a value; request more when all requested pieces have arrived."""
        fetch = self._fetches.get(piece.worker)
        if fetch is None or piece.job != fetch.job or piece.offset != len(fetch.data):
            return
        fetch.data.extend(piece.data)
        received = len(fetch.data)
        if received >= fetch.size:
            del self._fetches[piece.worker]
            fetch.done(self._store(piece.worker, fetch))
        elif received % (pickling.PIECES * pickling.PIECE) == 0:
            self._send(piece.worker, worker_messages.FetchResult(fetch.job, received))

    def _no_space(self, result: worker_messages.ProgramResult, size: int) -> str:
        """Why a value need not be fetched: the disk has no space for it, and it is too large to keep in memory."""
        with suppress(OSError):
            if size > max(pickling.IN_MEMORY, shutil.disk_usage(self._folder.parent).free):
                why = os.strerror(errno.ENOSPC)
                return pickling.no_space(f"{self._what} of {result.worker}", size, self._folder, why)
        return ""

    def _store(self, w: WorkerId, fetch: _Fetch) -> Outcome:
        """Write a long value to a file, which clients map. If the disk is full, it stays in memory or is an error."""
        path = self.folder(fetch.job) / str(w).replace("/", "-")
        if fetch.size > pickling.INLINE:
            try:
                replace_private(path, [memoryview(fetch.data)])
                return Outcome(value=messages.Blob(fetch.size, path=str(path)))
            except OSError as error:
                if fetch.size > pickling.IN_MEMORY:
                    return Outcome(
                        pickling.no_space(f"{self._what} of {w}", fetch.size, path.parent, error.strerror or str(error))
                    )
        return Outcome(value=messages.Blob(fetch.size, bytes(fetch.data)))

    def is_fetching(self, workers: Iterable[WorkerId]) -> bool:
        """Whether a value of one of these workers is being fetched."""
        return any(w in self._fetches for w in workers)

    def forget(self, workers: Iterable[WorkerId]) -> None:
        """Stop fetching the values of lost workers."""
        for w in workers:
            self._fetches.pop(w, None)
