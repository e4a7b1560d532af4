"""Messages over connections that break: each message arrives once, and in order."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given
from hypothesis import strategies as st

from nbelastic.transport.delivery import MAX_DOUBLINGS, MAX_UNACKNOWLEDGED, RETRANSMIT_BATCH, WINDOW, Delivery

PATIENCE = 1.0


class Ends:
    """Two ends, what is on its way between them, and what each has said, sent and heard."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ends = [Delivery(PATIENCE, 1), Delivery(PATIENCE, 2)]
        self.ways: list[deque[tuple[bytes, bytes]]] = [deque(), deque()]  # from this end
        self.said: list[list[bytes]] = [[], []]
        self.sent: list[Counter[bytes]] = [Counter(), Counter()]
        self.heard: list[list[bytes]] = [[], []]

    def enqueue(self, end: int, count: int = 1) -> None:
        for _ in range(count):
            message = f"{end}: {len(self.said[end])}".encode()
            self.said[end].append(message)
            self.ends[end].enqueue(message)
            self.send(end)

    def send(self, end: int) -> list[bytes]:
        """What is due goes on its way."""
        due = self.ends[end].due(self.now)
        self.ways[end].extend(due)
        self.sent[end].update(message for _, message in due)
        return [message for _, message in due]

    def carry(self, end: int, count: int | None = None) -> None:
        """What this end has sent arrives, so many of it, and what has arrived is confirmed."""
        for _ in range(len(self.ways[end]) if count is None else min(count, len(self.ways[end]))):
            head, message = self.ways[end].popleft()
            if self.ends[1 - end].receive(head, self.now):
                self.heard[1 - end].append(message)
        self.send(1 - end)
        if self.ends[1 - end].must_acknowledge:
            self.beat(1 - end)

    def beat(self, end: int) -> None:
        self.ways[end].append((self.ends[end].head(), b""))

    def lose(self, end: int, at: int) -> None:
        """One of those on their way does not arrive."""
        if self.ways[end]:
            del self.ways[end][at % len(self.ways[end])]

    def double(self, end: int, at: int) -> None:
        """One of those on their way arrives twice."""
        if self.ways[end]:
            self.ways[end].append(self.ways[end][at % len(self.ways[end])])

    def overtake(self, end: int, at: int) -> None:
        """One of those on their way arrives before all others."""
        if self.ways[end]:
            self.ways[end].rotate(at)

    def break_off(self) -> None:
        for way in self.ways:
            way.clear()

    def wait(self, seconds: float = PATIENCE) -> None:
        """Both ends do what they do now and then."""
        self.now += seconds
        for end in (0, 1):
            self.send(end)
            self.beat(end)

    def settle(self) -> None:
        """Connections hold from now on."""
        while any(end.pending for end in self.ends):
            self.wait()
            while any(self.ways):
                self.carry(0)
                self.carry(1)


END = st.integers(0, 1)
HAPPENINGS = st.one_of(
    st.tuples(st.just("enqueue"), END, st.integers(1, 100)),
    st.tuples(st.just("carry"), END, st.integers(1, 90)),
    st.tuples(st.sampled_from(["lose", "double", "overtake"]), END, st.integers(0, 99)),
    st.tuples(st.just("break_off")),
    st.tuples(st.just("wait"), st.sampled_from([0.4, 1.0, 8.0])),
)


@given(st.lists(HAPPENINGS, max_size=60))
def test_each_is_heard_once_and_in_order(story):
    """Whatever is lost, doubled or overtaken at whatever moment; and at the end nothing is kept."""
    ends = Ends()
    for name, *values in story:
        getattr(ends, name)(*values)
        for end in (0, 1):
            heard = ends.heard[1 - end]
            assert heard == ends.said[end][: len(heard)]
            assert not ends.ends[end].discarded
    ends.settle()
    assert ends.heard == [ends.said[1], ends.said[0]]
    assert [end.due(ends.now + 100) for end in ends.ends] == [[], []]


@given(st.integers(1, 300), st.lists(st.sampled_from([0.5, 1.0, 2.5]), max_size=40))
def test_silence_is_not_answered_with_a_flood(count, pauses):
    """To an end that confirms nothing go at most `WINDOW` messages, then the first few again, ever more rarely."""
    ends = Ends()
    ends.enqueue(0, count)
    rounds = 0
    for seconds in pauses:
        ends.now += seconds
        again = ends.send(0)
        assert again in ([], ends.said[0][:RETRANSMIT_BATCH])
        rounds += bool(again)
    first, *others = ends.said[0]
    assert len(ends.sent[0]) == min(count, WINDOW)
    assert ends.sent[0][first] == 1 + rounds
    assert all(ends.sent[0][message] <= 1 + rounds for message in others)
    assert rounds <= MAX_DOUBLINGS + sum(pauses) / (PATIENCE * 2**MAX_DOUBLINGS)


@given(st.integers(1, 400), st.integers(1, 70), st.sampled_from([4.0, 30.0]))
def test_an_end_that_was_stopped_hears_hardly_anything_twice(count, batch, stopped):
    """Nothing was lost, all of it waits to be read: what follows the few that were sent again is not sent again, too."""
    ends = Ends()
    ends.enqueue(0, count)
    for _ in range(int(stopped)):
        ends.now += 1.0
        ends.send(0)
    while any(ends.ways):
        ends.carry(0, batch)
        ends.carry(1)
    assert ends.heard[1] == ends.said[0]
    assert ends.sent[0].total() <= count + WINDOW + RETRANSMIT_BATCH * (2 + MAX_DOUBLINGS)


