"""What losses have cost a job: the number of failures, lost steps, and the share of its time in which it trained."""

from __future__ import annotations

from nbelastic.client.job_summary import job_summary
from nbelastic.protocol.status import EventRecord


def event(time, kind, lost=None, **seconds):
    return EventRecord(time, kind, "", took={phase: s * 1000 for phase, s in seconds.items()}, lost=lost)


def broken(time, back, lost=0):
    """A loss, and the first step after it."""
    return [event(time, "world-broken"), event(back, "training", lost, abort=0.1, all=back - time)]


BEGIN = [event(100, "job-started"), event(110, "training", form=1.0)]


def test_a_job_without_failures_has_trained_since_its_first_step():
    """The time until the first step is not training."""
    summary = job_summary(BEGIN)
    assert (summary.failures, summary.lost) == (0, 0)
    assert summary.trained_share(200.0) == 0.9


def test_failures_and_lost_steps_are_added_up():
    """The time from each loss to the next step is not training."""
    summary = job_summary([*BEGIN, *broken(120, 125), *broken(150, 155, lost=2)])
    assert (summary.failures, summary.lost) == (2, 2)
    assert summary.trained_share(200.0) == 0.8


def test_a_loss_is_no_failure_of_the_past_before_the_world_trains_again():
    """Its lost steps are not known yet; the time since it is not training. Two breaks in a row are one such time."""
    summary = job_summary([*BEGIN, *broken(120, 125), event(150, "world-broken"), event(160, "world-broken")])
    assert (summary.failures, summary.lost) == (1, 0)
    assert summary.trained_share(200.0) == 1 - (10 + 5 + 50) / 100
    assert job_summary([*BEGIN, event(150, "world-broken"), *broken(155, 160, lost=1)]).failures == 2


def test_the_silence_before_a_loss_is_no_training():
    """The event comes when the loss is detected. The whole change began before."""
    records = [event(150, "world-broken"), event(152, "training", 0, detect=8.0, abort=1.0, all=10.0)]
    assert job_summary([*BEGIN, *records]).trained_share(200.0) == 0.8


def test_planned_changes_stop_the_training_for_a_moment():
    """They do not count as failures."""
    summary = job_summary([*BEGIN, event(150, "training", leave=1.0, all=2.0)])
    assert (summary.failures, summary.lost, summary.trained_share(200.0)) == (0, 0, 0.88)


def test_pauses_are_left_out():
    """They are the user's wish: neither training nor idle."""
    paused = [*BEGIN, event(120, "paused"), event(140, "resumed")]
    assert job_summary(paused).trained_share(160.0) == 1 - 10 / 40
    assert job_summary(paused[:3]).trained_share(1000.0) == 0.5


def test_the_numbers_stay_after_the_end():
    """A new job begins anew."""
    over = [*BEGIN, *broken(120, 125, lost=1), event(200, "job-succeeded")]
    assert job_summary(over).trained_share(9999.0) == 0.85
    summary = job_summary([*over, event(300, "job-started")])
    assert (summary.failures, summary.lost, summary.trained_share(310.0)) == (0, 0, None)


def test_what_is_not_known_is_not_said():
    """No number of lost steps if it is missing for one failure; no summary if the job's beginning is forgotten."""
    assert job_summary([*BEGIN, *broken(120, 125, lost=None), *broken(130, 135)]).lost is None
    assert job_summary(BEGIN[1:]) is None
    assert job_summary([]) is None


def test_a_loss_during_a_pause_costs_no_time_before_the_training_goes_on():
    """A paused training loses no time. A loss before the pause, or one that outlasts it, counts for the rest of its time."""
    within = [event(120, "paused"), *broken(130, 930), event(940, "resumed")]
    assert job_summary([*BEGIN, *within]).trained_share(1040.0) == 1 - 10 / 120
    longer = [event(120, "paused"), event(130, "world-broken"), event(900, "resumed")]
    again = event(930, "training", 0, abort=0.1, all=800.0)
    assert job_summary([*BEGIN, *longer]).trained_share(930.0) == 1 - (10 + 30) / 50
    assert job_summary([*BEGIN, *longer, again]).trained_share(980.0) == 1 - (10 + 30) / 100
    earlier = [event(120, "world-broken"), event(130, "paused")]
    assert job_summary([*BEGIN, *earlier]).trained_share(999.0) == 1 - (10 + 10) / 30
    assert job_summary([*BEGIN, *earlier, event(930, "resumed")]).trained_share(930.0) == 1 - (10 + 10) / 30
