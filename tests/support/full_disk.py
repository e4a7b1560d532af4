"""A text stream whose disk is full."""

import errno
import io
import os


class FullDisk(io.StringIO):
    """Nothing can be written to it."""

    def write(self, _text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
