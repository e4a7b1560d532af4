"""A running world makes no commit: which members are behind, and what is done about them."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.state import HostPhase, Stage, WorkerState
from nbelastic.protocol import events as ev
from tests.core.story import Story, wid


def training(*hosts: str, **limits) -> Story:
    """Three workers on three hosts of this machine have made three commits; the fourth step is under way."""
    story = Story(*(hosts or ("a:1", "b:1", "c:1")), **{"min": 1, **limits}).run().commit(3).answer()
    for w in story.cluster.members:
        story.fakes[w].begun += 1
    return story


def behind(story: Story, worker: str, place: str = "train.py:88 in load") -> Story:
    """The worker has not begun the collective in which the others wait."""
    fake = story.fakes[wid(worker)]
    fake.begun -= 1
    fake.place = place
    return story


# ---- who is behind ----


def test_members_are_asked_where_they_are():
    """In a stall all members are asked for their positions, and the reason says so until they answer."""
    story = training()
    story.send(ev.StallDetected(story.cluster.generation, 3.0))
    assert story.last(cmd.QueryPosition) == cmd.QueryPosition(story.cluster.generation, story.cluster.members)
    assert story.reason == "3 workers train in generation 1; no commit for 3 s"
    story.answer()
    mark = story.mark()
    story.stand_still(4.0)
    assert len(story.commands(cmd.QueryPosition, mark)) == 1


def test_on_one_machine_no_network_is_probed():
    """Hosts of one machine are not probed."""
    story = training().stand_still(times=2)
    assert story.commands(cmd.Probe) == []


def test_a_member_that_is_behind_is_named_with_its_line():
    """Reasons and a record name the rank that is behind, how long, the commit and the place."""
    story = behind(training(), "c/0#1").stand_still(31.0)
    assert story.reason.endswith("; rank 2 (c/0#1) is 31 s behind at commit 3, in train.py:88 in load")
    assert story.cluster.workers[wid("c/0#1")].reason == "31 s behind at commit 3, in train.py:88 in load"
    assert story.records("worker-behind") == ["rank 2 (c/0#1) is 31 s behind at commit 3, in train.py:88 in load"]
    assert [story.cluster.workers[wid(w)].reason for w in ("a/0#1", "b/0#1")] == ["", ""]


def test_one_behind_by_a_commit_counts_too():
    """Where collectives are equal, the number of commits decides."""
    story = training()
    for w in ("a/0#1", "b/0#1"):
        story.fakes[wid(w)].commit += 1
    story.stand_still(5.0)
    assert "rank 2 (c/0#1) is 5 s behind at commit 3" in story.reason


def test_only_the_last_members_are_behind():
    """A member that waits in an earlier collective for a still earlier one is not behind."""
    story = behind(behind(training(), "c/0#1"), "c/0#1")
    behind(story, "b/0#1").stand_still(5.0)
    assert "rank 2 (c/0#1) is 5 s behind" in story.reason
    assert story.cluster.workers[wid("b/0#1")].reason == ""


def test_several_behind_are_counted():
    """The reason names the first member that is behind and counts the others; at most three are recorded."""
    story = training("a:6")
    for slot in range(1, 6):
        behind(story, f"a/{slot}#1")
    story.stand_still(5.0)
    text = "rank 1 (a/1#1) is 5 s behind at commit 3, in train.py:88 in load (and 4 more)"
    assert story.reason.endswith(text)
    assert len(story.records("worker-behind")) == 3


def test_being_behind_is_recorded_once():
    """A stall is recorded once per commit, however long it lasts."""
    story = behind(training(), "c/0#1")
    for seconds in (3.0, 4.0, 5.0):
        story.stand_still(seconds)
    assert len(story.records("worker-behind")) == 1
    story.fakes[wid("c/0#1")].begun += 1
    story.commit()
    story.send(ev.StallResolved(story.cluster.generation))
    behind(story, "c/0#1").stand_still(3.0)
    assert len(story.records("worker-behind")) == 2


def test_if_all_are_equally_far_none_is_behind():
    """All members are at the same place: the reason names the place and no member."""
    story = training().stand_still(31.0)
    assert story.reason.endswith("; no commit for 31 s; all ranks are at commit 3, in train.py:9 in step")
    assert story.records("worker-behind") == []


def test_equally_far_in_different_places():
    """The reason shows two of the different places, with their ranks."""
    story = training()
    story.fakes[wid("b/0#1")].place = "train.py:20 in evaluate"
    story.stand_still(31.0)
    text = "rank 0 (a/0#1) is in train.py:9 in step, rank 1 (b/0#1) is in train.py:20 in evaluate"
    assert story.reason.endswith(f"no commit for 31 s; {text}")


def test_a_member_that_does_not_answer_is_named():
    """After a second the reason names the first member that has not answered."""
    story = training()
    story.silent.update({wid("b/0#1"), wid("c/0#1")})
    story.stand_still(times=2)
    where = "rank 0 (a/0#1) is in train.py:9 in step, rank 1 (b/0#1) has not reported where it is"
    assert story.reason.endswith(f"no commit for 4 s; {where}")


def test_a_place_that_is_unknown_is_left_out():
    """Without a frame of the user's code the reason has only the numbers."""
    story = behind(training(), "c/0#1", place="").stand_still(5.0)
    assert story.reason.endswith("rank 2 (c/0#1) is 5 s behind at commit 3")


