"""A text stream whose disk is full."""

import errno
import io
import os


class FullDisk(io.StringIO):
    """Nothing can be written to it, nor was what it has buffered."""

    def write(self, _text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
