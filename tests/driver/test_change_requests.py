"""Orders of people: what becomes of each, and when it is said to be done."""

from __future__ import annotations

import pytest

from nbelastic.driver import change_requests
from nbelastic.errors import HostError, UsageError
from nbelastic.protocol import events as ev
from tests.core.story import Story, wid


def ask(story, message, by="dashboard"):
    """The order, and a way to ask what has become of it."""
    request = change_requests.parse(message, story.cluster, 2, by)
    return request, lambda: request.outcome(story.cluster)


def test_a_host_is_added_when_it_is_up():
    """Not when the order was taken: until its agent has spoken it is under way."""
    story = Story("a:1", min=1).run()
    request, done = ask(story, {"order": "add_host", "host": "carol@b:3"})
    assert request.text == "add b:3"
    story.send(request.event)
    assert done() is None
    story.quiet()
    assert done() == "up with 3 slots"


def test_a_host_that_cannot_be_started_is_a_refusal():
    """With the reason."""
    story = Story("a:1", min=1).run()
    request, done = ask(story, {"order": "add_host", "host": "b"})
    story.send(request.event, ev.AgentLost("b", "ssh: connection refused"))
    with pytest.raises(HostError, match="ssh: connection refused; it is tried again"):
        done()


def test_a_host_is_removed_when_it_has_left():
    """While its workers go on to the next commit it is under way."""
    story = Story("a:1", "b:1", min=1).run()
    request, done = ask(story, {"order": "remove_host", "host": "b", "now": False})
    story.send(request.event)
    assert done() is None
    story.quiet(3.0)
    assert done() == "it has left"


def test_a_host_that_was_added_again_is_not_removed():
    """Somebody else has changed their mind."""
    story = Story("a:1", "b:1", min=1).run()
    request, done = ask(story, {"order": "remove_host", "host": "b"})
    story.send(request.event)
    story.add("b:1")
    with pytest.raises(HostError, match="added again"):
        done()


def test_a_restart_is_done_when_another_is_ready():
    """The old one is gone at once; the order is under way until its slot has a worker that can take code."""
    story = Story("a:2", min=1).run()
    request, done = ask(story, {"order": "restart", "worker": "a/1#1"})
    story._forget(wid("a/1#1"))
    story.send(request.event)
    assert done() is None
    story.quiet(3.0)
    assert done() == "a/1#2 has replaced it"


def test_who_alone_has_the_state_is_refused_at_once():
    """Before anything is posted."""
    story = Story("a:1", min=1).run()
    with pytest.raises(UsageError, match="alone holds the training state"):
        ask(story, {"order": "restart", "worker": "a/0#1"})


def test_an_empty_max_takes_the_limit_away():
    """The dashboard sends null for an empty field; who does not speak of max keeps it."""
    story = Story("a:2", min=1, max=2).run()
    assert ask(story, {"order": "scale", "min": 2, "max": None})[0].event == ev.Scaled(2, None, "dashboard")
    assert ask(story, {"order": "scale", "min": 2})[0].event == ev.Scaled(2, 2, "dashboard")


def test_a_job_is_stopped_when_it_has_ended():
    """And without a job there is nothing to stop."""
    story = Story("a:1", min=1).run()
    request, done = ask(story, {"order": "stop_job"})
    assert done() is None
    story.send(request.event)
    assert done() == f"{story.job.name} has ended"
    with pytest.raises(UsageError, match="no job is running"):
        ask(story, {"order": "stop_job"})


@pytest.mark.parametrize(
    ("message", "said"),
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
def test_what_cannot_be_is_refused_in_one_line(message, said):
    """It says what is wrong."""
    story = Story("a:1", min=1)
    story.quiet()
    with pytest.raises(UsageError) as refused:
        ask(story, message)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
