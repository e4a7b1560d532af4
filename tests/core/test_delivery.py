"""What is said over connections that break: each message is heard once, and in order."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from nbelastic.core.delivery import KEPT, Delivery

PATIENCE = 1.0


class Ends:
    """Two ends, what is on its way between them, and what each has said and heard."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ends = [Delivery(PATIENCE, 1), Delivery(PATIENCE, 2)]
        self.ways: list[deque[tuple[bytes, bytes]]] = [deque(), deque()]  # from this end
        self.said: list[list[bytes]] = [[], []]
        self.heard: list[list[bytes]] = [[], []]

    def say(self, end: int, count: int = 1) -> None:
        for _ in range(count):
            message = f"{end}: {len(self.said[end])}".encode()
            self.said[end].append(message)
            self.ways[end].append((self.ends[end].say(message, self.now), message))

    def carry(self, end: int, count: int | None = None) -> None:
        """What this end has said arrives, so many of it."""
        for _ in range(len(self.ways[end]) if count is None else min(count, len(self.ways[end]))):
            head, message = self.ways[end].popleft()
            if self.ends[1 - end].hear(head, self.now):
                self.heard[1 - end].append(message)

    def break_off(self) -> None:
        for way in self.ways:
            way.clear()

    def wait(self, seconds: float = PATIENCE) -> None:
        """Both ends do what they do now and then."""
        self.now += seconds
        for end, way in zip(self.ends, self.ways, strict=True):
            way.extend(end.again(self.now))
            way.append((end.head(), b""))

    def settle(self) -> None:
        for _ in range(4):
            self.wait()
            self.carry(0)
            self.carry(1)


END = st.integers(0, 1)
HAPPENINGS = st.one_of(
    st.tuples(st.just("say"), END, st.integers(1, 5)),
    st.tuples(st.just("carry"), END, st.integers(1, 9)),
    st.tuples(st.just("break_off")),
    st.tuples(st.just("wait"), st.sampled_from([0.4, 1.0])),
)


@given(st.lists(HAPPENINGS, max_size=60))
def test_each_is_heard_once_and_in_order(story):
    """Whatever breaks at whatever moment; and at the end nothing is kept."""
    ends = Ends()
    for name, *values in story:
        getattr(ends, name)(*values)
        for end in (0, 1):
            heard = ends.heard[1 - end]
            assert heard == ends.said[end][: len(heard)]
    ends.settle()
    assert ends.heard == [ends.said[1], ends.said[0]]
    assert [end.again(ends.now + 100) for end in ends.ends] == [[], []]


def test_nothing_is_said_again_that_was_confirmed():
    """A sign of life confirms; without one a message goes out again, once each `patience`."""
    ends = Ends()
    ends.say(0, 3)
    ends.carry(0, 2)
    ends.wait(0.5)
    ends.carry(1)
    assert ends.ends[0].again(ends.now + 0.9) == []
    assert [message for _, message in ends.ends[0].again(ends.now + 1.0)] == [b"0: 2"]
    assert ends.ends[0].again(ends.now + 1.5) == []


def test_another_of_the_same_name():
    """It hears nothing of what was said to the one before, and is heard from its first word on."""
    ends = Ends()
    ends.say(0, 2)
    ends.say(1, 2)
    ends.carry(0)
    ends.carry(1)
    ends.break_off()
    ends.say(1, 1)  # to the one that is gone
    ends.ends[0], ends.said[0], ends.heard[0] = Delivery(PATIENCE, 3), [], []
    ends.break_off()
    ends.heard[1] = []
    ends.say(0, 2)
    ends.settle()
    assert ends.heard[1] == ends.said[0]
    assert ends.heard[0] == []
    ends.say(1)
    ends.settle()
    assert ends.heard[0] == ends.said[1][-1:]


def test_an_end_that_has_forgotten_the_other_goes_on():
    """What it had confirmed before is not said to it again, and what it says from then on is heard."""
    ends = Ends()
    ends.ends[1] = Delivery(PATIENCE, 7, number=100)
    ends.say(0, 5)
    ends.say(1, 5)
    ends.settle()
    ends.say(0, 2)
    ends.ends[1] = Delivery(PATIENCE, 7, number=200)
    ends.say(1, 2)
    ends.settle()
    assert ends.heard == [ends.said[1], ends.said[0]]


def test_who_does_not_confirm_costs_no_memory():
    """Of very many messages the oldest are given up; the others are heard, in order."""
    ends = Ends()
    ends.say(0, KEPT + 10)
    ends.break_off()
    ends.settle()
    assert ends.heard[1] == ends.said[0][10:]


def test_an_answer_tells_itself_from_old_news():
    """Who has not heard this end cannot have meant it."""
    one, two = Delivery(PATIENCE, 1), Delivery(PATIENCE, 2)
    early = two.say(b"who is there?", 0.0)
    assert not one.answers(early)
    assert two.hear(one.say(b"it is me", 0.0), 0.0)
    assert one.answers(two.say(b"hello", 0.0))
