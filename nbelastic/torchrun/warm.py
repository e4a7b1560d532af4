"""A script in a fork of the template: as `python script.py` would run it, without the interpreter's start and the imports."""

from __future__ import annotations

import contextlib
import io
import multiprocessing as mp
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Iterable
from multiprocessing import connection
from typing import Any

from nbelastic.system.processes import kill_group

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
CONTRACT = (  # what torch's agent and the rendezvous set, beside all that begins with TORCHELASTIC_
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
)
INTERRUPTED = 130
MOST = 20_000  # characters of a traceback that are told: a message has bounds


def run(target: str, module: bool, known: tuple[str, ...], *arguments: str) -> None:
    """Be the script (or module), then return. `known` names the variables that a fresh process would have, beside torch's.

    SystemExit with the code that a fresh process would have had; its exceptions are printed and go on to torch, which
    writes them into the error file.
    """
    os.setsid()  # its own process group: all that the script starts can be ended with it
    _follow()
    _be_fresh(known)
    try:
        _run(target, module, arguments)
    except SystemExit as end:
        if _code(end):
            raise SystemExit(_code(end)) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        sys.stderr.write(own_part("".join(traceback.format_exception(error))))
        raise
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def _run(target: str, module: bool, arguments: Iterable[str]) -> None:
    sys.argv = [target, *arguments]
    if module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
        runpy.run_path(target, run_name="__main__")


def _code(end: SystemExit) -> int:
    """As the interpreter has it: a text is printed and counts as 1."""
    if end.code is None or isinstance(end.code, int):
        return int(end.code or 0)
    print(end.code, file=sys.stderr)
    return 1


def _follow() -> None:
    """End with the elastic agent, however that ended. The kernel's own signal would tell of the template's end only."""
    parent: Any = mp.parent_process()

    def watch() -> None:
        connection.wait([parent.sentinel])
        kill_group(os.getpgrp())

    threading.Thread(target=watch, name="nbelastic-follow", daemon=True).start()


def _be_fresh(known: tuple[str, ...]) -> None:
    """Without what the template has set for itself and for engines."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL if each != signal.SIGINT else signal.default_int_handler)
    for name in set(os.environ) - set(known) - set(CONTRACT):
        if not name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    mp.set_start_method(None, force=True)  # the fork server's is inherited; data loaders start as they do anywhere
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout, sys.stderr = _unbuffered(1), _unbuffered(2)  # as with `python -u`


def _unbuffered(fd: int) -> io.TextIOWrapper:
    raw = open(fd, "wb", buffering=0, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)


_OURS = (os.path.dirname(os.path.abspath(__file__)), "<frozen runpy>", runpy.__file__)
_TORCHS = os.path.join("torch", "distributed", "elastic", "multiprocessing")


def own_part(text: str) -> str:
    """A traceback (as text) without the frames of those who ran the script; of a very long one the beginning and the end."""
    lines, kept, skipping = text.splitlines(keepends=True), [], False
    for line in lines:
        if line.startswith('  File "'):
            skipping = line.startswith(tuple(f'  File "{name}' for name in _OURS)) or _TORCHS in line
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    text = "".join(kept)
    return text if len(text) <= MOST else f"{text[: MOST // 2]}\n…\n{text[-MOST // 2 :]}"
