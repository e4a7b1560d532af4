"""Which tests of the core have their decisions recorded, and what renews the records."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.inner_pytest import run_pytest

PLUGIN = "from pathlib import Path\nfrom tests.support import decisions\ndecisions.FILE = Path(__file__).resolve().with_name('core') / 'decisions.txt'\n"
STORY = """
import pytest
from hypothesis import given, strategies as st
from tests.core.story import Story

@pytest.mark.parametrize("text", ["a b", "c"])
def test_story(text):
    Story("a:1", min=1).run()

class TestStories:
    def test_method(self):
        Story("b:1", min=1).run()

@pytest.mark.soak
def test_long():
    Story("c:1", min=1).run()

@given(st.just(1))
def test_any(number):
    Story("d:1", min=1).run()

def test_without_story(): pass
"""
NAMES = ["test_it.py::TestStories::test_method", "test_it.py::test_story[a b]", "test_it.py::test_story[c]"]


@pytest.fixture
def run(tmp_path):
    """Run pytest with the plug-in in a folder with these tests of a core: its exit code and what it prints."""
    (tmp_path / "core").mkdir()
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    soak:\n")
    (tmp_path / "core" / "test_it.py").write_text(STORY)

    def of(*arguments: str) -> tuple[int, str]:
        return run_pytest("-q", "-p", "tests.support.decisions", *(arguments or ("core",)), cwd=tmp_path)

    return of


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "core" / "decisions.txt"


def names(file: Path) -> list[str]:
    return [line.rpartition(" ")[0] for line in file.read_text().splitlines()]


def test_a_test_is_recorded_unless_its_story_differs_from_run_to_run(run, file):
    """Tests of hypothesis and soak tests are left out. A new test fails until it is recorded; so does one that decides otherwise."""
    code, text = run()
    assert code == 1
    assert "This test is not yet in" in text
    assert "3 failed, 3 passed" in text
    assert run("core", "--write-decisions")[0] == 0
    assert names(file) == NAMES
    assert run()[0] == 0
    other = file.with_name("test_it.py")
    other.write_text(STORY.replace('"b:1"', '"b:2"'))
    code, text = run()
    assert code == 1
    assert "The core decides otherwise in this test" in text
    assert "1 failed, 5 passed" in text


@pytest.mark.soak(share=0.2)
def test_a_record_stays_as_long_as_its_test(run, file):
    """Also if the test fails, is not chosen or cannot be collected. A run of its whole file drops it once it is gone."""
    run("core", "--write-decisions")
    tests, before = file.with_name("test_it.py"), file.read_text()
    for arguments in (("-k", "method"), ("--collect-only",), ("core/test_it.py::TestStories",)):
        assert run("core" if "::" not in arguments[-1] else "-q", *arguments, "--write-decisions")[0] == 0
        assert file.read_text() == before
    for broken in (STORY.replace("def test_method(self):", "def test_method(self):\n        assert 0"), STORY + "(\n"):
        tests.write_text(broken)
        assert run("core", "--write-decisions")[0]
        assert file.read_text() == before
    tests.write_text(STORY.replace("test_method", "test_other"))
    assert run("core", "--write-decisions")[0] == 0
    assert names(file) == [NAMES[0].replace("test_method", "test_other"), *NAMES[1:]]
    tests.rename(tests.with_name("test_others.py"))
    assert run("core", "--write-decisions")[0] == 0
    assert {name.partition("::")[0] for name in names(file)} == {"test_others.py"}


def test_a_merge_conflict_is_renewed_too(run, file):
    """Lines that only mark the conflict are dropped."""
    run("core", "--write-decisions")
    before = file.read_text()
    file.write_text(f"<<<<<<< HEAD\n{before}=======\n{before}>>>>>>> other\n")
    assert run()[0] == 0
    assert run("core", "--write-decisions")[0] == 0
    assert file.read_text() == before


def test_other_folders_are_not_recorded(run, file):
    """A test of the driver may use a story too."""
    (file.parents[1] / "test_driver.py").write_text(STORY)
    code, text = run("test_driver.py")
    assert (code, file.exists()) == (0, False), text
