"""A double of NCCL: a back end of torch.distributed for CPU tensors that behaves as NCCL does where it matters.

    mesh.py           the ranks' connections, which have no timeout; an abort ends each wait
    communicator.py   an `ncclComm_t` with its stream and its watchdog
    group.py          torch's process group over one communicator
    accelerator.py    what nbelastic calls: `nbelastic.worker.accelerator.Accelerator`
    install.py        importing it makes the back end "nccl" mean the double

It is faithful in these points:

- works run in order in a thread that stands for the group's stream; `wait` never raises;
- a lost peer makes a work hang, until an abort ends it: its outputs then have garbage, and no error is raised;
- an abort ends all works at once, and then takes some time to free the communicator;
- the watchdog records an error, holds the lock that new works need, and may end the process;
- an abort waits while a group connects, which has a timeout if it does not block; an abort of a group does not reach those made from it;
- two ranks of a group that use the same GPU of a machine are refused.

It differs in two: a work blocks the CPU in `wait`, as the CPU reads its tensors at once. And point-to-point operations are
never coalesced: torch does that only for its own class of groups.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

FAKE_NVML = Path(__file__).parents[1] / "fake_nvml"
sys.path.insert(0, str(FAKE_NVML))  # agents get this path. Only those with the variable below import the fake

# What a cluster is made with, by the back end.
CLUSTERS: dict[str, dict[str, Any]] = {
    "gloo": {},
    "nccl": {
        "backend": "nccl",
        "preload": ["tests.support.nccl_double.install"],
        "env": {"FAKE_NVML": str(FAKE_NVML / "64_gpus.json")},
    },
}
