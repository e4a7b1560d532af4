"""The programs of the pages “from torchrun” and “from Horovod” run: the one before as a script, the one after as a function."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.support.code_blocks import ROOT, blocks


def program(page: str, name: str) -> str:
    """The block of a page that begins with this name."""
    (found,) = [b.code for b in blocks("python", pages=[ROOT / "docs" / page]) if b.code.startswith(f"# {name}\n")]
    return found


def test_both_pages_lead_to_the_same_program():
    """So that running one of them is enough."""
    assert program("from-horovod.md", "after.py") == program("from-torchrun.md", "after.py")


def test_it_runs_before_and_after(make, tmp_path: Path, monkeypatch):
    """As a script it leaves its snapshot; as a function it trains all epochs on both ranks."""
    monkeypatch.chdir(tmp_path)
    for name in ("before.py", "after.py"):
        (tmp_path / name).write_text(program("from-torchrun.md", name))
    spec = importlib.util.spec_from_file_location("__main__", tmp_path / "after.py")
    after = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(after)

    cluster = make("localhost:2", min=2)
    cluster.run_script("before.py").wait(timeout=60)
    assert cluster.job.status == "succeeded", cluster.job.logs()
    assert (tmp_path / "snapshot.pt").exists()
    assert cluster.run(after.main, epochs=2).result(timeout=60) == [1, 1]
