"""Asks a warm process for a fork of it: see warm_process.py. It imports little: each process that is to be an agent imports it."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

AGENT = "from nbelastic.agent.start import main; main()"
LENGTH = struct.Struct("!q")
DECISIVE = ("PYTHON", "TORCH", "LD_")  # variables that Python, torch and the linker read as they start
IGNORED = (  # of these: what nbelastic sets for agents, which means nothing without a GPU, and what torch sets when it compiles
    "TORCH_NCCL",
    "TORCH_DIST_USE_NCCL2",
    "TORCH_CPP_LOG_LEVEL",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTHONSAFEPATH",  # ssh starts agents with it, and they remove it
)
NAMESPACES = ("net", "uts", "mnt")
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)
REFUSED = 1 << 32  # the answer to a request from another environment; no exit code is as large


def decisive(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that must be those of the warm process."""
    chosen = (name for name in environment if name.startswith(DECISIVE) and not name.startswith(IGNORED))
    return {name: environment[name] for name in chosen}


def ask(address: str, code: str, command: Sequence[str], fds: Mapping[int, int], **more: Any) -> int:
    """Have the warm process fork a process that runs the code as `command` would; return its pid.

    `fds`: for each descriptor of the new process, the one of this process. ConnectionRefusedError if it refuses the request,
    EOFError if it has ended.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        return send(connection, {"code": code, "command": command, "waits": False, **more}, fds)


def send(connection: socket.socket, request: dict[str, Any], fds: Mapping[int, int]) -> int:
    """Send a request with descriptors; the number that the warm process answers."""
    data = json.dumps({**request, "fds": list(fds)}).encode()
    socket.send_fds(connection, [LENGTH.pack(len(data))], list(fds.values()))
    connection.sendall(data)
    answer = connection.recv(LENGTH.size, socket.MSG_WAITALL)
    if len(answer) < LENGTH.size:
        raise EOFError
    number = int(LENGTH.unpack(answer)[0])
    if number == REFUSED:
        raise ConnectionRefusedError
    return number


def join(address: str) -> None:
    """Have the warm process at `address` fork an agent in this process's namespaces; wait for it and end as it ends.

    SIGTERM and SIGUSR1 are passed on to it.
    Return if there is none, or if the environment here differs in what Python and torch read as they start. If the warm process
    ends, its agent ends too. Then this process ends as well: the agent may have read its input.
    """
    fds = {number: number for number in range(3)}
    fds |= {-place: os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for place, name in enumerate(NAMESPACES, 1)}
    request = {"code": AGENT, "command": [sys.executable, "-c", AGENT], "waits": True, "session": True}
    request |= {"cwd": os.getcwd(), "environment": dict(os.environ)}
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            for sig in PASSED_ON:
                signal.signal(sig, lambda number, _: connection.send(bytes([number])))
            code = send(connection, request, fds)
    except EOFError:
        os._exit(1)
    except OSError:
        for sig in PASSED_ON:
            signal.signal(sig, signal.SIG_DFL)
        return
    finally:
        for number, fd in fds.items():
            if number < 0:
                os.close(fd)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)
