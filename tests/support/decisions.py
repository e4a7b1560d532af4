"""Each story of tests/core leads to the same decisions as before: `tests/core/decisions.txt` has a hash of them for each test.

A hash changes with every command, every word of a record and every reason to wait, also those that the test does not look at.
If you meant to change what the driver decides, `python -m pytest tests/core --write-decisions` renews the file, and its diff
names the stories that go another way now. A new test is added to the file in the same way. `--decisions-to FOLDER` writes the
decisions themselves, a file for each test: `diff -r` with those of another commit shows what has changed.

After the test a new driver takes over each of its stories: what that one decides counts too. Tests of hypothesis and soak tests
are left out, as their stories differ from run to run.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import is_hypothesis_test

FILE = Path(__file__).resolve().parents[1] / "core" / "decisions.txt"
LIMIT = 30  # decisions that are shown of a story that goes another way

_stories: list[Any] = []  # of the present test
_taken: list[str] = []  # in the present test
_is_noted = False  # whether what the present test decides is noted
_encoder = msgspec.json.Encoder(order="deterministic")
_recorded: dict[str, str] = {}
_found: dict[str, str] = {}
_collected: set[str] = set()


def note_story(story: object) -> None:
    """A story begins. After the test a new driver takes over in it."""
    if _is_noted:
        _stories.append(story)


def note(entry: object, commands: Iterable[object], reason: str) -> None:
    """The core has decided on these commands after an event, or something else that its name says."""
    if _is_noted:
        name = entry if isinstance(entry, str) else type(entry).__name__
        said = [f"    {type(command).__name__} {_encoder.encode(command).decode()}" for command in commands]
        _taken.append("\n".join([f"{name}: {reason}", *said]))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-decisions",
        action="store_true",
        help="write what the core decides now in the tests of this run to tests/core/decisions.txt, as hashes",
    )
    parser.addoption(
        "--decisions-to",
        type=Path,
        metavar="FOLDER",
        help="write what the core decides in each test of tests/core to a text file in this folder",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.write_decisions and getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--write-decisions works only without -n.")
    for known in (_recorded, _found, _collected):
        known.clear()
    lines = FILE.read_text("utf-8").splitlines() if FILE.exists() else []
    for line in lines:
        name, _, value = line.rpartition(" ")
        if "::" in name:  # else it is a mark of a merge conflict
            _recorded[name] = value


def pytest_itemcollected(item: pytest.Item) -> None:
    _collected.add(_name(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    global _is_noted
    name = _name(item)
    _is_noted = bool(name)
    try:
        yield
        if _taken or _stories:
            _take_over()
            _compare(item, name)
        else:
            _recorded.pop(name, None)
    finally:
        _is_noted = False
        _stories.clear()
        _taken.clear()


def _name(item: pytest.Item) -> str:
    """The test's name in the file; empty: it is in another folder, or has another story in each run."""
    differs = is_hypothesis_test(getattr(item, "obj", None)) or item.get_closest_marker("soak") is not None
    file = _file(item.path)
    return "" if differs or not file else f"{file}::{item.nodeid.partition('::')[2]}"


@cache
def _file(path: Path) -> str:
    """Its name in the folder of the core's tests; empty: it is in another folder."""
    path = path.resolve()
    return path.relative_to(FILE.parent).as_posix() if path.is_relative_to(FILE.parent) else ""


def _take_over() -> None:
    from tests.core.away import Away

    for story in list(_stories):
        Away(story).new_driver().quiet(1.0)


def _compare(item: pytest.Item, name: str) -> None:
    text = "\n".join(_taken) + "\n"
    _found[name] = hashlib.sha256(text.encode()).hexdigest()[:12]
    folder = item.config.option.decisions_to
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file = re.sub(r"[^\w.-]+", "_", name)
        (folder / f"{file}.txt").write_text(text, "utf-8")
    if item.config.option.write_decisions or _recorded.get(name) == _found[name]:
        return
    what = "The core decides otherwise in this test than" if name in _recorded else "This test is not yet in"
    pytest.fail(
        f"{what} tests/core/{FILE.name}, which has a hash of what the core decides in each test.\n"
        f"If you meant that: python -m pytest tests/core/{name.partition('::')[0]} --write-decisions, and commit that file.\n"
        "To see what differs, run this test with --decisions-to FOLDER before and after your change, and compare the "
        "folders with diff -r.\nThe last decisions are now:\n" + "\n".join(_taken[-LIMIT:]),
        pytrace=False,
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    option = session.config.option
    if option.write_decisions and not option.collectonly:
        kept = {name: value for name, value in _recorded.items() if not _is_gone(name, session.config)}
        lines = sorted(f"{name} {value}" for name, value in {**kept, **_found}.items())
        FILE.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def _is_gone(name: str, config: pytest.Config) -> bool:
    """Whether there is no such test any more: its file is gone, or all tests of it were collected, and this one was not."""
    file = name.partition("::")[0]
    if not (FILE.parent / file).exists():
        return True
    is_whole = not getattr(config.option, "lf", False) and not any("::" in argument for argument in config.args)
    return is_whole and name not in _collected and any(other.startswith(f"{file}::") for other in _collected)
