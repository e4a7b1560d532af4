"""A client leaves the driver."""

from __future__ import annotations

import threading
import time

import nbelastic as nbe
from nbelastic.core import commands as cmd
from tests.driver.raw_client import in_driver
from tests.support.waiting import until


def test_a_request_arrives_although_the_driver_sends_before_it_reads(start_hostless):
    """A client sends a request and leaves at once, while the driver is busy and then sends an update: 10 times."""
    cluster = start_hostless(keep=True)
    for most in range(1, 11):
        other = nbe.Cluster.attach("quiet")

        def leave(other=other, most=most):
            other.order({"order": "scale", "max": most}, "a page")
            other.detach()

        leaving = threading.Thread(target=leave)

        def be_busy_and_send(driver, leaving=leaving):
            leaving.start()
            time.sleep(0.1)  # the driver's loop reads nothing meanwhile
            driver.record(cmd.Record("noted", "an update"))
            driver._clients._send_updates()

        in_driver(cluster, be_busy_and_send)
        leaving.join()
        until(lambda most=most: cluster.status().max == most, timeout=5.0)
