"""A script in a fork of the template: what it may do as in a new interpreter."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from nbelastic.torchrun.forked_script import use_threads

FORK = """
import multiprocessing as mp, numpy, os, sys
from nbelastic.torchrun.forked_script import run_script
numpy.random.seed(1)
fork = mp.get_context("fork").Process(target=run_script, args=(sys.argv[1], False, tuple(os.environ)))
fork.start()
fork.join()
sys.exit(fork.exitcode)
"""


@pytest.fixture
def run(tmp_path):
    """Run the lines of a script in a fork, in this test's folder; return what it has printed as errors."""

    def run(*lines: str, code: int = 0) -> str:
        Path(tmp_path / "script.py").write_text("\n".join(lines))
        command = (sys.executable, "-c", FORK, str(tmp_path / "script.py"))
        done = subprocess.run(command, cwd=tmp_path, stderr=-1, text=True, timeout=20, check=False)
        assert done.returncode == code, done.stderr
        return done.stderr

    return run


@pytest.mark.parametrize(("end", "code"), [("", 0), ("exit(3)", 3), ("1 / 0", 1)])
def test_files_that_a_script_leaves_open(run, tmp_path, end, code):
    """A log that a script never closes has its last lines, however the script ends."""
    names = ("text", "w"), ("bytes", "wb"), ("both", "w+b")
    opened = [f"{name} = open({name!r}, {mode!r}); {name}.write({'b' * ('b' in mode)}'last')" for name, mode in names]
    run(*opened, "def main(): global text, bytes, both", end, code=code)
    assert [(tmp_path / name).read_text() for name, _ in names] == ["last"] * 3


def test_a_script_ends_before_its_threads(run, tmp_path):
    """A thread that saves while the script has already ended can pickle the script's classes, as can an exit handler."""
    (tmp_path / "other.py").write_text("assert __name__ == '__main__'")
    run(
        "import atexit, pickle, runpy, threading",
        "class Config: pass",
        "runpy.run_path('other.py', run_name='__main__')",
        "def save(name):",
        "    if name == 'thread': threading.main_thread().join()",
        "    pickle.dump(Config(), open(name, 'wb'))",
        "atexit.register(save, 'at exit')",
        "threading.Thread(target=save, args=('thread',)).start()",
    )
    assert b"Config" in (tmp_path / "thread").read_bytes()
    assert b"Config" in (tmp_path / "at exit").read_bytes()


def test_a_scripts_own_hook_for_exceptions(run):
    """The hook that a script has set prints its exception, from the script's first frame on. Some services count runs as failed there."""
    hook = "sys.excepthook = lambda kind, error, frames: print(kind.__name__, frames.tb_frame.f_code.co_name, file=sys.stderr)"
    assert run("import sys", hook, "1 / 0", code=1).splitlines()[0] == "ZeroDivisionError <module>"


def test_a_hook_for_exceptions_that_fails(run):
    """A hook that raises hides neither its own error nor the script's, whose exit code remains."""
    printed = run("import sys", "sys.excepthook = lambda *_: open('missing')", "1 / 0", code=1)
    assert "FileNotFoundError" in printed
    assert "ZeroDivisionError" in printed


def test_a_script_is_the_main_process(run):
    """For multiprocessing, a script runs in the main process, and its processes are that one's children."""
    show = "def show(): print(mp.current_process().name, getattr(mp.parent_process(), 'name', None), file=sys.stderr, flush=True)"
    child = "mp.get_context('fork').Process(target=show).start()"
    printed = run("import multiprocessing as mp, sys", show, "show()", child)
    assert printed.splitlines() == ["MainProcess None", "ForkProcess-1 MainProcess"]


def test_the_number_of_threads_that_is_set_for_a_script(monkeypatch):
    """`env={"OMP_NUM_THREADS": …}` of a script holds in forks too, though torch was imported before. Other text is ignored."""
    before = torch.get_num_threads()
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    try:
        for text in (str(before + 1), "", "0", "4,2"):
            monkeypatch.setenv("OMP_NUM_THREADS", text)
            use_threads()
            assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [
        ("3", 3, "exit code 3"),
        ("-1", 255, "exit code 255"),
        ("'no data'", 1, "exit code 1: no data"),
        ("256", 0, ""),
        ("0", 0, ""),
    ],
)
def test_an_exit_code_is_in_the_error_file(run, tmp_path, monkeypatch, end, code, error):
    """By its time the rank that has failed first is found. The others, which have lost it, also write one.

    The code is the one that a parent process reads: for `sys.exit(-1)` it is 255, and no signal is named.
    """
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    run(f"raise SystemExit({end})", code=code)
    assert (tmp_path / "error.json").exists() == bool(error)
    if error:
        failure = ProcessFailure(0, 1, code, str(tmp_path / "error.json"))
        assert failure.message == error
        assert abs(failure.timestamp - time.time()) < 60


def test_what_c_code_prints(run, tmp_path, monkeypatch):
    """`printf` of an extension is in the output at once, as with `python -u`, and so is not lost when the script is killed."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    printing = "libc.printf(b'from C, ')", "print(open('out').read(), file=sys.stderr)", "libc.printf(b'the end')"
    out = "os.dup2(os.open('out', os.O_WRONLY | os.O_CREAT, 0o600), 1)"
    assert run("import ctypes, os, sys", "libc = ctypes.CDLL(None)", out, *printing) == "from C, \n"
    assert (tmp_path / "out").read_text() == "from C, the end"


def test_a_script_restores_its_output(run, monkeypatch):
    """What a script prints after `sys.stdout = sys.__stdout__` is in the output at once, and so is not lost when it is killed."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    out = "os.dup2(os.open('out', os.O_WRONLY | os.O_CREAT, 0o600), 1)"
    restored = "sys.stdout = sys.__stdout__", "print('restored')", "print(open('out').read(), file=sys.__stderr__)"
    assert run("import os, sys", out, *restored) == "restored\n\n"


def test_each_script_has_random_numbers_of_its_own(run):
    """A rank that sets no seed draws other numbers than the others on its host, and than before a restart, as in new interpreters."""
    draw = "import numpy, random, sys", "print(numpy.random.rand(), random.random(), file=sys.stderr)"
    draws = [number for _ in range(2) for number in run(*draw).split()]
    assert len(set(draws)) == 4
