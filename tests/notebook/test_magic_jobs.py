"""Magics that run cells and scripts on the workers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from IPython.core.error import UsageError as IPythonUsageError
from magic_output import output_of

from nbelastic.client.checkpoints import checkpoint_plan
from nbelastic.client.cluster import Cluster
from nbelastic.client.notebook_line import NotebookLine
from nbelastic.errors import JobError, UsageError
from nbelastic.notebook import cell_output
from nbelastic.notebook.cell_magics import INTERRUPTED
from nbelastic.protocol.requests import CommitOutput, Piece


def test_a_training_cell_returns_a_live_job_at_once(ip, magics, cluster):
    """The Job is the cell's value and, if wanted, a variable."""
    result = ip.run_cell("%%elastic_run --job job\nprint('hello')\n").result
    assert result is cluster.job is ip.user_ns["job"]
    assert result.source == "print('hello')\n"
    assert result.waited == []
    ip.run_cell("%%elastic_run --timeout 7\npass").raise_error()
    assert cluster.job.waited == [7.0]


def test_a_failure_after_an_interrupted_wait_is_shown_below_the_cell(ip, magics, cluster, monkeypatch, capsys):
    """The cell no longer waits, by Ctrl-C or `--timeout`; its job may fail later."""
    awaited = []
    monkeypatch.setattr("nbelastic.notebook.run_magics.show_failure_here", awaited.append)
    cluster.raises = KeyboardInterrupt()
    output_of(ip, capsys, "%%elastic_run --wait\npass")
    assert awaited == [cluster.job]


def test_a_training_cell_has_options_for_its_checkpoints(ip, magics, cluster):
    """The cluster decides on options that are not given."""
    ip.run_cell("%%elastic_run --checkpoint ~/here --checkpoint-every 50 --checkpoint-keep 2\npass").raise_error()
    given = {"checkpoint": "~/here", "checkpoint_every": 50, "checkpoint_keep": 2}
    assert cluster.job.options == {**given, "swap": False}
    ip.run_cell("%%elastic_run --swap\npass").raise_error()
    assert cluster.job.options == {**dict.fromkeys(given), "swap": True}


def test_a_script_runs_with_its_options(ip, magics, cluster):
    """torchrun's options come before the script, the script's after it; the Job is the value, as that of a cell."""
    line = "--max-restarts 3 --nproc 2 -t 3 --env A=b --job job train.py --generations 10 --max-restarts 9 -m"
    assert ip.run_line_magic("elastic_run", line) is cluster.job is ip.user_ns["job"]
    assert cluster.job.source == "train.py --generations 10 --max-restarts 9 -m"
    assert cluster.job.options == {"max_restarts": 3, "nproc": 2, "tee": "3", "env": {"A": "b"}}
    ip.run_line_magic("elastic_run", "-m --cold --wait my.training")
    assert (cluster.job.options, cluster.job.waited) == ({"module": True, "cold": True}, [None])


def test_an_option_with_the_value_zero_is_given(ip, magics, cluster):
    """`--shutdown-timeout 0` reaches the script as torchrun's does. It is not taken for an option that was left out."""
    ip.run_line_magic("elastic_run", "--shutdown-timeout 0 --exit-barrier-timeout 0 --nproc 0 train.py")
    assert cluster.job.options == {"shutdown_timeout": 0, "exit_barrier_timeout": 0, "nproc": 0}
    with pytest.raises(UsageError, match="options need a cell"):
        ip.run_line_magic("elastic", "--limit 0")


