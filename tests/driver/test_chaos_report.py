"""The report of injected faults, made of the event log's records."""

from __future__ import annotations

import pytest

from nbelastic.client.chaos import plan
from nbelastic.client.chaos_report import outcomes, report
from nbelastic.errors import UsageError
from nbelastic.protocol.status import EventRecord

NOON = 1_700_000_000.0


def fault(at, kind="kill", worker="a/0#1", generation=1):
    return EventRecord(NOON + at, f"fault-{kind}", "chaos", worker[0], worker if kind != "host" else "", generation)


def step(at, generation, took=0.0, lost=0, leave=0.0):
    times = {"all": took * 1000, **({"leave": leave * 1000} if leave else {})}
    return EventRecord(NOON + at, "training", "first step", generation=generation, took=times, lost=lost)


def ended(at, kind, text="job-1 failed: no"):
    return EventRecord(NOON + at, kind, text)


def report_on(*records, seconds=100.0, **more):
    given = {"cluster": "mine", "seed": 7, "withheld": 0, "withheld_because": "", "ended": "100 s are over"}
    given |= {"steps_known": True, **more}
    return report(records, begun=NOON, end=NOON + seconds, **given)


def test_a_fault_is_survived_when_a_later_generation_makes_a_step():
    """The recovery lasts from the fault to the next step; a step of the generation that the fault has hit is none."""
    (one,) = outcomes([fault(10), step(10.1, 1), step(10.5, 2, lost=3)])
    assert (one.survived, round(one.recovery, 3), one.steps_lost) == (True, 0.5, 3)
    assert str(one) == "kill a/0#1: next step after 0.50 s, 3 steps lost"


def test_two_faults_may_share_a_recovery():
    """A second fault before the first one's recovery: each has its time, and the lost steps count once."""
    found = report_on(fault(10), fault(11, "stop", "b/0#1"), step(12, 2, lost=4))
    assert [round(each.recovery) for each in found.faults] == [2, 1]
    assert [each.steps_lost for each in found.faults] == [4, 0]
    assert found.steps_lost == 4
    assert round(found.goodput, 6) == 0.98, "the times overlap"
    assert round(found.longest_without_step, 6) == 2.0


def test_unknown_lost_steps_are_not_zero():
    """A driver that was replaced meanwhile does not know what was lost."""
    found = report_on(fault(10), step(12, 2, lost=2), fault(20, "host"), step(21, 3, lost=None))
    assert found.steps_lost is None
    assert "lost steps are not known" in repr(found)
    assert [row.split()[-1] for row in repr(found).splitlines() if row.startswith(("kill", "host"))] == ["2", "–"]


def test_a_job_that_fails_has_not_survived():
    """The reason is that of the job's end."""
    found = report_on(fault(10), step(11, 2), fault(20, "host", generation=2), ended(30, "job-failed"), seconds=30.0)
    (failed,) = found.not_survived
    assert (failed.kind, failed.victim, failed.why) == ("host", "a", "job-1 failed: no")
    assert "1 of 2 faults survived" in repr(found)
    assert "host a: not survived: job-1 failed: no" in repr(found)
    assert round(found.goodput, 3) == round(1 - 11 / 30, 3)


@pytest.mark.parametrize(("kind", "survived"), [("job-succeeded", True), ("job-stopped", None)])
def test_a_job_that_ends_otherwise(kind, survived):
    """A job that succeeds has survived; of one that a user stops it is not known."""
    (one,) = outcomes([fault(10), ended(11, kind)])
    assert (one.survived, one.recovery) == (survived, None)


def test_planned_changes_count_as_times_without_step_without_their_leave_phase():
    """A replacement that joins costs a short time without a step; while members agree on a commit they train on."""
    found = report_on(step(50, 3, took=1.5, leave=0.5))
    assert round(found.goodput, 6) == 0.99
    assert found.faults == ()


def test_without_known_steps_the_report_says_so():
    """A program that makes no commits has no goodput, and its faults no outcome: the report does not guess."""
    found = report_on(fault(10), steps_known=False, unresolved=(None, "the job goes on"))
    assert (found.goodput, found.longest_without_step, found.steps_lost) == (None, None, None)
    assert "not known: the program makes no commits" in repr(found)
    assert "0 of 1 faults survived, 1 not known, in" in repr(found)
    assert "kill a/0#1: not known: the job goes on" in repr(found).splitlines()


def test_the_views_have_the_same_facts():
    """Text and HTML have a row per kind; HTML escapes what a reason says."""
    found = report_on(
        *(fault(1), step(2, 2), fault(3, generation=2), step(6, 3), fault(7, "stop", generation=3)),
        ended(8, "job-failed", "job-1 failed: <b>"),
        withheld=2,
        withheld_because="min is 2",
    )
    text, html = repr(found), found._repr_html_()
    assert "kill   2         2         2.0 s   3.0 s    0" in text.splitlines()
    assert "stop   1         0         –       –        –" in text.splitlines()
    assert "withheld 2 times: min is 2" in text
    assert "seed 7" in text
    assert "<td" in html
    assert "&lt;b&gt;" in html
    assert "<b>" not in html


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"every": 0}, "every=0: give a number of seconds"),
        ({"duration": -1.0}, "duration=-1: give a number of seconds"),
        ({"every": "x"}, "every must be a number of seconds"),
        ({"kinds": ["kill", "melt"]}, "kinds: melt given; choose among kill, stop, host"),
        ({"kinds": []}, "kinds: none given"),
        ({"seed": 1.5}, "seed must be a whole number"),
    ],
)
def test_wrong_arguments_give_one_line(given, why):
    """UsageError with the argument and what is allowed."""
    arguments = {"every": 1.0, "kinds": "kill", "duration": None, "seed": None, "below_min": False, "by": "you"}
    with pytest.raises(UsageError, match=why):
        plan(**arguments | given)


def test_kinds_are_put_in_order():
    """One kind may be given as text; the order of several does not matter, so that a seed means the same."""
    given = {"every": 1.0, "duration": None, "seed": 1, "below_min": False, "by": "you"}
    assert plan(kinds="stop", **given).kinds == ("stop",)
    assert plan(kinds=["host", "kill"], **given) == plan(kinds=["kill", "host"], **given)
