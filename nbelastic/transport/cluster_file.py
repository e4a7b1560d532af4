"""The connection file with which a terminal's torchrun joins a cluster: the driver's address and the keys. Mode 0600."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

import msgspec

from nbelastic.errors import UsageError
from nbelastic.protocol.json_encoding import DECODE_ERRORS, encode
from nbelastic.system.folder_paths import runs_folder
from nbelastic.system.private_files import replace_private
from nbelastic.transport.keys import Keys

NAME = "cluster.json"


class ClusterFile(msgspec.Struct, frozen=True):
    """`address` of the driver's server, as `tcp://127.0.0.1:4711`. `lease`: seconds that the driver may be silent."""

    name: str
    address: str
    keys: Keys
    lease: float

    def write(self, path: Path) -> None:
        """Write with mode 0600, replacing an existing file."""
        replace_private(path, [encode(self)])


def read(path: str | Path) -> ClusterFile:
    """Read a connection file. UsageError if it cannot be read, is not one, or other users could read it."""
    try:
        with open(path, "rb") as file:
            mode, data = os.fstat(file.fileno()).st_mode, file.read()
    except OSError as error:
        raise UsageError(f"the connection file {path} cannot be read: {error.strerror}.") from None
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"the connection file {path} can be read by others, and holds keys: chmod 600 it.")
    try:
        return msgspec.json.decode(data, type=ClusterFile)
    except DECODE_ERRORS as error:
        raise UsageError(f"{path} is not a connection file: {error}.") from None


def find(endpoint: str, keys: str = "") -> ClusterFile:
    """Find a connection file by its path, or by `host:port`.

    For `host:port`, `keys` is the path of a file with the keys; without it, a cluster of this machine must listen there.
    UsageError if there is none.
    """
    host, _, port = endpoint.rpartition(":")
    if not endpoint or "/" in endpoint or not (host and port.isdecimal()):
        return read(endpoint)
    if keys:
        return msgspec.structs.replace(read(keys), address=f"tcp://{endpoint}")
    for path in runs_folder().glob(f"*/{NAME}"):
        with suppress(UsageError):  # the file of another cluster may be damaged
            found = read(path)
            if found.address.rpartition(":")[2] == port:
                return found
    raise UsageError(
        f"no cluster of this machine listens on port {port}: name its connection file, or --rdzv-conf keys=FILE."
    )
