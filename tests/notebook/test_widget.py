"""The widget's own tests, which need Node but no package and no network."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

WIDGETS = Path(__file__).parents[2] / "widgets"


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node here")
def test_the_widget_keeps_its_promises():
    """`node --test` in widgets/ passes."""
    done = subprocess.run(["node", "--test"], cwd=WIDGETS, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_view_knows_failures_by_kinds_that_there_are():
    """Each word by which it tells a failure is part of a kind that docs/reference.md lists."""
    (words,) = re.findall(r"^const FAILURE = /(.*)/;$", (WIDGETS / "dashboard.js").read_text(), re.MULTILINE)
    table = (WIDGETS.parent / "docs" / "reference.md").read_text().partition("| kind | when |")[2].partition("\n\n")[0]
    kinds = re.findall(r"`([a-z-]+)`", table)
    assert [word for word in words.split("|") if not any(word in kind for kind in kinds)] == []
