"""How a worker, and what its program forks, ends at SIGTERM."""

from __future__ import annotations

import errno
import os
import signal
import sys

import pytest

from nbelastic.programs import boot


class EndedError(BaseException):
    pass


class FullDisk:
    def flush(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_worker_ends_at_sigterm_though_its_disk_is_full(monkeypatch):
    """It would live on: the error of its log would be raised in the program, whose job would fail."""

    def end(code):
        raise EndedError(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(sys, "__stdout__", FullDisk())
    before = signal.signal(signal.SIGTERM, boot._leave)
    try:
        with pytest.raises(EndedError, match="0"):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
