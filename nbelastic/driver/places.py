"""Where a cluster keeps its files: a private run folder (keys, sockets' addresses) and a folder for logs."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

from nbelastic.core.errors import UsageError
from nbelastic.folders import base


class RunDir:
    """`<temporary folder>/nbelastic-<uid>/<name>`, mode 0700, held by a lock for as long as the cluster lives."""

    def __init__(self, name: str) -> None:
        if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
            raise UsageError(f"{name!r} is no name for a cluster: use letters, digits, '-', '_' and '.'.")
        self.base = base()
        self.path = self.base / name
        self._name = name

    def take(self) -> None:
        """Make the folder ours. UsageError if a cluster of that name is running."""
        self._lock = os.open(self.base / f"{self._name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 20, 0).decode() or "unknown"
            os.close(self._lock)
            raise UsageError(
                f"a cluster named {self._name!r} is running already (process {holder}): stop it or choose another name."
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        shutil.rmtree(self.path, ignore_errors=True)  # of a dead driver
        self.path.mkdir(mode=0o700)

    def release(self) -> None:
        """Remove it: there are keys in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        (self.base / f"{self._name}.lock").unlink(missing_ok=True)
        os.close(self._lock)

    def log_dir(self) -> Path:
        """A new folder for the logs of this start."""
        return self.base / "logs" / f"{self._name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def gpus() -> int:
    """How many GPUs this process may use. torch is not asked: a kernel never imports it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() and part.strip() != "-1"])
    return len([p for p in Path("/dev").glob("nvidia*") if p.name.removeprefix("nvidia").isdigit()])
