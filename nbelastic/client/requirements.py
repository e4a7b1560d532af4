"""Reads the user's requirements: the lines from which each host makes an environment of its own.

A host sees nothing of this machine's disk. So files that a file names with `-r` are put in its place, and other relative
paths are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from nbelastic.errors import UsageError
from nbelastic.protocol.settings import check
from nbelastic.system.argument_types import user_path

LARGEST = 256 << 10  # characters of all lines together
_COMMENT = re.compile(r"(^|\s+)#.*$")
_ANOTHER_FILE = re.compile(r"(?:-r|--requirement)(?:\s+|=|(?<=-r))\s*(.+)")
_CONSTRAINTS = re.compile(r"-c|--constraint\b")
_EDITABLE = re.compile(r"-e|--editable\b")
_PATH_OPTION = re.compile(r"(?:(?:-f|-i)[\s=]*|(?:--find-links|--index-url|--extra-index-url)(?:\s+|=)\s*)(\S+)")
_ARCHIVES = (".whl", ".tar.gz", ".zip")


def read_requirements(given: str | os.PathLike[str] | Sequence[str] | None) -> tuple[str, ...]:
    """The lines of a requirements file, or of a list, without comments. UsageError, in one line, for what no host can use."""
    if given is None:
        return ()
    if isinstance(given, str | os.PathLike):
        lines = tuple(_lines_of(user_path(given), ()))
    else:
        is_list = isinstance(given, Sequence) and all(isinstance(line, str) for line in given)
        check(is_list, "requirements must be the path of a file, or a list of lines such as ['einops>=0.8'].")
        lines = tuple(_usable(list(given), Path(), "requirements", ()))
    size = sum(map(len, lines))
    check(size <= LARGEST, f"requirements: {size} characters are too many: at most {LARGEST}.")
    return lines


def _lines_of(path: Path, inside: tuple[Path, ...]) -> Iterator[str]:
    """The usable lines of a file that is named in the files `inside`."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"the requirements file {path} cannot be read: {why}.") from None
    yield from _usable(text.splitlines(), path.parent, str(path), (*inside, path.resolve()))


def _usable(lines: Sequence[str], folder: Path, name: str, inside: tuple[Path, ...]) -> Iterator[str]:
    begun, first = "", 0
    for number, line in enumerate(lines, 1):
        first = first if begun else number
        begun += _COMMENT.sub("", line).strip() if not begun else " " + _COMMENT.sub("", line).strip()
        if begun.endswith("\\") and number < len(lines):
            begun = begun[:-1].rstrip()
            continue
        whole, begun = begun.removesuffix("\\").strip(), ""
        if whole:
            yield from _checked(whole, folder, f"{name}:{first}", inside)


def _checked(line: str, folder: Path, where: str, inside: tuple[Path, ...]) -> Iterator[str]:
    """The line, or those of the file that it names."""
    if found := _ANOTHER_FILE.fullmatch(line):
        other = folder / found[1].strip("'\"")
        check("://" not in found[1], f"{where}: -r takes a file of this machine, not a URL: copy its lines.")
        check(other.resolve() not in inside, f"{where}: {other} leads back to itself.")
        yield from _lines_of(other, inside)
        return
    check(not _CONSTRAINTS.match(line), f"{where}: constraints (-c) are not sent to hosts: write the versions here.")
    check(
        not _EDITABLE.match(line),
        f"{where}: an editable package (-e) is a folder of this machine. Your own modules go to the hosts without this line.",
    )
    path = _relative_path(line)
    check(
        not path,
        f"{where}: {path} is a path of this machine: name an absolute path that each host has, or a URL.",
    )
    yield line


def _relative_path(line: str) -> str:
    """The relative path that a line names; empty if it names none. A variable may have any value on the host."""
    option = _PATH_OPTION.match(line)
    if line.startswith("-") and option is None:
        return ""
    target = option[1] if option else line.partition(" @ ")[2].strip() or line
    target = target.split()[0].strip("'\"").removeprefix("file:")
    if target.startswith(("/", "$")) or "://" in target:
        return ""
    return target if option or "/" in target or target.startswith((".", "~")) or target.endswith(_ARCHIVES) else ""
