"""Addresses and endpoints convert to text and back."""

from __future__ import annotations

import pytest

from nbelastic.system.addresses import address_of, bracketed, split_endpoint


@pytest.mark.parametrize(
    ("address", "endpoint"), [("10.0.0.2", "10.0.0.2:4711"), ("gpu1", "gpu1:4711"), ("fd00::2", "[fd00::2]:4711")]
)
def test_an_endpoint_can_be_taken_apart_again(address, endpoint):
    """An endpoint splits into address and port: IPv6 addresses are in brackets, and a scheme may come first."""
    assert f"{bracketed(address)}:4711" == endpoint
    for text in (endpoint, f"tcp://{endpoint}"):
        assert (split_endpoint(text), address_of(text)) == ((address, 4711), address)
