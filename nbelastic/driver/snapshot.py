"""What a driver leaves for the next one of its cluster, in its run folder: settings, keys, hosts, the job.

All of it is its owner's alone (0700, 0600). A file is replaced as a whole: a kill at any byte leaves the one before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from nbelastic.core.commands import EndJob
from nbelastic.core.recovery import SavedCluster
from nbelastic.protocol import agent_messages, messages, worker_messages
from nbelastic.protocol.encoding import encode
from nbelastic.protocol.saved_cluster import NAME, read
from nbelastic.protocol.script_events import Terms
from nbelastic.provision.tcp_proxy import SavedGate
from nbelastic.system.files import replace_private
from nbelastic.transport.keys import Keys


class SavedAgent(msgspec.Struct, frozen=True):
    """An agent: which one of its host's, the process behind it on this machine (its own, or ssh's) as `pid@start`, this
    machine's address towards the host, where its workers have moved, and its job in a batch system.
    """

    number: int
    process: str
    here: str = ""
    move: messages.Rehome | None = None
    job: str = ""


class SavedJob(msgspec.Struct, frozen=True):
    """The newest job: a program, or a script.

    Of that one the number of the last round is here, the nodes of the hosts, and how it ended: it begins again.
    """

    name: str
    program: worker_messages.Program | None = None
    script: tuple[agent_messages.Script, Terms] | None = None
    round: int = 0
    nodes: dict[str, int] = {}
    over: EndJob | None = None


class Saved(msgspec.Struct, frozen=True):
    """`arguments`: those of `Cluster`. `term`: how many drivers it has had. `submitted`: how many jobs."""

    version: str
    wire: str
    name: str
    term: int
    address: str
    keys: Keys
    arguments: dict[str, Any]
    log_dir: str
    cluster: SavedCluster
    agents: dict[str, SavedAgent] = {}
    controller: str = ""
    gates: tuple[SavedGate, ...] = ()
    doors: tuple[tuple[str, str, str], ...] = ()
    started: int = 0
    submitted: int = 0
    processes: tuple[str, ...] = ()  # all on this machine that are to outlive the driver
    job: SavedJob | None = None
    number: str = ""  # of its folder for batch jobs
    owner: str = ""  # the kernel with which it ends; empty: it is kept
    hosts: tuple[str, ...] = ()  # these three: see `Head`
    slots: int = 0
    running: str = ""

    @staticmethod
    def read(folder: Path) -> Saved:
        """UsageError for what cannot be used: see `saved_cluster.read`."""
        return read(folder, Saved)

    def write(self, folder: Path) -> None:
        replace_private(folder / NAME, [encode(self)])
