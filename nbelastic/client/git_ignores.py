"""Which files a folder's `.gitignore` files exclude, as git decides it."""

from __future__ import annotations

import time
from pathlib import Path

from pathspec import GitIgnoreSpec

FILE = ".gitignore"
MOST = 100_000  # paths that are remembered
SETTLED = 2_000_000_000  # ns; a file that has changed since may change once more within the resolution of its time

Key = tuple[int, ...] | None  # of a file as it was read; None: there was none
_known: dict[Path, GitIgnores] = {}  # of all searches of this process


def ignores_of(folder: Path) -> GitIgnores:
    """The result of the last search, with what it has found out, unless a file that counts has changed."""
    new, known = GitIgnores(folder), _known.get(folder)
    if known is not None and known.top == new.top and known.is_current():
        return known
    _known[folder] = new
    return new


class GitIgnores:
    """The `.gitignore` files from the top of a repository down to each folder, and its `.git/info/exclude`.

    Without a repository those from `folder` down. They are read once.
    """

    def __init__(self, folder: Path) -> None:
        self.top = next((each for each in (folder, *folder.parents) if (each / ".git").exists()), folder)
        self._specs: dict[Path, GitIgnoreSpec | None] = {}
        self._found: dict[tuple[tuple[str, ...], bool], bool] = {}
        self._keys: dict[Path, Key] = {}
        self._is_settled = True

    def is_current(self) -> bool:
        """Whether all files are as they were read, and what is remembered is not too much."""
        return (
            self._is_settled
            and len(self._found) < MOST
            and all(_key(file) == key for file, key in list(self._keys.items()))
        )

    def excludes(self, path: Path, *, is_folder: bool) -> bool:
        """Whether git would ignore this file or folder, because of itself or of a folder around it."""
        try:
            return self._excludes(path.relative_to(self.top).parts, is_folder=is_folder)
        except ValueError:
            return False

    def _excludes(self, parts: tuple[str, ...], *, is_folder: bool) -> bool:
        if not parts:
            return False
        place = parts, is_folder
        if place not in self._found:
            around = self._excludes(parts[:-1], is_folder=True)
            self._found[place] = around or self._matches(parts, is_folder=is_folder)
        return self._found[place]

    def _matches(self, parts: tuple[str, ...], *, is_folder: bool) -> bool:
        """Whether a pattern for this path itself excludes it. That of the nearest folder counts."""
        for depth in range(len(parts) - 1, -1, -1):
            spec = self._spec(self.top.joinpath(*parts[:depth]))
            if spec is not None:
                found = spec.check_file("/".join(parts[depth:]) + ("/" if is_folder else "")).include
                if found is not None:
                    return found
        return False

    def _spec(self, folder: Path) -> GitIgnoreSpec | None:
        if folder not in self._specs:
            files = [folder / FILE] + ([folder / ".git" / "info" / "exclude"] if folder == self.top else [])
            keys = {file: _key(file) for file in files}
            self._keys |= keys
            now = time.time_ns()
            self._is_settled &= all(now - max(key[:2]) > SETTLED for key in keys.values() if key is not None)
            lines = [line for file in reversed(files) for line in _lines(file)]
            self._specs[folder] = GitIgnoreSpec.from_lines(lines) if lines else None
        return self._specs[folder]


def _key(file: Path) -> Key:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8-sig", errors="replace").splitlines()
    except OSError:
        return []