@given(st.integers(1, 400), st.integers(0, 70))
def test_what_a_break_took_along_goes_again_at_once(count, before):
    """As soon as the first of it is confirmed; what had arrived does not go again."""
    ends = Ends()
    ends.enqueue(0, count)
    ends.carry(0, before)
    ends.carry(1)
    arrived = len(ends.heard[1])
    ends.break_off()
    ends.wait()
    for _ in range(2 + count // RETRANSMIT_BATCH):
        ends.carry(0)
        ends.carry(1)
    assert ends.heard[1] == ends.said[0]
    assert all(ends.sent[0][message] == 1 for message in ends.said[0][:arrived])
    assert max(ends.sent[0].values()) <= 2


def test_nothing_is_said_again_that_was_confirmed():
    """A sign of life confirms; without one a message goes out again, after `patience`, then after twice as long."""
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


def test_who_is_back_need_not_wait():
    """After a long silence the first sign of life is answered with what was not confirmed, however long the pauses were."""
    ends = Ends()
    ends.enqueue(0)
    ends.break_off()
    for _ in range(60):
        ends.wait()
        ends.break_off()
    ends.beat(1)
    ends.now += 1.0
    ends.carry(1)
    assert ends.heard == [[], []]
    ends.carry(0)
    assert ends.heard[1] == ends.said[0]


def test_what_is_not_numbered_confirms_and_is_not_confirmed():
    """A report or a heartbeat carries the confirmation; nothing answers it."""
    one, two = Delivery(PATIENCE, 1), Delivery(PATIENCE, 2)
    one.enqueue(b"hello")
    ((head, _),) = one.due(0.0)
    assert two.receive(head, 0.0)
    assert two.must_acknowledge
    report = two.head()
    assert not two.must_acknowledge
    assert not one.receive(report, 0.0)
    assert not one.must_acknowledge
    assert not one.pending


def test_another_of_the_same_name():
    """It hears nothing of what was said to the one before, and is heard from its first word on."""
    ends = Ends()
    ends.enqueue(0, 2)
    ends.enqueue(1, 2)
    ends.carry(0)
    ends.carry(1)
    ends.break_off()
    ends.enqueue(1, 1)  # to the one that is gone
    ends.ends[0], ends.said[0], ends.heard[0] = Delivery(PATIENCE, 3), [], []
    ends.break_off()
    ends.heard[1] = []
    ends.enqueue(0, 2)
    ends.settle()
    assert ends.heard[1] == ends.said[0]
    assert ends.heard[0] == []
    ends.enqueue(1)
    ends.settle()
    assert ends.heard[0] == ends.said[1][-1:]


def test_an_end_that_has_forgotten_the_other_goes_on():
    """What it had confirmed before is not said to it again, and what it says from then on is heard."""
    ends = Ends()
    ends.ends[1] = Delivery(PATIENCE, 7, number=100)
    ends.enqueue(0, 5)
    ends.enqueue(1, 5)
    ends.settle()
    ends.enqueue(0, 2)
    ends.ends[1] = Delivery(PATIENCE, 7, number=200)
    ends.enqueue(1, 2)
    ends.settle()
    assert ends.heard == [ends.said[1], ends.said[0]]


def test_who_does_not_confirm_costs_no_memory():
    """Of very many messages the oldest are given up, and counted; the others are heard, in order."""
    ends = Ends()
    for number in range(MAX_UNACKNOWLEDGED + 10):
        ends.said[0].append(b"%d" % number)
        ends.ends[0].enqueue(ends.said[0][-1])
    assert ends.ends[0].congested
    assert ends.ends[0].discarded == 10
    ends.settle()
    assert ends.heard[1] == ends.said[0][10:]
    assert not ends.ends[0].congested


def test_an_answer_tells_itself_from_old_news():
    """Who has not heard this end cannot have meant it."""
    one, two = Delivery(PATIENCE, 1), Delivery(PATIENCE, 2)
    two.enqueue(b"who is there?")
    ((early, _),) = two.due(0.0)
    one.enqueue(b"it is me")
    assert not one.is_addressed_here(early)
    ((head, _),) = one.due(0.0)
    assert two.receive(head, 0.0)
    two.enqueue(b"hello")
    ((late, _),) = two.due(0.0)
    assert one.is_addressed_here(late)


def test_the_first_message_after_a_pause_has_its_time():
    """The patience begins when the message is sent, not with the confirmation before it: it is not sent twice at once."""
    end = Delivery(PATIENCE, 1)
    end.enqueue(b"one")
    assert len(end.due(10.0)) == 1
    assert end.due(10.9) == []
    assert len(end.due(11.0)) == 1


def test_a_busy_link_sends_a_lost_message_again():
    """Messages that are said meanwhile do not put it off: the patience counts from the oldest that is not confirmed."""
    end = Delivery(PATIENCE, 1)
    for number in range(10):
        end.enqueue(b"message %d" % number)
        assert [message for _, message in end.due(10.0 + number / 10)] == [b"message %d" % number]
    assert end.due(11.0)[0][1] == b"message 0"


def test_an_end_goes_on_though_all_that_it_sent_again_was_given_up():
    """The other end was away for so long that the oldest messages went: the others arrive when it is back."""
    ends = Ends()
    ends.enqueue(0, 20)
    ends.ways[0].clear()  # lost
    ends.now = 2 * PATIENCE
    ends.send(0)  # the first ones again, which are lost as well
    ends.ways[0].clear()
    for number in range(MAX_UNACKNOWLEDGED):
        ends.said[0].append(b"later %d" % number)
        ends.ends[0].enqueue(ends.said[0][-1])
    assert ends.ends[0].discarded == 20
    ends.settle()
    assert ends.heard[1] == ends.said[0][20:]
