"""The workers as peers of the driver."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nbelastic.driver.workers import Workers
from nbelastic.protocol.worker_messages import AllowPeers
from nbelastic.transport.backlog import Backlog
from tests.core.story import Story

ONE, TWO, OTHER = "10.0.0.1", "10.0.0.2", "10.1.0.2"


@pytest.mark.parametrize(
    ("addresses", "starting", "announced"),
    [
        ((), "a", []),
        ((ONE,), "a", []),
        ((ONE,), "b", [(TWO,)]),
        ((ONE, OTHER), "a", [(ONE, OTHER)]),
    ],
)
def test_members_are_told_only_addresses_that_they_do_not_know(addresses, starting, announced):
    """Nothing is sent to all members if a worker is replaced on a host of theirs that has one address."""
    story = Story(min=1, max=1)
    story.add("a:1", *addresses)
    story.run()
    story.add("b:1", TWO).answer()
    sent = []
    server = SimpleNamespace(send_to_all=lambda peers, message: sent.append((list(peers), message)))
    Workers(server, None, None, None, None).announce({starting}, story.cluster)
    assert sent == [(["worker/a/0#1"], AllowPeers(each)) for each in announced]


class Peers:
    """A server whose peers have sent their last messages at these times."""

    def __init__(self, **heard_at: float) -> None:
        self.backlog = Backlog(1)
        self.heard_at = {f"worker/{name}/0#1": at for name, at in heard_at.items()}


def test_no_worker_is_looked_at_while_all_are_heard(monkeypatch):
    """The oldest message of all decides; a worker that a new driver expects counts until it connects."""
    clock = SimpleNamespace(silence=lambda at, _: max(0.0, 100.0 - at))
    server = Peers(a=95.0, b=92.0)
    workers = Workers(server, None, clock, None, None)
    assert (workers.are_heard(8.0), workers.are_heard(7.9)) == (True, False)
    monkeypatch.setattr("time.monotonic", lambda: 50.0)
    expected = Story("c:1").answer().cluster.workers
    for w in expected:
        workers.expect(w)
    assert not workers.are_heard(8.0)
    server.heard_at["worker/c/0#1"] = 99.0
    assert workers.are_heard(8.0)