@pytest.mark.parametrize(
    ("line", "cell", "message"),
    [
        ("", None, "name a script, or write %%elastic_run above a cell."),
        ("--checkpoint there train.py", None, "--checkpoint options need a cell: a script saves its own checkpoints."),
        ("--swap train.py", None, "--swap needs a cell"),
        ("--cold", "pass", "a script and its options cannot be combined with a cell: write %elastic_run."),
        ("train.py", "pass", "a script and its options cannot be combined with a cell: write %elastic_run."),
        ("--env A train.py", None, "--env A: write NAME=VALUE."),
    ],
)
def test_scripts_and_cells_are_not_mixed(ip, magics, cluster, line, cell, message):
    """One line says what to write instead."""
    with pytest.raises((UsageError, IPythonUsageError)) as caught:
        magics.elastic_run(line) if cell is None else magics.elastic_run(line, cell)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"checkpoint_every": 5}, "checkpoint_every has no effect without checkpoint: name a folder too."),
        ({"checkpoint_keep": 5}, "checkpoint_keep has no effect without checkpoint: name a folder too."),
        ({"checkpoint": "a", "checkpoint_every": 0}, "checkpoint_every=0: a whole number, at least 1."),
        ({"checkpoint": "a", "checkpoint_keep": 1.5}, "checkpoint_keep=1.5: a whole number, at least 1."),
        ({"checkpoint": ""}, "checkpoint='' is not a folder."),
        ({"checkpoint": __file__}, f"checkpoint={__file__!r} is not a folder."),
    ],
)
def test_impossible_checkpoint_options_are_refused(given, message):
    """At once, for a function's job and a cell's, before anything is sent to a worker."""
    cluster = Cluster()
    for submit in (lambda: cluster.run(print, **given), lambda: cluster.run_cell("pass", **given)):
        with pytest.raises(UsageError) as caught:
            submit()
        assert str(caught.value) == message


def test_workers_get_absolute_checkpoint_folders(monkeypatch, tmp_path):
    """The worker's own folder does not matter; missing options have defaults."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert checkpoint_plan(None, None, None) is None
    assert checkpoint_plan("here", None, None) == (str(tmp_path / "here"), 100, 3)
    assert checkpoint_plan(Path("~/here"), 7, 1) == ("/home/me/here", 7, 1)
    assert checkpoint_plan(Path("~/here"), np.int64(7), np.int32(1)) == ("/home/me/here", 7, 1)


def test_a_failed_job_shows_only_the_remote_traceback(ip, magics, cluster, capsys):
    """One line and the failing rank's traceback, without frames of nbelastic."""
    remote = "Traceback (most recent call last):\n  File <cell>, line 1\nZeroDivisionError: division by zero\n"
    cluster.raises = JobError("rank 1 raised ZeroDivisionError.", rank=1, remote_traceback=remote)
    shown = output_of(ip, capsys, "%%elastic_run --wait\n1/0")
    assert shown == f"JobError: rank 1 raised ZeroDivisionError.\n\n{remote.rstrip()}"


def test_waiting_without_a_size_waits_for_the_job(ip, magics, cluster, capsys):
    """%elastic_wait alone waits for the job's end, and fails if there is no job."""
    assert output_of(ip, capsys, "%elastic_wait") == "UsageError: no job has run yet: start one with %%elastic_run."
    job = cluster.run_cell("pass")
    assert output_of(ip, capsys, "%elastic_wait --timeout 9") == ""
    assert job.waited == [9.0]


def test_a_wait_for_a_world_reports_that_the_job_has_ended_before(ip, magics, cluster, capsys):
    """Workers that are ready and do not train are not taken for a larger training, unless the result was asked for."""
    job = cluster.run_cell("pass")
    assert output_of(ip, capsys, "%elastic_wait --world 4") == ""
    job.status = "succeeded"
    text = "job-1 has ended (succeeded): 4 workers are ready, and none of them trains."
    assert output_of(ip, capsys, "%elastic_wait --world 4") == text
    job.result()
    assert output_of(ip, capsys, "%elastic_wait --world 4") == ""


def test_a_cell_on_each_worker_prints_each_workers_lines(ip, magics, cluster, capsys):
    """%%elastic prints lines under the workers' names; equal output once, under all its workers."""
    cluster.outputs = [("localhost/0#1", "a\nb\n", "", None), ("localhost/1#1", "", "careful\n", None)]
    shown = output_of(ip, capsys, "%%elastic --setup\nimport x\n")
    assert shown.splitlines() == ["[localhost/0#1] a", "[localhost/0#1] b", "[localhost/1#1] careful"]
    assert ("execute", "import x\n", True, None, None) in cluster.calls
    cluster.outputs = [(f"h/{i}#1", "a\nb\n", "", None) for i in range(3)]
    assert output_of(ip, capsys, "%%elastic\n1").splitlines() == ["[all 3 workers] a", "[all 3 workers] b"]
    cluster.outputs += [("h/3#1", "a\nc\n", "", None)]
    assert output_of(ip, capsys, "%%elastic\n1").splitlines() == [
        "[all 4 workers] a",
        "[h/0#1, h/1#1, h/2#1] b",
        "[h/3#1] c",
    ]
    cluster.outputs = [(f"h/{i}#1", "x" if i else "", "", None) for i in range(8)]
    assert output_of(ip, capsys, "%%elastic\n1") == "[h/1#1, h/2#1, h/3#1, h/4#1 and 3 more] x"


