"""The user's modules on this host: fetches the versions that the driver names, and places them where workers import from.

`<folder>/files/<SHA-256>` has each content once. `<folder>/<version>/<number>` is the copy of one of the notebook's folders,
made of links to these. `<folder>/<version>.json` says where a version is, and is written last. If the notebook's own
folders have the same files on this host (it is the notebook's machine, or they are shared), nothing is copied.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections import deque
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import msgspec

from nbelastic.protocol.code_messages import (
    BATCH,
    MAX_PIECES,
    PIECE,
    Code,
    CodeFile,
    CodePiece,
    CodeStored,
    FetchCode,
    PlacedCode,
    StoreCode,
    why_refused,
)
from nbelastic.protocol.messages import Message
from nbelastic.system.folder_paths import placed_code
from nbelastic.system.private_files import make_private, replace_private


class CodeStore:
    """Lives in the agent's main thread. `folder`: of this agent alone, mode 0700."""

    def __init__(self, host: str, folder: Path) -> None:
        self._host, self._folder = host, folder
        self._orders: deque[StoreCode] = deque()  # the first one is being fetched
        self._expected: deque[tuple[int, int, int]] = deque()  # pieces that were requested: file, offset, length
        self._data = bytearray()  # the beginning of the file whose pieces arrive
        self._received = 0  # bytes of the first version

    @property
    def is_fetching(self) -> bool:
        """Whether a version is on its way: workers that start now would not have it."""
        return bool(self._orders)

    def handle(self, message: StoreCode | CodePiece) -> list[Message]:
        """Handle a message of the driver. Returns the answers."""
        return self._store(message) if isinstance(message, StoreCode) else self._take(message)

    def _store(self, order: StoreCode) -> list[Message]:
        """Get a version."""
        why = why_refused(order)
        if why:
            return [CodeStored(self._host, order.version, f"the driver sent a code version that is refused: {why}")]
        needed, first = {*order.keep, order.version}, self._orders[0] if self._orders else None
        with suppress(OSError):  # such as a disk that can only be read now: the next order tries again
            self._remove_all_but(needed)
        # A new driver sends an order again, and does not answer requests that the last one has received.
        others = [other for other in self._orders if other.version in needed - {order.version}]
        self._orders = deque([*others, order])
        return [] if self._orders[0] is first else self._begin()

    def _take(self, piece: CodePiece) -> list[Message]:
        """Take the next piece of the version that is being fetched; others are dropped."""
        if not self._orders or not self._expected or piece.version != self._orders[0].version:
            return []
        file, offset, length = self._expected[0]
        if (piece.file, piece.offset, len(piece.data)) != (file, offset, length):
            return []
        self._expected.popleft()
        self._data += piece.data
        self._received += len(piece.data)
        wanted = self._orders[0].code.files[file]
        try:
            if len(self._data) == wanted.size:
                self._write(wanted, bytes(self._data))
                self._data.clear()
            return [] if self._expected else self._go_on()
        except (OSError, ValueError) as error:
            return self._end(problem=_describe(error))

    def _begin(self) -> list[Message]:
        """Begin with the first version, unless it is here already."""
        self._expected.clear()
        self._data.clear()
        self._received = 0
        if not self._orders:
            return []
        order = self._orders[0]
        try:
            if placed_code(self._folder, order.version).exists():
                return self._end(is_copied=(self._folder / order.version).exists())
            make_private(self._folder / "files")
            if _is_in_place(order.code):
                self._place(order, order.code.folders)
                return self._end()
            self._remove_changed(order.code)
            return self._go_on()
        except (OSError, ValueError) as error:
            return self._end(problem=_describe(error))

    def _remove_changed(self, code: Code) -> None:
        """Remove contents that a worker has written to: its version has links to them."""
        for file in {file.digest: file for file in code.files}.values():
            if self._content(file).exists() and not _has_content(self._content(file), file):
                self._content(file).unlink()

    def _go_on(self) -> list[Message]:
        """Request the next pieces or, if there are none, place the version."""
        order = self._orders[0]
        self._expected.extend(self._missing_pieces(order.code))
        if self._expected:
            return [FetchCode(self._host, order.version, tuple(self._expected))]
        self._place(order, self._copy(order))
        return self._end(is_copied=True)

    def _end(self, *, is_copied: bool = False, problem: str = "") -> list[Message]:
        """The first version is here, or cannot be."""
        version = self._orders.popleft().version
        return [CodeStored(self._host, version, problem, is_copied, self._received), *self._begin()]

    def _missing_pieces(self, code: Code) -> list[tuple[int, int, int]]:
        """The next pieces of files whose content is not here, at most `BATCH` bytes. A file's pieces follow one another."""
        pieces: list[tuple[int, int, int]] = []
        seen, total = set[str](), 0
        for number, file in enumerate(code.files):
            if file.digest in seen or self._content(file).exists():
                continue
            seen.add(file.digest)
            if not file.size:
                self._write(file, b"")
            begin = len(self._data) if not pieces and file.size else 0
            for offset in range(begin, file.size, PIECE):
                if total >= BATCH or len(pieces) >= MAX_PIECES:
                    return pieces
                length = min(PIECE, file.size - offset)
                pieces.append((number, offset, length))
                total += length
        return pieces

    def _content(self, file: CodeFile) -> Path:
        return self._folder / "files" / file.digest

    def _write(self, file: CodeFile, data: bytes) -> None:
        if sha256(data).hexdigest() != file.digest:
            raise ValueError(f"{file.path} arrived damaged")
        replace_private(self._content(file), [data])

    def _copy(self, order: StoreCode) -> tuple[str, ...]:
        """Make the folders of a version. Nothing else writes there, so no path in it can be a link to elsewhere."""
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=self._folder))
        try:
            for number in range(len(order.code.folders)):
                (new / str(number)).mkdir(mode=0o700)
            for file in order.code.files:
                path = new / str(file.folder) / file.path
                make_private(path.parent)
                os.link(self._content(file), path)
            new.rename(self._folder / order.version)
        except OSError:
            shutil.rmtree(new, ignore_errors=True)
            raise
        return tuple(str(self._folder / order.version / str(number)) for number in range(len(order.code.folders)))

    def _place(self, order: StoreCode, folders: tuple[str, ...]) -> None:
        placed = PlacedCode(folders, order.code)
        replace_private(placed_code(self._folder, order.version), [msgspec.json.encode(placed)])

    def _remove_all_but(self, needed: set[str]) -> None:
        """Remove versions that no worker will import from any more, and contents that only they had."""
        unneeded = [path for path in self._folder.glob("*.json") if path.stem not in needed]
        for path in unneeded:
            path.unlink(missing_ok=True)
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
        if unneeded:
            for path in (self._folder / "files").glob("*"):
                if path.stat().st_nlink == 1 and not self._orders:
                    path.unlink(missing_ok=True)


def _describe(error: Exception) -> str:
    why = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.strerror else str(error)
    return f"it cannot store your code: {why}"


def _is_in_place(code: Code) -> bool:
    """Whether the notebook's folders are here too, with the same files: by their content, as other machines have folders of that name."""
    return all(_has_content(Path(code.folders[file.folder], file.path), file) for file in code.files)


def _has_content(path: Path, file: CodeFile) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as found:
            status = os.fstat(fd)
            is_like = stat.S_ISREG(status.st_mode) and status.st_size == file.size
            return is_like and sha256(found.read(file.size + 1)).hexdigest() == file.digest
    except (OSError, ValueError):
        return False
