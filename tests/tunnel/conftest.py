"""What tests of tunnels share."""

from __future__ import annotations

import pytest

from tests.support.driver_lease import until_the_end


@pytest.fixture
def driver_lease(tmp_path):
    """The proxies end with this process."""
    return until_the_end(tmp_path)
