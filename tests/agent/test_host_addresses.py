"""The addresses at which other hosts reach this one, and their order."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from nbelastic.agent import host_addresses
from nbelastic.agent.host_addresses import addresses_by_preference
from nbelastic.protocol.ids import Interface
from nbelastic.system.interfaces import address_towards, interface_of

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
    monkeypatch.setattr(host_addresses, "address_towards", outgoing)


def found(*args, **kwargs):
    return [i.address for i in addresses_by_preference(*args, **kwargs)]


@pytest.mark.usefixtures("machine")
def test_the_address_that_reaches_the_driver_is_first():
    """Next is the default route's, then the others, IPv4 before IPv6, without bridges, link-local addresses and interfaces that are down."""
    assert found("10.1.9.9") == ["10.1.0.2", "10.0.0.2", "192.168.5.2", "fd00::2"]
    assert addresses_by_preference("10.1.9.9")[0] == Interface("eth1", "10.1.0.2")


@pytest.mark.usefixtures("machine")
def test_without_a_route_to_the_driver_the_default_route_is_first():
    """The agent reaches the driver through a tunnel, so the driver's address shows no route."""
    assert found("127.0.0.1")[0] == "10.0.0.2"
    assert "127.0.0.1" not in found("127.0.0.1")


@pytest.mark.usefixtures("machine")
def test_on_the_drivers_machine_loopback_is_first():
    """On the driver's machine the loopback address is first, then the external ones."""
    assert found("127.0.0.2", local=True)[:2] == ["127.0.0.2", "10.0.0.2"]
    assert found("10.0.9.9", local=True)[:2] == ["127.0.0.1", "10.0.0.2"]
    assert addresses_by_preference("127.0.0.2", local=True)[0] == Interface("lo", "127.0.0.2")


@pytest.mark.usefixtures("machine")
def test_a_bridge_is_taken_if_it_reaches_the_driver():
    """A bridge is used if it reaches the driver, as for an agent in a container."""
    assert found("172.17.0.5")[0] == "172.17.0.1"
    assert "192.168.122.1" not in found("172.17.0.5")


@pytest.mark.usefixtures("machine")
def test_nics_name_the_interfaces_to_use():
    """Only the named interfaces are used: one, several, a comma-separated list, or a bridge."""
    assert found("10.0.9.9", ["ib0"]) == ["192.168.5.2"]
    assert found("10.0.9.9", ["ib0, eth0"]) == ["10.0.0.2", "192.168.5.2", "fd00::2"]
    assert found("10.0.9.9", ["docker0", "eth1"]) == ["172.17.0.1", "10.1.0.2"]
    assert found("127.0.0.2", ["eth1"], local=True) == ["10.1.0.2"]
    assert found("127.0.0.2", ["eth1", "lo"], local=True) == ["127.0.0.2", "10.1.0.2"]


@pytest.mark.usefixtures("machine")
def test_an_unknown_interface_is_an_error_with_the_known_ones():
    """The error for an unknown interface lists the known ones."""
    with pytest.raises(OSError, match="there is no network interface eno1 here: it has lo, docker0, eth0"):
        addresses_by_preference("10.0.9.9", ["eth0", "eno1"])


@pytest.mark.usefixtures("machine")
def test_no_address_is_an_error():
    """If no interface has an address, the error names the interface that is down."""
    with pytest.raises(OSError, match="none of wlan0 is up with an address that other machines could reach"):
        addresses_by_preference("10.0.9.9", ["wlan0"])


def test_this_machine_has_a_loopback_address():
    """The machine that runs the tests has a loopback address."""
    assert addresses_by_preference("127.0.0.1", local=True)[0] == Interface("lo", "127.0.0.1")
    assert address_towards("127.0.0.1") == "127.0.0.1"
    for interface in addresses_by_preference("127.0.0.1", local=True):
        assert interface_of(interface.address) == interface.name


def test_an_unknown_address_has_no_interface():
    """The error for an address without an interface names the address."""
    with pytest.raises(OSError, match=r"no interface of this machine has the address 192\.0\.2\.77"):
        interface_of("192.0.2.77")
