"""How the tensors of a checkpoint get into its files."""

from __future__ import annotations

from typing import IO, Any


class StreamTransform:
    """Passes the file itself to torch for each tensor.

    Python flushes torch's own wrapper when it is collected. After an error the file is closed by then, and Python 3.13 prints
    a traceback.
    """

    def transform_save_stream(self, _item: Any, file: IO[bytes]) -> tuple[_UnclosableFile, list[str]]:
        return _UnclosableFile(file), []


class _UnclosableFile:
    """A file that stays open when torch closes it, as the next tensor goes into it too. torch flushes what it has saved."""

    def __init__(self, file: IO[bytes]) -> None:
        self.write, self.flush = file.write, file.flush

    def close(self) -> None:
        """The file itself is closed, and so flushed, after its last tensor."""
