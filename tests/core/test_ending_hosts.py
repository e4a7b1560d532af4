"""Hosts that are announced to end: their workers leave before, and nothing counts as a failure."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.requests import FAR
from nbelastic.core.state import HostPhase, Stage
from nbelastic.driver.status import snapshot
from nbelastic.driver.telemetry import Telemetry
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.timeouts import Timeouts
from tests.core.away import Away
from tests.core.story import Story, wid, with_stage

FAILURES = ("host-lost", "worker-lost", "world-broken", "slot-backoff")


def failures(story: Story) -> list[str]:
    return [text for kind in FAILURES for text in story.records(kind)]


@pytest.mark.parametrize("stage", [*Stage])
def test_an_announced_host_leaves_before_its_end(stage):
    """Whatever the members do just then: its worker leaves at a commit, the others train on, nothing is lost."""
    story = with_stage(stage)
    lost = len(failures(story))
    story.remove("c", within=30.0).quiet(1.0).commit(3).quiet(20.0)
    assert story.cluster.stage is Stage.RUNNING
    assert "c" not in story.cluster.hosts
    assert not story.cluster.ending
    assert len(failures(story)) == lost
    assert "c will leave at the next commit, and ends within 30 s, by a test" in story.records("host-removed")


def test_what_has_not_left_in_time_is_killed():
    """A training that makes no commit goes on without the host at its end, which is not a failure of the host."""
    story = Story("a:1", "b:1", min=1).run().commit(3)
    story.remove("b", within=30.0)
    story.hold_back(story.cluster.members[0])
    story.wait(29.0)
    assert story.alive("b") == ["b/0#1"]
    story.wait(2.0)
    assert cmd.StopWorker(wid("b/0#1"), kill=True) in story.said
    story.answer()
    assert "b" not in story.cluster.hosts
    assert story.records("host-lost") == []


def test_a_later_notice_does_not_give_more_time():
    """Of several announcements the first end counts."""
    story = with_stage(Stage.RUNNING).remove("c", within=5.0).remove("c", within=60.0)
    assert story.cluster.ending["c"].at == story.now + 5.0
    story.remove("c", within=2.0)
    assert story.cluster.ending["c"].at == story.now + 2.0


def test_discovery_takes_it_back_only_if_it_is_announced_anew():
    """A host that ends stays away while the discovery lists it; after it has disappeared from the list it may come back."""
    story = Story(min=1)
    story.discover("a:1", "b:1")
    story.answer().remove("b", within=30.0).answer()
    story.discover("a:1", "b:1")
    assert list(story.cluster.hosts) == ["a"]
    story.discover("a:1")
    story.discover("a:1", "b:1")
    assert list(story.cluster.hosts) == ["a", "b"]


def test_a_host_that_is_added_again_does_not_end():
    """An addition by a client cancels the drain and its deadline, also the agent's own one after SIGTERM."""
    story = with_stage(Stage.RUNNING).remove("c", within=30.0).add("c:1")
    assert story.last(cmd.CancelEnd) == cmd.CancelEnd("c")
    assert story.cluster.hosts["c"].phase is HostPhase.UP
    story.quiet(60.0)
    assert len(story.names) == 3


def test_a_newcomer_takes_over_from_the_last_host():
    """The only host with the training state trains on until another one has the state, if that comes in time."""
    story = Story("a:1", min=1).run().commit(3)
    story.remove("a", within=60.0).quiet(5.0)
    assert story.names == ["a/0#1"]
    story.add("b:1").quiet(5.0).commit(3).quiet(5.0)
    assert story.names == ["b/0#1"]
    assert list(story.cluster.hosts) == ["b"]
    assert failures(story) == []


def test_a_newcomer_takes_over_from_the_only_member():
    """With `max` 1 there are two members for one generation, in which the newcomer gets the training state."""
    story = Story("a:1", "b:1", min=1, max=1).run().commit(3)
    (first,) = story.names
    story.remove(first[0], within=30.0).quiet(20.0)
    (second,) = story.names
    assert second[0] != first[0]
    assert first[0] not in story.cluster.hosts
    assert story.fakes[wid(second)].commit >= 3
    assert not failures(story)


def test_without_another_host_the_training_is_stopped_in_time_to_save_it():
    """The job ends as stopped some seconds before the host does, so that rank 0 can write a last checkpoint."""
    story = Story("a:1", min=1, timeouts=Timeouts(checkpoint=20.0)).run().commit(3)
    story.remove("a", within=60.0).quiet(39.0)
    assert story.job.outcome == ""
    story.wait(2.0)
    assert story.job.outcome == "stopped"
    assert story.job.reason == "only hosts that end hold the training state: a"
    assert story.alive("a") == ["a/0#1"], "its program may still write a checkpoint"
    story.answer()
    assert list(story.cluster.hosts) == []


