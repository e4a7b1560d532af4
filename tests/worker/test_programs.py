"""Which program runs in a worker, and when the driver's decision ends it."""

from __future__ import annotations

import signal

import pytest

from nbelastic.protocol import worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.worker.inbox import Inbox
from nbelastic.worker.interrupts import ProgramRejected, ProgramReplaced
from nbelastic.worker.programs import Programs
from nbelastic.worker.protocol import Protocol


def order(number: int) -> worker_messages.NewProgram:
    return worker_messages.NewProgram(worker_messages.Program("job-1", "", None, "", None, number=number), 1, True)


@pytest.fixture
def programs():
    return Programs(Protocol(WorkerId("a", 0, 1), 60.0), Inbox(), lambda message: None)


@pytest.mark.parametrize("decision", [worker_messages.KeepProgram(0), order(2)])
def test_a_program_that_is_rejected_before_it_begins_does_not_run(programs, decision):
    """The driver may decide while this worker still copies the state. A later program says the same."""
    programs.note(order(1))
    programs.note(decision)
    with pytest.raises(ProgramRejected), programs.interruptible(1, on_trial=True, old_goes_on=bool):
        raise AssertionError("it runs")


def test_an_earlier_decision_does_not_reject_a_new_program(programs):
    """It was about the program before."""
    programs.note(worker_messages.KeepProgram(0))
    programs.note(order(1))
    with programs.interruptible(1, on_trial=True, old_goes_on=bool):
        programs.raise_if_rejected()


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_alarm_of_the_old_program(programs, goes_on):
    """It comes after a new program that was rejected. One that has replaced the old program ends the job: no alarm may come then."""
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.alarm(1000)
    try:
        with programs.interruptible(1, on_trial=True, old_goes_on=lambda: goes_on):
            assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
        assert bool(signal.getitimer(signal.ITIMER_REAL)[0]) == goes_on
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_the_end_of_the_last_program_is_kept(programs):
    """An earlier one may catch the exception, with `except:`, and end with a value of its own."""
    for value in ("last", "earlier"):
        with pytest.raises(ProgramReplaced):
            programs.replace(value)
    assert programs.end.value == "last"
