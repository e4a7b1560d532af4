"""Has the hosts of a cluster get the user's own modules as they are now, before something that uses them is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from nbelastic.client.code_files import CodeFiles, Found
from nbelastic.errors import UsageError
from nbelastic.protocol import requests
from nbelastic.protocol.code_messages import MAX_FILES, MAX_SIZE, version_of
from nbelastic.system.folder_paths import code_folder, placed_code
from nbelastic.system.private_files import make_private, replace_private

TIMEOUT = 300.0  # seconds in which all hosts must have the files
TRIES = 3  # if files change while they are read
SHOWN = 3  # names in a message
ADVICE = (
    "list what the hosts do not need in .gitignore, or start the cluster with code_sync=False if they have it already"
)


class _ChangedError(Exception):
    """Files have changed meanwhile: search again."""


class CodeSync:
    """`ask` sends a request to the driver, and waits for the answer. `folders`: where the user's modules are."""

    def __init__(self, ask: Callable[..., Any], run_folder: Path, folders: Sequence[str]) -> None:
        self._ask, self._folder = ask, code_folder(run_folder)
        self._files = CodeFiles(folders)
        self._imports: set[str] = set()  # of all that was sent so far: cells use what earlier ones have imported
        self._noted: set[str] = set()

    def send(self, imports: Iterable[str] = ()) -> str:
        """Send what was imported here, and what `imports` name. Returns its version; empty if there is nothing.

        UsageError if it is too much for a host that does not have it, or if it cannot be read.
        """
        self._imports.update(imports)
        why = ""
        for _ in range(TRIES):
            try:
                return self._send()
            except (_ChangedError, FileNotFoundError) as error:
                why = str(error)
            except OSError as error:
                why = f"{error.filename or self._folder}: {error.strerror}"
                break
            except UnicodeEncodeError as error:
                why = f"the name of a folder is not UTF-8 ({error.object!a})"
                break
        raise UsageError(f"your modules cannot be sent to the hosts: {why}.")

    def _send(self) -> str:
        found, is_partial = self._files.find(self._imports), False
        if found.code is None:  # hosts that have all files need only know which modules there are
            found, is_partial = self._files.find(self._imports, python_only=True), True
        if found.code is None:
            self._note(f"The hosts do not get your modules: {_too_much(found)}")
            return ""
        if not found.code.files:
            return ""
        self._save(found)
        version = version_of(found.code)
        try:
            sent: requests.CodeSent = self._ask(requests.SendCode(version), TIMEOUT, "the hosts to get your modules")
        except UsageError as error:  # a version of another client has replaced one that had a file of this one
            raise _ChangedError(str(error)) from None
        if sent.hosts and is_partial:
            raise UsageError(_too_much(self._files.find(self._imports)))
        if sent.hosts and found.ignored:
            self._note(f"The hosts do not get what .gitignore lists: {_some(map(str, found.ignored))}.")
        return version

    def _note(self, text: str) -> None:
        """Print a line, once."""
        if text not in self._noted:
            self._noted.add(text)
            print(text)

    def _save(self, found: Found) -> None:
        """Write into the run folder what is not there yet."""
        assert found.code is not None
        make_private(self._folder)
        for digest, path in found.paths.items():
            self._save_file(path, digest)
        replace_private(placed_code(self._folder, version_of(found.code)), [msgspec.json.encode(found.code)])

    def _save_file(self, path: Path, digest: str) -> None:
        saved = self._folder / digest
        if not saved.exists():
            data = path.read_bytes()
            if sha256(data).hexdigest() != digest:
                self._files.forget(path)
                raise _ChangedError(f"{path} changes all the time")
            replace_private(saved, [data])


def _too_much(found: Found) -> str:
    if len(found.sizes) > MAX_FILES:
        what = f"more than {MAX_FILES:,} files, many of them in {_fullest(found.sizes)}"
    else:
        largest = sorted(found.sizes.items(), key=lambda item: -item[1])[:SHOWN]
        named = ", ".join(f"{path} ({size / (1 << 20):,.1f} MiB)" for path, size in largest)
        what = f"more than {MAX_SIZE >> 20} MiB, with {named}"
    return f"your modules and their folders have {what}: {ADVICE}."


def _fullest(sizes: Iterable[Path]) -> Path:
    """The folder with most files."""
    counts: dict[Path, int] = {}
    for path in sizes:
        counts[path.parent] = counts.get(path.parent, 0) + 1
    return max(counts, key=lambda folder: counts[folder])


def _some(names: Iterable[str]) -> str:
    first, *rest = list(names)
    shown = [first, *rest[: SHOWN - 1]]
    return ", ".join(shown) + (f" and {len(rest) - SHOWN + 1} more" if len(rest) >= SHOWN else "")
