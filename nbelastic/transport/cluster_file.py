"""The file that lets a terminal's torchrun into a cluster: where its driver listens, and the keys. For its owner's eyes."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

import msgspec

from nbelastic.errors import UsageError
from nbelastic.protocol.encoding import encode
from nbelastic.system.files import replace_private
from nbelastic.system.folders import runs
from nbelastic.transport.keys import Keys

NAME = "cluster.json"


class ClusterFile(msgspec.Struct, frozen=True):
    """`address`: of the driver's end of the link, `tcp://127.0.0.1:4711`. `lease`: how long (seconds) it may be silent."""

    name: str
    address: str
    keys: Keys
    lease: float

    def write(self, path: Path) -> None:
        """Mode 0600. One that was there is replaced."""
        replace_private(path, [encode(self)])


def read(path: str | Path) -> ClusterFile:
    """UsageError if it cannot be read, is none, or if others could have read it."""
    try:
        with open(path, "rb") as file:
            mode, data = os.fstat(file.fileno()).st_mode, file.read()
    except OSError as error:
        raise UsageError(f"the cluster file {path} cannot be read: {error.strerror}.") from None
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"the cluster file {path} is open to others, and holds keys: chmod 600 it.")
    try:
        return msgspec.json.decode(data, type=ClusterFile)
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is no cluster file: {error}.") from None


def find(endpoint: str, keys: str = "") -> ClusterFile:
    """For a file's path, or for `host:port` with the file that has the `keys`; without one, that of a cluster of this machine.

    UsageError if there is none.
    """
    host, _, port = endpoint.rpartition(":")
    if not endpoint or "/" in endpoint or not (host and port.isdecimal()):
        return read(endpoint)
    if keys:
        return msgspec.structs.replace(read(keys), address=f"tcp://{endpoint}")
    for path in runs().glob(f"*/{NAME}"):
        with suppress(UsageError):  # the file of another cluster may be damaged
            found = read(path)
            if found.address.rpartition(":")[2] == port:
                return found
    raise UsageError(
        f"no cluster of this machine listens at port {port}: name its cluster file, or --rdzv-conf keys=FILE."
    )
