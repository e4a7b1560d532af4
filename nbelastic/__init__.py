"""nbelastic: elastic PyTorch training from a notebook.

These are the public names. Each is loaded on first use: `import nbelastic` in a kernel does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbelastic.client.cluster import Cluster
    from nbelastic.client.job import Job
    from nbelastic.errors import (
        ClusterStoppedError,
        DiscoveryError,
        DriverLostError,
        HostError,
        JobError,
        JobStoppedError,
        NbelasticError,
        NoWorldError,
        StateError,
        UsageError,
        WaitTimeoutError,
    )
    from nbelastic.notebook import load_ipython_extension, unload_ipython_extension
    from nbelastic.programs.elastic import elastic, warmup
    from nbelastic.protocol.host_sources import HostDiscovery
    from nbelastic.provision.discovery import FixedHosts, ScriptDiscovery
    from nbelastic.sharded.mesh import device_mesh
    from nbelastic.sharded.state import ShardedState
    from nbelastic.state.sampler import ElasticSampler, local_batch_size
    from nbelastic.state.state import ObjectState, State, TorchState
    from nbelastic.state.step_log import StepLog
    from nbelastic.state.stream import ElasticStream
    from nbelastic.worker.ranks import (
        cross_group,
        cross_rank,
        cross_size,
        device,
        environment,
        local_group,
        local_rank,
        local_size,
        rank,
        size,
    )

__version__ = "0.1.0"

_NAMES_BY_MODULE = {
    "nbelastic.errors": (
        "ClusterStoppedError",
        "DiscoveryError",
        "DriverLostError",
        "HostError",
        "JobError",
        "JobStoppedError",
        "NbelasticError",
        "NoWorldError",
        "StateError",
        "UsageError",
        "WaitTimeoutError",
    ),
    "nbelastic.client.cluster": ("Cluster",),
    "nbelastic.protocol.host_sources": ("HostDiscovery",),
    "nbelastic.provision.discovery": ("FixedHosts", "ScriptDiscovery"),
    "nbelastic.client.job": ("Job",),
    "nbelastic.notebook": ("load_ipython_extension", "unload_ipython_extension"),
    "nbelastic.programs.elastic": ("elastic", "warmup"),
    "nbelastic.sharded.mesh": ("device_mesh",),
    "nbelastic.sharded.state": ("ShardedState",),
    "nbelastic.state.sampler": ("ElasticSampler", "local_batch_size"),
    "nbelastic.state.state": ("ObjectState", "State", "TorchState"),
    "nbelastic.state.step_log": ("StepLog",),
    "nbelastic.state.stream": ("ElasticStream",),
    "nbelastic.worker.ranks": (
        "cross_group",
        "cross_rank",
        "cross_size",
        "device",
        "environment",
        "local_group",
        "local_rank",
        "local_size",
        "rank",
        "size",
    ),
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = [
    "Cluster",
    "ClusterStoppedError",
    "DiscoveryError",
    "DriverLostError",
    "ElasticSampler",
    "ElasticStream",
    "FixedHosts",
    "HostDiscovery",
    "HostError",
    "Job",
    "JobError",
    "JobStoppedError",
    "NbelasticError",
    "NoWorldError",
    "ObjectState",
    "ScriptDiscovery",
    "ShardedState",
    "State",
    "StateError",
    "StepLog",
    "TorchState",
    "UsageError",
    "WaitTimeoutError",
    "cross_group",
    "cross_rank",
    "cross_size",
    "device",
    "device_mesh",
    "elastic",
    "environment",
    "load_ipython_extension",
    "local_batch_size",
    "local_group",
    "local_rank",
    "local_size",
    "rank",
    "size",
    "unload_ipython_extension",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'nbelastic' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
