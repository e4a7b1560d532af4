"""Messages over connections that break: each arrives once, and in order."""

from __future__ import annotations

import math
from collections import Counter, deque

from hypothesis import given
from hypothesis import strategies as st

from nbelastic.transport.delivery import (
    MAX_DOUBLINGS,
    MAX_RETURNS,
    MAX_UNACKNOWLEDGED,
    RETRANSMIT_BATCH,
    WINDOW,
    Delivery,
)

RETRANSMIT_AFTER = 1.0


class Ends:
    """Two ends, the messages on their way between them, and what each end enqueued, sent and received."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ends = [Delivery(RETRANSMIT_AFTER, 1), Delivery(RETRANSMIT_AFTER, 2)]
        self.wires: list[deque[tuple[bytes, bytes]]] = [deque(), deque()]  # messages from this end
        self.enqueued: list[list[bytes]] = [[], []]
        self.sent: list[Counter[bytes]] = [Counter(), Counter()]
        self.received: list[list[bytes]] = [[], []]

    def enqueue(self, end: int, count: int = 1) -> None:
        for _ in range(count):
            message = f"{end}: {len(self.enqueued[end])}".encode()
            self.enqueued[end].append(message)
            self.ends[end].enqueue(message)
            self.send(end)

    def send(self, end: int) -> list[bytes]:
        """Put the messages that are due on their way."""
        due = self.ends[end].due(self.now)
        self.wires[end].extend(due)
        self.sent[end].update(message for _, message in due)
        return [message for _, message in due]

    def carry(self, end: int, count: int | None = None) -> None:
        """Deliver up to `count` messages that this end has sent; the other end acknowledges them."""
        for _ in range(len(self.wires[end]) if count is None else min(count, len(self.wires[end]))):
            head, message = self.wires[end].popleft()
            if self.ends[1 - end].receive(head, self.now):
                self.received[1 - end].append(message)
        self.send(1 - end)
        if self.ends[1 - end].must_acknowledge:
            self.heartbeat(1 - end)

    def heartbeat(self, end: int) -> None:
        self.wires[end].append((self.ends[end].head(), b""))

    def lose(self, end: int, at: int) -> None:
        """Lose one message that is on its way."""
        if self.wires[end]:
            del self.wires[end][at % len(self.wires[end])]

    def duplicate(self, end: int, at: int) -> None:
        """Deliver one message that is on its way twice."""
        if self.wires[end]:
            self.wires[end].append(self.wires[end][at % len(self.wires[end])])

    def overtake(self, end: int, at: int) -> None:
        """Deliver one message that is on its way before all others."""
        if self.wires[end]:
            self.wires[end].rotate(at)

    def cut(self) -> None:
        for wire in self.wires:
            wire.clear()

    def wait(self, seconds: float = RETRANSMIT_AFTER) -> None:
        """Let time pass; both ends send what is due, and a heartbeat."""
        self.now += seconds
        for end in (0, 1):
            self.send(end)
            self.heartbeat(end)

    def settle(self) -> None:
        """Deliver everything: connections hold from now on."""
        while any(end.pending for end in self.ends):
            self.wait()
            while any(self.wires):
                self.carry(0)
                self.carry(1)


END = st.integers(0, 1)
STEPS = st.one_of(
    st.tuples(st.just("enqueue"), END, st.integers(1, 100)),
    st.tuples(st.just("carry"), END, st.integers(1, 90)),
    st.tuples(st.sampled_from(["lose", "duplicate", "overtake"]), END, st.integers(0, 99)),
    st.tuples(st.just("cut")),
    st.tuples(st.just("wait"), st.sampled_from([0.4, 1.0, 8.0])),
)


@given(st.lists(STEPS, max_size=60))
def test_each_message_is_received_once_and_in_order(story):
    """Messages are lost, duplicated or overtaken at any moment; at the end both ends keep none."""
    ends = Ends()
    for name, *values in story:
        getattr(ends, name)(*values)
        for end in (0, 1):
            received = ends.received[1 - end]
            assert received == ends.enqueued[end][: len(received)]
            assert not ends.ends[end].discarded
    ends.settle()
    assert ends.received == [ends.enqueued[1], ends.enqueued[0]]
    assert [end.due(ends.now + 100) for end in ends.ends] == [[], []]


@given(st.integers(1, 300), st.lists(st.sampled_from([0.5, 1.0, 2.5]), max_size=40))
def test_a_silent_end_is_not_flooded(count, pauses):
    """An end that acknowledges nothing gets at most `WINDOW` messages, then the first few again, less and less often."""
    ends = Ends()
    ends.enqueue(0, count)
    rounds = 0
    for seconds in pauses:
        ends.now += seconds
        retransmitted = ends.send(0)
        assert retransmitted in ([], ends.enqueued[0][:RETRANSMIT_BATCH])
        rounds += bool(retransmitted)
    first, *others = ends.enqueued[0]
    assert len(ends.sent[0]) == min(count, WINDOW)
    assert ends.sent[0][first] == 1 + rounds
    assert all(ends.sent[0][message] <= 1 + rounds for message in others)
    assert rounds <= MAX_DOUBLINGS + sum(pauses) / (RETRANSMIT_AFTER * 2**MAX_DOUBLINGS)


@given(st.integers(1, 400), st.integers(1, 70), st.sampled_from([4.0, 30.0]))
def test_a_stopped_end_gets_few_messages_twice(count, batch, stopped):
    """No message was lost, all wait to be read: only the few retransmitted ones arrive twice."""
    ends = Ends()
    ends.enqueue(0, count)
    for _ in range(int(stopped)):
        ends.now += 1.0
        ends.send(0)
    while any(ends.wires):
        ends.carry(0, batch)
        ends.carry(1)
    assert ends.received[1] == ends.enqueued[0]
    assert ends.sent[0].total() <= count + WINDOW + RETRANSMIT_BATCH * (2 + MAX_DOUBLINGS)


@given(st.integers(1, 400), st.integers(0, 70))
def test_lost_messages_are_retransmitted_at_once(count, before):
    """As soon as the first of them is acknowledged the rest is retransmitted; messages that arrived are not."""
    ends = Ends()
    ends.enqueue(0, count)
    ends.carry(0, before)
    ends.carry(1)
    arrived = len(ends.received[1])
    ends.cut()
    ends.wait()
    for _ in range(2 + count // RETRANSMIT_BATCH):
        ends.carry(0)
        ends.carry(1)
    assert ends.received[1] == ends.enqueued[0]
    assert all(ends.sent[0][message] == 1 for message in ends.enqueued[0][:arrived])
    assert max(ends.sent[0].values()) <= 2


def test_acknowledged_messages_are_not_retransmitted():
    """Any message acknowledges. Without one a message is retransmitted after a time, then after twice that time."""
    ends = Ends()
    ends.enqueue(0, 3)
    ends.carry(0, 2)
    ends.now = 0.5
    ends.carry(1)
    ends.now = 1.4
    assert ends.send(0) == []
    ends.now = 1.5
    assert ends.send(0) == [b"0: 2"]
    ends.now = 3.4
    assert ends.send(0) == []
    ends.now = 3.5
    assert ends.send(0) == [b"0: 2"]


def test_the_first_sign_of_life_brings_retransmissions():
    """After a long silence the first message from the other end leads to a retransmission, whatever the back-off was."""
    ends = Ends()
    ends.enqueue(0)
    ends.cut()
    for _ in range(60):
        ends.wait()
        ends.cut()
    ends.heartbeat(1)
    ends.now += 1.0
    ends.carry(1)
    assert ends.received == [[], []]
    ends.carry(0)
    assert ends.received[1] == ends.enqueued[0]


def times_sent(silence, seconds):
    """How often it sends a message that is not acknowledged, while it receives a heartbeat once per `silence` seconds."""
    end, sent, now, heard_at = Delivery(RETRANSMIT_AFTER, 1), 0, 0.0, 0.0
    end.enqueue(b"message")
    while now < seconds:
        sent += len(end.due(now))
        now += 0.1
        if now - heard_at >= silence:
            heard_at = now
            end.hear(now)
    return sent


def test_a_late_end_is_not_flooded():
    """An end that sends heartbeats and acknowledges nothing is late: the pauses grow as for a silent one."""
    silent = times_sent(silence=1000.0, seconds=100.0)
    assert 10 <= silent <= 1 + MAX_DOUBLINGS + 100 / (RETRANSMIT_AFTER * 2**MAX_DOUBLINGS)
    for silence in (0.5, 1.1, 2.5, 6.0):
        assert times_sent(silence, 100.0) <= silent + 2 * MAX_RETURNS


def seconds_to_retransmission(outages):
    """How long after the last outage a message is sent again. Each outage loses it; two seconds with heartbeats follow."""
    end, now = Delivery(RETRANSMIT_AFTER, 1), 0.0
    end.enqueue(b"message")
    for seconds in outages:
        for _ in range(int(seconds * 10)):
            now += 0.1
            end.due(now)
        back = now
        for _ in range(20):
            end.hear(now)
            if end.due(now):
                break
            now += 0.1
    return now - back


def test_an_end_is_back_again_and_again():
    """The network breaks more than once before a message is acknowledged: each time, it is soon sent again."""
    for count in (1, 2, 3):
        for seconds in (1.5, 3.0, 6.0, 7.9, 20.0):
            assert seconds_to_retransmission([seconds] * count) <= RETRANSMIT_AFTER + 0.2
    assert seconds_to_retransmission([20.0] * 10) <= RETRANSMIT_AFTER + 0.2


def test_nothing_is_retransmitted_while_its_acknowledgement_may_be_unread():
    """Unread messages may contain it. Then only new messages are sent."""
    end = Delivery(RETRANSMIT_AFTER, 1)
    end.enqueue(b"message")
    assert len(end.due(100.0)) == 1
    assert end.due(104.0, unread=3.5) == end.due(1000.0, unread=math.inf) == []
    end.enqueue(b"later")
    assert [message for _, message in end.due(1000.0, unread=math.inf)] == [b"later"]
    assert [message for _, message in end.due(1000.0, unread=3.0)] == [b"message", b"later"]


def test_telemetry_acknowledges_and_is_not_acknowledged():
    """Telemetry and heartbeats carry an acknowledgement, and get none."""
    first, second = Delivery(RETRANSMIT_AFTER, 1), Delivery(RETRANSMIT_AFTER, 2)
    first.enqueue(b"hello")
    ((head, _),) = first.due(0.0)
    assert second.receive(head, 0.0)
    assert second.must_acknowledge
    telemetry = second.head()
    assert not second.must_acknowledge
    assert not first.receive(telemetry, 0.0)
    assert not first.must_acknowledge
    assert not first.pending


def test_a_new_peer_of_the_same_name():
    """It does not receive messages to the earlier one, and its own are received from the first on."""
    ends = Ends()
    ends.enqueue(0, 2)
    ends.enqueue(1, 2)
    ends.carry(0)
    ends.carry(1)
    ends.cut()
    ends.enqueue(1, 1)  # to the earlier peer
    ends.ends[0], ends.enqueued[0], ends.received[0] = Delivery(RETRANSMIT_AFTER, 3), [], []
    ends.cut()
    ends.received[1] = []
    ends.enqueue(0, 2)
    ends.settle()
    assert ends.received[1] == ends.enqueued[0]
    assert ends.received[0] == []
    ends.enqueue(1)
    ends.settle()
    assert ends.received[0] == ends.enqueued[1][-1:]


def test_an_end_that_has_forgotten_the_other_goes_on():
    """Messages that it acknowledged before are not sent again, and its new messages are received."""
    ends = Ends()
    ends.ends[1] = Delivery(RETRANSMIT_AFTER, 7, number=100)
    ends.enqueue(0, 5)
    ends.enqueue(1, 5)
    ends.settle()
    ends.enqueue(0, 2)
    ends.ends[1] = Delivery(RETRANSMIT_AFTER, 7, number=200)
    ends.enqueue(1, 2)
    ends.settle()
    assert ends.received == [ends.enqueued[1], ends.enqueued[0]]


def test_unacknowledged_messages_have_a_limit():
    """Of too many messages the oldest are discarded and counted; the others arrive in order."""
    ends = Ends()
    for number in range(MAX_UNACKNOWLEDGED + 10):
        ends.enqueued[0].append(b"%d" % number)
        ends.ends[0].enqueue(ends.enqueued[0][-1])
    assert ends.ends[0].congested
    assert ends.ends[0].discarded == 10
    ends.settle()
    assert ends.received[1] == ends.enqueued[0][10:]
    assert not ends.ends[0].congested


def test_a_message_is_not_addressed_to_an_end_that_its_sender_does_not_know():
    """A message that was sent before its sender received anything from this session belongs to an earlier session."""
    first, second = Delivery(RETRANSMIT_AFTER, 1), Delivery(RETRANSMIT_AFTER, 2)
    second.enqueue(b"who is there?")
    ((early, _),) = second.due(0.0)
    first.enqueue(b"an answer")
    assert not first.is_addressed_here(early)
    ((head, _),) = first.due(0.0)
    assert second.receive(head, 0.0)
    second.enqueue(b"hello")
    ((late, _),) = second.due(0.0)
    assert first.is_addressed_here(late)


def test_the_time_before_a_retransmission_begins_with_the_sending():
    """It does not begin with the last acknowledgement: after a pause a message is not sent twice at once."""
    end = Delivery(RETRANSMIT_AFTER, 1)
    end.enqueue(b"one")
    assert len(end.due(10.0)) == 1
    assert end.due(10.9) == []
    assert len(end.due(11.0)) == 1


def test_later_messages_do_not_delay_a_retransmission():
    """The time counts from the oldest message that is not acknowledged."""
    end = Delivery(RETRANSMIT_AFTER, 1)
    for number in range(10):
        end.enqueue(b"message %d" % number)
        assert [message for _, message in end.due(10.0 + number / 10)] == [b"message %d" % number]
    assert end.due(11.0)[0][1] == b"message 0"


def test_an_end_goes_on_when_all_retransmitted_messages_were_discarded():
    """The other end was away so long that the oldest messages were discarded: the others arrive when it is back."""
    ends = Ends()
    ends.enqueue(0, 20)
    ends.wires[0].clear()  # lost
    ends.now = 2 * RETRANSMIT_AFTER
    ends.send(0)  # retransmits the first ones, which are lost too
    ends.wires[0].clear()
    for number in range(MAX_UNACKNOWLEDGED):
        ends.enqueued[0].append(b"later %d" % number)
        ends.ends[0].enqueue(ends.enqueued[0][-1])
    assert ends.ends[0].discarded == 20
    ends.settle()
    assert ends.received[1] == ends.enqueued[0][20:]
