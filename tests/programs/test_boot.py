"""How a worker, and what its program forks, ends at SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest

from nbelastic.programs import boot
from tests.support.full_disk import FullDisk


class EndedError(BaseException):
    pass


def test_a_worker_ends_at_sigterm_though_its_disk_is_full(monkeypatch):
    """It would live on: the error of its log would be raised in the program, whose job would fail."""

    def end(code):
        raise EndedError(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(sys, "__stdout__", FullDisk())
    before = signal.signal(signal.SIGTERM, boot._leave)
    try:
        with pytest.raises(EndedError, match="0"):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


FORKS = """
import ctypes, os, signal
from nbelastic.programs import boot
from nbelastic.system import at_fork

signal.signal(signal.SIGTERM, boot._leave)
at_fork.register(boot._end_at_once)
ready, say = os.pipe()
child = os.fork()
signal.alarm(20)
if child == 0:
    lock, libc = ctypes.create_string_buffer(256), ctypes.CDLL(None)
    libc.pthread_mutex_lock(lock)
    os.write(say, b"hangs")
    libc.pthread_mutex_lock(lock)
os.read(ready, 5)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), signal.getsignal(signal.SIGTERM) is boot._leave)
"""


def test_a_process_that_a_program_forks_ends_at_sigterm():
    """A process of a pool hangs in C, as after a fork beside threads. `terminate()` ends it, and the program goes on."""
    ended = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True)
    assert ended.stdout == "-15 True\n"


def test_a_signal_handler_that_raises_between_programs_does_not_end_the_worker(capsys):
    """A program has ended and left an alarm, or a data loader's process that is killed now. The worker takes the next program."""

    def overdue(*_):
        raise TimeoutError("a step takes too long")

    async def serve():
        loop, comes = asyncio.get_running_loop(), asyncio.Event()

        def interrupt():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            loop.call_soon_threadsafe(comes.set)

        threading.Timer(0.05, interrupt).start()  # as the loop waits
        await comes.wait()
        print("the next program")

    before = signal.signal(signal.SIGUSR1, overdue)
    try:
        boot.run_until_done(serve())
    finally:
        signal.signal(signal.SIGUSR1, before)
    out, err = capsys.readouterr()
    assert (out, err.count("TimeoutError: a step takes too long")) == ("the next program\n", 1)


def test_a_fault_of_the_worker_itself_ends_it():
    """The agent starts another one."""

    async def fail():
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        boot.run_until_done(fail())
