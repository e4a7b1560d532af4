"""Cells between programs: what they print, what they raise, and that there always is an answer."""

from __future__ import annotations

import asyncio
import atexit
import json
import threading

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbelastic.programs import cells
from nbelastic.programs.cell_interrupts import CellInterrupts
from nbelastic.protocol import cell_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.json_encoding import encode
from nbelastic.transport.sockets import MAX_MESSAGE
from nbelastic.worker import alarms
from nbelastic.worker.output_buffer import OutputStream

W = WorkerId("a", 0, 1)


@pytest.fixture
def run(monkeypatch):
    """`run(source)`: the cell's result, in its own IPython shell."""
    options = Config({"HistoryManager": {"enabled": False}})  # nothing is written to this user's folder
    shell = InteractiveShell(config=options)
    monkeypatch.setattr(cells, "get_ipython", lambda: shell)

    interrupts = CellInterrupts()

    def cell(source: str, put=lambda *_: None, number=3) -> cell_messages.CellResult:
        return asyncio.run(cells.run(W, cell_messages.Cell(number, source), put, interrupts))

    cell.interrupts = interrupts

    yield cell
    shell.restore_sys_module_state()
    atexit.unregister(shell.atexit_operations)


def test_what_a_cell_prints(run):
    """The two streams are separate; top-level `await` works."""
    result = run("import asyncio, sys\nawait asyncio.sleep(0)\nprint('one')\nprint('two', file=sys.stderr)")
    assert result == cell_messages.CellResult(W, 3, "one\n", "two\n", "", "")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError: invalid syntax (<string>, line 1)"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "E: an error that cannot be shown"),
    ],
)
def test_an_error_in_one_line_and_in_many(run, source, error):
    """Without colours and prompt numbers; also for an error that cannot be printed."""
    result = run(source)
    assert result.error.partition(" (")[0] == error.partition(" (")[0]
    assert error.partition(":")[0] in result.traceback
    assert "\x1b" not in result.traceback
    assert "In[" not in result.traceback


def test_output_is_passed_on_while_the_cell_runs(run):
    """Text of both streams, what the cell displays, and its last value, in order."""
    pieces = []
    source = (
        "import sys\nprint('one')\nshell.display_pub.publish({'text/html': '<b>'})\nprint('two', file=sys.stderr)\n4"
    )
    run(f"shell = get_ipython()\n{source}", lambda *piece: pieces.append(piece))
    shown = [(kind, json.loads(text)[0] if kind == "display" else text) for _, kind, text in pieces]
    expected = [("out", "one"), ("display", {"text/html": "<b>"}), ("err", "two"), ("display", {"text/plain": "4"})]
    assert [one for one in shown if one in expected] == expected
    assert {number for number, _, _ in pieces} == {3}


PICTURE = """class Figure:
    def _repr_png_(self): return b"png"
    def __repr__(self): return "<Figure>"
shell = get_ipython()
def display(value): shell.display_pub.publish(*shell.display_formatter.format(value))
"""


@pytest.mark.parametrize(
    ("end", "count"), [("Figure()", 1), ("Figure()  # shown", 1), ("Figure();", 0), ("display(Figure());", 1)]
)
def test_a_picture_is_shown_as_in_a_notebook(run, end, count):
    """As the last value, or if it is displayed. A semicolon hides the value, as people write it after `plt.plot(…)`."""
    pieces = []
    assert run(f"{PICTURE}{end}", lambda *piece: pieces.append(piece)).error == ""
    shown = [json.loads(text) for _, kind, text in pieces if kind == "display"]
    assert shown == [[{"image/png": "cG5n", "text/plain": "<Figure>"}, {}]] * count


@pytest.mark.parametrize(
    "data",
    [
        "{'image/png': b'x' * 10**6, 'text/plain': '<Figure>'}",
        "{'text/html': '\"' * 4 * 10**5, 'text/plain': '<Figure>'}",
    ],
)
def test_a_picture_that_is_too_long_for_the_link(run, data):
    """Its text is shown with the reason. The link would drop the whole message: quotation marks are longer there."""
    pieces = []
    assert run(f"get_ipython().display_pub.publish({data}, {{}})", lambda *piece: pieces.append(piece)).error == ""
    ((_, _, text),) = pieces
    assert len(encode(cell_messages.CellPiece(W, *pieces[0]))) < MAX_MESSAGE
    ((shown, _),) = [json.loads(text)]
    assert shown["text/plain"].startswith("<Figure>\n(not displayed: it has 1.")
    assert len(shown) == 1


@pytest.mark.parametrize(
    "wait",
    [
        "import time\ntime.sleep(60)",
        "import asyncio\nawait asyncio.sleep(60)",
        "await asyncio.sleep(0)\ntime.sleep(60)",
    ],
)
def test_an_interrupt_ends_the_cell_and_nothing_else(run, wait):
    """Whether it computes, awaits, or blocks after an await. The next cell runs, and has the names of the first."""

    def interrupt_when_begun(number: int, _: str, text: str) -> None:
        if text == "begun":
            threading.Thread(target=run.interrupts.interrupt, args=(number,)).start()

    run("import asyncio, time")
    result = run(f"x = 5\nprint('begun')\n{wait}", interrupt_when_begun)
    assert result.error.partition(":")[0] in ("KeyboardInterrupt", "CancelledError")
    assert run("print(x)").stdout == "5\n"


def test_an_interrupt_that_comes_late_does_not_end_the_next_cell(run, monkeypatch):
    """The cell ends while another thread is about to interrupt it."""
    late = alarms.interrupt_main_thread
    monkeypatch.setattr(alarms, "interrupt_main_thread", lambda: None)
    run("print('begun')", lambda number, *_: run.interrupts.interrupt(number))
    result = run("print('begun')", lambda _number, _kind, text: text == "begun" and late(), number=4)
    assert (result.stdout, result.error) == ("begun\n", "")


def test_a_full_disk_keeps_no_answer_back(run, monkeypatch):
    """Output that cannot be written to the log file is in the answer."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(cells, "OutputStream", lambda taken, fd: OutputStream(taken, full.fileno()))
        assert run("print('x' * 20_000)").stdout == "x" * 20_000 + "\n"


@pytest.mark.parametrize("stream", ["None", "io.StringIO()", "open('/dev/null', 'w')\nsys.stdout.close()"])
def test_a_cell_may_leave_another_stream(run, stream):
    """`sys.stdout` may not even be a file after it: there is an answer, and the next cell prints as usual."""
    result = run(f"import io, sys\nprint('one')\nsys.stdout = {stream}")
    assert (result.stdout, result.error) == ("one\n", "")
    assert run("print('two')").stdout == "two\n"


def test_a_long_answer_is_not_too_long_for_the_link(run):
    """The end of the output is sent, with the number of characters that are missing."""
    source = (
        "import sys\nprint('\\x01' * 10**6)\nprint('\\x01' * 10**6, file=sys.stderr)\nraise ValueError('\\x01' * 10**6)"
    )
    result = run(source)
    assert len(encode(result)) < MAX_MESSAGE
    assert result.stdout.startswith("… 950001 characters are only in the log file …\n")
    assert json.loads(encode(result))["number"] == 3