def test_the_text_has_no_needless_digits():
    """An agent announces its end again to a new driver, with the time that is left."""
    story = with_stage(Stage.RUNNING).remove("c", within=38.77521)
    assert story.records("host-removed")[-1].endswith("and ends within 38.8 s, by a test")


def test_a_new_driver_knows_the_end():
    """The deadline of a host outlives the driver."""
    story = Story("a:1", "b:1", min=1).run().commit(3).remove("b", within=30.0)
    end = story.cluster.ending
    Away(story).new_driver()
    assert story.cluster.ending == end
    story.quiet(1.0).commit(3).quiet(5.0)
    assert list(story.cluster.hosts) == ["a"]


def test_a_driver_can_take_over_after_the_training_was_stopped():
    """The next driver can read when the hosts end, also those whose training was stopped to be saved."""
    story = Story("a:1", min=1).run().commit(3).remove("a", within=30.0)
    story.wait(21.0)
    assert story.job.outcome == "stopped"
    end = story.cluster.ending["a"].at
    Away(story).new_driver()
    assert story.cluster.ending["a"].at == end
    story.answer()
    assert list(story.cluster.hosts) == []


def test_a_last_checkpoint_is_not_cut_off():
    """A host whose job has ended leaves when its program has ended, too."""
    story = Story("a:1", "b:1", min=1).run().commit(3)
    mark = len(story.said)
    story.stop_job().remove("a", within=30.0)
    assert story.commands(cmd.StopWorker, mark) == []
    story.answer()
    assert list(story.cluster.hosts) == ["b"]


@pytest.mark.parametrize(("first", "last"), ["ab", "ba"])
def test_the_host_that_ends_last_trains_on(first, last):
    """If all hosts were announced to end, each leaves before its own end. The job is stopped only before the last one."""
    story = Story("a:1", "b:1", min=1).run().commit(3)
    story.remove(first, within=30.0).remove(last, within=300.0).quiet(5.0).commit(3).quiet(
        280.0 - Timeouts().checkpoint
    )
    assert story.names == [f"{last}/0#1"]
    assert list(story.cluster.hosts) == [last]
    assert failures(story) == []
    story.quiet(15.0)
    assert story.job.reason == f"only hosts that end hold the training state: {last}"


def test_a_host_that_could_not_leave_does_not_stop_the_others():
    """The job is not stopped for a host whose workers do not leave, while another one has much time left."""
    story = Story("a:1", "b:1", min=1).run().commit(3)
    story.hold_back(story.cluster.members[0])
    story.remove("a", within=30.0).remove("b", within=300.0)
    story.wait(25.0)
    assert story.job.outcome == ""


def healthy(*hosts: str) -> Story:
    """Hosts that have been up for a while."""
    return Story(*hosts, min=1).run().commit(3).quiet(100.0)


def test_another_host_takes_the_place_of_one_that_ends():
    """As batch jobs do: the next one is started at once, as it may have to wait in a queue. Nothing is lost."""
    story = healthy("a:1", "b:2")
    story.remove("b", within=300.0, replaced=True)
    assert cmd.StartAgent(HostSpec("b.2", 2, "")) in story.said
    assert story.records("host-added")[-1] == "b.2 with 2 slots in place of b, by a test"
    story.quiet(1.0).commit(3).quiet(2.0).commit(3).quiet(1.0)
    assert sorted(map(str, story.cluster.members)) == ["a/0#1", "b.2/0#1", "b.2/1#1"]
    assert "b" not in story.cluster.hosts
    assert failures(story) == []
    story.quiet(100.0).remove("b.2", within=300.0, replaced=True).quiet(2.0)
    assert "b.3 with 2 slots in place of b.2, by a test" in story.records("host-added")


def test_a_host_in_place_of_another_is_older_than_one_that_is_added_later():
    """So its workers have lower ranks, whatever the names."""
    story = healthy("m:1", "n:1")
    story.remove("n", within=300.0, replaced=True).add("a:1")
    story.quiet(5.0).commit(3).quiet(5.0).commit(3).quiet(2.0)
    assert [w.host for w in story.cluster.members] == ["m", "n.2", "a"]


