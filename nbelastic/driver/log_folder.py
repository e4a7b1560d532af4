"""The log folder of a cluster on the driver's machine, and the driver's own files in it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nbelastic.driver.event_log import EVENTS
from nbelastic.errors import UsageError
from nbelastic.system.private_files import append_private, make_private

LOG = "driver.log"  # the standard output and error of the driver's process


def prepare_log_folder(folder: Path) -> None:
    """Make the folder and the driver's files in it. UsageError if they are not safe from other users.

    Members of a group may be able to write to the folder: shared project folders are so. They cannot read the files.
    """
    try:
        make_private(folder)
        found = folder.stat()
        if found.st_uid not in (os.getuid(), 0):
            raise UsageError(
                f"log_dir={folder} belongs to another user: name a folder of your own, such as a new one in it."
            )
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise UsageError(f"all users can write to log_dir={folder}: run `chmod o-w`, or name a new folder in it.")
        for name in (LOG, EVENTS):
            os.close(append_private(folder / name))
    except OSError as error:
        path = error.filename or folder
        raise UsageError(f"log_dir: {path} cannot be used ({error.strerror}): name another folder.") from None
