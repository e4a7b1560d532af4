"""The arguments of `Cluster` in the form in which they are saved for clients that attach later."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from nbelastic.protocol.host_sources import (
    ClientDiscovery,
    EntryPoint,
    HostDiscovery,
    ListedHosts,
    ScriptSource,
    Source,
)
from nbelastic.protocol.ids import HostSpec
from nbelastic.system.addresses import bracketed

BY_CLIENTS = "own discovery"  # the saved argument that replaces a discovery object of a kernel: the object's key


def saved_arguments(given: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Return the arguments of `Cluster` as plain data that does not depend on the working folder."""
    names = [name for name, value in given.items() if value is not None or name == "elastic_timeout"]
    saved = {name: given[name] for name in names if name != "discovery"}
    saved |= {name: os.path.abspath(value) for name, value in saved.items() if name == "log_dir"}
    saved |= {name: os.fspath(value) for name, value in saved.items() if name in ("cwd", "python")}
    saved |= {
        name: {k: str(v) for k, v in saved[name].items()} for name in ("env", "launcher_options") if name in saved
    }
    saved |= {name: list(saved[name]) for name in ("preload", "cooldown", "requirements") if name in saved}
    saved |= {name: [os.path.abspath(folder) for folder in saved[name]] for name in ("code_folders",) if name in saved}
    saved |= {name: dict(saved[name]) for name in ("timeouts",) if name in saved}
    match source:
        case ListedHosts(hosts=hosts):
            saved["hosts"] = host_texts(hosts)
        case ScriptSource(words=words):
            saved["discovery"] = shlex.join(words)
        case EntryPoint(name=name):
            saved["discovery"] = name
        case ClientDiscovery(key=key):
            saved[BY_CLIENTS] = key
    return saved


def arguments_to_attach(
    name: str,
    log_dir: str,
    arguments: Mapping[str, Any],
    discovery: str | HostDiscovery | None,
) -> dict[str, Any]:
    """Return the arguments with which `Cluster` is created by a client that attaches.

    A discovery object of another kernel is left out, since it cannot be created here.
    """
    again = {**arguments, "name": name, "log_dir": log_dir}
    again.pop(BY_CLIENTS, None)
    if discovery is not None:
        again.pop("hosts", None)
        again["discovery"] = discovery
    return again


def host_texts(specs: Iterable[HostSpec]) -> list[str]:
    """Return hosts as users write them: `user@name:slots`."""
    return [(f"{spec.user}@" if spec.user else "") + f"{bracketed(spec.name)}:{spec.slots}" for spec in specs]
