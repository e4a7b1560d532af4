"""Requests of clients to change the cluster: the outcome of each, and when it is reported."""

from __future__ import annotations

import pytest

from nbelastic.driver import change_requests
from nbelastic.errors import HostError, UsageError
from nbelastic.protocol import events as ev
from nbelastic.protocol.requests import DashboardAction
from tests.core.story import Story, wid


def parse_request(story, message, by="dashboard"):
    """Parse a request; return it, and a function that returns its outcome."""
    request = change_requests.parse(DashboardAction(by, message, 2), story.cluster, by)
    return request, lambda: request.outcome(story.cluster)


def test_a_host_is_added_when_it_is_up():
    """An added host is reported as up only once its agent has connected."""
    story = Story("a:1", min=1).run()
    request, done = parse_request(story, {"order": "add_host", "host": "carol@b:3"})
    assert request.text == "add b:3"
    story.send(request.event)
    assert done() is None
    story.quiet()
    assert done() == "up with 3 slots"


def test_adding_a_host_that_cannot_be_started_fails():
    """A request to add a host fails with the reason for which the host cannot be started."""
    story = Story("a:1", min=1).run()
    request, done = parse_request(story, {"order": "add_host", "host": "b"})
    story.send(request.event, ev.AgentLost("b", "ssh: connection refused"))
    with pytest.raises(HostError, match="ssh: connection refused; it is tried again"):
        done()


def test_a_host_is_removed_when_it_has_left():
    """The removal of a host is pending until its workers have left at a commit."""
    story = Story("a:1", "b:1", min=1).run()
    request, done = parse_request(story, {"order": "remove_host", "host": "b", "now": False})
    story.send(request.event)
    assert done() is None
    story.quiet(3.0)
    assert done() == "it has left"


def test_a_host_that_was_added_again_is_not_removed():
    """The removal of a host fails if a client adds the host again meanwhile."""
    story = Story("a:1", "b:1", min=1).run()
    request, done = parse_request(story, {"order": "remove_host", "host": "b"})
    story.send(request.event)
    story.add("b:1")
    with pytest.raises(HostError, match="added again"):
        done()


def test_a_restart_is_done_when_the_new_worker_is_ready():
    """A restart is done when the new worker in the slot is ready, not when the old one is lost."""
    story = Story("a:2", min=1).run()
    request, done = parse_request(story, {"order": "restart", "worker": "a/1#1"})
    story._forget(wid("a/1#1"))
    story.send(request.event)
    assert done() is None
    story.quiet(3.0)
    assert done() == "a/1#2 has replaced it"


def test_a_restart_of_the_only_holder_of_the_state_is_refused():
    """A restart of the only worker that holds the training state is refused before an event is posted."""
    story = Story("a:1", min=1).run()
    with pytest.raises(UsageError, match="alone holds the training state"):
        parse_request(story, {"order": "restart", "worker": "a/0#1"})


def test_an_empty_max_removes_the_limit():
    """`max=None`, which the dashboard sends for an empty field, removes the limit; a request without `max` keeps it."""
    story = Story("a:2", min=1, max=2).run()
    assert parse_request(story, {"order": "scale", "min": 2, "max": None})[0].event == ev.Scaled(2, None, "dashboard")
    assert parse_request(story, {"order": "scale", "min": 2})[0].event == ev.Scaled(2, 2, "dashboard")


def test_a_training_is_paused_when_all_ranks_stand_still():
    """A pause is refused without a training, and when the training is resumed before."""
    story = Story("a:2", min=2).run()
    request, done = parse_request(story, {"order": "pause"})
    story.send(request.event)
    assert done() is None
    story.answer()
    assert done() == "paused at commit 1 of generation 1"
    resume, resumed = parse_request(story, {"order": "resume"})
    story.send(resume.event)
    assert resumed() == ""
    with pytest.raises(UsageError, match="was resumed, before it came to the next commit"):
        done()
    story.stop_job().quiet(5.0)
    for order in ("pause", "resume"):
        with pytest.raises(UsageError, match="no job is running, so there is no commit to stop at"):
            parse_request(story, {"order": order})


def test_a_job_is_stopped_when_it_has_ended():
    """A stop request is done when the job has ended, and is refused without a job."""
    story = Story("a:1", min=1).run()
    request, done = parse_request(story, {"order": "stop_job"})
    assert done() is None
    story.send(request.event)
    assert done() == f"{story.job.name} has ended"
    with pytest.raises(UsageError, match="no job is running"):
        parse_request(story, {"order": "stop_job"})


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"order": "add_host", "host": "b:x"}, "'b:x': the number of slots must be a whole number"),
        ({"order": "add_host", "host": ""}, "'' is not a valid host"),
        ({"order": "add_host", "host": 3}, "unknown request"),
        ({"order": "remove_host", "host": "c"}, "there is no host 'c'; the hosts are a"),
        ({"order": "restart", "worker": "a/7#1"}, "there is no worker 'a/7#1'; the workers are a/0#1"),
        ({"order": "scale", "min": 3, "max": 2}, "min=3 is more than max=2"),
        ({"order": "scale", "min": 0, "max": 2}, "min=0: at least 1"),
        ({"order": "scale", "min": True, "max": 2}, "must be whole numbers"),
        ({"order": "dance"}, "unknown request"),
        ({}, "unknown request"),
    ],
)
def test_an_invalid_request_is_refused_in_one_line(message, error):
    """An invalid request is refused with one line that names the fault."""
    story = Story("a:1", min=1)
    story.quiet()
    with pytest.raises(UsageError) as refused:
        parse_request(story, message)
    assert error in str(refused.value)
    assert "\n" not in str(refused.value)
