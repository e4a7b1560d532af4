"""The loopback ports of this machine to which tunnels through ssh lead: those of the driver's server and ipyparallel's controller.

The processes of the tunnels read them from a file in the run folder. They connect a host to no other port.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from nbelastic.system.private_files import replace_private


def ports_file(run_folder: Path) -> Path:
    return run_folder / "tunnel-ports.json"


class TunnelPorts:
    """The ports that the cluster has opened so far, also by an earlier driver."""

    def __init__(self, run_folder: Path) -> None:
        self._file = ports_file(run_folder)
        self._open: set[int] | None = None

    def open(self, ports: Iterable[int]) -> None:
        """Let hosts connect to these ports too."""
        if self._open is None:
            self._open = set()
            with suppress(OSError, ValueError):
                self._open.update(json.loads(self._file.read_text()))
        if not self._open.issuperset(ports):
            self._open.update(ports)
            replace_private(self._file, [json.dumps(sorted(self._open)).encode()])
