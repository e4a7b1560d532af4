"""`stop_timeout` and `timeouts`: valid values, and the errors for invalid ones."""

from __future__ import annotations

import pytest

import nbelastic as nbe
from nbelastic.protocol.settings import timeouts_of
from nbelastic.protocol.timeouts import Timeouts


def test_timeouts_that_are_not_chosen_have_their_defaults():
    """A chosen timeout, also as text from a magic's line, changes no other one."""
    assert timeouts_of(None, 60.0, "ssh") == Timeouts()
    assert timeouts_of({"recover": "5"}, 30.0, "ssh") == Timeouts(recover=5.0, stop=30.0)


def test_a_batch_job_may_wait_in_its_queue():
    """The default timeout for a Slurm agent is days, because its batch job may wait in a queue."""
    assert timeouts_of(None, 60.0, "slurm").agent > 24 * 3600
    assert timeouts_of({"agent": 10.0}, 60.0, "slurm").agent == 10.0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"timeouts": {"recovr": 5}}, "timeouts: 'recovr' is not one of agent, environment, worker, probe, store"),
        ({"timeouts": {"form": 0}}, "timeouts: form=0: more than 0 seconds"),
        ({"timeouts": {"form": float("inf")}}, "timeouts: form=inf: .* not endless"),
        ({"timeouts": {"form": "soon"}}, "timeouts: form='soon' is not a number of seconds"),
        ({"stop_timeout": -1.0}, "stop_timeout=-1: at least 0 seconds"),
    ],
)
def test_an_invalid_timeout_is_refused_in_one_line(options, problem):
    """An unknown name or an invalid time raises UsageError before anything is started."""
    with pytest.raises(nbe.UsageError, match=problem):
        nbe.Cluster("localhost:1", **options)
