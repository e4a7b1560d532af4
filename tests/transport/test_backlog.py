"""What a reader knows of its peers while more messages wait than it reads."""

from __future__ import annotations

from nbelastic.transport.backlog import TURNS, Backlog, Unread


def test_without_waiting_messages_all_is_read():
    """Silence counts up to now."""
    unread = Unread(3)
    assert unread.read_up_to(7.0) == 7.0
    unread.begin()
    unread.end(8.0)
    assert unread.read_up_to(9.0) == 9.0


def test_what_waits_may_have_come_since_the_last_was_read():
    """Reading some of it changes nothing: any peer's message may be among the rest."""
    unread = Unread(3)
    unread.end(10.0)
    unread.begin()
    unread.note_read(b"a", 11.0)
    unread.note_read(b"b", 11.0)
    unread.begin()
    assert unread.read_up_to(20.0) == 10.0


def test_one_that_sends_without_end_hides_no_silence():
    """When a whole queue of it is read, so is all that waited before: connections are read in turn."""
    unread = Unread(3)
    unread.end(10.0)
    unread.begin()
    for now in (11.0, 12.0, 13.0):
        unread.note_read(b"a", now)
    assert unread.read_up_to(13.0) == 10.0
    for now in (14.0, 15.0):
        unread.note_read(b"a", now)
        unread.note_read(b"b", now)
    assert unread.read_up_to(15.0) == 10.0
    unread.note_read(b"a", 16.0)
    assert unread.read_up_to(16.0) == 13.0


def test_each_backlog_counts_anew():
    """Messages that were read before all was read do not count for the next ones that wait."""
    unread = Unread(3)
    unread.begin()
    unread.note_read(b"a", 1.0)
    unread.note_read(b"a", 2.0)
    unread.end(3.0)
    unread.begin()
    unread.note_read(b"a", 4.0)
    unread.note_read(b"a", 5.0)
    assert unread.read_up_to(6.0) == 3.0


def test_it_never_goes_back():
    """Up to now all was read; then messages wait that came since the last was read. A worker would seem to respond."""
    unread = Unread(3)
    unread.end(10.0)
    assert unread.read_up_to(11.0) == 11.0
    unread.begin()
    assert unread.read_up_to(12.0) == 11.0


def test_a_connection_that_sends_nothing_is_known_before_all_is_read():
    """Two connections send more than is read. The third one has sent nothing since before the round."""
    backlog = Backlog(10_000)
    backlog.end(10.0)
    backlog.begin()
    for now in range(11, 11 + 2 * TURNS):
        backlog.note_read(b"a", float(now))
        backlog.note_read(b"b", float(now))
    assert backlog.connections.read_up_to(99.0) > 10.0
    assert backlog.messages.read_up_to(99.0) == 10.0
    backlog.end(20.0)
    assert backlog.connections.read_up_to(99.0) == backlog.messages.read_up_to(99.0) == 99.0
