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


class CodeSync:
    """`ask` sends a request to the driver, and waits for the answer. `folders`: where the user's modules are."""

    def __init__(self, ask: Callable[..., Any], run_folder: Path, folders: Sequence[str]) -> None:
        self._ask, self._folder = ask, code_folder(run_folder)
        self._files = CodeFiles(folders)
        self._imports: set[str] = set()  # of all that was sent so far: cells use what earlier ones have imported
        self._noted: set[Path] = set()

    def send(self, imports: Iterable[str] = ()) -> str:
        """Send what was imported here, and what `imports` name. Returns its version; empty if there is nothing.

        UsageError if it is too much for a host that does not have it, or if it cannot be read.
        """
        self._imports.update(imports)
        imports = self._imports
        found, is_partial = self._files.find(imports), False
        if found.code is None:
            found, is_partial = self._files.find(imports, python_only=True), True
            if found.code is None:
                raise _too_much(found)
        if not found.code.files:
            return ""
        try:
            version, sent = self._save_and_ask(found, imports, is_partial)
        except (
            UsageError
        ):  # another client's version has just replaced an old one, which had a file that is in this one too
            version, sent = self._save_and_ask(found, imports, is_partial)
        if sent.hosts and is_partial:
            raise _too_much(self._files.find(imports))
        new = [path for path in found.ignored if path not in self._noted]
        if sent.hosts and new:
            self._noted.update(new)
            hosts, names = _some(sent.hosts), _some(map(str, new))
            print(f"Not sent to {hosts}, as .gitignore lists it: {names}.")
        return version

    def _save_and_ask(self, found: Found, imports: set[str], is_partial: bool) -> tuple[str, requests.CodeSent]:
        version = self._save(found, imports, is_partial)
        return version, self._ask(requests.SendCode(version), TIMEOUT, "the hosts to get your code")

    def _save(self, found: Found, imports: set[str], is_partial: bool) -> str:
        """Write into the run folder what is not there yet. Returns the version."""
        for _ in range(TRIES):
            assert found.code is not None
            try:
                make_private(self._folder)
                if all(self._save_file(path, digest) for digest, path in found.paths.items()):
                    version = version_of(found.code)
                    replace_private(placed_code(self._folder, version), [msgspec.json.encode(found.code)])
                    return version
                found = self._files.find(imports, python_only=is_partial)
            except OSError as error:
                name = error.filename or self._folder
                raise UsageError(f"your code cannot be sent to the hosts: {name}: {error.strerror}.") from None
            if found.code is None:
                raise _too_much(found)
        raise UsageError("your code cannot be sent to the hosts, as it changes all the time: wait until it is written.")

    def _save_file(self, path: Path, digest: str) -> bool:
        """Whether the file still has this content, and it is in the run folder."""
        saved = self._folder / digest
        if not saved.exists():
            data = path.read_bytes()
            if sha256(data).hexdigest() != digest:
                self._files.forget(path)
                return False
            replace_private(saved, [data])
        return True


def _too_much(found: Found) -> UsageError:
    if len(found.sizes) > MAX_FILES:
        what = f"more than {MAX_FILES:,} files, many of them in {_fullest(found.sizes)}"
    else:
        largest = sorted(found.sizes.items(), key=lambda item: -item[1])[:SHOWN]
        named = ", ".join(f"{path} ({size / (1 << 20):,.1f} MiB)" for path, size in largest)
        what = f"more than {MAX_SIZE >> 20} MiB, with {named}"
    return UsageError(f"your modules and their folders have {what}: {ADVICE}.")


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
