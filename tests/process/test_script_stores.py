"""The stores that a node offers: which one a round uses when the driver moves the node meanwhile."""

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
    """It moves the node several times after its first message, and then forms a round with the offer number `taken`."""

    def __init__(self, *moves: str, taken: int) -> None:
        self._moves, self._taken = moves, taken
        self.offers: list[str] = []

    def connect(self, hear: Callable[[messages.Message], None]) -> Any:
        self._hear = hear
        return self

    def start(self) -> None:
        """Nothing to start."""

    def send(self, message: Any) -> None:
        self.offers.append(message.store)
        if len(self.offers) == 1:
            for address in self._moves:
                self._hear(messages.Rehome(address, "lo"))
        if len(self.offers) > self._taken:
            self.form(self.offers[self._taken])

    def form(self, store: str) -> None:
        assignments = (sev.Assignment("a", 1, "default"),)
        self._hear(node_messages.Round(1, 0, assignments, ranks_by_node(assignments), store, 0, "job-1"))


class StrangeDriver(MovingDriver):
    """It does not know the node, and handles no message before the answer to its welcome."""

    def send(self, message: Any) -> None:
        self._hear(messages.NewDriver(2))

    def reset_session(self, say: Callable[[], Any]) -> None:
        self.form(say().store)


@pytest.fixture(autouse=True)
def _own_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")


@pytest.mark.parametrize(
    ("moves", "taken", "address"),
    [
        (("127.0.0.1", "127.0.0.1"), 0, "127.0.0.1"),  # nothing to start
        (("127.0.0.2", "127.0.0.2"), 0, "127.0.0.1"),  # the round was formed before the node could send its new address
        (("127.0.0.2", "127.0.0.2"), 1, "127.0.0.2"),
    ],
)
def test_a_round_uses_what_was_offered_for_it(moves, taken, address):
    """Repeated or late moves take no store away: the round's store serves its ranks."""
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


def test_a_driver_that_does_not_know_a_node_is_told_what_it_offers():
    """A driver that does not know a node gets its offers at once, without waiting for a retransmission."""
    driver = StrangeDriver(taken=0)
    rendezvous = DriverRendezvous(driver.connect, sev.NodeReady("a", 0, "", "default"), ("127.0.0.1", "lo"), timeout=10)
    assert rendezvous.next_rendezvous().world_size == 1
