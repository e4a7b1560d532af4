"""Makes a Python environment for the user's requirements with uv, beside the host's own one. Run by an agent.

It has the packages of the host's environment, nbelastic and torch among them: a `.pth` file leads there. uv looks only at
the environment itself, and would install torch again for each package that needs it. So it is first given the metadata of the
host's packages, without their files. It then installs what is missing, or what the requirements want in another version.

The last line of the output says what is done or, with exit code 1, what has failed.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from nbelastic.agent.environment import READY, contents_of, installed_folders, make_trusted, making_lock_of
from nbelastic.system.processes import die_with_parent

UNUSED = 30 * 24 * 3600  # seconds after which an environment that no agent has used is removed
BORROWED = "nbelastic"  # the installer of the host's packages
KEPT = 12  # lines of uv that explain a failure
_PASSWORD = re.compile(r"://[^/\s]+@")  # up to the last @ before the path: a password may have one
_CAUSE = re.compile(r":?\s*(?:[╰├]─▶|\bcause:|\bCaused by:)\s*")
_SIGNS = re.compile(r"[×╰├│─▶╭]+\s*")
_NAMES = re.compile(r"[-_.]+")


class NotMadeError(Exception):
    """Why there is no environment, and what to do."""


def main() -> None:
    """Read the order, one JSON object, from the standard input. The argument is the agent's pid."""
    die_with_parent(parent=int(sys.argv[1]))
    order: dict[str, Any] = json.load(sys.stdin)
    folder = Path(order["folder"])
    try:
        with _alone(folder):
            if contents_of(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)
                _make(folder, order["requirements"], order["path"])
        remove_unused(folder.parent)
    except NotMadeError as error:
        _end(str(error))
    except OSError as error:
        _end(f"{error.filename or folder}: {error.strerror}; --env XDG_CACHE_HOME=FOLDER names another place")


def _say(text: str) -> None:
    print(_PASSWORD.sub("://***@", text), flush=True)


def _end(why: str) -> NoReturn:
    _say(why)
    sys.exit(1)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Make this environment in one process at a time, also of other hosts with the same home folder."""
    with open(making_lock_of(folder), "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another agent makes it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: several may make it, and the first one is used
            pass
        else:
            for left in folder.parent.glob(f".{folder.name}-*"):  # by makers that were killed
                shutil.rmtree(left, ignore_errors=True)
        yield


def _make(folder: Path, requirements: Sequence[str], path: Sequence[str]) -> None:
    """Make the environment in a folder beside, and rename that: an environment is whole, or is not there."""
    uv = _uv()
    _trust_cache(uv, folder.parent)
    parent = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        new = parent / "environment"
        _run([*uv, "venv", "--quiet", "--relocatable", "--python", sys.executable, str(new)], parent, "")
        modules = next(new.glob("lib/python*/site-packages"))
        leads = [f"import site; site.addsitedir({folder!r})\n" for folder in installed_folders()]
        (modules / "_nbelastic.pth").write_text("".join(leads), "utf-8")  # reads the `.pth` files there, too
        _borrow(modules, path)
        python = str(new / "bin" / "python")
        _run([*uv, "pip", "install", "--python", python, "--requirement", "-"], parent, "\n".join(requirements) + "\n")
        packages = _return_borrowed(modules)
        paths = [os.path.relpath(path, new) for path in _paths_in(new, python)]
        with open(new / READY, "w") as ready:
            json.dump({"packages": packages, "paths": paths}, ready)
            ready.flush()
            os.fsync(ready.fileno())
        try:
            new.rename(folder)
        except OSError:
            if contents_of(folder) is None:
                raise
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def _uv() -> list[str]:
    home = os.path.expanduser("~")  # the same text if there is none
    own = [f"{home}/{name}/bin" for name in (".local", ".cargo")] if home != "~" else []
    places = [os.path.join(sys.prefix, "bin"), *own]
    found = shutil.which("uv") or shutil.which("uv", path=os.pathsep.join(places))
    if found:
        return [found]
    if importlib.util.find_spec("uv"):
        return [sys.executable, "-m", "uv"]
    raise NotMadeError(f"uv is missing: `{sys.executable} -m pip install uv` there, or have it in the PATH")


def _trust_cache(uv: Sequence[str], folder: Path) -> None:
    """OSError if another user could replace what is in uv's cache: its files become those of the environment."""
    found = subprocess.run(
        [*uv, "cache", "dir"], cwd=folder, capture_output=True, text=True, errors="replace", check=False
    )
    if found.returncode:
        raise NotMadeError(f"uv: {in_one_line(found.stderr.splitlines())}")
    cache = Path(found.stdout.strip()).resolve()
    make_trusted(cache)
    os.environ["UV_CACHE_DIR"] = str(cache)  # without links, which could lead elsewhere from now on
    with suppress(OSError):  # UV_NO_CACHE has it name a folder that it will not use
        cache.rmdir()


