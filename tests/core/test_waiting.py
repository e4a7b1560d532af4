"""A job waits: for which workers and hosts, until when, and why."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.arrivals import missing
from nbelastic.core.state import ClusterState, Stage
from nbelastic.core.step import deadline, step
from nbelastic.protocol import events as ev
from nbelastic.protocol.cluster_limits import Limits
from nbelastic.protocol.exit_codes import GPU_LOST
from tests.core.story import Story, wid


def test_it_forms_once_there_are_enough_and_grows_then():
    """With min 8 and 0, 4, 12, 16 slots over time, worlds of 12 and 16 form."""
    story = Story(min=8).submit().quiet(2.0)
    assert "0 of min 8 workers ready" in story.reason
    story.add("a:4").quiet(2.0)
    assert "4 of min 8 workers ready" in story.reason
    assert story.commands(cmd.FormWorld) == []
    story.add("b:8").quiet(2.0)
    assert [len(order.members) for order in story.commands(cmd.FormWorld)] == [12]
    story.add("c:4").quiet(2.0)
    assert [len(order.members) for order in story.commands(cmd.FormWorld)] == [12, 16]
    assert story.cluster.stage is Stage.RUNNING


def test_a_dip_below_min_while_waiting_is_nothing():
    """A worker is lost while others start: it is replaced, and the world forms when all are ready."""
    story = Story("a:2", min=3).submit().answer()
    story.kill("a/0#1")
    assert "1 of min 3 workers ready" in story.reason
    assert story.cluster.resets == 0
    story.add("b:1").quiet(2.0)
    assert story.names == ["a/0#2", "a/1#1", "b/0#1"]


def test_the_wait_names_what_it_waits_for():
    """The reason counts ready workers and names starting ones with their waits."""
    story = Story("a:2", "slow:1", min=3)
    story.hear(ev.AgentReady)
    story.answer(lambda e: getattr(e, "worker", wid("slow/0#1")).host == "a")
    story.submit().now += 3
    story.answer(lambda e: getattr(e, "worker", wid("slow/0#1")).host == "a")
    assert story.reason == "2 of min 3 workers ready; waiting for slow/0#1 (3 s)"


def test_a_host_that_cannot_be_reached_is_named_with_its_error():
    """The reason names a host that does not start, its error, and when it is tried again."""
    story = Story("gpu2:1", min=1).submit()
    story.lose_host("gpu2", "ssh: no route")
    assert "waiting for gpu2 (lost: ssh: no route; tried again in 5 s)" in story.reason


def test_of_many_missing_things_three_are_kept():
    """A reason with 1,000 slots would be long, and each change of one would be news."""
    story = Story("gpu1:9", min=9).answer()
    story.send(*(ev.WorkerExited(w, GPU_LOST) for w in sorted(story.cluster.workers)))
    assert len(missing(story.cluster, story.now)) == 3


def test_no_host_says_what_to_do():
    """With nothing starting, the reason says what a user can do."""
    story = Story(min=2).submit()
    assert story.reason == "0 of min 2 workers ready; add a host or lower min"


def test_elastic_timeout_names_what_it_waited_for():
    """Below min for elastic_timeout the job fails, and the error says how many were ready and what was missing."""
    story = Story("a:1", "dark:1", min=2, elastic_timeout=60.0)
    story.hear(ev.AgentReady)
    story.submit().answer(lambda e: getattr(e, "worker", wid("dark/0#1")).host == "a")
    story.wait(59.9)
    assert story.cluster.active
    story.wait(0.2)
    end = story.last(cmd.EndJob)
    assert end.outcome == "failed"
    assert end.reason.startswith("1 of min 2 workers ready for 60 s (elastic_timeout); waiting for dark/0#1")


def before_its_function(story: Story, *workers: str) -> Story:
    """Programs run and have not reached the elastic function."""
    for w in workers:
        story._unsay(wid(w), ev.WorkerReady)
    return story


def test_a_program_without_an_elastic_function_may_take_its_time():
    """`elastic_timeout` does not bound a program that all workers run."""
    story = Story("a:2", min=2, elastic_timeout=60.0)
    story.answer()
    before_its_function(story.submit(), "a/0#1", "a/1#1").wait(10_000.0)
    assert story.cluster.active, story.job.reason
    story.ended("a/0#1", "a/1#1")
    assert story.job.outcome == "succeeded"


def test_elastic_timeout_does_not_count_the_lines_before_the_elastic_function():
    """`elastic_timeout` does not count the half hour in which a replacement loads its data."""
    story = Story("a:1", "b:1", min=2, elastic_timeout=60.0).run()
    story.kill("b/0#1").answer(lambda e: not isinstance(e, ev.WorkerReady) or e.worker != wid("b/0#2"))
    late = [e for e in story.answers if isinstance(e, ev.WorkerReady)]
    before_its_function(story, "b/0#2").wait(1800.0)
    assert story.reason.startswith("1 of min 2 workers ready; waiting for b/0#2")
    story.send(*late)
    story.quiet(2.0)
    assert (story.cluster.stage, story.names) == (Stage.RUNNING, ["a/0#1", "b/0#2"])


def test_elastic_timeout_sums_up_the_time_without_enough_workers():
    """A program fails in its first lines again and again: the pauses of its slot add up to 60 s."""
    story = Story("a:1", "b:1", min=2, elastic_timeout=60.0, cooldown=(25.0, 25.0)).run()
    story.kill("b/0#1").hear(ev.WorkerReady)
    deaths = 0
    while story.cluster.active:
        story.answer(lambda e: not isinstance(e, ev.WorkerReady)).wait(40.0)
        story.kill(*story.alive("b")).wait(25.0)
        deaths += 1
    assert deaths == 3
    assert story.job.reason.startswith(
        "1 of min 2 workers ready for 60 s (elastic_timeout); waiting for b/0 (in back-off"
    )


def test_a_program_that_others_wait_for_has_to_come_to_its_elastic_function():
    """A program hangs before its elastic function while another waits: after an hour the job fails and names it."""
    story = Story("a:2", min=2, elastic_timeout=60.0)
    story.answer()
    before_its_function(story.submit(), "a/1#1").answer().wait(3599.0)
    assert story.cluster.active
    story.wait(2.0)
    text = "1 of min 2 workers ready, and others have not come to the elastic function within 3600 s; waiting for a/1#1"
    assert story.job.reason.startswith(text)


def test_elastic_timeout_begins_anew_after_each_world():
    """Each world restarts the count of `elastic_timeout`."""
    story = Story("a:1", "b:1", min=2, elastic_timeout=60.0, cooldown=(50.0, 50.0)).run()
    for _ in range(4):
        story.kill(story.alive("b")[0]).quiet(55.0)
    assert story.cluster.stage is Stage.RUNNING


def test_the_first_world_waits_the_settle_time_for_those_that_start():
    """Enough workers are ready: the world waits at most a second for starting ones, and says so."""
    story = Story("a:2", "slow:1", min=2)
    story.hear(ev.AgentReady)
    story.submit().answer(lambda e: getattr(e, "worker", wid("slow/0#1")).host == "a")
    assert story.commands(cmd.FormWorld) == []
    assert story.reason.startswith("2 workers ready; waiting for slow/0#1")
    story.wait(1.0)
    assert story.names == ["a/0#1", "a/1#1"]


def test_a_full_world_forms_at_once():
    """With max ready the world forms at once."""
    story = Story("a:1", "slow:1", min=1, max=1, spares=1)
    story.hear(ev.AgentReady)
    story.submit().answer(lambda e: getattr(e, "worker", wid("slow/0#1")).host == "a")
    assert story.names == ["a/0#1"]


def test_survivors_that_are_enough_do_not_wait():
    """After a break, survivors that reach min form at once; the replacement joins later."""
    story = Story("a:3", min=2).run()
    mark = story.mark()
    story.kill("a/0#1").hear(ev.WorkerReady)
    assert [len(order.members) for order in story.commands(cmd.FormWorld, mark)] == [2]


@pytest.mark.parametrize("start", [0.1, 0.3, 1234.567, 1e9 + 0.1])
def test_a_tick_at_the_deadline_ends_the_wait(start):
    """A tick at exactly the time of `deadline` ends the wait, whatever the rounding of floats."""
    story = Story(min=2, elastic_timeout=0.7)
    story.now = start
    story.add("a:2").add("slow:1").hear(ev.AgentReady)
    story.submit().answer(lambda e: getattr(e, "worker", wid("slow/0#1")).host == "a")
    at = deadline(story.cluster, story.now)
    story.now = at
    story.send(ev.Ticked())
    assert story.cluster.stage is Stage.FORMING


def test_any_event_after_a_deadline_ends_the_wait():
    """Any event after a deadline also ends the wait."""
    story = Story("a:2", min=2, elastic_timeout=10.0)
    story.submit()
    story.now += 10.5
    story.send(ev.WorkerStarted(wid("ghost/0#9"), 1))
    assert story.last(cmd.EndJob).outcome == "failed"


def test_an_idle_cluster_counts_only_workers_that_can_work():
    """Without a job `ready` excludes workers that start, have failed, or were asked to end."""
    story = Story("a:2", min=2)
    story.hear(ev.AgentReady)
    assert story.reason.startswith("0 of min 2 workers ready; waiting for a/0#1 (0 s), a/1#1 (0 s)")
    story.broken.add(("a/1#1", "torhc"))
    story.set_up("imports", "torhc").answer()
    failed = "waiting for a/1#1 (failed: setup cell imports failed: NameError: torhc)"
    assert story.reason == f"1 of min 2 workers ready; {failed}"


def test_an_empty_cluster_has_no_deadline():
    """An empty cluster has no deadline."""
    cluster, commands = step(ClusterState(Limits()), ev.Ticked(), 5.0)
    assert (deadline(cluster, 5.0), commands) == (float("inf"), ())
    assert cluster.reason


def only(host: str):
    """The answers of this host's agent and workers."""
    return lambda e: host in (getattr(e, "host", ""), getattr(getattr(e, "worker", None), "host", ""))


def test_a_ready_newcomer_waits_for_a_host_that_is_starting():
    """A newcomer waits for a host that starts: one reconfiguration adds both."""
    story = Story("b:1", min=1).run()
    story.add("c:1").add("a:1").answer(only("c"))
    assert story.cluster.stage is Stage.RUNNING
    assert "a to start" in story.reason
    story.quiet(2.0)
    assert [len(order.members) for order in story.commands(cmd.FormWorld)] == [1, 3]


def test_a_ready_newcomer_waits_the_settle_time_for_a_slow_host():
    """A host is slower than the settle time: the world grows without it."""
    story = Story("b:1", min=1).run()
    story.add("c:1").add("a:1").answer(only("c")).wait(1.1)
    story.answer(only("c")).answer(only("b")).answer(only("c"))
    assert story.names == ["b/0#1", "c/0#1"]
