"""What a cell has printed on a worker."""

from __future__ import annotations

from nbelastic.protocol.worker_messages import CellResult

Executed = tuple[str, str, str, str | None]  # worker, stdout, stderr, error


def row(result: CellResult) -> Executed:
    """What a cell printed on one worker, and its error."""
    return str(result.worker), result.stdout, result.stderr, result.traceback or None
