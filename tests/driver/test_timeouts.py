"""`stop_timeout` and `timeouts`: which can be chosen, and what is said of those that cannot."""

from __future__ import annotations

import pytest

import nbelastic as nbe
from nbelastic.protocol.settings import timeouts_of
from nbelastic.protocol.timeouts import Timeouts


def test_what_is_not_chosen_is_as_usual():
    """One of them is changed, as text too, as it comes from a magic's line; the others stay."""
    assert timeouts_of(None, 60.0, "ssh") == Timeouts()
    assert timeouts_of({"recover": "5"}, 30.0, "ssh") == Timeouts(recover=5.0, stop=30.0)


def test_a_batch_job_may_wait_in_its_queue():
    """Its agent speaks when the job begins: days later, unless somebody says otherwise."""
    assert timeouts_of(None, 60.0, "slurm").agent > 24 * 3600
    assert timeouts_of({"agent": 10.0}, 60.0, "slurm").agent == 10.0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"timeouts": {"recovr": 5}}, "timeouts: 'recovr' is not one of agent, worker, settle"),
        ({"timeouts": {"form": 0}}, "timeouts: form=0: more than 0 seconds"),
        ({"timeouts": {"form": float("inf")}}, "timeouts: form=inf: .* not endless"),
        ({"timeouts": {"form": "soon"}}, "timeouts: form='soon' is not a number of seconds"),
        ({"stop_timeout": -1.0}, "stop_timeout=-1: at least 0 seconds"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options, problem):
    """A name that is none, or a time without end, is a UsageError before anything is started."""
    with pytest.raises(nbe.UsageError, match=problem):
        nbe.Cluster("localhost:1", **options)
