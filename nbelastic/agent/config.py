"""The configuration of an agent, which the driver sends with its start."""

from __future__ import annotations

import msgspec

from nbelastic.system.driver_lease import DriverLease
from nbelastic.transport.keys import Keys


class Config(msgspec.Struct, frozen=True):
    """What an agent needs to know, beside what `start` has used already."""

    host: str
    driver: str  # the endpoint of the driver's server
    keys: Keys
    number: int  # of this agent among those of the host
    driver_lease: DriverLease | None  # on the driver's machine; None elsewhere
    lease: float  # seconds without a driver after which the agent ends
    heartbeat: float  # seconds
    notice: float  # seconds between SIGTERM and the end
    address: str  # a loopback address on the driver's machine; empty elsewhere
    nics: tuple[str, ...]  # network interfaces to use; empty: any
    run_folder: str  # for temporary files; empty: make a folder
    log_dir: str  # the cluster's log folder on the driver's machine
    settings: dict[str, str]  # of the workers
    towards: str = ""  # an address on the driver's side of this host
    tunnel: str = ""  # the folder of the tunnel's end, through which the driver is reached; empty: there is none
    requirements: tuple[str, ...] = ()  # of the user, for an environment of their own
    successor: float = (
        0.0  # seconds before the time limit of its Slurm job in which the agent gets SIGUSR1; 0: it is none
    )
