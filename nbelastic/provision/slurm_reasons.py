"""Slurm's reasons for which a job does not start until a person changes something, and what that is."""

from __future__ import annotations

import re
from types import MappingProxyType

_HELD = "the job is held: run `scontrol release` with its number, or ask an administrator"
_ACCOUNT = "you may not use this account here: choose another one with account="
_QOS = "this quality of service does not allow the job: choose another one with qos="
_LONG = "this quality of service or account allows less time: ask for less with time="
ADVICE = MappingProxyType(
    {
        "PartitionTimeLimit": "the partition allows less time: ask for less with time=",
        "PartitionNodeLimit": "the partition does not allow such a job: ask for less, or choose another partition",
        "PartitionConfig": "the partition's limits do not allow such a job: ask for less, or choose another partition",
        "BadConstraints": "no node fits the options: change constraint=, gres=, mem= or nodelist=",
        "AccountNotAllowed": _ACCOUNT,
        "InvalidAccount": _ACCOUNT,
        "InvalidQOS": _QOS,
        "QOSNotAllowed": _QOS,
        "QOSMaxWallDurationPerJobLimit": _LONG,
        "AssocMaxWallDurationPerJobLimit": _LONG,
        "JobHeldAdmin": _HELD,
        "JobHeldUser": _HELD,
    }
)
_QUEUED = re.compile(r"queued \((\w+)\)")


def advice_for(state: str) -> str:
    """What to do about a job with this state, as `BatchAgent.state` gives it; empty if waiting may help."""
    match = _QUEUED.fullmatch(state)
    return ADVICE.get(match[1], "") if match else ""
