"""Entry of an agent's process. The template's imports take seconds, so they begin before this process imports much."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import sys
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from nbelastic.system import open_files

TEMPLATE = "nbelastic.programs.template"  # by name: host and worker never import one another


def main() -> None:
    """The configuration holds the link's keys, so it comes on the standard input, or in a 0600 file.

    The standard input stays open for as long as the driver wants the agent to live; a batch system has none to offer, and
    there `NBELASTIC_AGENT` names the file.
    """
    file = os.environ.pop("NBELASTIC_AGENT", None)
    config, lifeline = (_from_file(Path(file)), -1) if file else _from_stdin()
    settings = json.loads(config)
    _arrange(settings)
    os.environ["NBELASTIC_AGENT_PID"] = str(os.getpid())  # for the template, which does not pass it on
    mp.get_context("forkserver").set_forkserver_preload([TEMPLATE])
    forkserver.ensure_running()

    from nbelastic.agent import agent

    agent.run(config, lifeline)


def _from_file(path: Path) -> bytes:
    """Nobody else needs it."""
    config = path.read_bytes()
    with suppress(OSError):
        path.unlink()
    return config


def _from_stdin() -> tuple[bytes, int]:
    """The first line, and a descriptor on which the end of the rest can be waited for."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)  # no more: what follows is not ours to take
        if not byte:
            sys.exit("no configuration came on the standard input")
        line += byte
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # workers inherit it
    os.close(nothing)
    return bytes(line), lifeline


def _arrange(settings: dict[str, Any]) -> None:
    """The environment, limits, folder and paths that this process, the template and all workers have."""
    open_files.raise_limit()  # gloo ends a worker that has none left, and strangers' connections take one each
    os.environ.update(settings["environment"])
    os.environ["NBELASTIC_PRELOAD"] = ",".join(settings["preload"])
    threads = settings["threads"] or str(max(1, (os.cpu_count() or 1) // int(settings["settings"]["slots"])))
    # torch asks for the name of each address that its stores connect to; a lost answer would cost a new world 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or threads
    if settings["cwd"]:
        try:
            os.chdir(Path(settings["cwd"]).expanduser())
        except OSError as error:
            sys.exit(f"the folder {settings['cwd']} (cwd) cannot be entered here: {error.strerror}")
    if settings["path"]:
        sys.path[:] = settings["path"]
