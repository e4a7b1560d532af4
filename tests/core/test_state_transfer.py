"""After each formation all ranks hold the newest commit: which rank sends it, and which ranks receive it."""

from __future__ import annotations

from nbelastic.core import commands as cmd
from nbelastic.core.state import Stage
from nbelastic.protocol import events as ev
from tests.core.story import Story, wid, with_stage


def test_a_death_while_syncing_leaves_the_state_where_it_was():
    """A forming generation breaks: earlier holders still hold the state, and the newest commit wins."""
    story = Story("a:2", min=1, cooldown=(0.0, 0.0)).run().commit(7)
    story.add("b:1").answer(lambda e: not isinstance(e, ev.WorkerFormed))
    assert (story.cluster.stage, len(story.cluster.members)) == (Stage.FORMING, 3)
    story.kill("a/0#1").hear(ev.WorkerReady, "a/1#1")
    story.answer()
    order = story.commands(cmd.FormWorld)[2]
    assert order.members[order.root] == wid("a/1#1")
    assert order.members.index(wid("b/0#1")) in order.receivers


def last_holder_dies_while_forming(*, received: bool) -> Story:
    """The only member with the state dies when the newcomer has received it, or not, and has not reported yet."""
    story = Story("a:1", min=1, cooldown=(0.0, 0.0)).run().commit(7)
    story.add("b:1").answer(lambda e: not isinstance(e, ev.WorkerFormed))
    assert (story.cluster.stage, len(story.cluster.members)) == (Stage.FORMING, 2)
    story.fakes[wid("b/0#1")].holds = received
    story.kill("a/0#1").quiet(30.0)
    return story


def test_a_newcomer_that_has_just_received_the_state_holds_it():
    """Its report comes after the death of the last holder: the training goes on from there."""
    story = last_holder_dies_while_forming(received=True)
    assert story.cluster.job.outcome == "", story.reason
    assert story.cluster.stage is Stage.RUNNING


def test_the_state_is_lost_with_a_holder_whose_newcomer_has_received_a_part():
    """The job fails as soon as the newcomer says so."""
    story = last_holder_dies_while_forming(received=False)
    assert story.cluster.job.outcome == "failed"
    assert "no worker is left that holds the training state" in story.cluster.job.reason


def test_the_newest_commit_wins_and_all_others_receive():
    """The survivor with the newest commit is root; a worker that changed tensors since its commit is not."""
    story = Story("a:4", min=1).run().commit(5)
    story.fakes[wid("a/2#1")].commit += 1
    story.fakes[wid("a/3#1")].commit += 1
    story.fakes[wid("a/3#1")].clean = False
    mark = story.mark()
    story.kill("a/0#1").hear(ev.WorkerReady, "a/1#1", "a/2#1", "a/3#1")
    order = story.commands(cmd.FormWorld, mark)[0]
    assert [str(w) for w in order.members] == ["a/1#1", "a/2#1", "a/3#1"]
    assert (order.root, order.receivers) == (1, (0, 2))


def test_if_no_survivor_is_clean_all_receive():
    """All survivors have changed tensors since the commit: all receive the root's state."""
    story = Story("a:3", min=1).run().commit(5)
    for fake in story.fakes.values():
        fake.clean = False
    mark = story.mark()
    story.kill("a/0#1").hear(ev.WorkerReady, "a/1#1", "a/2#1")
    order = story.commands(cmd.FormWorld, mark)[0]
    assert (order.root, order.receivers) == (0, (1,))


def test_equal_survivors_send_nothing():
    """All survivors are clean at the same commit: no rank receives."""
    story = Story("a:3", min=1).run().commit(5)
    mark = story.mark()
    story.kill("a/0#1").hear(ev.WorkerReady, "a/1#1", "a/2#1")
    assert story.commands(cmd.FormWorld, mark)[0].receivers == ()


def test_in_a_planned_change_only_newcomers_receive():
    """In a reconfiguration all members leave at one commit, so only the newcomer receives."""
    story = Story("a:2", min=1).run().commit(5)
    mark = story.mark()
    story.add("b:1").quiet(2.0)
    order = story.commands(cmd.FormWorld, mark)[0]
    assert (order.root, order.receivers) == (0, (2,))


def test_in_the_first_world_all_receive_rank_zeros_state():
    """In a first world rank 0 is the root and all other ranks receive."""
    order = Story("a:3", min=3).run().last(cmd.FormWorld)
    assert (order.root, order.receivers) == (0, (1, 2))


def sending(story):
    """A member that is one commit ahead sends its state to the others."""
    story.fakes[wid("a/0#1")].commit += 1
    story.kill("a/3#1").hear(ev.WorkerReady)
    assert story.cluster.stage is Stage.FORMING
    assert story.cluster.formation.root == 0
    return story


