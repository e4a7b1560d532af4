"""From a fork of the template to an ipyparallel engine with a link to the driver. Imports little: the agent loads it too."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import sys
from typing import Any

from nbelastic.system.processes import die_with_parent
from nbelastic.worker.environment import log_to, set_interface


def boot(settings: dict[str, Any]) -> None:
    """Be the worker that `settings` describes, until the engine ends."""
    os.setsid()  # its own process group: all that the user's code starts can be ended with it
    die_with_parent(parent=getattr(sys.modules.get("nbelastic.programs.template"), "PID", 0))
    mp.set_start_method(None, force=True)  # the fork server's is inherited; data loaders start as they do anywhere
    log_to(settings["log_dir"], settings["worker"])
    faulthandler.enable(2)  # a crash in C leaves the Python stacks in the log
    set_interface(settings["interface"])
    os.environ["IPP_CONNECTION_INFO"] = settings["engine"]  # before any thread: adding to the environment moves it

    from nbelastic.ipp.engine import serve
    from nbelastic.programs.program import start_runner
    from nbelastic.worker.session import Session, start

    session = Session(settings)
    start(session)
    session.warm_up.start()
    serve(settings["profile"], lambda engine: start_runner(session, engine))
