"""Which versions meet: those of what a worker's and the notebook's objects are made with."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from functools import cache


def here() -> dict[str, str]:
    """Of this process's environment; empty for what is not installed. Nothing is imported to find out."""
    found = {"Python": platform.python_version()}
    for name in ("nbelastic", "torch", "ipyparallel"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


@cache
def ours() -> str:
    """Of nbelastic here."""
    return here()["nbelastic"]


def difference(there: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """What makes the two unfit for one cluster, both versions named; empty if nothing does.

    Of Python the minor version counts (functions travel as its byte code), of torch the release and not how it was built.
    """
    parts = []
    for name, cut in (("Python", _minor), ("nbelastic", str), ("torch", _release)):
        theirs, own = there.get(name, ""), ours.get(name, "")
        if own and cut(theirs) != cut(own):
            parts.append(f"{name} {theirs or 'missing'} there, {own} here")
    return "; ".join(parts)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _release(version: str) -> str:
    return version.partition("+")[0]
