"""What a worker says and does at the driver's word: no process, no socket, no clock."""

from __future__ import annotations

import math

import pytest

from nbelastic.protocol import events as ev
from nbelastic.protocol import messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.worker.formation import Formation
from nbelastic.worker.protocol import (
    AbortGroup,
    EndProcess,
    Introduce,
    LinkState,
    Perform,
    Post,
    PrepareGroup,
    Protocol,
    Send,
    SendOutput,
)

EPOCH = 7
W = WorkerId("a", 0, 1)
HERE = LinkState(disconnected=False, congested=False, received_at=0.0)
AWAY = LinkState(disconnected=True, congested=False, received_at=0.0)
ORDER = worker_messages.Formation(EPOCH + 1, (("a", (0, 1)),), "10.0.0.1:1", 0, ((1, 2),))


@pytest.fixture
def worker():
    """In the middle of a generation of its job, at its third commit there."""
    worker = Protocol(W, lease=math.inf)
    worker.facts.begin("job")
    worker.begin("job")
    worker.generation, worker.commits = EPOCH, 3
    worker.joined(Formation(EPOCH, 1, 2, 1, 2, 0, 1, "", 0, (), (("a", 2),)))
    worker.formed({})
    return worker


def commit(worker):
    worker.commits += 1
    worker.total += 1


def said(actions):
    return [action.message for action in actions if isinstance(action, Send)]


# ---- changes ----


def test_a_question_is_a_promise_at_once(worker):
    """The main thread may not get to a commit, as others have promised theirs: the answer does not wait for it."""
    question = worker_messages.Leave(EPOCH, ask=2)
    assert worker.receive(question) == [Send(ev.LeaveAcknowledged(W, EPOCH, 3, 2)), Post(question)]
    assert (worker.pause_at, worker.has_promised) == (4, True)
    worker.receive(worker_messages.Leave(EPOCH, 6))
    assert (worker.pause_at, worker.leave_at, worker.has_promised) == (None, 6, True)
    worker.receive(worker_messages.Leave(EPOCH, worker_messages.Leave.STAY))
    assert not worker.has_promised


def test_a_question_about_another_generation_is_no_promise(worker):
    """It has been left, or is not there yet."""
    assert not said(worker.receive(worker_messages.Leave(EPOCH - 1)))
    worker.receive(worker_messages.Leave(EPOCH - 1, 4))
    assert not worker.has_promised


@pytest.mark.parametrize(
    "word",
    [
        worker_messages.Abort(EPOCH, "gone"),
        worker_messages.DropGroup(EPOCH),
        worker_messages.StopProgram("job", "over"),
    ],
)
def test_a_generation_can_be_over_in_three_ways(worker, word):
    """Aborted, prepared for nothing, or its job has ended: the main thread learns of it."""
    assert not worker.is_over(EPOCH)
    assert worker.receive(word) == [Post(word)]
    assert worker.is_over(EPOCH)


def test_an_abort_counts_for_older_generations_too(worker):
    """And takes nothing back: an older one comes late."""
    worker.receive(worker_messages.Abort(EPOCH + 1, "gone"))
    worker.receive(worker_messages.Abort(EPOCH, "gone"))
    assert [worker.is_over(generation) for generation in (EPOCH, EPOCH + 1, EPOCH + 2)] == [True, True, False]


def test_a_group_is_built_unless_it_is_over_already(worker):
    """The order to prepare it comes after the one that drops it."""
    (build,) = worker.receive(worker_messages.Prepare(ORDER))
    assert isinstance(build, PrepareGroup)
    assert (build.formation.generation, build.formation.rank, build.formation.receivers) == (EPOCH + 1, 0, (1,))
    worker.receive(worker_messages.DropGroup(EPOCH + 1))
    assert worker.receive(worker_messages.Prepare(ORDER)) == []


def test_what_only_a_process_can_do_is_left_to_it(worker):
    """Programs, questions of where it is, the end of one that is stuck; another address is news for the main thread too."""
    for message in (
        worker_messages.Cell(1, "x"),
        worker_messages.QueryPosition(EPOCH),
        worker_messages.EndHungWorker(keep=True),
    ):
        assert worker.receive(message) == [Perform(message)]
    taken = worker_messages.LoadKeptState(W, 5)
    assert worker.receive(taken) == [Post(taken)]
    moved = messages.Rehome("10.0.0.2", "eth0")
    assert worker.receive(moved) == [Perform(moved), Post(moved)]


# ---- between generations ----


