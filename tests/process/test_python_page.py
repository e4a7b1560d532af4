"""The program of docs/python.md runs as a script."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.code_blocks import ROOT, blocks


@pytest.mark.soak(share=0.2)
@pytest.mark.cold  # agents start here as users' agents do
def test_the_script_runs(tmp_path):
    """It trains 200 steps, adds a host meanwhile, and returns one value per rank."""
    (block,) = [
        block for block in blocks("python", pages=[ROOT / "docs" / "python.md"]) if "nbe.Cluster(" in block.code
    ]
    script = tmp_path / "train.py"
    script.write_text(f"{block.code}\nimport json\nprint(json.dumps(results))\n")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert results == [[rank, 200] for rank in range(len(results))]
    assert len(results) in (2, 3, 4)
