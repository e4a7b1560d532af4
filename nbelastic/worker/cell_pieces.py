"""What a cell prints and displays, until the link thread sends it, and the cell's result after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import groupby

from nbelastic.protocol.cell_messages import CellPiece, CellResult
from nbelastic.protocol.ids import WorkerId
from nbelastic.system.terminal_text import LINE_STEP, drop_replaced_frames
from nbelastic.worker.output_buffer import MAX_TEXT, printable


class CellPieces:
    """The main thread puts, the link thread takes. Order is kept: a result comes after all that its cell has printed."""

    def __init__(self, worker: WorkerId) -> None:
        self._worker = worker
        self._waiting: deque[CellPiece | CellResult] = deque()

    def put(self, number: int, kind: str, text: str) -> None:
        """Put text of a stream ("out" or "err"), or a "display": a MIME bundle as JSON."""
        self._waiting.append(CellPiece(self._worker, number, kind, text))

    def end(self, result: CellResult) -> None:
        """Put the result of a cell."""
        self._waiting.append(result)

    def take(self) -> Iterator[CellPiece | CellResult]:
        """Yield what was put since the last call. Text of one stream is one piece, and of a long text only its end.

        Of a progress bar only the newest frame counts.
        """
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        for stream, group in groupby(taken, _stream):
            if stream is None:
                yield from group
            else:
                text = "".join(one.text for one in group if isinstance(one, CellPiece))
                text = "".join(map(drop_replaced_frames, LINE_STEP.split(text)))
                yield CellPiece(self._worker, *stream, shortened(text, MAX_TEXT))


def _stream(one: CellPiece | CellResult) -> tuple[int, str] | None:
    """Cell and stream of a text; None for all else."""
    return (one.number, one.kind) if isinstance(one, CellPiece) and one.kind != "display" else None


def shortened(text: str, most: int) -> str:
    """The last `most` characters, with a note on the others."""
    text = printable(text)
    left = len(text) - most
    return text if left <= 0 else f"… {left} characters are only in the log file …\n{text[left:]}"
