"""The agents of this user on this machine: each has a file in its folder, by which `nbelastic drain` finds it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nbelastic.system.folder_paths import find_in_user_folder
from nbelastic.system.private_files import replace_private
from nbelastic.system.process_identity import identity, is_alive, pidfd_of

PROCESS = "process"  # the file with the agent's process and host
NOTICE = "notice"  # the file that says in how many seconds the host ends


class Notice(NamedTuple):
    """The machine ends in about `within` seconds."""

    within: float
    reason: str


class RunningAgent(NamedTuple):
    """`process`: its identity."""

    folder: Path
    process: str
    host: str


def register(folder: Path, host: str) -> None:
    """Say that this process is the agent of `host`, and `folder` its own. The file ends with the folder."""
    replace_private(folder / PROCESS, [f"{identity(os.getpid())} {host}".encode()])


def find() -> list[RunningAgent]:
    """All that run, by host."""
    found = []
    for pattern in ("run-*/agent-*", "runs/*/agent-*"):
        for file in find_in_user_folder(f"{pattern}/{PROCESS}"):
            with suppress(OSError):  # it has just ended
                process, _, host = file.read_text().partition(" ")
                found.append(RunningAgent(file.parent, process, host))
    return sorted((agent for agent in found if is_alive(agent.process)), key=lambda agent: agent.host)


def announce_end(agent: RunningAgent, within: float) -> bool:
    """Let the agent's workers leave: the host ends in so many seconds. Returns False if the agent has ended."""
    try:
        fd = pidfd_of(agent.process)
    except ProcessLookupError:
        return False
    try:
        replace_private(agent.folder / NOTICE, [str(within).encode()])
        signal.pidfd_send_signal(fd, signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError):  # it removes its folder, then ends
        return False
    finally:
        os.close(fd)
    return True


def read_notice(folder: Path) -> Notice | None:
    """In the agent, after SIGTERM: what `announce_end` wrote; None if the signal came from elsewhere."""
    try:
        within = float((folder / NOTICE).read_text())
        (folder / NOTICE).unlink()
    except (OSError, ValueError):
        return None
    return Notice(within, "nbelastic drain")
