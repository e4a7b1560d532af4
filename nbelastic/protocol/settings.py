"""What `Cluster` was asked for, and whether it can be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from nbelastic.errors import UsageError
from nbelastic.protocol.limits import Limits
from nbelastic.protocol.sources import HostDiscovery, Source
from nbelastic.protocol.timeouts import Timeouts
from nbelastic.system.argument_types import NAMES, PATH, RANGE, SECONDS, TABLE, TEXT, WHOLE, check_kind, check_optional
from nbelastic.system.presence import Presence

SSH = "ssh"  # the launcher that is no batch system's
# Seconds without a driver, of a cluster that is not kept: for who has no line to this machine, whose end would tell of it; and
# for who has.
LEASE, LINE_LEASE = 60.0, 900.0
QUEUE = 7 * 24 * 3600.0  # seconds that a batch job may wait before its agent starts


# The arguments of Cluster. Whether their values can be is checked later.
NEEDED = {
    **dict.fromkeys(("min", "spares"), WHOLE),
    **dict.fromkeys(("silence", "stop_timeout", "lease"), SECONDS),
    **dict.fromkeys(("backend", "launcher"), TEXT),
    "cooldown": RANGE,
    "preload": NAMES,
}
OPTIONAL = {
    **dict.fromkeys(("max", "slots", "reset_limit"), WHOLE),
    **dict.fromkeys(("elastic_timeout", "stall"), SECONDS),
    **dict.fromkeys(("nics", "name"), TEXT),
    **dict.fromkeys(("log_dir", "cwd", "python"), PATH),
    **dict.fromkeys(("timeouts", "env", "launcher_options"), TABLE),
}


def check_kinds(given: Mapping[str, Any]) -> None:
    """UsageError, in one line, for the first argument of Cluster that is of a wrong type."""
    for name, kind in NEEDED.items():
        check_kind(name, given[name], kind)
    for name, kind in OPTIONAL.items():
        check_optional(name, given[name], kind)
    cooldown = given["cooldown"]
    check(len(cooldown) == 2, f"cooldown={cooldown!r}: two numbers of seconds, the lower first.")
    for seconds in cooldown:
        check_kind("cooldown", seconds, RANGE._replace(types=SECONDS.types))
    check(
        given["discovery"] is None or isinstance(given["discovery"], str | HostDiscovery),
        f"discovery must be a script's path or have a method hosts(): {type(given['discovery']).__name__} has none.",
    )


class Settings(msgspec.Struct, frozen=True):
    """`log_dir` is known when a cluster starts. What `python` names is on hosts that are not this machine.

    `lease`: for how many seconds all but the driver lives on without one. `owner`: the kernel (`pid@start`) with which the
    cluster ends; empty: none, it is kept. `number`: random, one per start.
    """

    name: str
    limits: Limits
    discovery: Source
    run_dir: Path
    backend: str
    preload: tuple[str, ...]
    environment: dict[str, str]
    nics: tuple[str, ...]
    python: str | None
    cwd: str | None
    launcher: str
    launcher_options: dict[str, str]
    lease: float = LINE_LEASE
    owner: str = ""
    log_dir: Path = Path()
    number: str = ""

    @property
    def silence(self) -> float:
        return self.limits.silence

    @property
    def heartbeat(self) -> float:
        """Seconds; several fit into the time after which silence means something."""
        return min(1.0, self.silence / 4)

    @property
    def presence(self) -> Presence:
        """For processes that outlive the driver."""
        return Presence(str(self.run_dir.with_name(f"{self.run_dir.name}.lock")), self.lease, self.owner, self.number)

    def check(self) -> None:
        """UsageError, in one line, for what cannot be."""
        limits, cooldown = self.limits, self.limits.cooldown
        check_bounds(limits.min, limits.max)
        check(self.backend in ("auto", "gloo", "nccl"), f"backend={self.backend!r}: choose auto, gloo or nccl.")
        check(limits.spares >= 0, f"spares={limits.spares}: at least 0.")
        check(limits.patience > 0, f"elastic_timeout={limits.patience:g}: more than 0 seconds, or None.")
        check(self.silence >= 1, f"silence={self.silence:g}: at least 1 second.")
        check(
            self.lease >= self.silence,
            f"lease={self.lease:g}: at least silence={self.silence:g} s.",
        )
        check(limits.stall is None or limits.stall > 0, f"stall={limits.stall}: more than 0 seconds.")
        check(limits.reset_limit is None or limits.reset_limit >= 0, f"reset_limit={limits.reset_limit}: at least 0.")
        check(0 <= cooldown[0] <= cooldown[1], f"cooldown={cooldown}: two numbers of seconds, the lower first.")
        if self.launcher == SSH:
            check(not self.launcher_options, "launcher_options go with a batch launcher: name it as launcher.")


def timeouts_of(given: Mapping[str, float] | None, stop: float, launcher: str) -> Timeouts:
    """The times of `Cluster(timeouts=…, stop_timeout=…)`. UsageError for a name or a number that cannot be."""
    check(stop >= 0, f"stop_timeout={stop:g}: at least 0 seconds.")
    known = [name for name in Timeouts.__struct_fields__ if name != "stop"]
    chosen = {} if launcher == SSH else {"agent": QUEUE}
    for name, seconds in (given or {}).items():
        check(name in known, f"timeouts: {name!r} is not one of {', '.join(known)}.")
        try:
            chosen[name] = float(seconds)
        except (TypeError, ValueError):
            raise UsageError(f"timeouts: {name}={seconds!r} is not a number of seconds.") from None
        check(0 < chosen[name] < float("inf"), f"timeouts: {name}={seconds}: more than 0 seconds, and not endless.")
    return Timeouts(stop=float(stop), **chosen)


def check(fine: bool, problem: str) -> None:
    if not fine:
        raise UsageError(problem)


def check_bounds(low: int, high: int | None) -> None:
    check(low >= 1, f"min={low}: at least 1.")
    check(high is None or high >= low, f"min={low} is more than max={high}: lower min or raise max.")


NCCL = {  # before torch is imported: aborting NCCL from another thread needs its watchdog out of the way (torch's sources)
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