def test_who_waits_for_a_world_enters_a_newer_one(worker):
    """Its own last generation is over for it, and one that was aborted before it began is left already."""
    worker.leave()
    word = worker.ready(5, clean=True, store="10.0.0.1:1")
    assert word == ev.WorkerReady(W, "job", EPOCH, 5, True, "10.0.0.1:1", True, EPOCH)
    (post,) = worker.receive(ORDER)
    worker.receive(worker_messages.Abort(EPOCH + 1, "gone"))
    assert worker.enter(post.news) is None
    assert worker.ready(5, clean=True, store="").generation == EPOCH + 1
    (post,) = worker.receive(worker_messages.Formation(EPOCH + 2, ORDER.hosts, "", 0, ()))
    assert worker.enter(post.news) is post.news
    assert (worker.commits, worker.facts.last_event) == (0, None)


@pytest.mark.parametrize("news", [None, worker_messages.Leave(EPOCH), worker_messages.DropGroup(EPOCH)])
def test_other_news_is_no_world(worker, news):
    """Whoever waits says its word again."""
    worker.leave()
    assert worker.enter(news) is None
    assert worker.left == EPOCH


def test_a_new_program_knows_nothing_of_the_last(worker):
    """But if its job is over by then, that counts."""
    worker.receive(worker_messages.Leave(EPOCH))
    worker.receive(worker_messages.StopProgram("next", "stopped by hand"))
    assert worker.quit is None
    worker.begin("next")
    assert (worker.generation, worker.left, worker.commits, worker.has_promised, worker.rank) == (0, 0, 0, False, 0)
    assert (worker.stopped("next"), worker.stopped("job")) == ("stopped by hand", None)
    assert worker.is_over(1)


# ---- what is reported ----


def progress(worker, now, line=HERE):
    """What it reports now: (for sure, the message)."""
    found = [action for action in worker.tick(now, line) if isinstance(action, Send)]
    return [
        (not action.newest, action.message)
        for action in found
        if isinstance(action.message, worker_messages.WorkerProgress)
    ]


def values(worker, now):
    return [(sure, message.report) for sure, message in progress(worker, now)]


def test_commits_are_reported_and_the_last_one_is_said(worker):
    """Only the newest report counts, so it may get lost; the first of a generation and the last of a program may not."""
    worker.telemetry.begin(5.0)
    ((sure, first),) = progress(worker, 1.0)
    assert (sure, first.first) == (True, 5.0)
    commit(worker)
    ((sure, next_),) = progress(worker, 3.0)
    assert (sure, next_.first, next_.commit) == (False, None, 1)
    commit(worker)
    worker.facts.busy = False
    ((sure, last),) = progress(worker, 5.0)
    assert (sure, last.commit) == (True, 2)


def test_rank_0_reports_more_often(worker):
    """The others only say how far they are."""
    commit(worker)
    assert len(progress(worker, 1.0)) == 1
    commit(worker)
    assert not progress(worker, 1.9)
    worker.rank = 0
    assert len(progress(worker, 2.1)) == 1
    commit(worker)
    assert len(progress(worker, 2.4)) == 1


def test_a_loss_that_is_nan_in_one_step_is_sent_at_once(worker):
    """Before the next sample is due, for sure, and though the next step's loss is a number again."""
    commit(worker)
    worker.telemetry.put({"loss": 0.5})
    progress(worker, 1.0)
    commit(worker)
    assert worker.telemetry.put({"loss": float("nan"), "step": 5.0})
    worker.telemetry.put({"loss": 0.4, "step": 6.0})
    assert values(worker, 1.01) == [(True, {"loss": None, "step": 6.0})]
    commit(worker)
    assert values(worker, 3.0) == [(False, {"loss": 0.4, "step": 6.0})]


def test_a_loss_that_stays_infinite_is_urgent_once(worker):
    """From the second sample on it is sent like any other, however many steps report it."""
    sure = []
    for second in range(1, 10, 2):
        commit(worker)
        for _ in range(3):
            worker.telemetry.put({"loss": float("inf")})
            sure += [is_sure for is_sure, _ in values(worker, second + 0.01)]
    assert sure == [True, False, False, False, False]


def test_a_nan_of_a_name_that_the_next_report_lacks_is_sent(worker):
    """As of a validation loss, which only some steps report."""
    worker.telemetry.put({"validation": float("nan")})
    worker.telemetry.put({"loss": 0.4})
    assert values(worker, 1.0) == [(True, {"loss": 0.4, "validation": None})]


