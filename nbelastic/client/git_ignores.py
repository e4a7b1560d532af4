"""Which files a folder's `.gitignore` files exclude, as git decides it."""

from __future__ import annotations

from pathlib import Path

from pathspec import GitIgnoreSpec

FILE = ".gitignore"


class GitIgnores:
    """The `.gitignore` files from the top of a repository down to each folder, and its `.git/info/exclude`.

    Without a repository those from `folder` down. They are read once, so an object is used for one search only.
    """

    def __init__(self, folder: Path) -> None:
        self._top = next((each for each in (folder, *folder.parents) if (each / ".git").exists()), folder)
        self._specs: dict[Path, GitIgnoreSpec | None] = {}
        self._found: dict[tuple[str, ...], bool] = {}

    def excludes(self, path: Path, *, is_folder: bool) -> bool:
        """Whether git would ignore this file or folder, because of itself or of a folder around it."""
        try:
            return self._excludes(path.relative_to(self._top).parts, is_folder=is_folder)
        except ValueError:
            return False

    def _excludes(self, parts: tuple[str, ...], *, is_folder: bool) -> bool:
        if not parts:
            return False
        if parts not in self._found:
            around = self._excludes(parts[:-1], is_folder=True)
            self._found[parts] = around or self._matches(parts, is_folder=is_folder)
        return self._found[parts]

    def _matches(self, parts: tuple[str, ...], *, is_folder: bool) -> bool:
        """Whether a pattern for this path itself excludes it. That of the nearest folder counts."""
        for depth in range(len(parts) - 1, -1, -1):
            spec = self._spec(self._top.joinpath(*parts[:depth]))
            if spec is not None:
                found = spec.check_file("/".join(parts[depth:]) + ("/" if is_folder else "")).include
                if found is not None:
                    return found
        return False

    def _spec(self, folder: Path) -> GitIgnoreSpec | None:
        if folder not in self._specs:
            files = [folder / FILE] + ([folder / ".git" / "info" / "exclude"] if folder == self._top else [])
            lines = [line for file in reversed(files) for line in _lines(file)]
            self._specs[folder] = GitIgnoreSpec.from_lines(lines) if lines else None
        return self._specs[folder]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
