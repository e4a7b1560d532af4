"""Messages about the user's own modules, which go from the notebook to the hosts, and the check of what a host accepts.

A file is named by the SHA-256 of its content, a code version by the SHA-256 of its list of files.
"""

# mypy: disable-error-code="misc"
# (subclasses of a frozen msgspec struct are frozen, too, which mypy does not know)
from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from nbelastic.protocol.messages import Message

MAX_SIZE = 64 << 20  # bytes in all files of a version
MAX_FILES = 20_000  # of a version
MAX_PATH, MAX_NAME = 1000, 255  # bytes of a path, and of one name in it
MAX_FOLDERS = 64
PIECE = 1 << 18  # bytes of a file in one message
BATCH = 1 << 22  # bytes per request for pieces
MAX_PIECES = 256  # per request
_DIGEST = re.compile(r"[0-9a-f]{64}")

SomePieces = Annotated[tuple[tuple[int, int, int], ...], Meta(max_length=MAX_PIECES)]


class CodeFile(Struct, frozen=True, array_like=True):
    """A file of a version. `path`: relative to the folder number `folder`, with slashes."""

    folder: int
    path: str
    digest: str
    size: int  # bytes


class Code(Struct, frozen=True):
    """A version: all files of the user's modules at one moment.

    `folders`: where the modules are on the notebook's machine, in the order in which Python searches them.
    """

    folders: tuple[str, ...]
    files: tuple[CodeFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def digests(self) -> Mapping[tuple[str, str], str]:
        """The content of each file, by its folder on the notebook's machine and its path there."""
        return {(self.folders[file.folder], file.path): file.digest for file in self.files}


class PlacedCode(Struct, frozen=True):
    """A version on a host, as its agent writes it down for the workers: `folders` are this host's."""

    folders: tuple[str, ...]
    code: Code


class StoreCode(Message):
    """Driver → agent: get this version, then answer with `CodeStored`. Other versions than those in `keep` are not needed."""

    version: str
    code: Code
    keep: tuple[str, ...] = ()


class FetchCode(Message):
    """Agent → driver: send these `pieces` of files of a version: the file's number, offset and length of each."""

    host: str
    version: str
    pieces: SomePieces


class CodePiece(Message):
    """Driver → agent: the answer to `FetchCode`, one for each piece."""

    version: str
    file: int
    offset: int
    data: bytes


class CodeStored(Message):
    """Agent → driver: this host has the version, or cannot have it because of `problem`.

    `is_copied`: it was sent to this host; else the same files are in the notebook's folders here. `received`: how many bytes
    were sent just now.
    """

    host: str
    version: str
    problem: str = ""
    is_copied: bool = False
    received: int = 0


def version_of(code: Code) -> str:
    """The name of a version."""
    return sha256(msgspec.json.encode(code)).hexdigest()


def why_refused(order: StoreCode) -> str:
    """Why an agent must not write these files; empty if it may.

    A path must lead to a new file below the version's own folder.
    """
    code = order.code
    if order.version != version_of(code):
        return "its name is not the hash of its list of files"
    if not all(map(_DIGEST.fullmatch, order.keep)):
        return "a version to keep is not a hash"
    if len(code.files) > MAX_FILES or len(code.folders) > MAX_FOLDERS or not 0 <= code.size <= MAX_SIZE:
        return f"it has {len(code.files)} files with {code.size} bytes in {len(code.folders)} folders"
    files, folders = set[tuple[str, ...]](), set[tuple[str, ...]]()
    for file in code.files:
        parts = (str(file.folder), *file.path.split("/"))
        if not 0 <= file.folder < len(code.folders) or file.size < 0 or not _DIGEST.fullmatch(file.digest):
            return f"{file.path!r} has a wrong folder, size or hash"
        if len(file.path.encode(errors="replace")) > MAX_PATH or not all(map(_is_name, parts)):
            return f"{file.path!r} is not a path below a folder"
        if parts in files:
            return f"{file.path!r} is there twice"
        files.add(parts)
        folders.update(parts[:depth] for depth in range(1, len(parts)))
    both = files & folders
    return f"{'/'.join(min(both)[1:])!r} is both a file and a folder" if both else ""


def _is_name(part: str) -> bool:
    """Whether this is an ordinary name of a file or folder."""
    return part not in ("", ".", "..") and len(part.encode(errors="replace")) <= MAX_NAME and part.isprintable()
