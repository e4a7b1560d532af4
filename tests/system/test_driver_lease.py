"""How long a process of a cluster runs on without a driver."""

import resource
import time
from contextlib import contextmanager

import pytest

from nbelastic.system.driver_lease import LeaseWatch
from tests.support import driver_lease


@contextmanager
def no_descriptor_left():
    """As when strangers have opened as many connections to a TCP proxy as it may have files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("lease", [driver_lease.until_the_end, lambda folder: driver_lease.named(folder, 60.0)])
def test_a_process_without_a_free_descriptor_runs_on(tmp_path, lease):
    """It cannot read who the driver is. It goes on until the lease has expired, and then ends: there may be no driver."""
    watch, now = LeaseWatch(lease(tmp_path)), time.monotonic()
    with no_descriptor_left():
        assert not watch.has_expired(now)
        assert not watch.has_expired(now + 59)
        assert watch.has_expired(now + 61)
    assert not watch.has_expired(now + 62)
