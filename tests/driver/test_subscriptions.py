"""Subscribers of a cluster's status: each receives every change, whatever the others do."""

from __future__ import annotations

import logging
import queue

from nbelastic.client.subscriptions import Subscriptions

PATIENCE = 10  # seconds


def test_an_exception_in_a_subscriber_does_not_end_it(caplog):
    """A subscriber that raises is called again at the next change, does not affect others, and is logged once."""
    calls, others = queue.SimpleQueue(), queue.SimpleQueue()

    def fails_twice(status):
        calls.put(status)
        if calls_so_far[0] < 2:
            calls_so_far[0] += 1
            raise RuntimeError("a hiccup")

    calls_so_far = [0]
    watchers = Subscriptions(lambda: "status")
    with caplog.at_level(logging.ERROR, "nbelastic"):
        undo = [watchers.add(fails_twice), watchers.add(others.put)]
        for _ in range(3):
            watchers.notify()
            assert calls.get(timeout=PATIENCE) == "status"
            assert others.get(timeout=PATIENCE) == "status"
    for each in undo:
        each()
    assert [record.exc_info[1].args for record in caplog.records] == [("a hiccup",)]


def test_a_subscriber_that_comes_as_the_thread_ends(monkeypatch):
    """A new subscriber is called, though the thread of those before it, which ends without any, seems to live."""
    watchers, calls = Subscriptions(lambda: "status"), queue.SimpleQueue()
    undo = watchers.add(calls.put)
    thread = watchers._thread
    undo()
    thread.join(PATIENCE)
    monkeypatch.setattr(thread, "is_alive", lambda: True)
    while not calls.empty():
        calls.get()
    undo = watchers.add(calls.put)
    assert calls.get(timeout=PATIENCE) == "status"
    undo()
