"""A rank differs from the others: it is reported, and its host is left out if the user asked for that."""

from nbelastic.core import commands as cmd
from nbelastic.core.state import HostPhase, Stage
from nbelastic.protocol.program_events import ReplicaDiffered
from tests.core.story import Story, wid

TEXT = "rank 2 (c/0#1) has other values than the other ranks since commit 3"


def training(*hosts: str, **limits) -> Story:
    return Story(*(hosts or ("a:1", "b:1", "c:1")), **{"min": 1, **limits}).run().commit(3).answer()


def differs(story: Story, worker: str, *, were_equal: bool = True) -> Story:
    story.send(ReplicaDiffered(wid(worker), story.cluster.generation, 3, were_equal))
    return story


def test_a_rank_that_differs_is_reported_and_trains_on():
    """By default nothing else is done: the user decides."""
    story = differs(training(), "c/0#1")
    (text,) = story.records("replica-differs")
    assert text.startswith(f"{TEXT}: its memory or its device may be faulty")
    assert story.cluster.stage is Stage.RUNNING
    assert story.commands(cmd.StopAgent) == []


def test_its_host_is_left_out_on_request():
    """The others go on from the last commit, and the host is tried again after its back-off."""
    story = differs(training(exclude_differing=True), "c/0#1")
    assert story.cluster.hosts["c"].phase is HostPhase.LOST
    assert TEXT in story.cluster.hosts["c"].reason
    assert story.commands(cmd.StopAgent) == [cmd.StopAgent("c")]
    story.answer()
    assert story.cluster.stage is Stage.RUNNING
    assert set(story.cluster.members) == {wid("a/0#1"), wid("b/0#1")}


def test_a_rank_that_was_never_equal_is_only_reported():
    """Then the program itself may change the model on that rank: its next host would be left out too."""
    story = differs(training(exclude_differing=True), "c/0#1", were_equal=False)
    assert len(story.records("replica-differs")) == 1
    assert story.commands(cmd.StopAgent) == []


def test_a_host_with_all_ranks_stays():
    """Only the worker is replaced: without the host no rank would hold the state."""
    story = differs(training("a:3", exclude_differing=True), "a/2#1")
    assert story.cluster.hosts["a"].phase is HostPhase.UP
    assert story.commands(cmd.StopWorker) == [cmd.StopWorker(wid("a/2#1"), kill=True)]
    story.answer()
    assert wid("a/2#2") in story.cluster.members


def test_another_generation_and_other_workers_are_not_meant():
    """Late news of a generation that is over changes nothing."""
    story = training(exclude_differing=True)
    story.send(ReplicaDiffered(wid("c/0#1"), story.cluster.generation - 1, 3, were_equal=True))
    story.send(ReplicaDiffered(wid("d/0#1"), story.cluster.generation, 3, were_equal=True))
    assert story.records("replica-differs") == []
    assert story.commands(cmd.StopAgent) == []


def test_in_a_world_that_breaks_the_rank_is_only_reported():
    """Its host may be lost with the break, and what the survivors hold is not known yet."""
    story = training(exclude_differing=True).kill("a/0#1")
    assert story.cluster.stage is not Stage.RUNNING
    differs(story, "c/0#1")
    assert len(story.records("replica-differs")) == 1
    assert story.commands(cmd.StopAgent) == []
