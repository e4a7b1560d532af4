"""How a worker answers the driver's messages: no process, no socket, no clock."""

from __future__ import annotations

import pytest

from nbelastic.protocol import cell_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.worker.protocol import (
    AbortGroup,
    EndProcess,
    Introduce,
    LinkState,
    Perform,
    Post,
    PrepareGroup,
    Send,
    SendOutput,
)
from tests.worker.worker_protocol import CONNECTED, DISCONNECTED, GENERATION, W, commit, sent

FORMATION = worker_messages.Formation(GENERATION + 1, (("a", (0, 1)),), "10.0.0.1:1", 0, ((1, 2),))


# ---- changes ----


def test_the_question_whether_to_leave_is_answered_at_once(worker):
    """Other ranks may wait for this one before its next commit: the answer does not wait for the main thread."""
    question = worker_messages.Leave(GENERATION, ask=2)
    assert worker.receive(question) == [Send(ev.LeaveAcknowledged(W, GENERATION, 3, 2)), Post(question)]
    assert (worker.pause_at, worker.has_promised) == (4, True)
    worker.receive(worker_messages.Leave(GENERATION, 6))
    assert (worker.pause_at, worker.leave_at, worker.has_promised) == (None, 6, True)
    worker.receive(worker_messages.Leave(GENERATION, worker_messages.Leave.STAY))
    assert not worker.has_promised


def test_a_halt_binds_until_the_driver_lets_the_worker_train_on(worker):
    """It stands still at the agreed commit and at no other; a halt of another generation has no effect."""
    worker.receive(worker_messages.Halt(GENERATION - 1, 4))
    assert not worker.has_promised
    order = worker_messages.Halt(GENERATION, 5)
    assert worker.receive(order) == [Post(order)]
    assert (worker.pause_at, worker.has_promised, worker.stands_still) == (5, True, False)
    commit(worker)
    commit(worker)
    assert worker.stands_still
    worker.receive(worker_messages.Leave(GENERATION, worker_messages.Leave.STAY))
    assert not worker.has_promised
    assert not worker.stands_still


def test_steps_are_timed_between_a_worlds_first_commit_and_its_end(worker):
    """Many workers that form a world on few processors need them. A rank alone waits for no other."""
    assert worker.is_timing_steps
    worker.commits = 0
    assert not worker.is_timing_steps
    commit(worker)
    worker.receive(worker_messages.Abort(GENERATION, "a rank was lost"))
    assert not worker.is_timing_steps
    worker.leave()
    assert not worker.is_timing_steps


def test_a_question_about_another_generation_is_not_answered(worker):
    """That generation was left, or has not begun."""
    assert not sent(worker.receive(worker_messages.Leave(GENERATION - 1)))
    worker.receive(worker_messages.Leave(GENERATION - 1, 4))
    assert not worker.has_promised


@pytest.mark.parametrize(
    "word",
    [
        worker_messages.Abort(GENERATION, "gone"),
        worker_messages.DropGroup(GENERATION),
        worker_messages.StopProgram("job", "over"),
    ],
)
def test_a_generation_can_be_over_in_three_ways(worker, word):
    """It is aborted, its preparation is dropped, or its job has ended: the main thread is informed."""
    assert not worker.is_over(GENERATION)
    assert worker.receive(word) == [Post(word)]
    assert worker.is_over(GENERATION)


def test_an_abort_counts_for_older_generations_too(worker):
    """A late abort of an older generation changes nothing."""
    worker.receive(worker_messages.Abort(GENERATION + 1, "gone"))
    worker.receive(worker_messages.Abort(GENERATION, "gone"))
    assert [worker.is_over(generation) for generation in (GENERATION, GENERATION + 1, GENERATION + 2)] == [
        True,
        True,
        False,
    ]


def test_a_group_is_built_unless_it_is_over_already(worker):
    """The message to prepare it may arrive after the one that drops it."""
    (build,) = worker.receive(worker_messages.Prepare(FORMATION))
    assert isinstance(build, PrepareGroup)
    assert (build.formation.generation, build.formation.rank, build.formation.receivers) == (GENERATION + 1, 0, (1,))
    worker.receive(worker_messages.DropGroup(GENERATION + 1))
    assert worker.receive(worker_messages.Prepare(FORMATION)) == []


