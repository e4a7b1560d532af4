"""Bundles: the messages of several processes travel as one message, and are unpacked unchanged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbelastic.protocol.messages import HEAD
from nbelastic.transport.delivery import Delivery
from nbelastic.transport.relay import HOLD, MOST, Relay, bundles, is_bundle, opened

A, B = b"worker/a/0#1", b"worker/a/1#1"


def all_frames(messages):
    """The frames of all bundles that the messages need."""
    return [frame for bundle in bundles(messages) for frame in bundle]


def due(relay, now):
    return [frame for bundle in relay.due(now) for frame in bundle]


def numbered_message(text=b"{}", session=1):
    """The head of a message that is kept until it is acknowledged, and the message."""
    delivery = Delivery(1.0, session)
    delivery.enqueue(text)
    return delivery.due(0.0)[0]


def telemetry(text=b'{"type":"WorkerProgress"}', session=1):
    return Delivery(1.0, session).head(), text


HEARTBEAT = telemetry(b"")
frames = st.binary(max_size=20)
names = st.binary(min_size=1, max_size=8).filter(lambda name: b"\n" not in name)
messages = st.lists(st.tuples(names, st.sampled_from([b"", HEARTBEAT[0], numbered_message()[0]]), frames), max_size=12)


@given(messages)
def test_bundles_are_opened_unchanged(sent):
    """Each message, with its peer's name and with or without a head, in order.

    A bundle differs from a single message.
    """
    frames_sent = all_frames(sent)
    assert [(name, [head, frame] if head else [frame]) for name, head, frame in sent] == list(opened(frames_sent))
    assert is_bundle(frames_sent) == bool(sent)
    assert not is_bundle([b"head", b"frame"])
    assert not is_bundle([b"frame"])


def test_equal_messages_are_in_a_bundle_once():
    """A bundle with the same message for eight workers has one copy of it."""
    message = b"x" * 1000
    frames_sent = all_frames((f"worker/a/{slot}#1".encode(), HEARTBEAT[0], message) for slot in range(8))
    assert frames_sent.count(message) == 1
    assert len(list(opened(frames_sent))) == 8


@pytest.mark.parametrize("heads", [b"x", HEARTBEAT[0], HEARTBEAT[0] * 3])
def test_an_invalid_bundle(heads):
    """A bundle has as many heads as names, or none."""
    with pytest.raises(ValueError, match="2 names"):
        list(opened([A + b"\n" + B, heads, b"{}"]))


def test_a_numbered_message_is_sent_at_once_with_waiting_telemetry():
    """Telemetry waits a little. A numbered message does not wait, and later messages do not overtake it."""
    relay = Relay()
    relay.take(A, telemetry(), 10.0)
    assert due(relay, 10.0) == []
    assert relay.wait(10.0) == pytest.approx(HOLD)
    relay.take(A, numbered_message(), 10.01)
    assert relay.wait(10.01) == 0.0
    assert [frame for _, (_, frame) in opened(due(relay, 10.01))] == [telemetry()[1], b"{}"]
    assert due(relay, 99.0) == []
    assert relay.wait(99.0) == float("inf")


def test_telemetry_is_bundled():
    """One bundle per interval, whatever the number of workers; it has the newest of each kind of each worker."""
    relay = Relay()
    for number in range(10):
        for name in (A, B):
            relay.take(name, telemetry(b'{"type":"WorkerProgress","commit":%d}' % number), number / 1000)
    assert due(relay, HOLD - 0.001) == []
    bundle = list(opened(due(relay, HOLD)))
    assert [(name, message[1][-2:]) for name, message in bundle] == [(A, b"9}"), (B, b"9}")]


def test_numbered_messages_are_not_replaced():
    """Equal messages are all sent. A retransmitted one is in the bundle once, in its old place."""
    relay, delivery = Relay(), Delivery(1.0, 1)
    for _ in range(3):
        delivery.enqueue(b"{}")
    messages_sent = delivery.due(0.0)
    for name in (A, B):
        for head, frame in messages_sent:
            relay.take(name, (head, frame), 0.0)
    for head, frame in delivery.due(5.0):
        relay.take(A, (head, frame), 0.0)
    assert [name for name, _ in opened(due(relay, 0.0))] == [A, A, A, B, B, B]


def test_a_bundle_has_a_maximum_size():
    """Long messages go in several bundles, so that heartbeats and messages of other peers pass between them."""
    sent = [(A, HEARTBEAT[0], bytes([number]) * (MOST // 4)) for number in range(10)]
    frames_sent = list(bundles(sent))
    assert [len(list(opened(bundle))) for bundle in frames_sent] == [4, 4, 2]
    assert [frame for bundle in frames_sent for _, (_, frame) in opened(bundle)] == [frame for *_, frame in sent]


def test_heartbeats_share_one_frame():
    """All heartbeats of a host are one message."""
    relay = Relay()
    for name in (A, B):
        relay.take(name, HEARTBEAT, 0.0)
        relay.take(name, telemetry(), 0.0)
    bundle = due(relay, HOLD)
    assert bundle[-3:] == [A + b"\n" + B, HEARTBEAT[0] * 2, b""]
    assert len(bundle) == 6, "the two equal reports as well"


@pytest.mark.parametrize(
    ("name", "invalid"),
    [(A, []), (A, [b"{}"]), (A, [b"short", b"{}"]), (A, [HEARTBEAT[0], b"{}", b"more"]), (A + b"\n" + B, HEARTBEAT)],
)
def test_an_invalid_message_is_not_relayed(name, invalid):
    """The relay drops messages of another form, and those of a peer whose name is not valid."""
    relay = Relay()
    relay.take(name, invalid, 0.0)
    assert due(relay, HOLD) == []


def test_heads_have_one_size():
    """Bundles rely on it."""
    assert len(HEARTBEAT[0]) == len(numbered_message()[0]) == HEAD.size
