"""Entry point of an agent's process. It starts the template before its own imports, as both take seconds.

If the environment for the user's requirements is not made yet, the agent has it made, and starts the template then.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import sys
from multiprocessing import forkserver
from typing import Any

from nbelastic.agent.fork import shorten_addresses
from nbelastic.system import open_files
from nbelastic.system.cpu_count import usable_cpus
from nbelastic.system.first_line import read_first_line
from nbelastic.system.folder_paths import compiler_cache

TEMPLATE = "nbelastic.programs.template"  # by name: the agent must not import it


def main() -> None:
    """Read the configuration, start the template, and run the agent.

    The configuration contains keys. It is the first line of the standard input, whose end ends the agent.
    """
    os.environ.pop("PYTHONSAFEPATH", None)  # of this process and the template, which gets it as an option
    config, parent_pipe = _from_stdin()
    settings = json.loads(config)
    _set_up_process(settings)
    os.environ["NBELASTIC_AGENT_PID"] = str(
        os.getpid()
    )  # for the template, which removes it from the workers' environment
    # A batch script ignores SIGUSR1 until the agent handles it. The template must not inherit that, as it would no handler.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    mp.get_context("forkserver").set_forkserver_preload([TEMPLATE])
    shorten_addresses()
    environment = None
    if settings.get("requirements"):
        from nbelastic.agent.environment import Environment

        environment = Environment(settings["requirements"])
    if environment is None or environment.use():
        forkserver.ensure_running()
    else:
        environment.begin()

    from nbelastic.agent import agent

    agent.run(config, parent_pipe, environment)


def _from_stdin() -> tuple[bytes, int]:
    """The first line, and a descriptor that becomes readable when the standard input ends."""
    line = read_first_line()
    parent_pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # workers inherit it
    os.close(nothing)
    return line, parent_pipe


def _set_up_process(settings: dict[str, Any]) -> None:
    """Set environment, limits, folder and paths of this process; the template and all workers inherit them."""
    open_files.raise_limit()  # gloo ends a worker at its limit, and connections of other programs count, too
    os.environ.update(settings["defaults"] | dict(os.environ) | settings["environment"])
    os.environ["NBELASTIC_PRELOAD"] = ",".join(settings["preload"])
    threads = settings["threads"] or str(max(1, usable_cpus() // int(settings["settings"]["slots"])))
    # torch looks up the name of each address that its stores connect to. A lost answer would delay a new world by 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    # torch makes this folder as it is imported. Its default has a name that another user can foresee, and is open to all.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiler_cache(settings["run_folder"])))
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or threads
    if settings["cwd"]:
        try:
            os.chdir(os.path.expanduser(settings["cwd"]))
        except OSError as error:
            sys.exit(f"the folder {settings['cwd']} (cwd) cannot be entered here: {error.strerror}")
    if settings["path"]:
        sys.path[:] = settings["path"]
    # Python has read this variable as it started, before it was set here
    sys.path[:0] = filter(None, settings["environment"].get("PYTHONPATH", "").split(os.pathsep))