def test_what_only_a_process_can_do_is_left_to_it(worker):
    """Programs, questions about the position, the end of a hung worker. The main thread too learns of a new address."""
    for message in (
        cell_messages.Cell(1, "x"),
        worker_messages.QueryPosition(GENERATION),
        worker_messages.EndHungWorker(keep=True),
    ):
        assert worker.receive(message) == [Perform(message)]
    taken = worker_messages.LoadKeptState(W, 5)
    assert worker.receive(taken) == [Post(taken)]
    moved = messages.Rehome("10.0.0.2", "eth0")
    assert worker.receive(moved) == [Perform(moved), Post(moved)]


# ---- between generations ----


def test_a_worker_that_waits_for_a_world_enters_a_newer_one(worker):
    """Its own last generation is over, and a generation that was aborted before it began counts as left."""
    worker.leave()
    word = worker.ready(5, clean=True, store="10.0.0.1:1")
    assert word == ev.WorkerReady(W, "job", GENERATION, 5, True, "10.0.0.1:1", True, GENERATION)
    (post,) = worker.receive(FORMATION)
    worker.receive(worker_messages.Abort(GENERATION + 1, "gone"))
    assert worker.enter(post.news) is None
    assert worker.ready(5, clean=True, store="").generation == GENERATION + 1
    (post,) = worker.receive(worker_messages.Formation(GENERATION + 2, FORMATION.hosts, "", 0, ()))
    assert worker.enter(post.news) is post.news
    assert (worker.commits, worker.facts.last_event) == (0, None)


@pytest.mark.parametrize("news", [None, worker_messages.Leave(GENERATION), worker_messages.DropGroup(GENERATION)])
def test_other_messages_begin_no_world(worker, news):
    """A worker that waits then reports again that it is ready."""
    worker.leave()
    assert worker.enter(news) is None
    assert worker.left == GENERATION


def test_a_new_program_knows_nothing_of_the_last(worker):
    """If its job is over already, the worker knows that."""
    worker.receive(worker_messages.Leave(GENERATION))
    worker.receive(worker_messages.StopProgram("next", "stopped by hand"))
    assert worker.quit is None
    worker.begin("next")
    assert (worker.generation, worker.left, worker.commits, worker.has_promised, worker.rank) == (0, 0, 0, False, 0)
    assert (worker.stopped("next"), worker.stopped("job")) == ("stopped by hand", None)
    assert worker.is_over(1)


# ---- what is reported ----


def test_a_result_comes_after_all_that_was_printed_and_reported(worker):
    """The driver has all output and reports when the program has ended; it receives the result once."""
    commit(worker)
    result = worker_messages.ProgramResult(W, "job")
    worker.program_ended(result)
    output, *rest = worker.tick(1.0, CONNECTED)
    assert output == SendOutput()
    assert [type(message) for message in sent(rest)] == [worker_messages.WorkerProgress, worker_messages.ProgramResult]
    assert not sent(worker.tick(9.0, CONNECTED))


def test_output_waits_for_a_driver_that_takes_it(worker):
    """The driver is disconnected, or does not acknowledge messages."""
    congested_link = LinkState(disconnected=False, congested=True, received_at=0.0)
    links = (CONNECTED, congested_link, DISCONNECTED)
    assert [worker.tick(1.0, link)[0].later for link in links] == [False, True, True]


# ---- without a driver, and with a new one ----


def test_a_worker_that_lost_a_connection_aborts_its_group(worker):
    """Without a driver, a rank that lost a connection aborts its group, so that others raise too; the program's own error does not."""
    assert AbortGroup() not in worker.tick(1.0, DISCONNECTED)
    worker.raised("RuntimeError: x", intact=True)
    assert AbortGroup() not in worker.tick(1.0, DISCONNECTED)
    worker.raised("RuntimeError: x", intact=False)
    assert AbortGroup() in worker.tick(1.0, DISCONNECTED)
    assert AbortGroup() not in worker.tick(1.0, CONNECTED)


def test_a_worker_that_has_left_an_aborted_group_aborts_it_for_all(worker):
    """The abort may not have reached the others, and there is no driver. After a planned change they may need its connections."""
    worker.leave()
    assert AbortGroup() not in worker.tick(1.0, DISCONNECTED)
    worker.receive(worker_messages.Abort(GENERATION, "a worker was lost"))
    assert AbortGroup() not in worker.tick(1.0, CONNECTED)
    assert AbortGroup() in worker.tick(1.0, DISCONNECTED)
    worker.generation = GENERATION + 1
    assert AbortGroup() not in worker.tick(1.0, DISCONNECTED)


