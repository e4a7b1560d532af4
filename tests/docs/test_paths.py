"""Pages name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PATH = re.compile(r"`([a-z_.]+(?:/[a-z_0-9.]+)*/[a-z_0-9]+\.(?:py|js|css|sh|cfg|txt))\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_file_that_a_page_names_exists(page):
    """Relative to the checkout or to `nbelastic/`."""
    named = PATH.findall(page.read_text())
    missing = {name for name in named if not (ROOT / name).exists() and not (ROOT / "nbelastic" / name).exists()}
    assert not missing


def test_the_pages_name_files():
    """The pattern finds the names that the check is about."""
    assert len(PATH.findall((ROOT / "docs" / "contributing.md").read_text())) > 30
