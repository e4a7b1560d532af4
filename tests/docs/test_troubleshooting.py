"""The messages that docs/troubleshooting.md quotes are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line.split("|")[1].strip()
    for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines()
    if line.startswith("| ")
]
SOURCES = [*(ROOT / "nbelastic").rglob("*.py"), *(ROOT / "widgets" / "src").glob("*.js")]
CODE = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in SOURCES))  # texts over several lines
OTHERS = {
    "Click to show javascript error",
    "Error displaying widget: model not found",
    "queued (Resources)",
    "%elastic_run",
    "%%elastic_run",
    "trainer.train()",
}
QUOTES = sorted({quote for row in ROWS for quote in re.findall(r"`([^`]+)`", row)} - OTHERS)


def fixed_parts(quote: str) -> list[str]:
    """The parts of a message that are the same each time: without names, numbers and what is left out."""
    parts = re.split(r"…|'\w+'|\bNAME\b|\bmodel\b|, in train.py:88|\b[\d.]+\b", quote)
    return [part.strip(" ,:;()") for part in parts if part.strip(" ,:;()")]


@pytest.mark.parametrize("quote", QUOTES)
def test_a_message_is_in_the_code(quote):
    """Part by part, in that order of words."""
    assert [part for part in fixed_parts(quote) if part not in CODE] == []


def test_there_are_messages():
    """The page quotes messages; else the test above has nothing to look at."""
    assert len([quote for quote in QUOTES if " " in quote]) > 15