def test_a_receiver_whose_sender_dies_never_sends_on_a_mixture():
    """A receiver with parts of two commits reports that it holds no state, and receives it from a holder."""
    story = sending(Story("a:4", min=1).run().commit(5))
    mark = story.mark()
    story.kill("a/0#1").tear("a/1#1").hear(ev.WorkerReady, "a/1#1", "a/2#1")
    order = story.commands(cmd.FormWorld, mark)[0]
    assert [str(w) for w in order.members] == ["a/1#1", "a/2#1"]
    assert (order.root, order.receivers) == (1, (0,))
    story.quiet(3.0)
    assert story.cluster.stage is Stage.RUNNING


def test_a_job_whose_survivors_all_hold_mixtures_fails_in_words():
    """No survivor holds a whole state: the job ends, and does not resume from parts of two commits."""
    story = sending(Story("a:4", min=1).run().commit(5))
    mark = story.mark()
    story.kill("a/0#1").tear("a/1#1", "a/2#1").hear(ev.WorkerReady, "a/1#1", "a/2#1")
    assert story.commands(cmd.FormWorld, mark) == []
    end = story.last(cmd.EndJob)
    assert end.outcome == "failed"
    assert "broke off halfway; no worker is left that holds the training state" in end.reason


def test_the_job_fails_with_the_last_holder_of_the_state_though_it_is_no_member():
    """A newcomer entered the next world, which broke before all had left the present one: it holds the state, and waits.

    When the others are lost, and then it is, no worker may begin anew.
    """
    story = Story("a:1", "b:1", min=2, max=3, cooldown=(0.0, 0.0)).run().commit(3)
    members = story.cluster.member_set
    story.add("c:1").answer(lambda e: not (isinstance(e, ev.WorkerReady) and e.worker in members))
    story.hear(ev.WorkerReady, "a/0#1").hear(ev.WorkerFormed)
    story.kill("b/0#1").hear(ev.WorkerReady, "a/0#1", "c/0#1").kill("a/0#1")
    assert [str(w) for w, worker in story.cluster.workers.items() if worker.has_state] == ["c/0#1"]
    story.kill("c/0#1").quiet(60.0)
    assert story.job.outcome == "failed"
    assert "c/0#1 died (SIGKILL); no worker is left that holds the training state" in story.job.reason


def test_the_last_holder_hands_over_before_its_host_leaves():
    """As above, but its host is removed: it stays until others have the state."""
    story = Story("a:1", "b:1", min=2, max=3, cooldown=(0.0, 0.0)).run().commit(3)
    members = story.cluster.member_set
    story.add("c:1").answer(lambda e: not (isinstance(e, ev.WorkerReady) and e.worker in members))
    story.hear(ev.WorkerReady, "a/0#1").hear(ev.WorkerFormed)
    story.kill("b/0#1").hear(ev.WorkerReady, "a/0#1", "c/0#1").kill("a/0#1")
    story.remove("c").quiet(10.0).commit(3).quiet(10.0)
    assert (story.cluster.stage, story.names) == (Stage.RUNNING, ["a/0#2", "b/0#2"])
    assert min(fake.commit for fake in story.fakes.values()) >= 6


def test_newcomers_that_are_in_the_next_world_already_hold_the_state():
    """All members are lost before the driver knows that they have left: the newcomers go on from what they have."""
    story = Story("a:2", min=1, cooldown=(0.0, 0.0)).run().commit(3)
    members = story.cluster.member_set
    story.add("b:1").add("c:1").answer(lambda e: not isinstance(e, ev.LeaveAcknowledged)).wait(2.0)
    story.answer(lambda e: not isinstance(e, ev.LeaveAcknowledged)).hear(ev.LeaveAcknowledged)
    story.answer(lambda e: e.worker not in members)
    story.fakes[wid("c/0#1")].commit += 1  # it alone has seen the end of the next world's first step
    newest = story.fakes[wid("c/0#1")].commit
    story.lose_host("a")
    assert story.job.outcome == ""
    story.quiet(5.0)
    assert story.cluster.stage is Stage.RUNNING
    (commit,) = {fake.commit for fake in story.fakes.values()}
    assert commit >= newest


def test_newcomers_that_were_in_the_next_world_before_it_began_hold_the_state():
    """As above, but the driver knows that all members have left, when these are lost."""
    story = with_stage(Stage.LEAVING, min=1, cooldown=(0.0, 0.0))
    story.hear(ev.WorkerReady, "a/0#1").hear(ev.WorkerFormed, "a/0#1", "d/0#1").hear(ev.WorkerReady)
    assert (story.cluster.generation, story.cluster.stage) == (2, Stage.FORMING)
    for w in ("a/0#1", "b/0#1", "c/0#1"):
        story.kill(w)
    story.quiet(10.0)
    assert (story.cluster.stage, len(story.names)) == (Stage.RUNNING, 4)
