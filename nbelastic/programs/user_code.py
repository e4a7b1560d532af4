"""The user's own modules in this worker: imports the version that a program or a cell belongs to.

If a file has changed, the worker forgets all these modules, and imports again what cells have imported of them. So a program
never runs with modules of two versions.
"""

from __future__ import annotations

import contextlib
import importlib
import linecache
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from nbelastic.protocol.code_messages import Code, PlacedCode
from nbelastic.system.folder_paths import placed_code
from nbelastic.worker.interrupts import ProgramReplaced

INSTALLED = {"site-packages", "dist-packages"}  # folders of packages


class UserCode:
    """For the main thread. `folder`: where the host's agent says where the versions are.

    `preloaded`: the hashes of modules that the template has imported, by module.
    """

    def __init__(self, folder: Path, preloaded: Mapping[str, str]) -> None:
        self._folder = folder
        self._version = ""
        self._placed = PlacedCode((), Code((), ()))
        self._loaded = dict(preloaded)

    def use(self, version: str, names: dict[str, Any]) -> None:
        """Import from this version from now on; an empty one changes nothing. `names`: of cells.

        OSError if it is not on this host; what the modules raise when they are imported again. Then nothing has changed.
        """
        if version and version != self._version:
            with self.unless_it_fails():
                self._use(version, names)

    def _use(self, version: str, names: dict[str, Any]) -> None:
        new = msgspec.json.decode(placed_code(self._folder, version).read_bytes(), type=PlacedCode)
        now = _digests(new.code)
        ours = self._imported(now)
        changed = [name for name in ours if now.get(name) != self._loaded.get(name)]
        files, before = new.code.digests, self._placed.code.digests
        is_other = bool(changed) or any(files.get(path) != digest for path, digest in before.items())
        _change_paths(self._placed.folders, new.folders)
        self._version, self._placed, self._loaded = version, new, now
        importlib.invalidate_caches()
        if is_other:
            _import_again(ours, changed, names)

    def _imported(self, other: Iterable[str] = ()) -> list[str]:
        """The modules of this version, and of another one, that this process has imported."""
        tops = {name.partition(".")[0] for name in (*self._loaded, *other)}
        return [name for name in list(sys.modules) if name.partition(".")[0] in tops]  # another thread may import

    @contextlib.contextmanager
    def unless_it_fails(self) -> Iterator[None]:
        """Return to the present version if an error leaves the block: the program that runs goes on with it."""
        version, placed, loaded, paths = self._version, self._placed, self._loaded, list(sys.path)
        modules = dict(sys.modules)
        try:
            yield
        except ProgramReplaced:
            raise
        except BaseException:
            if version != self._version:
                for name in self._imported(loaded):
                    del sys.modules[name]
                tops = {name.partition(".")[0] for name in (*self._loaded, *loaded)}
                sys.modules.update({name: each for name, each in modules.items() if name.partition(".")[0] in tops})
                sys.path[:] = paths
                self._version, self._placed, self._loaded = version, placed, loaded
            raise


def own_modules(besides: Iterable[str]) -> dict[str, str]:
    """The hashes of the modules that this process has imported and that are not of an installed package, by module.

    `besides`: modules whose packages are not the user's, wherever they lie: torch may be a checkout.
    """
    others = {name.partition(".")[0] for name in besides}
    standard = os.path.dirname(os.__file__) + os.sep
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in others or not isinstance(file, str) or file.startswith(standard):
            continue
        if not _is_installed(name, file):
            with contextlib.suppress(OSError):
                found[name] = sha256(Path(file).read_bytes()).hexdigest()
    return found


def _is_installed(name: str, file: str) -> bool:
    """Whether the module is of a package that pip has installed, also with `--target` into a folder of PYTHONPATH."""
    path = Path(file)
    if INSTALLED.intersection(path.parts):  # a module may have another name than its file: requests.packages.urllib3
        return True
    depth = name.count(".") + (path.stem == "__init__")
    folder = path.parents[min(depth, len(path.parents) - 1)]
    return any(folder.glob("*.dist-info"))


def _digests(code: Code) -> dict[str, str]:
    """The hash of each module by its name."""
    return {name: file.digest for file in code.files if (name := _module_name(file.path))}


def _module_name(path: str) -> str:
    """The module that a file is; empty if it is none."""
    folders, _, file = path.rpartition("/")
    name, _, suffix = file.partition(".")
    if suffix != "py" and not suffix.endswith("so"):
        return ""
    parts = [*filter(None, folders.split("/")), *([name] if name != "__init__" else [])]
    return ".".join(parts)


def _change_paths(old: tuple[str, ...], new: tuple[str, ...]) -> None:
    """Search these folders first. Those that are searched already, as on the notebook's machine, stay where they are."""
    sys.path[:] = [path for path in sys.path if path not in old or path in new]
    there = {os.path.realpath(path) for path in sys.path}
    sys.path[:0] = [path for path in new if os.path.realpath(path) not in there]


def _import_again(ours: list[str], changed: list[str], names: dict[str, Any]) -> None:
    """Remove these modules, and import again what cells have imported of them."""
    old = {name: sys.modules.pop(name) for name in ours}
    for name in changed:
        _remove_bytecode(old[name])
    linecache.checkcache()
    try:
        names.update(_imported_names(names, old))
    except SyntaxError as error:
        raise error.with_traceback(None) from None


def _imported_names(names: Mapping[str, Any], old: Mapping[str, ModuleType]) -> dict[str, Any]:
    """The new values of cells' variables that were imported from these modules. They are imported again for that."""
    by_id = {id(module): name for name, module in old.items()}
    new: dict[str, Any] = {}
    for name, value in names.items():
        if id(value) in by_id:
            new[name] = importlib.import_module(by_id[id(value)])
            continue
        module, own = "", name
        with contextlib.suppress(Exception):  # an object of the user's may raise anything
            module, own = getattr(value, "__module__", ""), getattr(value, "__name__", name)
        if isinstance(module, str) and module in old and vars(old[module]).get(own) is value:
            new[name] = getattr(importlib.import_module(module), own, value)
    return new


def _remove_bytecode(module: ModuleType) -> None:
    """Remove a module's compiled file: Python takes it for current if the source has changed within a second, to the same size."""
    cached = getattr(module, "__cached__", None)
    if isinstance(cached, str):
        with contextlib.suppress(OSError):
            os.unlink(cached)