def _run(command: Sequence[str], folder: Path, text: str) -> None:
    """Run uv with this input, and pass on what it prints. NotMadeError with its last lines if it fails."""
    process = subprocess.Popen(
        command,
        cwd=folder,  # no project's settings apply there
        env={**os.environ, "UV_NO_PROGRESS": "1", "NO_COLOR": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=die_with_parent,  # noqa: PLW1509  (this process has one thread)
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(text)
    lines: list[str] = []
    with process.stdout as output:
        for line in output:
            if line.strip() and not line.startswith("Using Python"):
                lines.append(line.strip())
                _say(f"uv: {_SIGNS.sub('', lines[-1])}")
    if (code := process.wait()) < 0:  # uv has not said why
        raise NotMadeError(f"uv was killed by signal {-code}: perhaps no memory was left")
    if code:
        why = in_one_line(lines)
        raise NotMadeError(f"uv: {why}" if why else f"uv has ended with exit code {code}")


def in_one_line(lines: Sequence[str]) -> str:
    """What uv prints about a failure: from the line that names it, or the last lines."""
    begins = next((i for i, line in enumerate(lines) if line.startswith(("error:", "×"))), 0)
    text = " ".join(line.removeprefix("error: ") for line in lines[begins:][-KEPT:])
    return _SIGNS.sub("", _CAUSE.sub(": ", text))


def _borrow(modules: Path, path: Sequence[str]) -> None:
    """Have uv believe that the packages of the host are installed here."""
    names = set()
    for package in importlib.metadata.distributions(path=[folder for folder in path if folder]):
        try:
            text = package.read_text("METADATA") or package.read_text("PKG-INFO")
            name = _NAMES.sub("_", package.name or "").lower()
        except UnicodeDecodeError:  # of an old package; uv installs another one if it is needed
            continue
        if not text or not name or name in names:
            continue
        names.add(name)
        folder = modules / f"{name}-{package.version}.dist-info"
        files = {"METADATA": text, "INSTALLER": BORROWED, "RECORD": ""}
        files["RECORD"] = "".join(f"{folder.name}/{file},,\n" for file in files)
        folder.mkdir()
        for file, content in files.items():
            (folder / file).write_text(content, "utf-8")


def _return_borrowed(modules: Path) -> dict[str, str]:
    """Remove what `_borrow` has written. Returns the packages that uv has installed, with their versions."""
    installed = {}
    for folder in modules.glob("*.dist-info"):
        file = folder / "INSTALLER"
        if file.exists() and file.read_text() == BORROWED:
            shutil.rmtree(folder)
        else:
            name, _, version = folder.name.removesuffix(".dist-info").partition("-")
            installed[name] = version
    return dict(sorted(installed.items()))


def _paths_in(folder: Path, python: str) -> list[str]:
    """The folders of modules in the environment, with those that its packages add, in the order of its `sys.path`."""
    out = subprocess.run(
        [python, "-P", "-c", "import json, sys; print(json.dumps(sys.path))"], check=True, capture_output=True
    ).stdout
    return [path for path in json.loads(out) if path.startswith(f"{folder}/")]


def remove_unused(folder: Path) -> None:
    """Remove environments that no agent has used for `UNUSED` seconds, and what killed makers have left of them."""
    for file in folder.glob("*.making"):
        used = file.with_suffix(".lock")
        with suppress(OSError), open(file, "ab") as making, open(used, "ab") as using:
            if time.time() - max(file.stat().st_mtime, used.stat().st_mtime) < UNUSED:
                continue
            for lock in (making, using):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: an agent makes it, or uses it
            for path in (file.with_suffix(""), *folder.glob(f".{file.stem}-*")):
                shutil.rmtree(path, ignore_errors=True)
            file.unlink()
            used.unlink()
