"""The worker's IPython: its programs and cells run in it, and so do those of `%px` once the worker is an ipyparallel engine."""

from __future__ import annotations

import sys

from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.displaypub import DisplayPublisher
from IPython.core.profiledir import ProfileDir
from jupyter_client.session import Session
from traitlets.config import Config


def make_shell(profile: str) -> None:
    """Make the IPython of this process, which nothing is connected to. `profile`: the folder of its profile."""
    sys.path.insert(0, "")  # the user's modules are found in the working folder
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a log file, to be read while this runs
    config = Config({"HistoryManager": {"enabled": False}})
    shell = ZMQInteractiveShell.instance(config=config, profile_dir=ProfileDir(location=profile))
    # ipykernel has these send messages. Cells catch what they show; programs print it.
    shell.displayhook.session = Session()
    shell.display_pub = DisplayPublisher(shell=shell)
