"""Forks when the template dies."""

from __future__ import annotations

import errno
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from types import SimpleNamespace

import pytest

from nbelastic.agent.fork import TRIES, ForkRefusedError, fork
from nbelastic.agent.nodes import Nodes
from nbelastic.protocol.agent_messages import NodeExited, Script
from nbelastic.system.processes import is_ending, state_of
from tests.support.full_disk import FullDisk
from tests.support.waiting import until


@pytest.fixture
def template():
    """A function that returns the pid of the present template."""
    forkserver.ensure_running()
    yield lambda: vars(forkserver._forkserver)["_forkserver_pid"]
    forkserver._forkserver._stop()


def test_a_template_that_dies_during_a_fork(template, monkeypatch):
    """If the template dies during a fork, another template is started and forks the process."""
    old, makes, connected, connect = template(), [], threading.Event(), forkserver.connect_to_new_process

    def make():
        makes.append(1)
        return mp.get_context("forkserver").Process(target=time.sleep, args=(60,))

    def note(descriptors):
        try:
            return connect(descriptors)
        finally:
            connected.set()

    monkeypatch.setattr(forkserver, "connect_to_new_process", note)
    os.kill(old, signal.SIGSTOP)  # it does not answer
    until(lambda: state_of(old) == "T")
    with ThreadPoolExecutor(1) as pool:
        forked = pool.submit(fork, make)
        assert connected.wait(10)
        os.kill(old, signal.SIGKILL)
        process = forked.result(20)
    assert (len(makes), template() != old, process.is_alive()) == (2, True, True)
    process.kill()
    process.join()


def test_templates_that_die_each_time(template):
    """After the last try with a new template the error is raised."""
    makes = []

    class Dies:
        def start(self):
            os.kill(template(), signal.SIGKILL)
            until(lambda: is_ending(template()))
            raise EOFError

    with pytest.raises(EOFError):
        fork(lambda: makes.append(1) or Dies())
    assert len(makes) == TRIES
    forkserver.ensure_running()


def test_a_template_that_runs_but_closes_the_connection(template, monkeypatch):
    """If a running template closes the connection, there is no second try, and no wait in which the agent sees no worker end."""
    monkeypatch.setattr("nbelastic.agent.fork._wait_for_end", lambda _: pytest.fail("it waits"))
    makes = []

    class BreaksOff:
        def start(self):
            raise ConnectionResetError

    with pytest.raises(ForkRefusedError):
        fork(lambda: makes.append(1) or BreaksOff())
    assert len(makes) == 1


