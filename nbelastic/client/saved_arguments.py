"""The arguments of `Cluster`, as they are kept for who attaches later."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.sources import ByClients, HostDiscovery, Installed, Listed, Script, Source
from nbelastic.system.addresses import bracketed

BY_CLIENTS = "own discovery"  # among the arguments that are kept: the key of an object of a kernel's


def kept_arguments(given: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """What `Cluster` was called with, such that it can be written down and used in another folder."""
    said = {name for name, value in given.items() if value is not None or name == "elastic_timeout"}
    kept = {name: given[name] for name in given if name in said and name != "discovery"}
    kept |= {name: os.path.abspath(value) for name, value in kept.items() if name == "log_dir"}
    kept |= {name: os.fspath(value) for name, value in kept.items() if name in ("cwd", "python")}
    kept |= {name: {k: str(v) for k, v in kept[name].items()} for name in ("env", "launcher_options") if name in kept}
    kept |= {name: list(kept[name]) for name in ("preload", "cooldown") if name in kept}
    kept |= {name: dict(kept[name]) for name in ("timeouts",) if name in kept}
    match source:
        case Listed(hosts=hosts):
            kept["hosts"] = written(hosts)
        case Script(words=words):
            kept["discovery"] = shlex.join(words)
        case Installed(name=name):
            kept["discovery"] = name
        case ByClients(key=key):
            kept[BY_CLIENTS] = key
    return kept


def arguments_of(
    name: str,
    log_dir: str,
    arguments: Mapping[str, Any],
    discovery: str | HostDiscovery | None,
) -> dict[str, Any]:
    """What `Cluster` is to be called with again. An object of another kernel's cannot be said: see `BY_CLIENTS`."""
    again = {**arguments, "name": name, "log_dir": log_dir}
    again.pop(BY_CLIENTS, None)
    if discovery is not None:
        again.pop("hosts", None)
        again["discovery"] = discovery
    return again


def written(specs: Iterable[HostSpec]) -> list[str]:
    """As people write them."""
    return [(f"{spec.user}@" if spec.user else "") + f"{bracketed(spec.name)}:{spec.slots}" for spec in specs]