def test_a_worker_without_a_driver_ends_after_its_lease(worker):
    """The lease has expired: its program stops as on request, with a last checkpoint; then the worker ends."""
    worker._lease = 5.0
    assert EndProcess() not in worker.tick(4.0, CONNECTED)
    news = [action.news for action in worker.tick(6.0, CONNECTED) if isinstance(action, Post)]
    assert news == [
        worker_messages.Abort(0, "no driver has come for 5 s (lease)"),
        worker_messages.StopProgram("job", news[0].reason),
    ]
    assert worker.is_over(GENERATION)
    assert not [action for action in worker.tick(7.0, CONNECTED) if isinstance(action, Post)]
    worker.facts.busy = False
    assert EndProcess() in worker.tick(8.0, CONNECTED)


def test_a_new_driver_receives_an_introduction_and_the_result(worker):
    """The late welcome of an older driver is not answered."""
    worker.program_ended(worker_messages.ProgramResult(W, "job"))
    worker.tick(1.0, CONNECTED)
    assert worker.receive(messages.NewDriver(2)) == [Introduce()]
    assert worker.receive(messages.NewDriver(1)) == []
    assert worker_messages.ProgramResult(W, "job") in sent(worker.tick(2.0, CONNECTED))


def test_the_report_shows_what_was_acknowledged_and_what_is_over(worker):
    """The report also shows that a generation is over."""
    worker.receive(worker_messages.Leave(GENERATION))
    here = worker.report(1, "store")
    assert (here.job, here.busy, here.generation, here.rank, here.size) == ("job", True, GENERATION, 1, 2)
    assert (here.formed, here.holds_state, here.has_promised, here.highest_generation, here.stop_reason) == (
        True,
        True,
        True,
        GENERATION,
        "",
    )
    worker.receive(worker_messages.Abort(GENERATION + 1, "gone"))
    here = worker.report(1, "store")
    assert (here.formed, here.holds_state, here.highest_generation, here.store) == (
        False,
        True,
        GENERATION + 1,
        "store",
    )


@pytest.mark.parametrize(
    "end", [worker_messages.Leave(GENERATION, worker_messages.Leave.STAY), worker_messages.Halt(GENERATION, 9)]
)
def test_a_new_driver_does_not_continue_a_world_in_which_a_cell_runs(worker, end):
    """The cell may have changed one rank only, and no driver has compared the ranks."""
    worker.receive(worker_messages.Halt(GENERATION, 3))
    assert worker.report(1, "").formed
    worker.receive(cell_messages.CommitCell(GENERATION, 1, "pass", 30.0, everywhere=True))
    assert not worker.report(1, "").formed
    worker.receive(end)
    assert worker.report(1, "").formed


@pytest.mark.parametrize(("own", "stopped"), [(False, "the job is over"), (True, "")])
def test_the_report_shows_why_a_program_stops(worker, own, stopped):
    """The report has the reason, unless the program was to end with its own error."""
    worker.receive(worker_messages.StopProgram("job", "the job is over", own=own))
    assert worker.report(1, "").stop_reason == stopped


@pytest.mark.parametrize(("named", "turns"), [(True, (0, 0)), (False, (None, None)), (None, (None, 2))])
def test_who_writes_the_last_checkpoint(worker, named, turns):
    """The worker that the driver has named first. Without a driver, rank 1 writes as the second, if no other has."""
    for writes in (named, None):
        worker.receive(worker_messages.StopProgram("job", "the job is over", writes=writes))
    assert tuple(worker.last_turn(disconnected=one) for one in (False, True)) == turns


def test_the_report_shows_a_program_that_begins(worker):
    """The report has its job's name and that it runs, and nothing of the program before."""
    worker.receive(worker_messages.StopProgram("job", "the job is over"))
    worker.facts.begin("next")
    here = worker.report(1, "")
    assert (here.job, here.busy, here.stop_reason, here.generation, here.formed) == ("next", True, "", 0, False)
    worker.begin("next")
    here = worker.report(1, "")
    assert (here.job, here.busy, here.stop_reason) == ("next", True, "")