def test_going_on_clears_the_reasons():
    """The next commit clears the reasons of a stall."""
    story = behind(training(), "c/0#1").stand_still(31.0)
    story.send(ev.StallResolved(story.cluster.generation))
    assert story.reason == "3 workers train in generation 1"
    assert story.cluster.stall is None
    assert all(worker.reason == "" for worker in story.cluster.workers.values())


def test_catching_up_clears_the_workers_reason():
    """A member that is no longer behind has no reason, although no commit is made yet."""
    story = behind(training(), "c/0#1").stand_still(5.0)
    story.fakes[wid("c/0#1")].begun += 1
    story.stand_still(6.0)
    assert story.cluster.workers[wid("c/0#1")].reason == ""
    assert "all ranks" not in story.reason
    assert "no commit for 6 s" in story.reason


def go_on(story: Story, *steps: int) -> Story:
    """Members have begun so many collectives more."""
    for w, more in zip(story.cluster.members, steps, strict=True):
        story.fakes[w].begun += more
    return story


def test_a_program_that_goes_on_is_not_behind():
    """All members go on between two answers, and answer at different times: none is behind."""
    story = go_on(training(), 1, 0, 2).stand_still(5.0)
    go_on(story, 9, 9, 9).stand_still(6.0)
    assert story.reason.endswith("; no commit for 6 s, although the program goes on")
    assert all(worker.reason == "" for worker in story.cluster.workers.values())
    story.stand_still(7.0)
    assert "rank 1 (b/0#1) is 7 s behind" in story.reason


def test_a_program_that_never_commits_is_asked_about_it():
    """Without any commit no member is called behind as long as all go on, and the reason asks for state.commit()."""
    story = go_on(Story("a:1", "b:1", min=1).run().answer(), 3, 4).stand_still(5.0)
    assert "behind" not in story.reason
    go_on(story, 5, 5).stand_still(6.0)
    assert story.reason.endswith("no commit for 6 s, although the program goes on: does its loop call state.commit()?")
    assert story.records("worker-behind") == []
    story.stand_still(7.0)
    assert "rank 0 (a/0#1) is 7 s behind at commit 0" in story.reason


def test_a_break_clears_the_reasons():
    """A break clears the reasons of a stall."""
    story = behind(training(), "c/0#1").stand_still(5.0)
    story.kill("a/0#1")
    assert story.cluster.stall is None
    assert "behind" not in story.reason
    assert story.cluster.workers[wid("c/0#1")].reason == ""


@pytest.mark.parametrize("stage", [Stage.PREPARING, Stage.ASKED, Stage.LEAVING])
def test_a_change_that_hangs_has_its_reason(stage):
    """A reconfiguration waits for a commit that is not made: the reason says both."""
    story = training(min=2).add("d:1")
    missing = {Stage.PREPARING: ev.WorkerPrepared, Stage.ASKED: ev.LeaveAcknowledged, Stage.LEAVING: ev.WorkerReady}[
        stage
    ]
    story.answer(lambda e: not (isinstance(e, missing) and e.worker == wid("c/0#1")))
    assert story.cluster.stage is stage
    story.answers.clear()
    behind(story, "c/0#1").stand_still(31.0)
    assert "rank 2 (c/0#1) is 31 s behind" in story.reason
    assert len(story.reason) > len("rank 2 (c/0#1) is 31 s behind at commit 3, in train.py:88 in load")


def test_a_member_that_has_left_as_agreed_is_not_behind():
    """In a reconfiguration only members still in the generation can be behind."""
    story = training(min=2).add("d:1")
    story.answer(lambda e: not (isinstance(e, ev.WorkerReady) and e.worker == wid("c/0#1")))
    story.answers.clear()
    story.silent |= {wid("a/0#1"), wid("b/0#1")}
    story.stand_still(times=2)
    assert "rank 2 (c/0#1) is 4 s behind" in story.reason


def test_a_member_that_answers_from_no_generation_is_not_behind():
    """A member that has left answers with no generation: it is not behind."""
    story = training(min=2).add("d:1")
    story.answer(lambda e: not (isinstance(e, ev.WorkerReady) and e.worker == wid("c/0#1")))
    story.answers.clear()
    for w in ("a/0#1", "b/0#1"):
        story.fakes[wid(w)].begun = 0
    story.stand_still(5.0)
    assert "rank 2 (c/0#1) is 5 s behind" in story.reason


