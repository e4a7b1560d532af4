"""What interrupts the main thread leaves the program's own alarm alone."""

import signal
import time

import pytest

from nbelastic.worker import alarms


class OverdueError(Exception):
    pass


@pytest.fixture
def alarm():
    """The handler and the timer of a program that limits its own time."""

    def raise_error(*_):
        raise OverdueError

    before = signal.signal(signal.SIGALRM, raise_error)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("seconds", [0.05, 0.3])
def test_an_alarm_of_the_program_outlives_a_cell(alarm, seconds):
    """The program has set an alarm, and a cell runs at a commit: the alarm comes after the cell, and interrupts only the program."""
    interrupted = []
    alarm(seconds)
    with alarms.handling(interrupted.append):
        alarms.interrupt_after(0.02)
        time.sleep(0.1)
    assert len(interrupted) == 1
    with pytest.raises(OverdueError):
        time.sleep(60)


def test_without_an_alarm_none_comes(alarm):
    """A cell at a commit leaves no alarm behind."""
    alarm(0)
    with alarms.handling(lambda _: None):
        alarms.interrupt_after(60)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