def test_a_nan_after_the_last_commit_is_sent(worker):
    """The program reports it and ends: no further commit comes that would take it along."""
    commit(worker)
    progress(worker, 1.0)
    worker.telemetry.put({"loss": float("nan")})
    worker.facts.busy = False
    assert values(worker, 1.01) == [(True, {"loss": None})]


def test_a_result_comes_after_all_that_was_printed_and_reported(worker):
    """The driver is to know all of it when the program has ended; it hears the result once."""
    commit(worker)
    result = worker_messages.ProgramResult(W, "job")
    worker.program_ended(result)
    output, *rest = worker.tick(1.0, HERE)
    assert output == SendOutput()
    assert [type(message) for message in said(rest)] == [worker_messages.WorkerProgress, worker_messages.ProgramResult]
    assert not said(worker.tick(9.0, HERE))


def test_output_waits_for_a_driver_that_takes_it(worker):
    """It is away, or does not confirm what it gets."""
    crowded = LinkState(disconnected=False, congested=True, received_at=0.0)
    assert [worker.tick(1.0, line)[0].later for line in (HERE, crowded, AWAY)] == [False, True, True]


# ---- without a driver, and with a new one ----


def test_who_lost_a_connection_passes_it_on(worker):
    """Without a driver nobody aborts the others: who has raised lets them raise as well. The program's own error does not."""
    assert AbortGroup() not in worker.tick(1.0, AWAY)
    worker.raised("RuntimeError: x", intact=True)
    assert AbortGroup() not in worker.tick(1.0, AWAY)
    worker.raised("RuntimeError: x", intact=False)
    assert AbortGroup() in worker.tick(1.0, AWAY)
    assert AbortGroup() not in worker.tick(1.0, HERE)


def test_a_worker_that_nobody_comes_back_for_ends(worker):
    """The lease is over: its program stops as if by hand, with a last checkpoint; when that has ended, so does it."""
    worker._lease = 5.0
    assert EndProcess() not in worker.tick(4.0, HERE)
    news = [action.news for action in worker.tick(6.0, HERE) if isinstance(action, Post)]
    assert news == [
        worker_messages.Abort(0, "no driver has come for 5 s (lease)"),
        worker_messages.StopProgram("job", news[0].reason),
    ]
    assert worker.is_over(EPOCH)
    assert not [action for action in worker.tick(7.0, HERE) if isinstance(action, Post)]
    worker.facts.busy = False
    assert EndProcess() in worker.tick(8.0, HERE)


def test_a_new_driver_is_introduced_to_and_hears_the_result_again(worker):
    """An older one's welcome comes late, and is not answered."""
    worker.program_ended(worker_messages.ProgramResult(W, "job"))
    worker.tick(1.0, HERE)
    assert worker.receive(messages.NewDriver(2)) == [Introduce()]
    assert worker.receive(messages.NewDriver(1)) == []
    assert worker_messages.ProgramResult(W, "job") in said(worker.tick(2.0, HERE))


def test_a_new_driver_hears_that_a_promise_was_made(worker):
    """And that a generation that is over is not to be gone on with."""
    worker.receive(worker_messages.Leave(EPOCH))
    here = worker.report(1, "store")
    assert (here.job, here.busy, here.generation, here.rank, here.size) == ("job", True, EPOCH, 1, 2)
    assert (here.formed, here.holds_state, here.has_promised, here.highest_generation, here.stop_reason) == (
        True,
        True,
        True,
        EPOCH,
        "",
    )
    worker.receive(worker_messages.Abort(EPOCH + 1, "gone"))
    here = worker.report(1, "store")
    assert (here.formed, here.holds_state, here.highest_generation, here.store) == (False, True, EPOCH + 1, "store")


@pytest.mark.parametrize(("own", "stopped"), [(False, "the job is over"), (True, "")])
def test_a_new_driver_hears_who_was_told_to_stop(worker, own, stopped):
    """Why, unless it was told to end with its own error."""
    worker.receive(worker_messages.StopProgram("job", "the job is over", own=own))
    assert worker.report(1, "").stop_reason == stopped


def test_a_new_driver_hears_of_a_program_that_begins(worker):
    """Its job's name and that it runs, and nothing of what is still there of the one before."""
    worker.receive(worker_messages.StopProgram("job", "the job is over"))
    worker.facts.begin("next")
    here = worker.report(1, "")
    assert (here.job, here.busy, here.stop_reason, here.generation, here.formed) == ("next", True, "", 0, False)
    worker.begin("next")
    here = worker.report(1, "")
    assert (here.job, here.busy, here.stop_reason) == ("next", True, "")