@pytest.mark.parametrize("step", ["ensure_running", "connect_to_new_process"])
def test_no_open_file_is_left_for_a_fork(template, monkeypatch, step):
    """That worker is refused with the reason, and the agent lives on: the next fork succeeds."""

    def fail(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def make():
        return mp.get_context("forkserver").Process(target=int)

    with monkeypatch.context() as full:
        full.setattr(forkserver, step, fail)
        with pytest.raises(ForkRefusedError, match="Too many open files"):
            fork(make)
    process = fork(make)
    process.join(20)
    assert process.exitcode == 0


REPORT = """
import multiprocessing as mp, os, sys
from multiprocessing import forkserver
from types import SimpleNamespace
def report():
    template = sys.modules["nbelastic.programs.template"]
    names = {"quiet_module", "threaded_module"} & sys.modules.keys()
    print(template.REFUSED, sorted(names), "NBELASTIC_REFUSED" in os.environ, flush=True)
sys.modules["__main__"].__spec__ = None
os.environ.update(NBELASTIC_PRELOAD="missing_module,script_module,quiet_module,threaded_module", NBELASTIC_AGENT_PID=str(os.getpid()))
context = mp.get_context("forkserver")
context.set_forkserver_preload(["nbelastic.programs.template"])
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
if __name__ == "__main__":
    process = context.Process(target=report)
    process.start()
    process.join()
"""


def test_preloaded_modules_that_are_refused(tmp_path):
    """One is missing, one is a script that ends: they are named. One starts a thread, which does not survive a fork.

    The template starts again without that one.
    """
    (tmp_path / "quiet_module.py").touch()
    (tmp_path / "script_module.py").write_text(
        "import argparse\nargparse.ArgumentParser().error('no data set is given')\n"
    )
    (tmp_path / "threaded_module.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='spy').start()\n"
    )
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    path = f"{tmp_path}{os.pathsep}{os.getcwd()}"
    ended = subprocess.run(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert ended.stdout == (
        "the module 'missing_module' of preload cannot be imported (ModuleNotFoundError: No module named 'missing_module'); "
        "the module 'script_module' of preload cannot be imported (SystemExit: 2); "
        "the module 'threaded_module' of preload starts the thread 'spy' when it is imported: "
        "each worker imports it itself ['quiet_module'] False\n"
    ), ended.stderr


REFUSES = """
import multiprocessing as mp, time
from nbelastic.agent import fork as forks
context = mp.get_context("forkserver")
context.set_forkserver_preload(["refuses"])
make = lambda: context.Process(target=time.sleep, args=(60,))
first = forks.fork(make)
for _ in range(2):
    try:
        forks.fork(make)
    except forks.ForkRefusedError as error:
        print(error)
third = forks.fork(make)
print(first.is_alive(), third.is_alive())
for process in (first, third):
    process.kill()
    process.join()
"""
REFUSING = """
import errno, os
from nbelastic.programs.refused_forks import survive_refused_forks
calls, real = [], os.fork
def fork():
    calls.append(None)
    if len(calls) in (2, 3):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
    return real()
os.fork = fork
survive_refused_forks()
"""


def test_a_template_that_cannot_fork_lives_on(tmp_path):
    """The limit of processes is reached: that worker is not forked. Others run on, and later ones are forked."""
    (tmp_path / "refuses.py").write_text(REFUSING)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", REFUSES], env=environment, capture_output=True, text=True, check=False)
    why = "the template could not fork: no process or memory is left here"
    assert done.stdout.splitlines() == [why, why, "True True"]
    assert set(done.stderr.splitlines()) == {"nbelastic: a worker cannot be forked: Resource temporarily unavailable"}


def test_a_full_disk_does_not_end_the_template(tmp_path):
    """That a worker cannot be forked cannot be printed either. Others run on, and later ones are forked."""
    (tmp_path / "refuses.py").write_text(REFUSING)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", REFUSES],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            check=False,
        )
    assert done.stdout.splitlines()[-1] == "True True"


def test_a_node_of_a_script_that_cannot_be_forked_has_ended(monkeypatch):
    """The driver learns of it as of any other end of a node, also if the disk is full and nothing can be printed."""

    def refuse(_):
        raise ForkRefusedError

    monkeypatch.setattr(sys, "stderr", FullDisk())
    monkeypatch.setattr("nbelastic.agent.nodes.fork", refuse)
    nodes = Nodes(mp.get_context("forkserver"), {"host": "a"})
    nodes.start(SimpleNamespace(number=5), ("127.0.0.1", "lo"), "/logs")
    assert nodes.check(0.0) == [NodeExited("a", 5, 1)]
    assert (nodes.check(1.0), nodes.ended, nodes.numbers) == ([], {5: 1}, ())


def test_the_path_of_the_temporary_folder_may_be_long(tmp_path):
    """A unix socket's path has at most 107 bytes, and a batch system may make a folder per job with a longer one."""
    folder = tmp_path / ("job" * 50)
    folder.mkdir()
    code = (
        "import multiprocessing as mp\n"
        "from nbelastic.agent.fork import fork, shorten_addresses\n"
        "shorten_addresses()\n"
        "process = fork(lambda: mp.get_context('forkserver').Process(target=print, args=('forked',), daemon=True))\n"
        "process.join()\n"
    )
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("forked\n", "")
    assert os.listdir(folder) == []


def test_a_node_has_the_time_in_which_its_workers_may_save(monkeypatch):
    """`shutdown_timeout` is between SIGTERM and SIGKILL of a worker: the agent kills the node, and so its workers, only after that."""
    signals = []
    monkeypatch.setattr("nbelastic.agent.nodes.fork", lambda _: SimpleNamespace(pid=7, exitcode=None))
    monkeypatch.setattr("nbelastic.agent.nodes.kill_group", lambda *call: not signals.append(call))
    monkeypatch.setattr("nbelastic.agent.nodes.kill_with_children", lambda *call: signals.append(call))
    monkeypatch.setattr("nbelastic.agent.nodes.is_stopped", lambda _: False)
    nodes = Nodes(mp.get_context("forkserver"), {"host": "a"})
    nodes.start(
        SimpleNamespace(number=5, script=Script("job-1", "train.py", shutdown=20.0)), ("127.0.0.1", "lo"), "/logs"
    )
    nodes.stop(5, kill=False)
    now = time.monotonic()
    nodes.check(now + 20.0)
    assert signals == [(7, signal.SIGTERM)]
    nodes.check(now + 26.0)
    assert signals[1:] == [(7,)]


def test_a_node_ends_that_had_to_as_it_began(monkeypatch):
    """Just after its fork it has no process group that SIGTERM would reach: it gets the signal later, once, and has all its time."""
    code = (
        "import os, signal\n"
        "input(); signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True)); os.setsid()\n"
        "print('began', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as process:
        monkeypatch.setattr("nbelastic.agent.nodes.fork", lambda _: SimpleNamespace(pid=process.pid, exitcode=None))
        nodes = Nodes(mp.get_context("forkserver"), {"host": "a"})
        nodes.start(SimpleNamespace(number=5, script=Script("job-1", "train.py")), ("127.0.0.1", "lo"), "/logs")
        nodes.stop(5, kill=False)
        process.stdin.write(b"begin\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"began\n"
        for _ in range(3):
            assert nodes.check(time.monotonic()) == []
        out, _ = process.communicate(b"end\n", timeout=60)
    assert (out, process.returncode) == (b"asked\n", 0)


@pytest.mark.parametrize("how", ["stop", "close"])
def test_a_killed_node_leaves_no_worker(monkeypatch, how):
    """With `--cold` and `--no-python` torch starts each worker in a session of its own: the worker is killed with its node."""
    code = (
        "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, start_new_session=True) as node:
        worker = int(node.stdout.readline())
        process = SimpleNamespace(pid=node.pid, exitcode=None, join=lambda _: None)
        monkeypatch.setattr("nbelastic.agent.nodes.fork", lambda _: process)
        nodes = Nodes(mp.get_context("forkserver"), {"host": "a"})
        nodes.start(SimpleNamespace(number=5, script=Script("job-1", "train.py")), ("127.0.0.1", "lo"), "/logs")
        if how == "stop":
            nodes.stop(5, kill=True)
            nodes.check(time.monotonic())
        else:
            nodes.close()
    until(lambda: state_of(worker) in "XZ", what="the worker's end")
