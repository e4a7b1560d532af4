"""A pytest that a test starts, to see what a plug-in of ours does there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_pytest(*arguments: str, cwd: Path) -> tuple[int, str]:
    """Run pytest in this folder with the plug-ins that the arguments name: its exit code and what it prints."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    outer |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}  # importing other plug-ins takes seconds
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=cwd,
        env=outer,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
