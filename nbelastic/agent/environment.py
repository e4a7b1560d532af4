"""The Python environment of a host's workers: the host's own or, for the user's requirements, one that is made beside it.

It is in `~/.cache/nbelastic/environments`, and named by a hash of all that decides what is in it. `environment_maker` makes it,
in a process of its own. The template, and so each worker, runs in it; the agent stays in the host's own environment.
"""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing as mp
import os
import platform
import site
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from nbelastic.system.private_files import make_private
from nbelastic.system.processes import kill_group
from nbelastic.system.trusted_folders import why_untrusted

READY = "nbelastic.json"  # is in an environment that is whole: what was installed, and its folders of modules
MAKER = "from nbelastic.agent.environment_maker import main; main()"
LONGEST = 1000  # characters of a text


class Environment:
    """Lives in the agent's main thread. Nothing is made for no requirements."""

    def __init__(self, requirements: Sequence[str]) -> None:
        self._requirements = requirements
        self._path = [*sys.path]
        self._folder = environments_folder() / name_of(requirements, self._path) if requirements else None
        self._maker: subprocess.Popen[bytes] | None = None
        self.is_ready = not requirements
        self.packages: dict[str, str] = {}  # that it has beside those of the host, with their versions
        self.text = ""  # what the maker does, or why it has failed

    def use(self) -> bool:
        """Have workers run in the environment from now on. False if it is not made yet."""
        if self._folder is None:
            return True
        found = self._read(self._folder)
        if found is None:
            return False
        self.packages, self.is_ready = found["packages"], True
        mp.set_executable(str(self._folder / "bin" / "python"))
        own = [str(self._folder / path) for path in found["paths"]]
        first = next((i for i, path in enumerate(sys.path) if path in installed_folders()), len(sys.path))
        sys.path[first:first] = own  # multiprocessing gives it to the workers; the agent has imported all that it needs
        os.environ["PATH"] = os.pathsep.join([str(self._folder / "bin"), os.environ.get("PATH", os.defpath)])
        return True

    def _read(self, folder: Path) -> dict[str, Any] | None:
        if not (folder / READY).exists() or why_untrusted(folder.parent):
            return None  # the maker reports why
        lock = -1
        with suppress(OSError):  # not every file system has locks: then none is removed either
            lock = os.open(lock_of(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            os.utime(lock)
        found = contents_of(folder)  # None: also if it was removed before the lock was held
        if found is None and lock >= 0:
            os.close(lock)
        return found  # the lock of a whole one stays open while this process lives

    def begin(self) -> None:
        """Have another process make it. `check` says how far it is."""
        order = {"folder": str(self._folder), "requirements": list(self._requirements), "path": self._path}
        self._maker = subprocess.Popen(
            [sys.executable, "-P", "-c", MAKER, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._maker.stdin is not None
        assert self._maker.stdout is not None
        os.set_blocking(self._maker.stdout.fileno(), False)
        self._rest = b""
        self.text = "begins"
        with suppress(BrokenPipeError), self._maker.stdin as pipe:
            pipe.write(json.dumps(order).encode())

    @property
    def sentinels(self) -> list[int]:
        """Descriptors that become readable when there is news of the maker."""
        return [self._maker.stdout.fileno()] if self._maker is not None and self._maker.stdout is not None else []

    def check(self) -> bool | None:
        """Update `text`. None while the environment is being made; then whether it is used from now on, and the template started."""
        assert self._maker is not None
        assert self._maker.stdout is not None
        data = b""
        while more := self._maker.stdout.read(1 << 16):
            data += more
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.text = next(
            (text for line in reversed(lines) if (text := line.decode(errors="replace").strip())), self.text
        )
        self.text = self.text[-LONGEST:]
        if more is None:  # nothing new
            return None
        code = self._maker.wait()
        self.close()
        if code == 0 and self.use():
            forkserver.ensure_running()  # the template
        elif code == 0:
            self.text = "it was removed as soon as it was made"
        return self.is_ready

    def close(self) -> None:
        """Kill the maker, if it runs."""
        if self._maker is not None:
            if self._maker.returncode is None:
                kill_group(self._maker.pid)
                self._maker.wait()
            assert self._maker.stdout is not None
            self._maker.stdout.close()
            self._maker = None


def contents_of(folder: Path) -> dict[str, Any] | None:
    """The `packages` and `paths` of an environment. None: there is none, or a crash of the machine has left a part of it."""
    try:
        found: dict[str, Any] = json.loads((folder / READY).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return found


def environments_folder() -> Path:
    """Where this user's environments are: beside uv's cache, from which files are linked and not copied.

    The path has no links: a link could lead elsewhere after the folder was checked.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (cache / "nbelastic" / "environments").resolve()


def make_trusted(folder: Path) -> None:
    """Make a folder from which code is used, if it is missing. OSError if another user could replace what is in it."""
    make_private(folder)
    if why := why_untrusted(folder):
        raise OSError(errno.EPERM, why, str(folder))


def lock_of(folder: Path) -> Path:
    """The file that agents lock while they use an environment, so that none is removed. OSError if there can be none."""
    make_trusted(folder.parent)
    return folder.with_name(f"{folder.name}.lock")


def making_lock_of(folder: Path) -> Path:
    """The file that is locked while an environment is made. A lock for both would keep a maker that waits until all agents end."""
    return lock_of(folder).with_suffix(".making")


def installed_folders() -> list[str]:
    """The folders of this interpreter's installed packages."""
    own = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [*own, *site.getsitepackages()]


def name_of(requirements: Sequence[str], path: Sequence[str]) -> str:
    """The name of the environment: other requirements, another Python or other packages of the host make another one."""
    packages = sorted(entry for folder in path if folder for entry in _packages_in(folder))
    about = [sys.version, platform.machine(), os.confstr("CS_GNU_LIBC_VERSION"), sys.prefix]
    return sha256(json.dumps([list(requirements), about, packages]).encode()).hexdigest()[:32]


def _packages_in(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info"))]
    except OSError:  # an archive, or a folder that is missing
        return []
