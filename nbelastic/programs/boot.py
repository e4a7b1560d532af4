"""Turns a fork of the template into a worker: an ipyparallel engine with a link to the driver. The agent imports it too."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import sys
from typing import Any

from nbelastic.system.processes import die_with_parent
from nbelastic.system.tunnel_folder import engine_connection
from nbelastic.worker.environment import log_to, set_interface


def boot(settings: dict[str, Any]) -> None:
    """Run the worker that `settings` describe, until the engine ends."""
    os.setsid()  # its own process group: the agent can kill it with all processes that the user's code starts
    template = sys.modules.get("nbelastic.programs.template")
    die_with_parent(parent=getattr(template, "PID", 0))
    mp.set_start_method(None, force=True)  # not the inherited fork server: data loaders start as usual
    if settings["gpu"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = settings["gpu"]  # before anything looks for GPUs, so that it is `cuda:0`
    log_to(settings["log_dir"], settings["worker"])
    faulthandler.enable(2)  # a crash in C writes the Python stacks to the log
    set_interface(settings["interface"], settings["outward"])
    os.environ["IPP_CONNECTION_INFO"] = engine_connection(
        settings["engine"], settings["tunnel"]
    )  # before any thread: adding a variable moves the environment

    from nbelastic.ipp.engine import serve
    from nbelastic.programs.program import start_runner
    from nbelastic.worker.session import Session, start

    session = Session({**settings, "refused": getattr(template, "REFUSED", "")})
    start(session)
    session.warm_up.start()
    serve(settings["profile"], lambda engine: start_runner(session, engine))
