"""Finds the files of the user's own modules: what the notebook imports from its working folder.

A module of one file is that file. A package is all files in its folder; one without `__init__.py`, its Python files. What
`.gitignore` lists is left out, and hidden files, installed packages, and links that lead out of the folders.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from nbelastic.client.git_ignores import SETTLED, ignores_of
from nbelastic.client.imported_names import names_in_text
from nbelastic.protocol.code_messages import MAX_FILES, MAX_SIZE, Code, CodeFile

PYTHON = (".py", ".pyi", ".so")
INSTALLED = {"site-packages", "dist-packages", "__pycache__"}
LOADERS = (ExtensionFileLoader, EXTENSION_SUFFIXES), (SourceFileLoader, SOURCE_SUFFIXES)  # in Python's order
NOT_OURS = {"__main__", "__mp_main__", "nbelastic", "torch", "ipykernel_launcher"}


class Found(NamedTuple):
    """What a search has found. `code` is None if it is too much: then `sizes` has all files. `ignored`: imported, but not sent."""

    code: Code | None
    paths: dict[str, Path]  # by digest
    sizes: dict[Path, int]
    ignored: tuple[Path, ...]


class _Read(NamedTuple):
    key: tuple[int, ...]  # of the file when it was read
    digest: str
    imports: set[str]


_contents: dict[Path, _Read] = {}  # of all clusters of this process


class CodeFiles:
    """`folders`: the working folder, and others that the user has named."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._roots = tuple(dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders))
        self._elsewhere: set[str] = set()  # folders outside, from which modules were imported

    def find(self, names: Iterable[str] = (), *, python_only: bool = False) -> Found:
        """Find the files of modules that are imported here, of those that `names` import, and of those that they import."""
        search = _Search(self._roots, python_only=python_only)
        search.add_imported(dict(sys.modules), self._elsewhere)
        pending = set(names)
        while True:
            for name in pending:
                search.add_name(name)
            new = search.take_new()
            if search.is_too_much:
                return Found(None, {}, search.sizes, tuple(search.ignored))
            if not new:
                break
            pending = {name for path in new if path.suffix == ".py" for name in self._content(path).imports}
        files, folders, paths = [], sorted({folder for folder, _ in search.files}, key=search.order), {}
        for folder, path in sorted(search.files):
            digest = self._content(path).digest
            files.append(
                CodeFile(folders.index(folder), path.relative_to(folder).as_posix(), digest, search.sizes[path])
            )
            paths[digest] = path
        return Found(Code(tuple(map(str, folders)), tuple(files)), paths, search.sizes, tuple(search.ignored))

    def forget(self, path: Path) -> None:
        """Read this file again the next time."""
        _contents.pop(path, None)

    def _content(self, path: Path) -> _Read:
        """The file's hash and imports, from the last time if the file has not changed. OSError if it cannot be read."""
        status = path.stat()
        key = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
        known = _contents.get(path)
        if known is None or known.key != key:
            data = path.read_bytes()
            imports = names_in_text(data.decode("utf-8-sig", errors="replace")) if path.suffix == ".py" else set[str]()
            known = _Read(key, sha256(data).hexdigest(), imports)
            if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > SETTLED:
                _contents[path] = known
        return known


