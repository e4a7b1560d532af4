"""Run a script in a fork of the template as `python script.py` would, without starting Python and importing torch."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import logging
import multiprocessing as mp
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterable
from multiprocessing import connection
from typing import Any

from nbelastic.protocol.exit_codes import exit_text
from nbelastic.system.processes import exit_code_of, kill_group, reseed
from nbelastic.torchrun.tracebacks import user_frames, user_traceback

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Variables that torch's agent and the rendezvous set, besides those that begin with TORCHELASTIC_
WORKER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
)
INTERRUPTED = 130
_IONBF = 2  # of C's `setvbuf`: no buffer


def run_script(target: str, module: bool, variables: tuple[str, ...], *arguments: str) -> None:
    """Run the script or module, and end this process. `variables`: names of the environment of a new process, besides torch's.

    SystemExit with the exit code of a new process, unless it is 0; the error file has that. Exceptions are printed and raised to
    torch, which writes them into the error file.
    """
    os.setsid()  # a process group, so that all that the script starts can be killed with it
    _end_with_agent()
    _reset_process(variables)
    try:
        _run(target, module, arguments)
    except SystemExit as end:
        if code := exit_code_of(end):
            _write_error_file(f"{exit_text(code)}: {end.code}" if isinstance(end.code, str) else exit_text(code))
            raise SystemExit(code) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        _print_exception(error)
        raise
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's threads, as at an interpreter's end
        atexit._run_exitfuncs()  # a fork of multiprocessing ends without
        _flush_files()
    # Torch would have it wait for the other workers of this node: without end if they are stopped, and if it is killed meanwhile,
    # torch's event blocks the node that ends the wait.
    os._exit(0)


def _print_exception(error: Exception) -> None:
    """Print it as a new interpreter does: with the hook that the script has set, if any. Some report there that it has failed."""
    if sys.excepthook is sys.__excepthook__:
        sys.stderr.write(user_traceback("".join(traceback.format_exception(error))))
        return
    try:
        sys.excepthook(type(error), error, user_frames(error.__traceback__))
    except Exception:  # noqa: BLE001  (as an interpreter does)
        traceback.print_exc()


def _flush_files() -> None:
    """Write what open files still buffer, as at an interpreter's end: a fork of multiprocessing ends without."""
    binary = io.BufferedWriter, io.BufferedRandom
    for kinds in ((io.TextIOWrapper,), binary):  # in this order: a file of text writes to a binary one
        for file in gc.get_objects():
            if issubclass(type(file), kinds):
                with contextlib.suppress(OSError, ValueError):
                    file.flush()


def _run(target: str, module: bool, arguments: Iterable[str]) -> None:
    sys.argv = [target, *arguments]
    _keep_main()
    if module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
        runpy.run_path(target, run_name="__main__")


def _keep_main() -> None:
    """Let the next module that runpy runs stay `__main__`: threads and exit handlers of a script may pickle its classes."""
    runner: Any = runpy
    temporary = runner._TempModule

    class Kept(runner._TempModule):  # type: ignore[misc]
        def __enter__(self) -> Any:
            runner._TempModule = temporary  # for scripts that the script runs
            return super().__enter__()

        def __exit__(self, *_: object) -> None:
            """Do not restore the template's module."""

    runner._TempModule = Kept


def _write_error_file(message: str) -> None:
    """Write an error file as torch reads it, unless there is one. By its time the first failure is found: others fail because of it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)  # the script may have removed it
    with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
        json.dump({"message": message, "timestamp": int(time.time())}, file)


def _end_with_agent() -> None:
    """Kill this process group when the elastic agent ends. Linux's parent-death signal would watch the template instead."""
    parent: Any = mp.parent_process()

    def watch() -> None:
        connection.wait([parent.sentinel])
        kill_group(os.getpgrp())

    threading.Thread(target=watch, name="nbelastic-end-with-agent", daemon=True).start()


def _reset_process(variables: tuple[str, ...]) -> None:
    """Undo what the template has set: signals, environment, random numbers, exit handlers, start method, streams."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    for name in set(os.environ) - set(variables) - set(WORKER_VARIABLES):
        if not name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    use_threads()
    reseed()
    _drop_exit_handlers()
    sys.excepthook = sys.__excepthook__
    process: Any = mp.current_process()  # some scripts set up logging, for example, in the main process only
    process.name, process._identity = "MainProcess", ()
    vars(multiprocessing.process)["_parent_process"] = None
    mp.set_start_method(None, force=True)  # the fork inherits the fork server's; data loaders need Python's default
    # Also by the names with which a script undoes a redirection
    sys.stdin = sys.__stdin__ = open(os.devnull, encoding="utf-8")  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _unbuffered(1)  # type: ignore[misc]  # as with `python -u`
    sys.stderr = sys.__stderr__ = _unbuffered(2)  # type: ignore[misc]
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IONBF, 0)  # also what libraries in C print


def use_threads() -> None:
    """Use as many threads as OMP_NUM_THREADS says. Torch has read the template's when it was imported there."""
    torch, count = sys.modules.get("torch"), os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and count.isdecimal() and int(count) and "MKL_NUM_THREADS" not in os.environ:
        torch.set_num_threads(int(count))


def _drop_exit_handlers() -> None:
    """Drop the template's handlers, but keep what Python itself does at a process's end."""
    atexit._clear()
    util: Any = multiprocessing.util
    atexit.register(util._exit_function)  # ends child processes: in newer Pythons by this handler alone
    atexit.register(logging.shutdown)
    finalize: Any = weakref.finalize
    finalize._registry.clear()
    finalize._registered_with_atexit = False


def _unbuffered(fd: int) -> io.TextIOWrapper:
    raw = open(fd, "wb", buffering=0, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