def test_stale_and_unexpected_reports_are_dropped():
    """Reports of another generation, of no member, without a stall, or repeated change nothing."""
    story = training("a:1", "b:1", max=1, spares=1)
    generation = story.cluster.generation
    before = story.cluster
    stranger = next(w for w in story.cluster.workers if w not in story.cluster.members)
    story.send(
        ev.PositionReported(story.cluster.members[0], generation, 3, 4),
        ev.StallResolved(generation),
        ev.StallDetected(generation - 1, 9.0),
    )
    assert story.cluster == before
    story.stand_still(5.0)
    before = story.cluster
    story.send(
        ev.PositionReported(stranger, generation, 3, 4),
        ev.PositionReported(story.cluster.members[0], generation - 1, 3, 4),
        ev.StallResolved(generation - 1),
    )
    assert story.cluster == before


def test_without_a_job_there_is_no_stall():
    """After the job's end, late reports of a stall change nothing."""
    story = training()
    generation = story.cluster.generation
    story.stop_job().send(ev.StallDetected(generation, 5.0))
    assert story.commands(cmd.QueryPosition) == []
    assert story.cluster.stall is None


def test_after_the_first_rank_has_finished_none_is_behind():
    """After a rank has finished no other rank is behind."""
    story = training().returned("a/0#1")
    story.send(ev.StallDetected(story.cluster.generation, 5.0))
    assert story.commands(cmd.QueryPosition) == []


# ---- stall ----


def test_without_stall_no_member_is_killed():
    """Without `stall` a member that is behind is never killed."""
    story = behind(training(), "c/0#1")
    for seconds in range(3, 3000, 100):
        story.now += 100
        story.stand_still(float(seconds))
    assert story.commands(cmd.StopWorker) == []


def test_a_member_behind_for_longer_than_stall_is_replaced():
    """A member behind for longer than `stall` is killed with a failure and a reason, and replaced."""
    story = behind(training(stall=30.0, cooldown=(0.0, 0.0)), "c/0#1")
    story.stand_still(5.0).now += 29.0
    story.stand_still(34.0)
    assert story.commands(cmd.StopWorker) == []
    story.now += 1.0
    story.send(ev.StallDetected(story.cluster.generation, 35.0))
    assert story.last(cmd.StopWorker) == cmd.StopWorker(wid("c/0#1"), kill=True)
    why = "c/0#1 stalled (35 s behind at commit 3, in train.py:88 in load; stall is 30 s)"
    assert story.records("worker-lost") == story.records("world-broken") == [why]
    assert story.cluster.hosts["c"].slots[0].failures == 1
    story.answers.clear()
    for w in ("a/0#1", "b/0#1"):
        story._abort(wid(w), 1)
    story._say(wid("c/0#2"), ev.WorkerRegistered(wid("c/0#2")))
    story.quiet(2.0)
    assert story.names == ["a/0#1", "b/0#1", "c/0#2"]


def test_a_member_that_progresses_is_not_stalled():
    """Each new collective restarts the time of a member that is behind."""
    story = behind(training(stall=30.0), "c/0#1")
    for seconds in range(5, 100, 20):
        story.stand_still(float(seconds)).now += 20.0
        for fake in story.fakes.values():
            fake.begun += 1
    assert story.commands(cmd.StopWorker) == []


def test_if_all_are_equally_far_none_is_killed():
    """A long evaluation on all ranks kills no member."""
    story = training(stall=30.0)
    for seconds in range(5, 300, 20):
        story.stand_still(float(seconds)).now += 20.0
    assert story.commands(cmd.StopWorker) == []


def test_all_that_stalled_are_replaced_in_one_break():
    """Two members are behind: both are killed in one break."""
    story = training("a:4", stall=30.0)
    behind(behind(story, "a/2#1"), "a/3#1").stand_still(5.0).now += 30.0
    story.send(ev.StallDetected(story.cluster.generation, 35.0))
    assert len(story.commands(cmd.StopWorker)) == 2
    assert story.cluster.resets == 1


# ---- a host's silence is not its workers' ----


def test_an_unresponsive_host_is_named_once():
    """A host and its workers are unresponsive: the host is lost, and reports about its workers are dropped."""
    story = training("a:1", "b:2")
    quiet = "no message from it for 2 s"
    mark = story.mark()
    story.send(ev.AgentLost("b", quiet), *(ev.WorkerFrozen(wid(w), quiet) for w in ("b/0#1", "b/1#1")))
    assert story.commands(cmd.Record, mark) == [
        cmd.Record("host-lost", f"b: {quiet}; tried again in 5 s", host="b"),
        cmd.Record("world-broken", f"host b was lost ({quiet})", generation=1),
    ]
    assert story.cluster.resets == 1
    assert [slot.failures for slot in story.cluster.hosts["b"].slots] == [0, 0]


def test_an_unresponsive_worker_of_a_responsive_host_is_named():
    """A stopped process makes its worker lost, and its host stays."""
    story = training("a:1", "b:2")
    story.send(ev.WorkerFrozen(wid("b/0#1"), "no message from it for 2 s"))
    assert story.records("world-broken") == ["b/0#1 froze (no message from it for 2 s)"]
    assert story.cluster.hosts["b"].phase is HostPhase.UP
    assert story.cluster.workers[wid("b/1#1")].state is WorkerState.RUNNING
