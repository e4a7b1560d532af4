"""Entry of an agent's process. The template's imports take seconds, so they begin before this process imports much."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import sys
from multiprocessing import forkserver
from pathlib import Path

TEMPLATE = "nbelastic.worker.template"  # by name: host and worker never import one another


def main() -> None:
    """`NBELASTIC_AGENT` names the configuration file (0600: it holds the link's keys)."""
    config = Path(os.environ.pop("NBELASTIC_AGENT")).read_bytes()
    settings = json.loads(config)
    if settings["path"]:
        sys.path[:] = settings["path"]
    os.environ["NBELASTIC_PRELOAD"] = ",".join(settings["preload"])
    mp.get_context("forkserver").set_forkserver_preload([TEMPLATE])
    forkserver.ensure_running()

    from nbelastic.host import agent

    agent.run(config)