@pytest.mark.parametrize("hosts", [("a:1",), ("a:1", "b:1")])
def test_a_host_trains_on_until_its_successor_is_up(hosts):
    """It leaves some time before its end at the latest. If it is the only one, it stays for the state even then."""
    story = healthy(*hosts)
    story.remove("a", within=100.0, replaced=True).wait(
        100.0 - Timeouts().drain - 1.0
    )  # the next one waits in the queue
    assert wid("a/0#1") in story.cluster.members
    assert not story.cluster.leaving
    story.wait(2.0)
    assert story.cluster.leaving == {wid("a/0#1")}
    story.quiet(5.0).commit(3).quiet(5.0).commit(3).quiet(2.0)
    assert sorted(w.host for w in story.cluster.members) == sorted(["a.2", *(h[0] for h in hosts[1:])])
    assert failures(story) == []


def test_a_host_whose_job_ends_too_early_has_its_successor():
    """It is not tried again after the end of its agent, which does not count as a failure: the successor is on its way."""
    story = healthy("a:1", "b:1")
    story.remove("b", within=300.0, replaced=True)
    story.send(ev.AgentLost("b", "its job was cancelled"))
    assert list(story.cluster.hosts) == ["a", "b.2"]
    story.quiet(5.0).commit(3).quiet(2.0)
    assert sorted(w.host for w in story.cluster.members) == ["a", "b.2"]


def test_without_its_successor_a_host_drains():
    """A client removes the successor: nothing is waited for."""
    story = healthy("a:1", "b:1").remove("b", within=300.0, replaced=True).remove("b.2").quiet(1.0).commit(3).quiet(1.0)
    assert list(story.cluster.hosts) == ["a"]
    assert failures(story) == []


def test_hosts_that_end_soon_after_their_start_are_replaced_more_and_more_seldom():
    """A time limit that is shorter than the notice floods no queue: each next job has a longer back-off."""
    story = healthy("a:1", "b:1")
    waits = []
    for name in ("b", "b.2", "b.3", "b.4"):
        story.remove(name, within=30.0, replaced=True).quiet(1.0).commit(3)
        text = story.records("host-added")[-1]
        waits.append(float(text.partition(", in ")[2].removesuffix(" s") or 0))
        story.quiet(waits[-1] + 2.0)
    assert waits == [0.0, 5.0, 10.0, 20.0]


def test_an_announcement_that_is_repeated_adds_one_host():
    """Nor is a host replaced that a client has removed, nor while the cluster stops."""
    story = healthy("a:1", "b:1")
    for within in (300.0, 200.0, 20.0):
        story.remove("b", within=within, replaced=True)
    assert story.cluster.ending["b"].at == story.now + 20.0
    story.remove("a")
    story.remove("a", within=30.0, replaced=True)
    assert [name for name in story.cluster.hosts if "." in name] == ["b.2"]
    story.send(ev.StopRequested("a test"))
    story.remove("b.2", within=30.0, replaced=True)
    assert "b.3" not in story.cluster.hosts


def test_a_host_whose_end_is_not_known_has_its_successor():
    """A drained node without a time limit: no countdown is shown, and the event log names none."""
    story = healthy("a:1", "b:1")
    story.remove("b", within=10 * FAR, replaced=True)
    assert [host.ends_in for host in snapshot("c", story.cluster, Telemetry(), story.now).hosts] == [None] * 3
    story.quiet(1.0).commit(3).quiet(2.0).commit(3).quiet(1.0)
    assert sorted(w.host for w in story.cluster.members) == ["a", "b.2"]
    assert story.records("host-removed") == ["b will leave at the next commit, by a test"]


def test_a_lost_host_that_has_a_successor_is_no_work_for_a_cluster_that_stops():
    """The host and its successor are gone, and so is its announced end: no deadline is in the past."""
    story = with_stage(Stage.RUNNING, min=2)
    story.lose_host("c")
    story.remove("c", within=600.0, replaced=True)
    assert "c" in story.cluster.ending
    story.send(ev.StopRequested("the test", 100.0))
    story.wait(20.0)
    assert "c" not in story.cluster.ending


def test_a_successor_that_does_not_come_up_is_lost():
    """It was never lost before, though the host that it replaces had ended too early."""
    story = Story("a:1", "b:1", min=1).run().remove("b", within=300.0, replaced=True)
    story.wait(max(0.0, story.cluster.hosts["b.2"].retry_at - story.now))
    story.send(ev.AgentLost("b.2", "its job was rejected"))
    assert story.records("host-lost") == ["b.2: its job was rejected; tried again in 10 s"]
