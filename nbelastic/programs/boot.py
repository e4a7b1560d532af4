"""Turns a fork of the template into a worker: an IPython with a link to the driver. The agent imports it too."""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing as mp
import os
import selectors
import signal
import sys
import traceback
from collections.abc import Coroutine
from typing import Any

from nbelastic.system import at_fork
from nbelastic.system.processes import die_with_parent, reseed
from nbelastic.worker.environment import log_to, set_interface


def boot(settings: dict[str, Any]) -> None:
    """Run the worker that `settings` describe, until the agent ends it."""
    os.setsid()  # its own process group: the agent can kill it with all processes that the user's code starts
    template = sys.modules.get("nbelastic.programs.template")
    die_with_parent(parent=getattr(template, "PID", 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    at_fork.register(_end_at_once)
    reseed()
    mp.set_start_method(None, force=True)  # not the inherited fork server: data loaders start as usual
    if settings["gpu"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = settings["gpu"]  # before anything looks for GPUs, so that it is `cuda:0`
    log_to(settings["log_dir"], settings["worker"])
    faulthandler.enable(2)  # a crash in C writes the Python stacks to the log
    set_interface(settings["interface"], settings["outward"])

    from nbelastic.programs.program import serve
    from nbelastic.programs.shell import make_shell
    from nbelastic.worker.session import Session, start

    session = Session({**settings, "refused": getattr(template, "REFUSED", "")})
    at_fork.register(session.output.discard)
    start(session)
    session.warm_up.start()
    make_shell(settings["profile"])
    run_until_done(serve(session, settings["profile"], settings["tunnel"]))


def run_until_done(serving: Coroutine[Any, Any, None]) -> None:
    """Run it in an event loop, which goes on if a signal handler raises while it waits: that of an ended program's alarm."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(serving)
        while not task.done():
            try:
                loop.run_until_complete(task)
            except Exception as error:
                raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
                # An error of the loop itself would come again at once.
                if task.done() or raised_in == selectors.__file__:
                    raise
                traceback.print_exc()


def _leave(*_: object) -> None:
    """End at SIGTERM: there is nothing to clean up."""
    try:
        for stream in (sys.__stdout__, sys.__stderr__):
            if stream is not None:
                stream.flush()
    finally:  # a flush raises if the disk is full, or if the signal came while the stream was written to
        os._exit(0)


def _end_at_once() -> None:
    """In a process that the program forks: SIGTERM ends it also while it hangs in C, as `Process.terminate()` promises."""
    if signal.getsignal(signal.SIGTERM) is _leave:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
