"""The tutorial's cells run in IPython as a reader types them, and the model that comes out is as good as the page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.code_blocks import ROOT, blocks

PAGE = ROOT / "docs" / "tutorial.md"
MOST_WORDS = 600  # before a reader trains a model of their own
SHELL = """
import json, sys, time
from IPython.core.interactiveshell import InteractiveShell
from tests.support.waiting import until

shell = InteractiveShell.instance()
for cell in json.load(sys.stdin):
    if first := 20 if "os.kill" in cell else 500 if "%elastic_pull" in cell else 0:
        until(lambda: shell.user_ns["cluster"].status().step > first, 60, f"{first} steps")
    print(time.strftime("%X"), cell.splitlines()[0], file=sys.stderr, flush=True)
    shell.run_cell(cell).raise_error()
print(json.dumps([[event.kind, event.size] for event in shell.user_ns["cluster"].events]))
"""


@pytest.mark.soak(share=0.2)
@pytest.mark.timeout(300)  # five processes import torch and scikit-learn: 40 s on two free cores
def test_its_cells_run(tmp_path):
    """They lose a worker, replace it and add a host. After 500 steps the accuracy is that on the page."""
    cells = [block.code.replace("epochs = 1000", "epochs = 10**6") for block in blocks("python", pages=[PAGE])]
    assert any("epochs = 10**6" in cell for cell in cells)  # the training goes on until the last cell
    try:
        done = subprocess.run(
            [sys.executable, "-c", SHELL],
            input=json.dumps(cells),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(
            f"after {late.timeout} s it has come to:\n{(late.stderr or b'').decode()}\n{(late.stdout or b'').decode()}"
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert accuracy(done.stdout) == pytest.approx(accuracy(PAGE.read_text()), abs=0.03)
    events = json.loads(done.stdout.splitlines()[-1])
    sizes = [size for kind, size in events if kind == "world-formed"]
    assert (sizes[0], min(sizes), sizes[-1]) == (2, 1, 4), events
    assert "worker-lost" in dict(events)


def accuracy(text: str) -> float:
    found = re.search(r"^accuracy on 297 new pictures: ([\d.]+)$", text, re.MULTILINE)
    assert found, text
    return float(found[1])


def test_it_is_short():
    """A newcomer reads at most 600 words, code included, before the training of their own model."""
    text = PAGE.read_text()
    assert len(text[: text.index("## Lose a worker")].split()) <= MOST_WORDS