def test_errors_of_a_cell_name_their_workers(ip, magics, cluster, capsys):
    """%%elastic fails with the remote tracebacks: equal ones once, at most three different ones."""
    traceback = "Cell, line 1\n----> 1 y\n\nNameError: name 'y'"
    cluster.outputs = [("h/0#1", "", "", None), *((f"h/{i}#1", "", "", traceback) for i in (1, 2))]
    shown = output_of(ip, capsys, "%%elastic\ny")
    assert shown == f"JobError: the cell raised on 2 of 3 workers; h/1#1, h/2#1 raised:\n\n{traceback}"
    cluster.outputs = [(f"h/{i}#1", "", "", f"KeyError: {i}") for i in range(5)]
    shown = output_of(ip, capsys, "%%elastic\ny")
    assert shown.splitlines()[0] == "JobError: the cell raised on 5 of 5 workers; h/0#1 raised:"
    assert re.findall("KeyError: .", shown) == ["KeyError: 0", "KeyError: 1", "KeyError: 2"]
    assert shown.endswith("2 more workers raised other errors.")


def test_output_is_shown_while_the_cell_runs(ip, magics, cluster, capsys):
    """What a worker has printed before it was interrupted stays in the notebook, and one line follows."""
    text = json.dumps([{"text/plain": "<1>"}, {}])
    cluster.pieces = [Piece("h/0#1", "out", "begun\n"), Piece("h/0#1", "display", text), Piece("h/0#1", "out", "rest")]
    cluster.raises = KeyboardInterrupt()
    *shown, last = output_of(ip, capsys, "%%elastic_px\nx").splitlines()
    assert shown == ["[h/0#1] begun", "[h/0#1] <1>", "[h/0#1] rest"]
    assert last == f"KeyboardInterrupt: {INTERRUPTED}"


class Changing(NotebookLine):
    """Keeps what was shown instead of showing it."""

    def __init__(self):
        self.texts = []

    def show(self, text):
        self.texts.append(text)


def test_lines_without_an_end_change_in_place(ip, magics, cluster, capsys, monkeypatch):
    """They have a place of their own, which is empty at the end. A cell without such lines has no such place."""
    place, now = Changing(), [0.0]
    monkeypatch.setattr(cell_output, "changing_line", lambda: place)
    display = cell_output.CellDisplay(["a", "b"], clock=lambda: now[0])

    def later(*pieces, seconds=1.0):
        now[0] += seconds
        display.update([Piece(*piece) for piece in pieces])

    later(("a", "out", "line\n"), ("b", "out", "line\n"))
    later()
    assert place.texts == []
    later(("a", "out", "soon"))
    later()
    later(("a", "out", " ended\n"), seconds=0.1)
    assert place.texts == ["[a] soon", ""]
    later(("a", "err", "\r10%"), ("b", "err", "\r20%"))
    later(*[(f"w{n}", "err", f"\r{n}") for n in range(9)])
    assert place.texts[-1] == "[a] 10%\n[b] 20%"
    later()
    assert place.texts[-1].splitlines()[-2:] == ["[w5] 5", "… 3 more lines without an end …"]
    display.end()
    assert place.texts[-1] == ""
    assert capsys.readouterr().err.splitlines()[:2] == ["[a] 10%", "[b] 20%"]


def test_many_ranks_are_named_by_runs(ip, magics, cluster, capsys):
    """`ranks 0-2, 5`, not one name after the other."""
    cluster.outputs = [row(rank, "a\n" if rank in (0, 1, 2, 5) else "b\n") for rank in range(6)]
    shown = output_of(ip, capsys, "%%elastic_px --at-commit\nx")
    assert shown.splitlines() == ["[ranks 0-2, 5] a", "[ranks 3-4] b"]


