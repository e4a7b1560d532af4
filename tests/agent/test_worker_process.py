"""What an agent knows of a worker's process."""

import os
from types import SimpleNamespace

import pytest

from nbelastic.agent.worker_process import LONGEST_LINE, WorkerProcess


@pytest.mark.parametrize(
    ("code", "text", "line"),
    [
        (1, "Traceback (most recent call last):\nKeyError: 'x'\n", "KeyError: 'x'"),
        (0, "a warning\n", ""),
        (-9, "y" * 2 * LONGEST_LINE, "y" * LONGEST_LINE),
        (1, None, ""),
    ],
    ids=["fails", "ends well", "long line", "wrote nothing"],
)
def test_the_last_line_of_a_failed_worker(tmp_path, code, text, line):
    """It is what the process wrote last to its standard error."""
    log = tmp_path / "a-0-1.err"
    if text is not None:
        log.write_text(text)
    process = SimpleNamespace(pid=os.getpid(), exitcode=code)
    assert WorkerProcess(process, "", log).last_line() == line
