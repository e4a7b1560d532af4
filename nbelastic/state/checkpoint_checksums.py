"""Checksums of the files of a checkpoint: torch does not notice changed bytes in them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from nbelastic.errors import StateError


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a checkpoint: its size in bytes, and the sha256 of its contents."""

    size: int
    sha256: str


def write_sealed(path: Path, line: bytes) -> None:
    """Write a new file: the line, and its checksum in a second one."""
    with path.open("xb") as file:
        file.write(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def measured(file: Path) -> File:
    """The size and the checksum of a file as it is now. Raises OSError."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()  # releases the GIL for the training thread
        return File(opened.tell(), digest)


def check_file(folder: Path, name: str, wanted: File) -> None:
    """StateError if this file of a checkpoint is not as it was written. Raises OSError."""
    if "/" in name:
        raise StateError(f"it names a file outside, {name!r}")
    size = (folder / name).stat().st_size
    if size != wanted.size:
        raise StateError(f"{name} has {size} bytes instead of {wanted.size}")
    if measured(folder / name) != wanted:
        raise StateError(f"{name} is damaged: its checksum is wrong")


def read_sealed(path: Path) -> bytes:
    """The line that `write_sealed` has written. StateError if it is damaged. Raises OSError."""
    raw = path.read_bytes()
    line, _, _ = raw.partition(b"\n")
    if raw != line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n":
        raise StateError(f"{path.name} is damaged: its checksum is wrong")
    return line
