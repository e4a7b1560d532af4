"""The notebook's own modules on hosts that do not have its folder."""

from __future__ import annotations

import pytest

from tests.hosts.cluster_checks import LONG, event_texts

MODULE = """
from own_package.inner import NUMBER
def value():
    return NUMBER
"""
LATER = "def report():\n    import own_late\n    return own_late.WORD\n"


@pytest.fixture
def notebook(network, monkeypatch):
    """The folder of a notebook with modules; the host `apart` does not have it."""
    folder = network.folder / "notebook"
    (folder / "own_package").mkdir(parents=True, exist_ok=True)
    (folder / "own_module.py").write_text(MODULE + LATER)
    (folder / "own_late.py").write_text("WORD = 'late'\n")
    (folder / "own_package" / "__init__.py").write_text("")
    (folder / "own_package" / "inner.py").write_text("NUMBER = 1\n")
    (folder / "not_imported.py").write_text("")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


def test_an_edited_module_is_on_every_host_at_the_next_run(network, make, notebook):
    """A host without the notebook's folder gets the modules before the job, and each host runs a later edit.

    A host that shares the folder gets no copy. A newcomer has the modules before its setup cells run. What no one imports is
    not sent.
    """
    network.add("apart", "late", hides=(str(notebook),))
    cluster = make("h1:1,apart:1", min=2)
    cluster.execute("import own_module, os, sys", setup=True, timeout=LONG)
    cell = "own_module.value(), own_module.report(), own_module.__file__"
    shared, copied = sorted(cluster.run_cell(cell).result(LONG), key=lambda row: row[2] != f"{notebook}/own_module.py")
    assert shared == (1, "late", f"{notebook}/own_module.py")
    assert copied[:2] == (1, "late")
    assert "/code/" in copied[2]
    names = {
        row for out in cluster.execute("print(os.listdir(os.path.dirname(own_module.__file__)))") for row in [out[1]]
    }
    assert any("not_imported" not in row for row in names)
    assert [text.startswith("apart has your modules: 4 files") for text in event_texts(cluster, "code-sent")] == [True]
    for number in (2, 3):
        (notebook / "own_package" / "inner.py").write_text(f"NUMBER = {number}\n")
        assert [row[0] for row in cluster.run_cell(cell).result(LONG)] == [number, number]
    cluster.add_host("late:1")
    cluster.wait(3, timeout=LONG)
    assert [row[0] for row in cluster.run_cell(cell).result(LONG)] == [3, 3, 3]
