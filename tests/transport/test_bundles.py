"""Bundles: what several processes say travels as one message, and comes out as it went in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbelastic.protocol.messages import HEAD
from nbelastic.transport.delivery import Delivery
from nbelastic.transport.relay import HOLD, MOST, Relay, bundles, is_bundle, opened

A, B = b"worker/a/0#1", b"worker/a/1#1"


def bundled(messages):
    """All of them, in as many bundles as that takes: their frames."""
    return [frame for bundle in bundles(messages) for frame in bundle]


def due(relay, now):
    return [frame for bundle in relay.due(now) for frame in bundle]


def numbered(text=b"{}", me=1):
    """The head of a message that is kept until it is confirmed, and the message."""
    one = Delivery(1.0, me)
    one.enqueue(text)
    return one.due(0.0)[0]


def report(text=b'{"type":"WorkerProgress"}', me=1):
    return Delivery(1.0, me).head(), text


HEARTBEAT = report(b"")
frames = st.binary(max_size=20)
names = st.binary(min_size=1, max_size=8).filter(lambda name: b"\n" not in name)
messages = st.lists(st.tuples(names, st.sampled_from([b"", HEARTBEAT[0], numbered()[0]]), frames), max_size=12)


@given(messages)
def test_what_is_bundled_is_opened(said):
    """Each message, whose it is, with its head or without, in order; and a bundle is told from a single message."""
    found = bundled(said)
    assert [(name, [head, what] if head else [what]) for name, head, what in said] == list(opened(found))
    assert is_bundle(found) == bool(said)
    assert not is_bundle([b"head", b"frame"])
    assert not is_bundle([b"frame"])


def test_an_order_to_many_is_in_a_bundle_once():
    """Eight workers that are told the same cost one copy of it."""
    order = b"x" * 1000
    found = bundled((f"worker/a/{slot}#1".encode(), HEARTBEAT[0], order) for slot in range(8))
    assert found.count(order) == 1
    assert len(list(opened(found))) == 8


@pytest.mark.parametrize("heads", [b"x", HEARTBEAT[0], HEARTBEAT[0] * 3])
def test_what_is_no_bundle(heads):
    """As many heads as names, or none."""
    with pytest.raises(ValueError, match="2 names"):
        list(opened([A + b"\n" + B, heads, b"{}"]))


def test_what_has_to_arrive_goes_at_once_with_all_that_waits():
    """A report waits a little; a numbered message does not, and is not overtaken by what was said after it."""
    relay = Relay()
    relay.take(A, report(), 10.0)
    assert due(relay, 10.0) == []
    assert relay.wait(10.0) == pytest.approx(HOLD)
    relay.take(A, numbered(), 10.01)
    assert relay.wait(10.01) == 0.0
    assert [what for _, (_, what) in opened(due(relay, 10.01))] == [report()[1], b"{}"]
    assert due(relay, 99.0) == []
    assert relay.wait(99.0) == float("inf")


def test_reports_wait_for_one_another():
    """One bundle a while, whatever the number of workers; of each kind of each worker the newest."""
    relay = Relay()
    for at in range(10):
        for name in (A, B):
            relay.take(name, report(b'{"type":"WorkerProgress","commit":%d}' % at), at / 1000)
    assert due(relay, HOLD - 0.001) == []
    bundle = list(opened(due(relay, HOLD)))
    assert [(name, message[1][-2:]) for name, message in bundle] == [(A, b"9}"), (B, b"9}")]


def test_numbered_messages_all_go():
    """None replaces another, however alike they are; but one that is sent again is in the bundle once, in its old place."""
    relay, one = Relay(), Delivery(1.0, 1)
    for _ in range(3):
        one.enqueue(b"{}")
    first = one.due(0.0)
    for name in (A, B):
        for head, what in first:
            relay.take(name, (head, what), 0.0)
    for head, what in one.due(5.0):
        relay.take(A, (head, what), 0.0)
    assert [name for name, _ in opened(due(relay, 0.0))] == [A, A, A, B, B, B]


def test_a_bundle_has_an_end():
    """What is long goes in several: heartbeats and what others say pass between them."""
    said = [(A, HEARTBEAT[0], bytes([number]) * (MOST // 4)) for number in range(10)]
    found = list(bundles(said))
    assert [len(list(opened(bundle))) for bundle in found] == [4, 4, 2]
    assert [what for bundle in found for _, (_, what) in opened(bundle)] == [what for *_, what in said]


def test_heartbeats_share_their_place():
    """They have nothing to say but whose they are: all of a host are one message."""
    relay = Relay()
    for name in (A, B):
        relay.take(name, HEARTBEAT, 0.0)
        relay.take(name, report(), 0.0)
    bundle = due(relay, HOLD)
    assert bundle[-3:] == [A + b"\n" + B, HEARTBEAT[0] * 2, b""]
    assert len(bundle) == 6, "the two equal reports as well"


@pytest.mark.parametrize(
    ("name", "nonsense"),
    [(A, []), (A, [b"{}"]), (A, [b"short", b"{}"]), (A, [HEARTBEAT[0], b"{}", b"more"]), (A + b"\n" + B, HEARTBEAT)],
)
def test_nonsense_is_not_relayed(name, nonsense):
    """A process of this host that does not speak the language is not heard, nor one whose name would be taken for two."""
    relay = Relay()
    relay.take(name, nonsense, 0.0)
    assert due(relay, HOLD) == []


def test_heads_have_one_size():
    """Bundles count on that."""
    assert len(HEARTBEAT[0]) == len(numbered()[0]) == HEAD.size
