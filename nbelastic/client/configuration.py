"""Turns the arguments of `Cluster` into the settings of its driver, and checks them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from nbelastic.client.requirements import read_requirements
from nbelastic.client.saved_arguments import BY_CLIENTS, arguments_to_attach, saved_arguments
from nbelastic.protocol.cluster_limits import Limits
from nbelastic.protocol.host_sources import ClientDiscovery, HostDiscovery, Source
from nbelastic.protocol.run_folder import RunFolder
from nbelastic.protocol.settings import (
    KUBERNETES,
    NEEDED,
    OPTIONAL,
    SSH,
    Settings,
    check,
    check_kinds,
    timeouts_of,
)
from nbelastic.protocol.timeouts import LEASE, LEASE_WITH_SSH
from nbelastic.provision.discovery import source_of
from nbelastic.provision.kubernetes_api import check_installed, own_namespace
from nbelastic.provision.pod_manifest import parse_options
from nbelastic.provision.sbatch_options import check_time_limit, gpus_of
from nbelastic.system.argument_types import user_path
from nbelastic.system.cpu_count import usable_cpus
from nbelastic.system.gpu_count import visible_gpus

SHARE_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"  # NCCL's own variable, from 2.30 on: 1 lets several ranks use one GPU
_numbers = itertools.count(1)  # for names of clusters that the user has not named
_ARGUMENTS = (*NEEDED, *OPTIONAL, "hosts", "discovery", "keep", "code_sync", "requirements", "chaos")


@dataclass(frozen=True)
class Configuration:
    """A cluster's checked arguments.

    `arguments` are saved for clients that attach later. `discovery` is an object of this process that lists the hosts,
    None if the driver finds them. A host added without a number of slots has `default_slots`.
    """

    settings: Settings
    arguments: dict[str, Any]
    discovery: HostDiscovery | None
    default_slots: int
    slots_follow_gpus: bool  # of hosts with GPUs, without a number
    log_dir: Path | None
    is_kept: bool

    def with_discovery_of(self, arguments: Mapping[str, Any]) -> Configuration:
        """Keep the discovery that `arguments` were saved with, if that is an object of a kernel.

        Such an object cannot be created anew: the hosts stay as they are.
        """
        if not arguments.get(BY_CLIENTS):
            return self
        settings = msgspec.structs.replace(self.settings, discovery=ClientDiscovery(arguments[BY_CLIENTS]))
        return replace(self, settings=settings, arguments=dict(arguments))


def configure(arguments: Mapping[str, Any]) -> Configuration:
    """Check the arguments of `Cluster`. UsageError, in one line, for the first that is wrong."""
    given = dict(arguments)
    check_kinds(given)
    hosts, discovery, slots = given["hosts"], given["discovery"], given["slots"]
    if isinstance(discovery, str) and discovery.startswith(f"{KUBERNETES}:"):
        given["launcher"] = KUBERNETES  # agents start in the pods
    given["requirements"] = read_requirements(given["requirements"])  # a later driver must not read an edited file
    launcher = given["launcher"]
    if launcher == KUBERNETES:
        connect = "direct" if own_namespace() else "exec"
        given["launcher_options"] = {"connect": connect, **(given["launcher_options"] or {})}
    check(slots is None or slots >= 1, f"slots={slots}: at least 1.")
    check(hosts is None or discovery is None, "give hosts or discovery, not both.")
    name = given["name"] or f"nbelastic-{os.getpid()}-{next(_numbers)}"
    run_folder = RunFolder(name)
    default_slots = slots or _default_slots(given)
    if hosts is None and discovery is None and _makes_hosts(given):
        hosts = _host_names(given["min"] if given["max"] is None else given["max"] + given["spares"], default_slots)
    source = source_of(discovery, hosts, slots, default_slots)
    settings = _settings(given, run_folder, source)
    settings.check()
    if launcher == KUBERNETES:
        check_installed()
        parse_options(settings.launcher_options)
        check(bool(hosts or discovery), "name the pods, or an image (--image) from which nbelastic makes them.")
    elif launcher != SSH:
        from nbelastic.provision.batch import check_options  # importing ipyparallel is slow

        check_options(launcher, settings.launcher_options)
        check_time_limit(settings.launcher_options, settings.limits.timeouts.successor)
    given["slots"] = default_slots
    given["log_dir"] = user_path(given["log_dir"]) if given["log_dir"] is not None else None
    return Configuration(
        settings=settings,
        arguments=saved_arguments(given, source),
        discovery=discovery if isinstance(source, ClientDiscovery) and not isinstance(discovery, str) else None,
        default_slots=default_slots,
        slots_follow_gpus=slots is None,
        log_dir=given["log_dir"],
        is_kept=given["keep"],
    )


def _makes_hosts(given: Mapping[str, Any]) -> bool:
    """Whether a host is a job that the launcher submits, or a pod that it makes, under any name."""
    if given["launcher"] == KUBERNETES:
        return bool(given["launcher_options"].get("image"))
    return bool(given["launcher"] != SSH)


def _default_slots(given: Mapping[str, Any]) -> int:
    """The slots of a host for which the user gave no number: a batch job has as many as the GPUs that it asks for.

    A pod has one: its option `gpus` counts those of a slot.
    """
    if given["launcher"] == SSH:
        return visible_gpus() or max(given["min"], usable_cpus())
    return 1 if given["launcher"] == KUBERNETES else gpus_of(given["launcher_options"] or {}) or 1


def _host_names(workers: int, slots: int) -> list[str]:
    """Names of batch jobs or pods that together have slots for so many workers."""
    return [f"s{number}" for number in range(-(-max(1, workers) // slots))]


def configure_again(name: str, log_dir: str, arguments: Mapping[str, Any]) -> Configuration:
    """Check arguments that were saved. UsageError if, for example, a file that they name has been removed."""
    again = dict.fromkeys(_ARGUMENTS) | arguments_to_attach(name, log_dir, arguments, None)
    return configure(again).with_discovery_of(arguments)


def _settings(given: Mapping[str, Any], run_folder: RunFolder, source: Source) -> Settings:
    silence, launcher, nics = float(given["silence"]), given["launcher"], given["nics"] or ""
    options = dict(given["launcher_options"] or {})
    in_pods = launcher == KUBERNETES and not options.get("image")  # they run already
    tunnels = launcher == SSH or in_pods or options.get("connect") == "exec"
    limits = Limits(
        min=given["min"],
        max=given["max"],
        spares=given["spares"],
        elastic_timeout=_seconds(given["elastic_timeout"]),
        reset_limit=given["reset_limit"],
        cooldown=(float(given["cooldown"][0]), float(given["cooldown"][1])),
        silence=silence,
        stall=_seconds(given["stall"]),
        exclude_differing=bool(given["exclude_differing"]),
        backend=given["backend"],
        shares_gpus=(given["env"] or {}).get(SHARE_GPUS, os.environ.get(SHARE_GPUS)) == "1",
        timeouts=timeouts_of(given["timeouts"], given["stop_timeout"], SSH if in_pods else launcher),
    )
    lease = float(given["lease"]) if given["keep"] else max(LEASE_WITH_SSH if tunnels else LEASE, silence)
    return Settings(
        name=run_folder.name,
        limits=limits,
        discovery=source,
        run_folder=run_folder.path,
        preload=tuple(given["preload"]),
        environment={name: str(value) for name, value in (given["env"] or {}).items()},
        nics=tuple(part.strip() for part in nics.split(",") if part.strip()),
        python=given["python"],
        cwd=str(given["cwd"]) if given["cwd"] is not None else None,
        launcher=launcher,
        launcher_options=options,
        lease=lease,
        metrics_port=given["metrics_port"],
        code_sync=bool(given["code_sync"]),
        code_folders=_folders(given["code_folders"]),
        requirements=given["requirements"],
        chaos=bool(given["chaos"]),
    )


def _folders(given: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    found = tuple(os.path.abspath(user_path(folder)) for folder in given)
    for folder in found:
        check(os.path.isdir(folder), f"code_folders: there is no folder {folder}.")
    return found


def _seconds(number: float | None) -> float | None:
    return None if number is None else float(number)
