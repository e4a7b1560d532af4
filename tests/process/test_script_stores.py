"""Stores that a node offers to a round, while the driver gives the node other addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nbelastic.core.script_group import ranks_by_node
from nbelastic.protocol import messages, node_messages
from nbelastic.protocol import script_events as sev
from nbelastic.system.addresses import split_endpoint
from nbelastic.torchrun.rendezvous import DriverRendezvous


class MovingDriver:
    """A driver that gives the node other addresses, and then forms a round with the node's offer number `taken`."""

    congested = False

    def __init__(self, *moves: str, taken: int) -> None:
        self._moves, self._taken = moves, taken
        self.offers: list[str] = []

    def connect(self, receive: Callable[[messages.Message], None]) -> Any:
        self._receive = receive
        return self

    def start(self) -> None:
        """Nothing to start."""

    def send(self, message: Any) -> None:
        self.offers.append(message.store)
        if len(self.offers) == 1:
            for address in self._moves:
                self._receive(messages.Rehome(address, "lo"))
        if len(self.offers) > self._taken:
            self.form(self.offers[self._taken])

    def form(self, store: str) -> None:
        assignments = (sev.Assignment("a", 1, "default"),)
        self._receive(node_messages.Round(1, 0, assignments, ranks_by_node(assignments), store, 0, "job-1"))


class StrangeDriver(MovingDriver):
    """A driver that does not know the node, and handles no message before the node's introduction."""

    def send(self, message: Any) -> None:
        self._receive(messages.NewDriver(2))

    def reset_session(self, introduction: Callable[[], Any]) -> None:
        self.form(introduction().store)


@pytest.fixture(autouse=True)
def _own_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")


@pytest.mark.parametrize(
    ("moves", "taken", "address"),
    [
        (("127.0.0.1", "127.0.0.1"), 0, "127.0.0.1"),  # the address stays the same
        (("127.0.0.2", "127.0.0.2"), 0, "127.0.0.1"),  # the round was formed before the node could send its new address
        (("127.0.0.2", "127.0.0.2"), 1, "127.0.0.2"),
    ],
)
def test_a_round_uses_the_store_that_was_offered_for_it(moves, taken, address):
    """A node keeps the store of a round, also after repeated or late changes of its address."""
    driver = MovingDriver(*moves, taken=taken)
    rendezvous = DriverRendezvous(driver.connect, sev.NodeReady("a", 0, "", "default"), ("127.0.0.1", "lo"), timeout=10)
    info = rendezvous.next_rendezvous()
    assert split_endpoint(driver.offers[taken]) == (
        info.bootstrap_store_info.master_addr,
        info.bootstrap_store_info.master_port,
    )
    assert info.bootstrap_store_info.master_addr == address
    assert info.store.port == info.bootstrap_store_info.master_port
    assert info.store.get("torchelastic/assigned_ranks/0") == b"[0, 1, 0, 1]"
    assert len(set(driver.offers)) == len({address.rpartition(":")[0] for address in driver.offers})


def test_a_driver_that_does_not_know_a_node_gets_its_offers():
    """A driver that does not know a node gets its offers at once, without waiting for a retransmission."""
    driver = StrangeDriver(taken=0)
    rendezvous = DriverRendezvous(driver.connect, sev.NodeReady("a", 0, "", "default"), ("127.0.0.1", "lo"), timeout=10)
    assert rendezvous.next_rendezvous().world_size == 1
