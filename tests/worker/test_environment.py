"""The network interfaces that process groups use."""

from __future__ import annotations

import os

import pytest

from nbelastic.worker import environment
from nbelastic.worker.environment import set_interface


@pytest.mark.parametrize(
    ("own", "interfaces", "gloo", "nccl"),
    [
        ({}, ("eth1", ""), "eth1", "=eth1"),
        ({}, ("lo", ""), "lo", "=lo"),
        ({}, ("lo", "eth0"), "lo", "=eth0"),
        ({}, ("eth1", "eth0"), "eth1", "=eth1"),
        ({"NCCL_SOCKET_IFNAME": "bond,eth"}, ("eth1", "eth0"), "eth1", "bond,eth"),
        ({"GLOO_SOCKET_IFNAME": "ib0,ib1"}, ("eth1", "eth0"), "ib0", "=eth1"),
    ],
)
def test_gloo_follows_the_address_and_nccl_never_starts_on_loopback(monkeypatch, own, interfaces, gloo, nccl):
    """NCCL reads its variable once, so it gets an outward interface at once, by its exact name. The user's own values win."""
    monkeypatch.setattr(environment, "_OWN", own)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "before")
    set_interface(*interfaces)
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == (gloo, nccl)
