"""What a reader knows of its peers while more messages wait than it reads."""

from __future__ import annotations

from nbelastic.transport.backlog import Backlog


def test_without_waiting_messages_all_is_read():
    """Silence counts up to now."""
    backlog = Backlog(3)
    assert backlog.read_up_to(7.0) == 7.0
    backlog.begin()
    backlog.end(8.0)
    assert backlog.read_up_to(9.0) == 9.0


def test_what_waits_may_have_come_since_the_last_was_read():
    """Reading some of it changes nothing: any peer's message may be among the rest."""
    backlog = Backlog(3)
    backlog.end(10.0)
    backlog.begin()
    backlog.note_read(b"a", 11.0)
    backlog.note_read(b"b", 11.0)
    backlog.begin()
    assert backlog.read_up_to(20.0) == 10.0


def test_one_that_sends_without_end_hides_no_silence():
    """When a whole queue of it is read, so is all that waited before: connections are read in turn."""
    backlog = Backlog(3)
    backlog.end(10.0)
    backlog.begin()
    for now in (11.0, 12.0, 13.0):
        backlog.note_read(b"a", now)
    assert backlog.read_up_to(13.0) == 10.0
    for now in (14.0, 15.0):
        backlog.note_read(b"a", now)
        backlog.note_read(b"b", now)
    assert backlog.read_up_to(15.0) == 10.0
    backlog.note_read(b"a", 16.0)
    assert backlog.read_up_to(16.0) == 13.0


def test_each_backlog_counts_anew():
    """Messages that were read before all was read do not count for the next ones that wait."""
    backlog = Backlog(3)
    backlog.begin()
    backlog.note_read(b"a", 1.0)
    backlog.note_read(b"a", 2.0)
    backlog.end(3.0)
    backlog.begin()
    backlog.note_read(b"a", 4.0)
    backlog.note_read(b"a", 5.0)
    assert backlog.read_up_to(6.0) == 3.0
