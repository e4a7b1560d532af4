"""Addresses and endpoints as text."""

from __future__ import annotations

import pytest

from nbelastic.system.addresses import address_of, bracketed, split_endpoint


@pytest.mark.parametrize(
    ("address", "endpoint"), [("10.0.0.2", "10.0.0.2:4711"), ("gpu1", "gpu1:4711"), ("fd00::2", "[fd00::2]:4711")]
)
def test_an_endpoint_can_be_taken_apart_again(address, endpoint):
    """IPv6 addresses stand in brackets before the port, others as they are; a scheme may come first."""
    assert f"{bracketed(address)}:4711" == endpoint
    for text in (endpoint, f"tcp://{endpoint}"):
        assert (split_endpoint(text), address_of(text)) == ((address, 4711), address)
