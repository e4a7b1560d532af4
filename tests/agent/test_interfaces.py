"""Where this machine is reached: which addresses, and in which order."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from nbelastic.agent import interfaces
from nbelastic.agent.interfaces import candidates, outgoing_address
from nbelastic.protocol.ids import Interface
from nbelastic.system.interfaces import interface_of

NETWORK = {
    "lo": ["127.0.0.1", "::1"],
    "docker0": ["172.17.0.1"],
    "eth0": ["10.0.0.2", "fd00::2", "fe80::1%eth0"],
    "eth1": ["10.1.0.2"],
    "ib0": ["192.168.5.2"],
    "wlan0": ["192.168.7.2"],
    "virbr0": ["192.168.122.1"],
    "zero0": ["169.254.3.4"],
}
WAYS = {"10.0.9.9": "10.0.0.2", "10.1.9.9": "10.1.0.2", "172.17.0.5": "172.17.0.1", "192.0.2.1": "10.0.0.2"}


@pytest.fixture
def machine(monkeypatch):
    """A machine with the network above; wlan0 is down."""

    def entry(address):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return SimpleNamespace(family=family, address=address)

    def outgoing(driver):
        if driver.startswith("127."):
            return "127.0.0.1"
        if driver not in WAYS:
            raise OSError("network is unreachable")
        return WAYS[driver]

    known = {name: [entry(address) for address in addresses] for name, addresses in NETWORK.items()}
    stats = {name: SimpleNamespace(isup=name != "wlan0") for name in known}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    monkeypatch.setattr(interfaces, "outgoing_address", outgoing)


def found(*args, **kwargs):
    return [i.address for i in candidates(*args, **kwargs)]


@pytest.mark.usefixtures("machine")
def test_the_address_that_reaches_the_driver_is_first():
    """Then the default route's, then the others, IPv4 before IPv6; no bridge, no link-local address, nothing that is down."""
    assert found("10.1.9.9") == ["10.1.0.2", "10.0.0.2", "192.168.5.2", "fd00::2"]
    assert candidates("10.1.9.9")[0] == Interface("eth1", "10.1.0.2")


@pytest.mark.usefixtures("machine")
def test_without_a_way_to_the_driver_the_default_route_is_first():
    """The driver is reached through a tunnel, so its address says nothing about the network."""
    assert found("127.0.0.1")[0] == "10.0.0.2"
    assert "127.0.0.1" not in found("127.0.0.1")


@pytest.mark.usefixtures("machine")
def test_on_the_drivers_machine_loopback_is_first():
    """There it is the given loopback address, or 127.0.0.1, and then the real ones."""
    assert found("127.0.0.2", local=True)[:2] == ["127.0.0.2", "10.0.0.2"]
    assert found("10.0.9.9", local=True)[:2] == ["127.0.0.1", "10.0.0.2"]
    assert candidates("127.0.0.2", local=True)[0] == Interface("lo", "127.0.0.2")


@pytest.mark.usefixtures("machine")
def test_a_bridge_is_taken_if_it_reaches_the_driver():
    """Agents in containers of the driver's machine."""
    assert found("172.17.0.5")[0] == "172.17.0.1"
    assert "192.168.122.1" not in found("172.17.0.5")


@pytest.mark.usefixtures("machine")
def test_nics_name_the_interfaces_to_use():
    """One, several, a comma-separated list, even a bridge: these and no others."""
    assert found("10.0.9.9", ["ib0"]) == ["192.168.5.2"]
    assert found("10.0.9.9", ["ib0, eth0"]) == ["10.0.0.2", "192.168.5.2", "fd00::2"]
    assert found("10.0.9.9", ["docker0", "eth1"]) == ["172.17.0.1", "10.1.0.2"]
    assert found("127.0.0.2", ["eth1"], local=True) == ["10.1.0.2"]
    assert found("127.0.0.2", ["eth1", "lo"], local=True) == ["127.0.0.2", "10.1.0.2"]


@pytest.mark.usefixtures("machine")
def test_an_unknown_interface_is_an_error_with_the_known_ones():
    """What it is called here, a person sees at once."""
    with pytest.raises(OSError, match="there is no network interface eno1 here: it has lo, docker0, eth0"):
        candidates("10.0.9.9", ["eth0", "eno1"])


@pytest.mark.usefixtures("machine")
def test_no_address_is_an_error():
    """The named interface is down: said with its name."""
    with pytest.raises(OSError, match="none of wlan0 is up with an address that other machines could reach"):
        candidates("10.0.9.9", ["wlan0"])


def test_this_machine_has_a_loopback_address():
    """With the real network, whatever it is."""
    assert candidates("127.0.0.1", local=True)[0] == Interface("lo", "127.0.0.1")
    assert outgoing_address("127.0.0.1") == "127.0.0.1"
    for interface in candidates("127.0.0.1", local=True):
        assert interface_of(interface.address) == interface.name


def test_an_address_that_is_not_here_has_no_interface():
    """The error names it."""
    with pytest.raises(OSError, match=r"no interface of this machine has the address 192\.0\.2\.77"):
        interface_of("192.0.2.77")
