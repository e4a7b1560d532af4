"""The loopback ports of this machine to which tunnels of hosts lead: those of the driver's server and ipyparallel's controller.

The processes of the tunnels read them from a file in the run folder, with the key that a host must know. They connect a host to
no other port.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from nbelastic.system.private_files import replace_private
from nbelastic.tunnel import allowed_ports, handshake
from nbelastic.tunnel.allowed_ports import Allowed


def ports_file(run_folder: Path) -> Path:
    return run_folder / "tunnel-ports.json"


class TunnelPorts:
    """The ports that the cluster has opened so far, also by an earlier driver. `client_secret`: the cluster's."""

    def __init__(self, run_folder: Path, client_secret: str) -> None:
        self._file = ports_file(run_folder)
        self._key = handshake.key_from(client_secret).hex()
        self._allowed: Allowed | None = None

    def open(self, ports: Iterable[int], engines: int = 0) -> None:
        """Let hosts connect to these ports too. `engines`: how many workers of a host may do so."""
        if self._allowed is None:
            self._allowed = allowed_ports.read(self._file) or Allowed(self._key)
        known = self._allowed
        wanted = Allowed(self._key, tuple(sorted({*known.ports, *ports})), max(known.engines, engines))
        if wanted != known:
            replace_private(self._file, [msgspec.json.encode(wanted)])
            self._allowed = wanted
