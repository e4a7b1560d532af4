"""The one folder in which everything of ours lies on a machine: `<temporary folder>/nbelastic-<uid>`, ours alone."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from nbelastic.core.errors import UsageError


def base() -> Path:
    """Made if it is not there. UsageError if somebody else could have put something into it."""
    path = Path(tempfile.gettempdir()) / f"nbelastic-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or path.is_symlink():
        raise UsageError(f"{path} belongs to somebody else or is open to others: remove it or set TMPDIR.")
    return path
