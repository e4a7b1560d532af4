"""The folder in which a host's end of a tunnel listens: for processes of the host, and for its next ssh connection.

It is private (mode 0700). Its sockets are named by descriptor, as its path may be too long for a unix socket.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from nbelastic.system.engine_ports import engine_ports
from nbelastic.system.folder_paths import find_in_user_folder

CONTROL = "control"
PORT = "port"  # ZeroMQ and ipyparallel append `:` and the port to an address
ANSWER_TIMEOUT = 5.0  # seconds in which the end of the tunnel answers
KILL_TIMEOUT = 5.0  # seconds in which a killed process has gone
_CREDENTIALS = struct.Struct("3i")  # of the process at the other end of a connection: its pid, user and group


def name_of(cluster: str, host: str, agent: int) -> str:
    """The folder's name. `cluster`: the number of its start; `agent`: the agent's number. Hosts may share a file system."""
    return f"tunnel-{hashlib.sha256(f'{cluster} {host}'.encode()).hexdigest()[:16]}-{agent}"


def find(cluster: str, host: str) -> dict[int, Path]:
    """The folders of this cluster's agents for this host, by the agent's number."""
    pattern = name_of(cluster, host, 0).removesuffix("0")
    found = find_in_user_folder(f"run-*/{pattern}*")
    return {int(folder.name.rpartition("-")[2]): folder for folder in found}


def open_folder(folder: Path) -> int:
    """A descriptor by which sockets in the folder are named; programs that this process starts do not inherit it."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def socket_path(fd: int, name: str) -> str:
    return f"/proc/self/fd/{fd}/{name}"


def interface(fd: int) -> str:
    """The address, without `:` and a port of the driver's machine, to which a process of the host connects."""
    return f"ipc://{socket_path(fd, PORT)}"


def ask(folder: Path, request: str, fds: Sequence[int] = ()) -> socket.socket:
    """Send a request to the end of the tunnel; return the connection once it has answered. OSError if there is none.

    `attach` goes with the two descriptors of a new ssh connection. `listen PORT …` is sent before processes connect to these
    ports of the driver's machine. `end` ends the agent.
    """
    connection = _connect(folder)
    try:
        socket.send_fds(connection, [request.encode()], fds)
        answer = connection.recv(16)
    except BaseException:
        connection.close()
        raise
    if not answer:
        connection.close()
        raise ConnectionResetError("the tunnel ends")
    return connection


def kill(folder: Path) -> None:
    """Kill the end of the tunnel, and wait until it has gone. OSError if there is none."""
    with _connect(folder) as connection:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _, _ = _CREDENTIALS.unpack(credentials)
    if pid > 0:  # else it is in another container
        pidfd = os.pidfd_open(pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], KILL_TIMEOUT)
        os.close(pidfd)


def _connect(folder: Path) -> socket.socket:
    fd = open_folder(folder)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(ANSWER_TIMEOUT)
        connection.connect(socket_path(fd, CONTROL))
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(fd)
    return connection


def driver_endpoint(driver: str, tunnel: str) -> str:
    """The endpoint at which this process reaches the driver, which listens at `driver`. `tunnel`: the folder, or empty."""
    return f"{interface(open_folder(Path(tunnel)))}:{driver.rpartition(':')[2]}" if tunnel else driver


def engine_connection(connection: str, tunnel: str) -> str:
    """ipyparallel's connection information (JSON) for an engine in this process. `tunnel`: the folder, or empty.

    OSError if the tunnel has ended.
    """
    if not tunnel:
        return connection
    folder = Path(tunnel)
    ask(folder, " ".join(["listen", *map(str, engine_ports(connection))])).close()
    return json.dumps({**json.loads(connection), "interface": interface(open_folder(folder))})
