"""The prose of the pages and of the code is plain English: see `plain_english.py` for what that excludes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.plain_english import faults

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]}
LISTS_OLD_WORDS = {"glossary.md", "CHANGELOG.md"}
FOLDERS = sorted(path.name for path in (ROOT / "nbelastic").iterdir() if (path / "__init__.py").exists())
TEST_FOLDERS = sorted(
    path.name for path in (ROOT / "tests").iterdir() if any(path.glob("*.py")) and path.name != "docs"
)


def found_in(text: str, tmp_path: Path, name: str = "page.md") -> list[str]:
    path = tmp_path / name
    path.write_text(text)
    return [fault for _, fault in faults(path)]


def printed(paths: list[Path]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{line}: {fault}" for path in paths for line, fault in faults(path)]


@pytest.mark.parametrize("name", sorted(PAGES.keys() - LISTS_OLD_WORDS))
def test_a_page_is_plain_english(name):
    """No banned word, no riddle, no sentence of more than 25 words."""
    assert printed([PAGES[name]]) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_plain_english(folder):
    """The same of its docstrings and comments."""
    assert printed(sorted((ROOT / "nbelastic" / folder).glob("*.py"))) == []


@pytest.mark.parametrize("folder", TEST_FOLDERS)
def test_a_folder_of_tests_is_plain_english(folder):
    """The docstrings and comments of a folder of tests have no fault."""
    assert printed(sorted((ROOT / "tests" / folder).glob("*.py"))) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("The slot has three strikes.", "“strikes”: write failure"),
        ("Whoever comes later waits.", "“Whoever”: write name the actor"),
        ("A row a host is shown.", "“A row a host”: write one ... per ..."),
        ("This is no folder.", "“is no folder”: write is not a ..."),
        ("Who is late is left out.", "“Who is” as a subject"),
        ("A line. Those that wait are replaced; what is of no use ends.", None),
        ("word " * 26 + ".", "26 words in a sentence"),
        ("| a cell | a slot that cools |", "“cools”"),
        ("- an item of a list\n  that is for ever", "“for ever”"),
    ],
)
def test_a_fault_is_found(tmp_path, text, fault):
    """In paragraphs, cells and items."""
    found = found_in(text, tmp_path)
    assert (len(found) == 1 and fault in found[0]) if fault else found == []


@pytest.mark.parametrize(
    "text",
    [
        "It is no longer there, and the slot is no more than a number.",
        "The variable `strikes`, the “ghost” of an old page, and [a link](of/a/ghost.md).",
        "```python\nstrikes = 3  # nobody\n```\n",
        "Who is late?",
        "A short sentence; " + "word " * 20 + ": " + "word " * 20 + ".",
    ],
)
def test_plain_text_has_none(tmp_path, text):
    """Code, links and quotations are not prose; a colon or semicolon begins another clause."""
    assert found_in(text, tmp_path) == []


def test_docstrings_comments_and_texts_are_read_and_code_is_not(tmp_path):
    """Comments on neighbouring lines are one text. A string literal of a few words is an error, an event or a label."""
    source = '"""Nobody\nreads this."""\nstrikes = "nobody"  # noqa: E501\n# a long\n# comment of a ghost\nx = 1  # a guest\n'
    source += 'print(f"nothing was heard of {x} today")\n'
    assert [fault.split(":")[0] for fault in found_in(source, tmp_path, "code.py")] == [
        "“heard”",
        "“Nobody”",
        "“ghost”",
        "“guest”",
    ]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("\nimport sys\nfor ghost in sys.argv:\n    print(ghost if ghost in sys.path else 0)\n", 0),
        ("\nghost = 1 if sys is not None else 2\nimport sys\n", 1),
        ("the ghost of an old worker is not in the list", 1),
        ("the ghost of a null byte is \0 in the list", 1),
    ],
)
def test_a_program_in_a_string_literal_is_not_prose(tmp_path, text, count):
    """A string literal is code, and not read, if it parses as Python with more than two statements."""
    assert len(found_in(f"PROGRAM = {text!r}\n", tmp_path, "code.py")) == count


def test_words_are_spelled_as_the_dictionary_has_them():
    """By codespell, over everything that people read."""
    paths = ["nbelastic", "docs", "widgets", "tests", "README.md", "CHANGELOG.md"]
    command = [
        sys.executable,
        "-m",
        "codespell_lib",
        "--skip",
        "*.pyc,*.json,*.png,*.svg,constraints.txt,node_modules,static",
        "-L",
        "notin,oen",
        *paths,
    ]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, ""), found.stdout + found.stderr
