"""How many steps a loss undoes: commits that were reported, and that the next world makes again."""

from __future__ import annotations

import pytest

from nbelastic.driver.lost_steps import LostSteps


@pytest.fixture
def steps():
    steps = LostSteps()
    steps.begin_job()
    steps.note_formation(0)
    assert steps.take() is None
    return steps


def test_no_step_is_lost_if_a_survivor_holds_the_newest_commit(steps):
    """Also if it has made a commit that was not reported before the loss."""
    for newest, root in [(100, 100), (140, 141)]:
        steps.note_commit(newest)
        steps.note_break()
        steps.note_formation(root)
        assert steps.take() == 0


def test_commits_that_no_survivor_holds_are_lost(steps):
    """The commits of the generation before do not count again at the next loss."""
    steps.note_commit(100)
    steps.note_break()
    steps.note_formation(97)
    assert steps.take() == 3
    steps.note_commit(98)
    steps.note_break()
    steps.note_formation(98)
    assert steps.take() == 0


def test_a_second_loss_before_the_first_step_adds_to_the_first(steps):
    """Both worlds are broken before a commit is made."""
    steps.note_commit(100)
    steps.note_break()
    steps.note_formation(99)
    steps.note_break()
    steps.note_formation(98)
    assert steps.take() == 2
    assert steps.take() is None


def test_a_planned_change_loses_nothing(steps):
    """Its first commit has no number of lost steps. The newest commit counts for a later loss."""
    steps.note_commit(100)
    steps.note_formation(100)
    assert steps.take() is None
    steps.note_break()
    steps.note_formation(99)
    assert steps.take() == 1


def test_a_sharded_model_may_return_to_an_older_commit(steps):
    """The ranks report that commit with their first one."""
    steps.note_commit(100)
    steps.note_break()
    steps.note_formation(100)
    steps.note_commit(97)
    assert steps.take(96) == 4


def test_the_next_driver_knows_a_number_only_after_a_report():
    """A loss before that, while there was no driver, is not counted as free of cost."""
    steps = LostSteps()
    steps.note_break()
    steps.note_commit(40)  # of a survivor
    steps.note_formation(40)
    assert steps.take() is None
    steps.note_commit(50)
    steps.note_break()
    steps.note_formation(50)
    assert steps.take() == 0


def test_a_new_job_begins_at_its_own_first_commit(steps):
    """The commits of the job before do not count."""
    steps.note_commit(5000)
    steps.begin_job()
    steps.note_formation(0)
    steps.note_break()
    steps.note_formation(0)
    assert steps.take() == 0
