"""The limit of open files: it is raised, and too many workers for it are refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

import nbelastic as nbe
from nbelastic.errors import HostError
from nbelastic.system import open_files
from tests.support import driver_thread


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    """In this process and in those that it starts; a higher limit stays."""
    code = (
        "import resource\n"
        "from nbelastic.system import open_files\n"
        "for soft, hard in ((2000, 2000), (700, 900), (100, 600)):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))\n"
        "    print(open_files.raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["2000 2000 2000", "900 900 900", "600 600 600"]


@pytest.mark.parametrize(
    ("limit", "used", "fit", "engines"),
    [(256, 20, 93, 21), (1024, 20, 605, 149), (100, 20, 0, 0), (20_000, 20, 13_256, 3312), (300, 200, 2, 28)],
)
def test_how_many_workers_fit(limit: int, used: int, fit: int, engines: int) -> None:
    """Files that this process has open already count. ipyparallel's controller, if it is used, has room for fewer."""
    assert (open_files.most_workers(limit, used), open_files.most_engines(limit)) == (fit, engines)


def test_more_workers_than_fit_are_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line names how many fit and which limit to raise; nothing has been started."""
    driver_thread.use_driver_threads(monkeypatch)
    monkeypatch.setattr(open_files, "raise_limit", lambda: 256)
    before = set(threading.enumerate())
    with pytest.raises(HostError, match=r"^99 workers are asked for, and only \d+ fit: .*ulimit -Hn.*$"):
        nbe.Cluster("localhost:99", min=99, log_dir=tmp_path).start()
    assert set(threading.enumerate()) <= before
