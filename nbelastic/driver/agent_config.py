"""What an agent is started with: the first line of its standard input, as JSON, or a file of its job."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from nbelastic.driver.agent_handle import AgentHandle
from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.settings import NCCL_DEFAULTS, NCCL_ENVIRONMENT, Settings
from nbelastic.transport.keys import Keys


def agent_config(
    spec: HostSpec, handle: AgentHandle, local: str, *, settings: Settings, server: str, keys: Keys
) -> dict[str, Any]:
    """The configuration. `local`: the host's loopback address if it is this machine, else empty; `server`: the driver's endpoint."""
    return {
        "host": spec.name,
        "number": handle.number,
        "cluster": settings.number,
        "towards": handle.driver_address,
        "driver": server,
        "threads": "",
        "keys": msgspec.to_builtins(keys.for_clients()),
        "driver_lease": settings.driver_lease if local else None,
        "lease": settings.lease,
        "heartbeat": settings.heartbeat,
        "notice": settings.limits.timeouts.notice,
        "successor": settings.limits.timeouts.successor if settings.submits_jobs and not local else 0.0,
        "address": local,
        "nics": settings.nics,
        "path": list(sys.path) if local else [],
        "run_folder": str(settings.run_folder) if local else "",
        "log_dir": str(settings.log_dir),
        "preload": list(settings.preload),
        "defaults": NCCL_DEFAULTS,
        "environment": {**NCCL_ENVIRONMENT, **settings.environment},
        "cwd": settings.cwd or "",
        "requirements": settings.requirements,
        "settings": {"slots": str(spec.slots), "backend": settings.limits.backend},
    }
