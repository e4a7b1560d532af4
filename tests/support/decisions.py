"""Each story of tests/core leads to the same decisions as before: `tests/core/decisions.txt` has a hash of them for each test.

A hash changes with every command, every word of a record and every reason to wait, also those that the test does not look at.
If you meant to change what the driver decides, `python -m pytest tests/core --write-decisions` renews the file, and its diff
names the stories that go another way now. `--decisions-to FOLDER` writes the decisions themselves, a file for each test: `diff
-r` with those of another commit shows what has changed.

After the test a new driver takes over each of its stories: what that one decides counts too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

FILE = Path(__file__).parents[1] / "core" / "decisions.txt"
LIMIT = 30  # decisions that are shown of a story that goes another way

stories: list[Any] = []  # of the present test
_taken: list[str] = []  # in the present test
_encoder = msgspec.json.Encoder(order="deterministic")
_recorded: dict[str, str] = {}
_found: dict[str, str] = {}


def note(entry: object, commands: Iterable[object], reason: str) -> None:
    """The core has decided on these commands after an event, or something else that its name says."""
    name = entry if isinstance(entry, str) else type(entry).__name__
    said = [f"    {type(command).__name__} {_encoder.encode(command).decode()}" for command in commands]
    _taken.append("\n".join([f"{name}: {reason}", *said]))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-decisions", action="store_true", help="renew tests/core/decisions.txt for the tests of this run"
    )
    parser.addoption("--decisions-to", type=Path, metavar="FOLDER", help="write what the core decides in each test")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.write_decisions and getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--write-decisions works without -n.")
    _recorded.clear()
    _found.clear()
    lines = FILE.read_text("utf-8").splitlines() if FILE.exists() else []
    _recorded.update(line.rsplit(" ", 1) for line in lines)  # type: ignore[arg-type]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    stories.clear()
    _taken.clear()
    yield
    if (_taken or stories) and _repeats_itself(item):
        _take_over()
        _compare(item)


def _repeats_itself(item: pytest.Item) -> bool:
    """Whether each run of it has the same story: hypothesis writes others each time."""
    function = getattr(item, "obj", None)
    return getattr(item, "cls", None) is None and not getattr(function, "is_hypothesis_test", False)


def _take_over() -> None:
    from tests.core.away import Away

    for story in list(stories):
        Away(story).new_driver().quiet(1.0)


def _compare(item: pytest.Item) -> None:
    name = item.nodeid.removeprefix("tests/core/")
    text = "\n".join(_taken) + "\n"
    _found[name] = hashlib.sha256(text.encode()).hexdigest()[:12]
    folder = item.config.option.decisions_to
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file = re.sub(r"[^\w.-]+", "_", name)
        (folder / f"{file}.txt").write_text(text, "utf-8")
    if item.config.option.write_decisions or _recorded.get(name) == _found[name]:
        return
    what = "are others than before" if name in _recorded else f"are not in {FILE.name}"
    pytest.fail(
        f"The decisions of this story {what}; tests/support/decisions.py says what to do. The last ones are now:\n"
        + "\n".join(_taken[-LIMIT:]),
        pytrace=False,
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.option.write_decisions:
        whole = not session.config.option.keyword and session.config.args == ["tests/core"]
        kept = {} if whole else _recorded  # those of tests that are gone end with a run of all of them
        lines = sorted(f"{name} {value}" for name, value in {**kept, **_found}.items())
        FILE.write_text("".join(f"{line}\n" for line in lines), "utf-8")