@pytest.mark.parametrize("magic", ["%%elastic", "%%elastic --setup", "%%elastic_run", "%%elastic_run --wait"])
def test_a_syntax_error_is_found_before_anything_is_sent(ip, magics, cluster, capsys, magic):
    """The line, the caret and the message, without frames of nbelastic; no job begins and no worker receives the cell."""
    before = list(cluster.calls)
    shown = output_of(ip, capsys, f"{magic}\ngood = 1\nbad = = 2\n")
    assert shown == 'File "<cell>", line 2\n    bad = = 2\n          ^\nSyntaxError: invalid syntax'
    assert (cluster.calls, cluster.job) == (before, None)
    assert not ip.run_cell(f"{magic}\nbad = = 2").success
    assert "SyntaxError: 'return' outside function" in output_of(ip, capsys, f"{magic}\nreturn 5")


@pytest.mark.parametrize(
    "cell",
    ["!ls -l", "%time 1 + 1", "%%time\nx = 1", "files = !ls", "x = '\\d'", "if 1:\n    !ls\n    %time 2", "dir?"],
)
def test_the_syntax_of_ipython_is_allowed(ip, magics, cluster, capsys, cell):
    """Shell commands, magics and help work in cells for the workers as in all cells."""
    assert "Error" not in output_of(ip, capsys, f"%%elastic\n{cell}")
    assert "Error" not in output_of(ip, capsys, f"%%elastic_run\n{cell}")
    assert cluster.job.source.strip() == cell


def test_only_a_cell_between_jobs_may_await(ip, magics, cluster, capsys):
    """A program is compiled as a module: `await` outside of a function is a SyntaxError, as on the worker."""
    assert output_of(ip, capsys, "%%elastic\nimport asyncio\nawait asyncio.sleep(0)") == ""
    shown = output_of(ip, capsys, "%%elastic_run\nimport asyncio\nawait asyncio.sleep(0)")
    assert "SyntaxError: 'await' outside function" in shown


def test_setup_cells_have_keys(ip, magics, cluster, capsys, monkeypatch):
    """The given key, or the notebook's id of the cell. Setup cells are listed and cleared by their keys."""
    output_of(ip, capsys, "%%elastic_setup imports\n\nimport x\nimport y\n")
    parent = {"header": {}, "metadata": {"cellId": "0b2e"}}
    monkeypatch.setattr(ip, "get_parent", lambda: parent, raising=False)
    output_of(ip, capsys, "%%elastic --setup\nz = 1\n")
    assert output_of(ip, capsys, "%elastic_setup").splitlines() == ["imports: import x", "0b2e: z = 1"]
    assert output_of(ip, capsys, "%elastic_setup --clear nothing") == (
        "UsageError: there is no setup cell 'nothing'; there are imports, 0b2e."
    )
    assert "there is no setup cell ''" in output_of(ip, capsys, '%elastic_setup --clear ""')
    output_of(ip, capsys, "%elastic_setup --clear imports")
    assert list(cluster.setup_cells) == ["0b2e"]
    output_of(ip, capsys, "%elastic_setup --clear")
    assert output_of(ip, capsys, "%elastic_setup") == ""


def test_old_and_new_names_do_the_same(ip, magics, cluster, capsys):
    """%%elastic_px is %%elastic, %%elastic_setup is %%elastic --setup, and %elastic_dashboard is %elastic."""
    for cell in ("%%elastic --timeout 3\nx", "%%elastic_px --timeout 3\nx"):
        output_of(ip, capsys, cell)
    for cell in ("%%elastic --setup key\nx", "%%elastic_px --setup key\nx", "%%elastic_setup key\nx"):
        output_of(ip, capsys, cell)
    calls = [call for call in cluster.calls if call[0] == "execute"]
    assert calls == [("execute", "x\n", False, None, 3.0)] * 2 + [("execute", "x\n", True, "key", None)] * 3
    before = len(ip.displayed)
    output_of(ip, capsys, "%elastic\n%elastic_dashboard")
    assert ip.displayed[before] == ip.displayed[before + 1]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("%elastic_setup key", "KEY, --timeout and --out need a cell: write %%elastic_setup above it."),
        ("%%elastic_setup --clear\nx", "--clear needs no cell: write %elastic_setup --clear."),
    ],
)
def test_a_setup_line_and_a_setup_cell_have_their_own_options(ip, magics, cluster, capsys, line, text):
    """One line says what to write instead."""
    assert output_of(ip, capsys, line) == f"UsageError: {text}"


def test_setup_needs_a_cell(ip, magics, cluster, capsys):
    """%elastic --setup is a typing error for %%elastic --setup, and the message says so."""
    shown = output_of(ip, capsys, "%elastic --setup")
    assert shown == "UsageError: options need a cell: write %%elastic_px above it."


