"""The driver snapshot: what a driver saves in the run folder so that the next driver of its cluster can take over.

Only the user may read it (modes 0700 and 0600). A file is replaced as a whole: after a kill at any byte the previous one is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from nbelastic.core.cluster_snapshot import SavedCluster
from nbelastic.core.commands import EndJob
from nbelastic.protocol import agent_messages, messages, worker_messages
from nbelastic.protocol.json_encoding import encode
from nbelastic.protocol.local_clusters import SNAPSHOT_FILE, read
from nbelastic.protocol.script_events import Terms
from nbelastic.provision.tcp_proxy import SavedProxy
from nbelastic.system.private_files import replace_private
from nbelastic.transport.keys import Keys


class SavedAgent(msgspec.Struct, frozen=True):
    """An agent that runs.

    `number`: which start of an agent it is. `process`: the process for it on this machine (its own, or ssh's) as `pid@start`.
    `driver_address`: this machine's address as the host reaches it. `rehome`: the newest address of its workers, if that
    has changed. `job`: its job in a batch system, or its pod. `returns`: Kubernetes ends the pod, and the host gets another.
    `disconnected`: its tunnel has broken, and it has sent nothing since. `drain_announced`: that its node is drained was announced.
    """

    number: int
    process: str
    driver_address: str = ""
    rehome: messages.Rehome | None = None
    job: str = ""
    returns: bool = False
    disconnected: bool = False
    drain_announced: bool = False

    @property
    def is_tunnelled(self) -> bool:
        return bool(self.driver_address) and (not self.job or bool(self.process))


class SavedJob(msgspec.Struct, frozen=True):
    """The newest job: a program, or a script.

    Of a script: the number of its last round, the number of each host's node in it, and how it ended (`over`). The next driver
    starts its workers again. `external`: the external nodes of that round, with the identities of those on this machine.
    """

    name: str
    program: worker_messages.Program | None = None
    script: tuple[agent_messages.Script, Terms] | None = None
    round: int = 0
    nodes: dict[str, int] = {}
    external: dict[str, str] = {}
    over: EndJob | None = None


class DriverSnapshot(msgspec.Struct, frozen=True):
    """`arguments`: of `Cluster`. `term`: the number of this driver of the cluster, from 1.

    The fields that every process of the user reads are described at `local_clusters.SnapshotHead`.
    """

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
    proxies: tuple[SavedProxy, ...] = ()
    agents_started: int = 0  # so far
    submitted: int = 0  # jobs so far
    processes: tuple[str, ...] = ()  # all on this machine that outlive the driver
    tunnels: tuple[str, ...] = ()
    job: SavedJob | None = None
    number: str = ""  # names the folder for batch jobs
    machine: str = ""  # see `local_clusters`: where the processes run
    owner: str = ""  # the kernel with whose end the cluster ends; empty: the cluster is kept
    hosts: tuple[str, ...] = ()
    slots: int = 0
    running: str = ""
    code: tuple[str, ...] = ()  # versions of the user's modules, the newest last
    skipped: float = 0.0  # seconds by which the driver's clock was behind the monotonic one: that of the saved times

    @staticmethod
    def read(folder: Path) -> DriverSnapshot:
        """The snapshot of a run folder. UsageError if it cannot be used: see `local_clusters.read`."""
        return read(folder, DriverSnapshot)

    def write(self, folder: Path) -> None:
        replace_private(folder / SNAPSHOT_FILE, [encode(self)])
