"""The entry point of the group `torchrun.handlers`. torch always loads it with its rendezvous, so it imports little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def handler() -> Callable[[Any], Any]:
    """The function that creates a rendezvous handler from torch's `RendezvousParameters`."""
    return create


def create(params: Any) -> Any:
    """See `external_node.create`."""
    from nbelastic.torchrun import external_node

    return external_node.create(params)
