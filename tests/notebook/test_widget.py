"""The widget's own tests, which need Node but no package and no network."""

from __future__ import annotations

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
