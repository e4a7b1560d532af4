"""Installed versions of Python, nbelastic, torch and ipyparallel, and whether two sets fit in one cluster."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

TESTED_TORCH = ("2.11", "2.13", "2.14", "2.15")  # see tests/matrix.sh


def installed() -> dict[str, str]:
    """The versions in this process's environment; empty text for a missing package. No package is imported."""
    return {**_installed()}


@cache
def _installed() -> dict[str, str]:
    """It takes milliseconds, and a driver asks for each host."""
    found = {"Python": platform.python_version()}
    for name in ("nbelastic", "torch", "ipyparallel"):
        found[name] = _version(name)
    return found


def _version(package: str) -> str:
    """Empty for a missing package. The remains of an uninstalled one have no metadata: an uninstall on NFS may leave its folder."""
    for found in importlib.metadata.distributions(name=package):
        with suppress(KeyError, FileNotFoundError):  # newer versions of Python raise one of them
            if found.version:
                return found.version
    return ""


@cache
def nbelastic_version() -> str:
    return installed()["nbelastic"]


def difference(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Which versions keep two environments out of one cluster; empty if they fit.

    Python's minor versions must be equal, because functions are sent as byte code. Of torch the release counts, not the build.
    """
    parts = []
    for name, cut in (("Python", _minor), ("nbelastic", str), ("torch", _release)):
        theirs, own = there.get(name, ""), here.get(name, "")
        if own and cut(theirs) != cut(own):
            parts.append(f"{name} {theirs or 'missing'} there, {own} here")
    return "; ".join(parts)


def differing(packages: Mapping[str, Mapping[str, str]], host: str) -> str:
    """Which packages a host has in other versions than another host; empty if none. `packages`: versions by host and name."""
    found: dict[str, str] = {}
    for other, theirs in packages.items():
        for name, version in packages[host].items():
            if theirs.get(name, version) != version:
                found.setdefault(name, f"{name} {version} there, {theirs[name]} on {other}")
    return "; ".join(found.values())


def untested(there: Mapping[str, str]) -> str:
    """That torch there is of a version with which nbelastic was not tested; empty if it was."""
    torch = there.get("torch", "")
    if not torch or _minor(torch) in TESTED_TORCH:
        return ""
    return f"torch {torch}: nbelastic was not tested with it, but with {', '.join(TESTED_TORCH)}"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _release(version: str) -> str:
    return version.partition("+")[0]
