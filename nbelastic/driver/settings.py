"""What `Cluster` was asked for, and whether it can be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from nbelastic.core.errors import UsageError
from nbelastic.core.timeouts import Timeouts
from nbelastic.core.world import Limits
from nbelastic.driver.batch import check_options
from nbelastic.driver.discovery import HostDiscovery

SSH = "ssh"  # the launcher that is no batch system's
QUEUE = 7 * 24 * 3600.0  # seconds that a batch job may wait before its agent starts


class Settings(msgspec.Struct, frozen=True):
    """`log_dir` is known when a cluster starts. What `python` names is on hosts that are not this machine.

    `lease`: for how many seconds all but the driver lives on without one; None: not at all. `number`: random, one per start.
    """

    name: str
    limits: Limits
    discovery: HostDiscovery
    run_dir: Path
    backend: str
    preload: tuple[str, ...]
    environment: dict[str, str]
    nics: tuple[str, ...]
    python: str | None
    cwd: str | None
    launcher: str
    launcher_options: dict[str, str]
    lease: float | None = None
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
    def keep(self) -> tuple[Path, float] | None:
        """For processes that outlive the driver: where it names itself, and the lease."""
        return None if self.lease is None else (self.run_dir.with_name(f"{self.run_dir.name}.lock"), self.lease)

    def check(self) -> None:
        """UsageError, in one line, for what cannot be."""
        limits, cooldown = self.limits, self.limits.cooldown
        check_bounds(limits.min, limits.max)
        check(self.backend in ("auto", "gloo", "nccl"), f"backend={self.backend!r}: choose auto, gloo or nccl.")
        check(limits.spares >= 0, f"spares={limits.spares}: at least 0.")
        check(limits.patience > 0, f"elastic_timeout={limits.patience:g}: more than 0 seconds, or None.")
        check(self.silence >= 1, f"silence={self.silence:g}: at least 1 second.")
        check(
            self.lease is None or self.lease >= self.silence,
            f"lease={self.lease}: at least silence={self.silence:g} s.",
        )
        check(limits.stall is None or limits.stall > 0, f"stall={limits.stall}: more than 0 seconds.")
        check(limits.reset_limit is None or limits.reset_limit >= 0, f"reset_limit={limits.reset_limit}: at least 0.")
        check(0 <= cooldown[0] <= cooldown[1], f"cooldown={cooldown}: two numbers of seconds, the lower first.")
        if self.launcher != SSH:
            check_options(self.launcher, self.launcher_options)
        else:
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
        except ValueError:
            raise UsageError(f"timeouts: {name}={seconds!r} is not a number of seconds.") from None
        check(0 < chosen[name] < float("inf"), f"timeouts: {name}={seconds}: more than 0 seconds, and not endless.")
    return Timeouts(stop=float(stop), **chosen)


def check(fine: bool, problem: str) -> None:
    if not fine:
        raise UsageError(problem)


def check_bounds(low: int, high: int | None) -> None:
    check(low >= 1, f"min={low}: at least 1.")
    check(high is None or high >= low, f"min={low} is more than max={high}: lower min or raise max.")
