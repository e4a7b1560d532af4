"""The worker's IPython: its programs and cells run in it, and so do those of `%px` once the worker is an ipyparallel engine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.displaypub import DisplayPublisher
from IPython.core.profiledir import ProfileDir
from jupyter_client.session import Session
from traitlets.config import Config


class _TextPublisher(DisplayPublisher):  # type: ignore[misc]  # IPython carries no types here
    """Prints what programs display, as text. IPython's own publisher also keeps it, in a history that grows."""

    def publish(self, data: dict[str, Any], *_: object, **__: object) -> None:
        if "text/plain" in data:
            print(data["text/plain"])

    def clear_output(self, wait: bool = False) -> None:
        """The log stays whole."""


@contextlib.contextmanager
def printed_displays(shell: Any) -> Iterator[None]:
    """Print what a program displays: to an engine's last client it would be the output of an earlier `%px`."""
    publisher, shell.display_pub = shell.display_pub, _TextPublisher()
    try:
        yield
    finally:
        shell.display_pub = publisher


def make_shell(profile: str) -> None:
    """Make the IPython of this process, which nothing is connected to. `profile`: the folder of its profile."""
    sys.path.insert(0, "")  # the user's modules are found in the working folder
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a log file, to be read while this runs
    config = Config({"HistoryManager": {"enabled": False}})
    shell = ZMQInteractiveShell.instance(config=config, profile_dir=ProfileDir(location=profile))
    # ipykernel has these send messages. Cells catch what they show; programs print it.
    shell.displayhook.session = Session()
    shell.display_pub = _TextPublisher()
    shell.user_ns.update(exit=sys.exit, quit=sys.exit)  # ipykernel's need a kernel
