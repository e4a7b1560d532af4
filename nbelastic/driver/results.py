"""The values of a job's program as they come from the workers: none of them is unpickled here."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nbelastic.protocol import messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.system import pickling
from nbelastic.system.files import replace_private

Send = Callable[[WorkerId, messages.Message], object]


class Outcome(NamedTuple):
    """What became of a program on one worker: its packed value, or an error (one line, with its traceback)."""

    error: str = ""
    traceback: str = ""
    value: messages.Blob | None = None


class _Coming(NamedTuple):
    """A value that is being fetched from another machine."""

    job: str
    size: int
    data: bytearray
    done: Callable[[Outcome], None]


class Results:
    """Lives in the driver's thread. A value is in the message, in a file in `folder`, or is fetched in pieces: `send(worker,
    message)` asks for them.
    """

    def __init__(self, folder: Path, send: Send) -> None:
        self._folder, self._send = folder, send
        self._coming: dict[WorkerId, _Coming] = {}

    def take(self, result: worker_messages.ProgramResult, done: Callable[[Outcome], None]) -> None:
        """Call `done(outcome)` when the value is here, which may be at once."""
        value = result.value
        self._coming.pop(result.worker, None)
        if value is None:
            done(Outcome(result.error or "an error without a message", result.traceback))
        elif value.data:
            done(Outcome(value=value))
        elif value.path:
            done(self._in_file(result, value))
        else:
            self._coming[result.worker] = _Coming(result.job, value.size, bytearray(), done)
            self._send(result.worker, worker_messages.FetchResult(result.job, 0))

    def _in_file(self, result: worker_messages.ProgramResult, value: messages.Blob) -> Outcome:
        path = Path(value.path)
        if path.parent != self.folder(result.job):  # the workers' key must not open any file of the notebook's user
            return Outcome(f"the result of {result.worker} is not where results are: {path}")
        try:
            whole = path.stat().st_size == value.size
        except OSError as error:
            return Outcome(f"the result of {result.worker} cannot be read: {error}")
        return Outcome(value=value) if whole else Outcome(f"the result of {result.worker} is not whole: {path}")

    def folder(self, job: str) -> Path:
        """Where its workers on this machine put long values."""
        return self._folder / job

    def remove_all_but(self, jobs: Collection[str]) -> None:
        """Of what a dead driver has left."""
        with suppress(FileNotFoundError):
            for folder in self._folder.iterdir():
                if folder.name not in jobs:
                    self.remove(folder.name)

    def remove(self, job: str) -> None:
        """Nobody asks for its values any more; who has them has mapped them."""
        shutil.rmtree(self.folder(job), ignore_errors=True)

    def piece(self, piece: worker_messages.ResultPiece) -> None:
        """The next bytes of a value; more of them are asked for when all have come that were."""
        coming = self._coming.get(piece.worker)
        if coming is None or piece.job != coming.job or piece.offset != len(coming.data):
            return
        coming.data.extend(piece.data)
        at = len(coming.data)
        if at >= coming.size:
            del self._coming[piece.worker]
            coming.done(Outcome(value=self._kept(piece.worker, coming)))
        elif at % (pickling.PIECES * pickling.PIECE) == 0:
            self._send(piece.worker, worker_messages.FetchResult(coming.job, at))

    def _kept(self, w: WorkerId, coming: _Coming) -> messages.Blob:
        """A long value in a file, where clients map it; in a message, if there is no room."""
        path = self.folder(coming.job) / str(w).replace("/", "-")
        if coming.size > pickling.INLINE:
            with suppress(OSError):
                replace_private(path, [memoryview(coming.data)])
                return messages.Blob(coming.size, path=str(path))
        return messages.Blob(coming.size, bytes(coming.data))

    def coming(self, workers: Iterable[WorkerId]) -> bool:
        """Whether pieces of one of their values are still to come."""
        return any(w in self._coming for w in workers)

    def forget(self, workers: Iterable[WorkerId]) -> None:
        """They are gone: nothing more comes."""
        for w in workers:
            self._coming.pop(w, None)
