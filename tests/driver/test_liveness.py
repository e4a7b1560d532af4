"""Stalls: the time since a world's last commit, compared with its usual time between commits."""

from nbelastic.driver.liveness import StallDetector
from nbelastic.protocol.events import StallDetected, StallResolved


def test_a_world_that_commits_has_no_stall():
    """No stall is posted as long as the world commits."""
    detector = StallDetector()
    for second in range(100):
        detector.note_commits(1, second, float(second))
        assert detector.check(1, 5.0, second + 0.5) is None


def test_a_stall_is_posted_again_and_its_end_once():
    """A stall is posted each second with its length, and its end once."""
    detector = StallDetector()
    detector.note_commits(3, 10, 100.0)
    assert detector.check(3, 5.0, 104.9) is None
    assert detector.check(3, 5.0, 106.0) == StallDetected(3, 6.0)
    assert detector.check(3, 5.0, 106.5) is None
    assert detector.check(3, 5.0, 107.0) == StallDetected(3, 7.0)
    detector.note_commits(3, 11, 107.5)
    assert detector.check(3, 5.0, 108.0) == StallResolved(3)
    assert detector.check(3, 5.0, 108.5) is None


def test_a_world_that_never_commits_stalls_too():
    """The stall of a world without a commit is counted from the first check."""
    detector = StallDetector()
    assert detector.check(7, 5.0, 50.0) is None
    assert detector.check(7, 5.0, 56.0) == StallDetected(7, 6.0)


def test_a_new_generation_has_no_stall_yet():
    """The stall of the previous generation does not count."""
    detector = StallDetector()
    detector.note_commits(1, 5, 0.0)
    assert detector.check(1, 5.0, 10.0) == StallDetected(1, 10.0)
    assert detector.check(2, 5.0, 10.5) is None
    assert detector.check(2, 5.0, 14.0) is None


def test_rare_commits_are_not_a_stall():
    """With a commit every 30 s, a stall is posted only after five times that long."""
    detector = StallDetector()
    assert detector.check(1, 5.0, 0.0) is None
    for number in range(1, 5):
        detector.note_commits(1, number, 30.0 * number)
    assert detector.check(1, 5.0, 120.0 + 149.0) is None
    assert isinstance(detector.check(1, 5.0, 120.0 + 151.0), StallDetected)


def test_late_reports_change_nothing():
    """A late report of an earlier commit or generation does not end a stall."""
    detector = StallDetector()
    detector.note_commits(2, 9, 10.0)
    detector.note_commits(2, 9, 20.0)
    detector.note_commits(1, 99, 20.0)
    assert isinstance(detector.check(2, 5.0, 20.0), StallDetected)