# ---- cells at a commit ----


def row(rank, stdout="", error=None, displays=()):
    return CommitOutput(rank, f"a/{rank}#1", stdout, "", error, displays)


def test_a_cell_at_a_commit_shows_equal_output_and_values_of_ranks_once(ip, magics, cluster, capsys, monkeypatch):
    """Text follows the names of the ranks; other kinds are displayed below them."""
    text, rich = '[{"text/plain": "7"}, {}]', '[{"text/plain": "<1>", "text/html": "<b>1</b>"}, {}]'
    displayed = []
    monkeypatch.setattr(cell_output, "display", lambda data, **how: displayed.append((data["text/html"], how["raw"])))
    cluster.outputs = [row(0, "same\n", displays=(text, rich)), row(1, "same\n", displays=(text,))]
    shown = output_of(ip, capsys, "%%elastic --at-commit\nx")
    assert shown.splitlines() == ["[ranks 0-1] same", "[ranks 0-1] 7", "[rank 0]"]
    assert displayed == [("<b>1</b>", True)]
    cluster.outputs = [row(0, displays=(text,)), row(1, displays=(text,))]
    line = "%%elastic_px --at-commit --rank 0 --rank 1 --limit 5 --timeout 9"
    assert output_of(ip, capsys, f"{line}\nx") == "[ranks 0-1] 7"
    assert cluster.calls[-1] == ("execute at commit", "x\n", {"ranks": [0, 1], "limit": 5.0, "timeout": 9.0})


def test_an_error_of_a_cell_at_a_commit_names_its_ranks(ip, magics, cluster, capsys):
    """What the cell has printed comes first."""
    cluster.outputs = [row(0, "before\n"), row(1, error="ValueError: mine")]
    shown = output_of(ip, capsys, "%%elastic --at-commit\nx")
    assert "[rank 0] before" in shown
    assert "the cell raised on 1 of 2 ranks; rank 1 raised:" in shown


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            "%elastic --at-commit",
            "UsageError: options need a cell: write %%elastic_px above it.",
        ),
        ("%%elastic --rank 0\nx", "UsageError: --rank and --limit need --at-commit."),
        (
            "%%elastic --at-commit --setup\nx",
            "UsageError: a setup cell runs between jobs: leave out --setup or --at-commit.",
        ),
    ],
)
def test_options_that_do_not_go_together_are_named(ip, magics, cluster, capsys, line, text):
    """Nothing is sent."""
    assert output_of(ip, capsys, line) == text
    assert not any("execute" in call[0] for call in cluster.calls)


def test_a_training_is_paused_stepped_and_resumed(ip, magics, cluster, capsys):
    """The magics that wait print where the training stands."""
    for line in ("%elastic_pause", "%elastic_step 5 --timeout 2"):
        assert output_of(ip, capsys, line) == cluster.status().reason
    assert output_of(ip, capsys, "%elastic_resume") == ""
    assert cluster.calls[-3:] == [
        ("pause", {"timeout": 60.0, "by": "%elastic_pause"}),
        ("step", 5, {"timeout": 2.0, "by": "%elastic_step"}),
        ("resume", {"by": "%elastic_resume"}),
    ]


def test_variables_are_pushed_and_the_state_is_pulled(ip, magics, cluster, capsys):
    """Names are separated by blanks or commas. A missing one is named, and nothing is pushed."""
    ip.user_ns.update(data=[1], lr=0.1)
    assert output_of(ip, capsys, "%elastic_push data,lr") == ""
    assert cluster.calls[-1] == ("push", {"data": [1], "lr": 0.1})
    assert "the notebook has no variable 'nothing'." in output_of(ip, capsys, "%elastic_push data nothing")
    assert "no job has run yet" in output_of(ip, capsys, "%elastic_pull weights")
    ip.run_cell_magic("elastic_run", "", "1")
    assert "'a-b' is not a valid variable name." in output_of(ip, capsys, "%elastic_pull a-b")
    output_of(ip, capsys, "%elastic_pull everything")
    output_of(ip, capsys, "%elastic_pull weights model --timeout 3")
    assert (ip.user_ns["everything"]["step"], ip.user_ns["weights"]) == (7, {"weight": 1.0})
    assert cluster.job.waited == [None, 3.0]
