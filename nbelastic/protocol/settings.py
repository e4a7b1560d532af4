"""The settings of a cluster, and the checks of the arguments of `Cluster`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from nbelastic.errors import UsageError
from nbelastic.protocol.cluster_limits import Limits
from nbelastic.protocol.host_sources import HostDiscovery, Source
from nbelastic.protocol.timeouts import BATCH_QUEUE, LEASE_WITH_SSH, Timeouts
from nbelastic.system.argument_types import NAMES, PATH, RANGE, SECONDS, TABLE, TEXT, WHOLE, check_kind, check_optional
from nbelastic.system.driver_lease import DriverLease

SSH = "ssh"  # the default launcher; any other name but KUBERNETES is a batch system
KUBERNETES = "kubernetes"

# Types of the arguments of `Cluster`. `Settings.check` checks the values.
NEEDED = {
    **dict.fromkeys(("min", "spares"), WHOLE),
    **dict.fromkeys(("silence", "stop_timeout", "lease"), SECONDS),
    **dict.fromkeys(("backend", "launcher"), TEXT),
    "cooldown": RANGE,
    **dict.fromkeys(("preload", "code_folders"), NAMES),
}
OPTIONAL = {
    **dict.fromkeys(("max", "slots", "reset_limit", "metrics_port"), WHOLE),
    **dict.fromkeys(("elastic_timeout", "stall"), SECONDS),
    **dict.fromkeys(("nics", "name"), TEXT),
    **dict.fromkeys(("log_dir", "cwd", "python"), PATH),
    **dict.fromkeys(("timeouts", "env", "launcher_options"), TABLE),
}


def check_kinds(given: Mapping[str, Any]) -> None:
    """UsageError, in one line, for the first argument of `Cluster` that has a wrong type."""
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
    """What a driver needs to know about its cluster. Most fields are arguments of `Cluster`."""

    name: str
    limits: Limits
    discovery: Source
    run_folder: Path
    preload: tuple[str, ...]
    environment: dict[str, str]
    nics: tuple[str, ...]
    python: str | None  # the interpreter on other machines
    cwd: str | None
    launcher: str
    launcher_options: dict[str, str]
    lease: float = (
        LEASE_WITH_SSH  # seconds: agents and workers run on without a driver, and a kept cluster without a client
    )
    owner: str = ""  # identity of the kernel with which the cluster ends; empty: it is kept
    log_dir: Path = Path()  # set when the cluster starts
    number: str = ""  # random, one per start
    metrics_port: int | None = None  # of 127.0.0.1
    code_sync: bool = True  # the hosts get the modules of the notebook's folders
    code_folders: tuple[str, ...] = ()  # beside the working folder; absolute
    requirements: tuple[str, ...] = ()  # lines, for an environment on each host
    chaos: bool = False  # clients may inject faults

    @property
    def silence(self) -> float:
        return self.limits.silence

    @property
    def tunnels(self) -> bool:
        """Whether hosts elsewhere are reached through a tunnel: of ssh, or of `exec` in pods."""
        in_pods = self.launcher == KUBERNETES
        return self.launcher == SSH or (
            in_pods and not (self.makes_pods and self.launcher_options["connect"] == "direct")
        )

    @property
    def submits_jobs(self) -> bool:
        """Whether each host elsewhere is a job of a batch system."""
        return self.launcher not in (SSH, KUBERNETES)

    @property
    def makes_pods(self) -> bool:
        """Whether each host is a pod that is made for it; else hosts of Kubernetes are pods that exist."""
        return bool(self.launcher_options.get("image"))

    @property
    def heartbeat(self) -> float:
        """Seconds between heartbeats, so that `silence` lasts for several of them."""
        return min(1.0, self.silence / 4)

    @property
    def driver_lease(self) -> DriverLease:
        """The lease of processes that may outlive the driver."""
        return DriverLease(
            str(self.run_folder.with_name(f"{self.run_folder.name}.lock")), self.lease, self.owner, self.number
        )

    def check(self) -> None:
        """UsageError, in one line, for the first wrong value."""
        limits, cooldown = self.limits, self.limits.cooldown
        check_bounds(limits.min, limits.max)
        check(limits.backend in ("auto", "gloo", "nccl"), f"backend={limits.backend!r}: choose auto, gloo or nccl.")
        check(limits.spares >= 0, f"spares={limits.spares}: at least 0.")
        check(limits.patience > 0, f"elastic_timeout={limits.patience:g}: more than 0 seconds, or None.")
        check(self.silence >= 1, f"silence={self.silence:g}: at least 1 second.")
        check(
            self.lease >= self.silence,
            f"lease={self.lease:g}: at least silence={self.silence:g} s.",
        )
        check(limits.stall is None or limits.stall > 0, f"stall={limits.stall}: more than 0 seconds.")
        port = self.metrics_port
        check(port is None or 0 < port < 1 << 16, f"metrics_port={port}: 1 to 65535.")
        check(limits.reset_limit is None or limits.reset_limit >= 0, f"reset_limit={limits.reset_limit}: at least 0.")
        check(0 <= cooldown[0] <= cooldown[1], f"cooldown={cooldown}: two numbers of seconds, the lower first.")
        check_environment(self.environment)
        for name, value in NCCL_ENVIRONMENT.items():
            own = self.environment.get(name, value)
            check(own == value, f"env: {name}={own}: nbelastic needs {value}, to abort collectives: leave it out.")
        longest = self.environment.get(CONNECTS, NCCL_DEFAULTS[CONNECTS])
        check(
            longest.isdecimal() and int(longest) < CONNECTS_BELOW,
            f"env: {CONNECTS}={longest}: whole seconds below {CONNECTS_BELOW}, as an abort waits for that.",
        )
        if self.launcher == SSH:
            check(not self.launcher_options, "launcher_options go with a batch launcher: name it as launcher.")


def timeouts_of(given: Mapping[str, float] | None, stop: float, launcher: str) -> Timeouts:
    """The `Timeouts` of `Cluster(timeouts=…, stop_timeout=…)`. UsageError for an unknown name or a wrong number."""
    check(stop >= 0, f"stop_timeout={stop:g}: at least 0 seconds.")
    known = [name for name in Timeouts.__struct_fields__ if name != "stop"]
    chosen = {} if launcher == SSH else {"agent": BATCH_QUEUE}
    for name, seconds in (given or {}).items():
        check(name in known, f"timeouts: {name!r} is not one of {', '.join(known)}.")
        try:
            chosen[name] = float(seconds)
        except (TypeError, ValueError):
            raise UsageError(f"timeouts: {name}={seconds!r} is not a number of seconds.") from None
        check(0 < chosen[name] < float("inf"), f"timeouts: {name}={seconds}: more than 0 seconds, and not endless.")
    return Timeouts(stop=float(stop), **chosen)


def check(is_right: bool, problem: str) -> None:
    """UsageError with this text unless the condition is true."""
    if not is_right:
        raise UsageError(problem)


def check_environment(variables: Mapping[str, str]) -> None:
    """UsageError for a variable that no process can have."""
    for name, value in variables.items():
        is_right = isinstance(name, str) and name and "=" not in name and "\0" not in name + value
        check(bool(is_right), f"env: {name!r} cannot be a variable: a name without =, and no zero bytes.")


def check_bounds(low: int, high: int | None) -> None:
    check(low >= 1, f"min={low}: at least 1.")
    check(high is None or high >= low, f"min={low} is more than max={high}: lower min or raise max.")


# Both are set before torch is imported. To abort NCCL from another thread, NCCL's watchdog must not act (see torch's sources).
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "50",  # after an error the watchdog holds its lock for four times as long
    "NCCL_COMM_BLOCKING": "-1",  # neither 0 nor 1, which would apply to all communicators, whatever their options say
    "TORCH_DIST_USE_NCCL2": "0",  # the engine that these variables are for, and that is tested
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order, in which agents read CUDA_VISIBLE_DEVICES
}
CONNECTS, CONNECTS_BELOW = "TORCH_NCCL_NONBLOCKING_TIMEOUT", 30  # a worker whose abort takes so long is replaced
# The user's own values of these win.
NCCL_DEFAULTS = {
    "NCCL_NVLS_ENABLE": "0",  # NVLink SHARP leaks memory with each communicator
    "NCCL_RAS_ENABLE": "0",  # it opens connections of its own, and a port without a key
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "20",  # seconds in which a communicator connects: an abort has to wait for that
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else a module that calls `torch.cuda.is_available()` spoils the template
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",  # nbelastic sends the state that way
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # aborted groups would print long warnings
}
