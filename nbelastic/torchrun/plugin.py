"""The entry point of the group `torchrun.handlers`. torch loads it whenever its rendezvous is imported, so it imports little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def handler() -> Callable[[Any], Any]:
    """What makes a rendezvous handler of torch's `RendezvousParameters`."""
    return create


def create(params: Any) -> Any:
    """See `external.create`."""
    from nbelastic.torchrun import external_node

    return external_node.create(params)
