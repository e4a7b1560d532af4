"""Cells on a shared cluster, whose workers no test ends: output, values and errors."""

from __future__ import annotations

import json
import re

import pytest


def test_cells_run_on_all_workers(cluster):
    """Each worker returns its output and its error; the names of a cell stay for the next cell and the next job."""
    rows = cluster.execute(
        "import os, sys\nx = 5\nprint('pid', os.getpid())\nprint('bad', file=sys.stderr)", timeout=20
    )
    assert [row[0] for row in rows] == [w.id for w in cluster.workers]
    assert [row[1] for row in rows] == [f"pid {w.pid}\n" for w in cluster.workers]
    assert [row[2:] for row in rows] == [("bad\n", None)] * 3
    rows = cluster.execute("print(x)\n1 / 0", timeout=20)
    assert [row[1] for row in rows] == ["5\n"] * 3
    assert len({row[3] for row in rows}) == 1  # the tracebacks have no prompt number, which differs between engines
    assert re.search(r"^Cell, line 2\n.*^-+> 2 1 / 0$", rows[0][3], re.DOTALL | re.MULTILINE)
    assert rows[0][3].endswith("\nZeroDivisionError: division by zero")
    assert cluster.run_cell("x + 1").result(timeout=20) == [6, 6, 6]


@pytest.mark.parametrize(("last_line", "status"), [("pass", 0), ("1 / 0", 1), ("await asyncio.sleep(0)\n    1 / 0", 1)])
def test_a_child_that_a_cell_forks_is_no_second_worker(cluster, last_line, status):
    """It ends with the cell, of which it runs the rest, with the exit status that it would have in a script."""
    fork = f"import asyncio, os\npid = os.fork()\nif pid == 0:\n    {last_line}\n"
    wait = "if pid:\n    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    rows = cluster.execute(fork + wait, timeout=20)
    assert [row[1:] for row in rows] == [(f"{status}\n", "", None)] * 3


def test_output_arrives_while_the_cell_runs(cluster, tmp_path):
    """The cell waits for a file that its own first line has the client write: it would not end otherwise."""
    go, seen = tmp_path / "go", []

    def on_output(pieces):
        seen.extend(pieces)
        if [piece.text for piece in seen] == ["begun\n"] * 3:
            go.touch()

    source = (
        f"import os, time\nprint('begun')\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\nos.getpid()"
    )
    rows = cluster.execute(source, on_output=on_output, timeout=20)
    assert [row[1:] for row in rows] == [("begun\n", "", None)] * 3
    values = {piece.worker: json.loads(piece.text)[0]["text/plain"] for piece in seen if piece.kind == "display"}
    assert values == {worker.id: str(worker.pid) for worker in cluster.workers}


@pytest.mark.parametrize("setup", [False, True])
def test_ctrl_c_interrupts_a_cell_on_the_workers(cluster, setup):
    """They stay, and the next cell runs at once. A setup cell that was interrupted everywhere is not kept."""
    before, seen, kept = [worker.pid for worker in cluster.workers], [], cluster.setup_cells

    def on_output(pieces):
        seen.extend(pieces)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cluster.execute(
            "y = 7\nprint('begun')\nimport time\ntime.sleep(600)", on_output=on_output, setup=setup, timeout=20
        )
    cluster.wait(3, timeout=20)
    rows = cluster.execute("import os\nprint(os.getpid(), y)", timeout=20)
    assert [row[1] for row in rows] == [f"{pid} 7\n" for pid in before]
    assert cluster.setup_cells == kept


def test_no_output_of_a_cell_is_lost(cluster):
    """Each of thirty cells in quick succession has all of its output, and none of another cell."""
    for number in range(30):
        rows = cluster.execute(f"print('cell {number}'); print('x' * 10000)", timeout=20)
        assert [row[1] for row in rows] == [f"cell {number}\n{'x' * 10000}\n"] * 3


def test_a_cell_as_a_program(cluster):
    """An error in a cell that runs as a job has a traceback with the lines of the cell."""
    job = cluster.run_cell("def f():\n    raise KeyError('in a cell')\n\nf()")
    error = job.exception(timeout=20)
    assert re.search(r"line 4, in <module>\n +f\(\)", error.remote_traceback)
    assert "raise KeyError('in a cell')" in error.remote_traceback


def test_a_cell_with_a_syntax_error(cluster):
    """The kernel finds a syntax error: the error has the wrong line, and no job is started."""
    before = cluster.job
    for run in (cluster.run_cell, cluster.execute):
        with pytest.raises(SyntaxError) as caught:
            run("good = 1\nx = = 1")
        assert (caught.value.lineno, caught.value.text.strip()) == (2, "x = = 1")
    assert cluster.job is before


def test_names_outside_a_world(cluster):
    """`rank()` without a world raises NoWorldError; `device()` works without a world."""
    rows = cluster.execute(
        "import nbelastic as nbe\nprint(nbe.device())\ntry:\n    nbe.rank()\nexcept nbe.NoWorldError as e:\n    print(e)",
        timeout=20,
    )
    assert all(out.startswith(("cpu\n", "cuda:")) and "there is no world here" in out for _, out, _, _ in rows)


CELL_WITH_A_DATA_SET = """
import os
from torch.utils.data import DataLoader, Dataset

class Mine(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index, os.getppid()

found = [(numbers.tolist(), set(parents.tolist())) for numbers, parents in DataLoader(Mine(), batch_size=4, num_workers=1)]
found, os.getpid()
"""


def test_data_loaders_are_forks_of_the_worker(cluster):
    """A data set that a cell defines can be loaded by processes that are forks of the worker."""
    for found, pid in cluster.run_cell(CELL_WITH_A_DATA_SET).result(timeout=30):
        assert found == [([0, 1, 2, 3], {pid}), ([4, 5, 6, 7], {pid})]
