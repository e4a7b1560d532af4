"""Turn a fork of the template into a host's node. This module imports little, because the agent loads it too."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from nbelastic.protocol import agent_messages
from nbelastic.protocol.exit_codes import UNSUCCESSFUL_NODE
from nbelastic.system.private_files import make_own, redirect
from nbelastic.system.processes import die_with_parent

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # torchrun's own default


def boot(settings: dict[str, Any]) -> None:
    """Run the node that `settings` describes until its script has ended."""
    os.setsid()
    die_with_parent(parent=getattr(sys.modules.get("nbelastic.programs.template"), "PID", 0))
    mp.set_start_method(None, force=True)
    script = msgspec.convert(settings["script"], agent_messages.Script)
    folder = Path(settings["log_dir"])
    make_own(folder)
    # Torch unpickles its workers' errors from its temporary files. A user may share the parent of the log folder with a group.
    tempfile.tempdir = settings["relay"]
    redirect(folder / f"{settings['host']}-elastic.log", 1, 2)  # what torch's agent logs
    _set_environment(script, settings)

    from nbelastic.torchrun.node import Node

    if not Node(settings, script, folder).run():
        sys.exit(UNSUCCESSFUL_NODE)


def _set_environment(script: agent_messages.Script, settings: dict[str, Any]) -> None:
    """Give workers the environment and folder of the host's agent instead of the template's."""
    for name in set(os.environ) - set(settings["environment"]):
        del os.environ[name]
    os.environ.update(settings["environment"])
    for name in (*script.unset, "NBELASTIC_PRELOAD", "NBELASTIC_AGENT_PID"):
        os.environ.pop(name, None)
    os.environ.update(script.environment)
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", SIGNALS)
    if script.cwd and os.path.isdir(script.cwd):
        os.chdir(script.cwd)