class _Search:
    def __init__(self, roots: Sequence[Path], *, python_only: bool) -> None:
        self._roots, self._python_only = roots, python_only
        self._ignores = {root: ignores_of(root) for root in roots}
        self._prefixes = tuple({Path(os.path.realpath(each)) for each in (sys.prefix, sys.base_prefix)})
        searched = (Path(os.path.realpath(each)) for each in sys.path if isinstance(each, str))
        # in Python's order; new finders, as Python's own may not know a file of this moment yet
        self._finders = {folder: _finder(folder) for folder in [*filter(self._is_ours, searched), *roots]}
        self._names: set[str] = set(NOT_OURS)  # that were looked up
        self._new: list[Path] = []
        self.files: set[tuple[Path, Path]] = set()  # each with the folder from which it is imported
        self.sizes: dict[Path, int] = {}
        self._total = 0  # bytes
        self.ignored: list[Path] = []

    @property
    def is_too_much(self) -> bool:
        return len(self.sizes) > MAX_FILES or self._total > MAX_SIZE

    def order(self, folder: Path) -> int:
        return list(self._finders).index(folder)

    def take_new(self) -> list[Path]:
        """The files that were found since the last call."""
        new, self._new = self._new, []
        return new

    def add_imported(self, modules: dict[str, ModuleType], elsewhere: set[str]) -> None:
        """Add the modules of this process that come from the folders. `elsewhere`: is extended by other folders."""
        for name, module in modules.items():
            if "." in name or name in self._names:
                continue
            self._names.add(name)  # what is imported from elsewhere is not looked up here
            for place in _places(module):
                around = os.path.dirname(place)
                if around in elsewhere:
                    continue
                if self._is_ours(Path(os.path.realpath(around))):
                    self._add(Path(place))
                else:
                    elsewhere.add(around)

    def add_name(self, name: str) -> None:
        """Add the module of this name, if it is in one of the folders."""
        if name in self._names or name in sys.stdlib_module_names:
            return
        self._names.add(name)
        bare = []  # folders without `__init__.py`: a package only if no folder has a module of this name
        for folder, finder in self._finders.items():
            spec = finder.find_spec(name)
            if spec is not None and spec.loader is not None and spec.origin is not None:
                self._add(Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin))
                return
            bare += [folder / name] if spec is not None else []
        for package in bare:
            if any(any(package.glob(each)) for each in ("*.py", "*/*.py")):
                self._add(package)

    def _is_ours(self, path: Path) -> bool:
        """Whether this is inside the folders, and in no environment or hidden folder there."""
        for root in self._roots:
            if path == root or root in path.parents:
                inner = path.relative_to(root).parts
                around = [path, *path.parents][: len(inner)]
                hidden = any(part in INSTALLED or part.startswith(".") for part in inner)
                return not hidden and not any(
                    each in self._prefixes or (each / "pyvenv.cfg").exists() for each in around
                )
        return False

    def _add(self, path: Path) -> None:
        """Add a module's file, or a package's folder. It may be a link within the folders."""
        folder = Path(os.path.realpath(path.parent))
        path = folder / path.name
        if not self._is_ours(path) or not path.exists() or not self._is_ours(Path(os.path.realpath(path))):
            return
        is_folder = path.is_dir()
        if self._excludes(path, is_folder=is_folder):
            self.ignored.append(path)
            return
        if folder not in self._finders:
            self._finders[folder] = _finder(folder)
        if not is_folder:
            self._add_file(folder, path)
            return
        python_only = self._python_only or not (path / "__init__.py").is_file()
        for file in self._files_in(path):
            if not python_only or file.suffix in PYTHON:
                self._add_file(folder, file)

    def _add_file(self, folder: Path, path: Path) -> None:
        if (folder, path) not in self.files and not self.is_too_much:
            self.files.add((folder, path))
            self.sizes[path] = path.stat().st_size
            self._total += self.sizes[path]
            self._new.append(path)

    def _files_in(self, folder: Path, around: tuple[Path, ...] = ()) -> Iterator[Path]:
        """The files in a folder. `around`: the folders that lead to it, as they are without links."""
        around = (*around, Path(os.path.realpath(folder)))
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            path = Path(entry.path)
            if entry.name.startswith(".") or entry.name in INSTALLED or not entry.name.isprintable():
                continue
            is_link = entry.is_symlink()
            target = Path(os.path.realpath(path)) if is_link else path
            if is_link and not self._is_ours(target):
                continue
            real = target if is_link else entry  # of a link that leads to itself, the entry's questions would fail
            if real.is_dir():
                leads_back = any(target == each or target in each.parents for each in around)
                if not leads_back and not any(self._excludes(each, is_folder=True) for each in {path, target}):
                    yield from self._files_in(path, around)
            elif real.is_file():
                if not self._excludes(path, is_folder=False):
                    yield path
                elif path.suffix == ".py":
                    self.ignored.append(path)

    def _excludes(self, path: Path, *, is_folder: bool) -> bool:
        root = next(root for root in self._roots if root == path or root in path.parents)
        return self._ignores[root].excludes(path, is_folder=is_folder)


def _places(module: ModuleType) -> list[str]:
    """The file of a module, or the folders of a package."""
    try:
        paths = [str(path) for path in module.__path__]
    except Exception:  # noqa: BLE001  (it is not a package, or a stand-in for a module)
        paths = []
    file = getattr(module, "__file__", None)
    return paths or ([file] if isinstance(file, str) else [])


def _finder(folder: Path) -> FileFinder:
    return FileFinder(str(folder), *LOADERS)
