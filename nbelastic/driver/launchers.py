"""Start, poll and stop an agent on a host, over ipyparallel's launchers."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from ipyparallel.cluster.launcher import LocalProcessLauncher

from nbelastic.core.errors import HostError
from nbelastic.core.messages import HostSpec
from nbelastic.processes import kill_group


class AgentLauncher(LocalProcessLauncher):  # type: ignore[misc]
    """One agent as a local process."""

    def find_args(self) -> list[str]:
        return [sys.executable, "-c", "from nbelastic.host.start import main; main()"]


class LocalAgent:
    """An agent on this machine. `on_stop(exit code)` is called in the loop's thread."""

    def __init__(self, host: str, run_dir: Path, on_stop: Callable[[int | None], None]) -> None:
        self._host, self._run_dir, self._on_stop = host, run_dir, on_stop

    def start(self, config: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        stem = "".join(c if c.isalnum() or c in ".-_" else "_" for c in self._host)
        path = self._run_dir / f"agent-{stem}.json"
        write_private(path, json.dumps(config))
        self._launcher = AgentLauncher(
            work_dir=os.getcwd(),
            output_file=str(self._run_dir / f"agent-{stem}.log"),
            environment={
                "NBELASTIC_AGENT": str(path),
                "NBELASTIC_RUN_DIR": str(self._run_dir),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or config["settings"]["threads"],
                **environment,
            },
        )
        self._launcher.on_stop(lambda data: self._on_stop(data.get("exit_code")))
        self._launcher.start()

    def output(self) -> str:
        """The last lines of what the agent printed."""
        return "\n".join(self._launcher.get_output().strip().splitlines()[-5:])

    def kill(self) -> None:
        """The agent's workers die with it."""
        if self._launcher.running:
            kill_group(self._launcher.pid)


def address_of(spec: HostSpec) -> str:
    """The address of a host that is this machine. HostError for any other: those need SSH."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(spec.name, None)}
    except OSError as error:
        raise HostError(f"host {spec.name!r} is unknown ({error.strerror or error}): check its name.") from None
    loopback = sorted(a for a in found if a.startswith("127.") or a == "::1")
    if loopback:
        return loopback[0] if loopback[0] != "::1" or len(loopback) == 1 else loopback[1]
    mine = found & own_addresses()
    if not mine:
        raise HostError(
            f"host {spec.name!r} ({', '.join(sorted(found))}) is not this machine; this version starts workers only on "
            "this machine: use localhost or a 127.x.y.z address."
        )
    return min(mine)


@cache
def own_addresses() -> frozenset[str]:
    return frozenset(a.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for a in entries)


def write_private(path: Path, text: str) -> None:
    """Write `text` to a file that only its owner can read, from the first byte on."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
