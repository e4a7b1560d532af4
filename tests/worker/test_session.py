"""Agreeing on the commit to leave at, without any driver."""

from __future__ import annotations

import queue
import threading
import time

import msgspec
import pytest
import torch

from nbelastic.core import messages as m
from nbelastic.core import wire
from nbelastic.core.delivery import WINDOW
from nbelastic.worker.formation import Formation
from nbelastic.worker.printed import BOUND
from nbelastic.worker.rendezvous import Group
from nbelastic.worker.session import Session, WorldAborted, WorldLeft

EPOCH = 7


@pytest.fixture
def session():
    """In the middle of an epoch; what it says stays in its link."""
    settings = {"worker": "a/0#1", "address": "127.0.0.1", "backend": "gloo", "slots": 1, "relay": "/tmp"}
    settings["heartbeat"], settings["lease"] = 1.0, 0.0
    session = Session(settings)
    session.group = Group(EPOCH, torch.device("cpu"), "gloo")
    session.commits = 3
    return session


def said(session):
    return [msgspec.json.decode(frame, type=wire.FromWorker) for frame in session.link._out]


def test_a_question_is_answered_from_within_a_step(session):
    """The others have promised to stop, and this rank waits for them in a collective: it does not get to a commit."""
    session._receive(wire.Leave(EPOCH))
    assert said(session) == [m.WorkerOffered(session.worker, EPOCH, 3)]
    passed = threading.Event()

    def train():
        session.committed(4)
        passed.set()
        with pytest.raises(WorldLeft):
            session.committed(5)

    thread = threading.Thread(target=train)
    thread.start()
    assert not passed.wait(0.2)
    session._receive(wire.Leave(EPOCH, 5))
    thread.join(20)
    assert (passed.is_set(), session.commits) == (True, 5)


def test_a_change_that_is_called_off_holds_nobody(session):
    """Asked, told to stay and asked again before the main thread has looked: the last word counts."""
    session._receive(wire.Leave(EPOCH))
    session._receive(wire.Leave(EPOCH, wire.Leave.STAY))
    session.committed(4)
    session.committed(5)
    assert not session.attention
    for message in (wire.Leave(EPOCH), wire.Leave(EPOCH, wire.Leave.STAY), wire.Leave(EPOCH), wire.Leave(EPOCH, 7)):
        session._receive(message)
    session.committed(6)
    with pytest.raises(WorldLeft):
        session.committed(7)


def test_commits_are_reported_and_the_last_one_is_said(session):
    """Only the newest report counts, so it may get lost; the first of an epoch and the last of a program may not."""
    session.account.busy = True
    session._first = 5.0
    session._send_progress(1.0)
    session.committed(4)
    session._send_progress(2.0)
    assert [message.first for message in said(session)] == [5.0]
    assert [report.commit for report in session.link._reports.values()] == [4]
    session.committed(5)
    session.account.busy = False
    session._send_progress(3.0)
    assert [message.commit for message in said(session)] == [0, 5]
    assert not session.link._reports


def reports(session):
    """Those that were sent for sure, oldest first."""
    return [message.report for message in said(session) if isinstance(message, wire.WorkerProgress)]


def test_a_loss_that_is_nan_in_one_step_is_sent_at_once(session):
    """Before the next sample is due, for sure, and though the next step's loss is a number again."""
    session.account.busy = True
    session.committed(4)
    session.report({"loss": 0.5})
    session._send_progress(1.0)
    session.committed(5)
    session.report({"loss": float("nan"), "step": 5.0})
    session.report({"loss": 0.4, "step": 6.0})
    session._send_progress(1.01)
    assert reports(session) == [{"loss": None, "step": 6.0}]
    session.committed(6)
    session._send_progress(2.0)
    assert [message.report for message in session.link._reports.values()] == [{"loss": 0.4, "step": 6.0}]


def test_a_loss_that_stays_infinite_is_urgent_once(session):
    """From the second sample on it is sent like any other, however many steps report it."""
    session.account.busy = True
    for second in range(1, 5):
        session.committed(3 + second)
        for _ in range(3):
            session.report({"loss": float("inf")})
            session._send_progress(second + 0.01)
    assert reports(session) == [{"loss": None}]


def test_a_nan_of_a_name_that_the_next_report_lacks_is_sent(session):
    """As of a validation loss, which only some steps report."""
    session.account.busy = True
    session.report({"validation": float("nan")})
    session.report({"loss": 0.4})
    session._send_progress(1.0)
    assert reports(session) == [{"loss": 0.4, "validation": None}]


def test_a_nan_after_the_last_commit_is_sent(session):
    """The program reports it and ends: no further commit comes that would take it along."""
    session.account.busy = True
    session.committed(4)
    session._send_progress(1.0)
    session.report({"loss": float("nan")})
    session.account.busy = False
    session._send_progress(1.01)
    assert reports(session)[-1] == {"loss": None}


@pytest.fixture
def gpu(session, monkeypatch):
    """`gpu(then)`: this worker has one, which calls `then()` when it has done what is under way. Returns what was called."""
    calls = []

    def pretend(then=lambda: None):
        class Stream:
            def synchronize(self):
                calls.append("stream")

        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda where: (calls.append(str(where)), then()))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
        monkeypatch.setattr(session.group, "leave", lambda: calls.append("leave"))
        return calls

    return pretend


def test_what_is_under_way_on_the_gpu_ends_before_a_group_is_left(session, gpu):
    """A collective after the last step is not cut off: the whole GPU is waited for, whichever stream it is on."""
    calls = gpu()
    session._receive(wire.Leave(EPOCH, 4))
    with pytest.raises(WorldLeft):
        session.committed(4)
    session.leave_group()
    assert calls == ["cuda:0", "stream", "leave"]


def test_a_collective_that_was_aborted_on_the_gpu_is_not_taken_for_complete(session, gpu):
    """The abort comes while the rank waits for it at the commit where all leave: this rank goes back."""
    gpu(lambda: session._receive(wire.Abort(EPOCH, "gone")))
    session._receive(wire.Leave(EPOCH, 4))
    with pytest.raises(WorldAborted):
        session.committed(4)


def test_without_a_gpu_nothing_is_waited_for(session, monkeypatch):
    """Nor is CUDA asked for a device."""
    monkeypatch.setattr(torch.cuda, "is_available", None)
    session._receive(wire.Leave(EPOCH, 4))
    with pytest.raises(WorldLeft):
        session.committed(4)


def test_output_waits_while_the_driver_confirms_nothing(session):
    """What is printed meanwhile is bounded; its end is sent when the driver has caught up."""
    session.account.busy = True
    for _ in range(WINDOW):
        session.link._delivery.say(b"word")
    session.printed.write("out", "x" * 100_000)
    session._tick()
    session.printed.write("out", "the end")
    session._tick()
    assert not [message for message in said(session) if isinstance(message, wire.WorkerOutput)]
    session.link._delivery.give_up()
    session._tick()
    (output,) = [message for message in said(session) if isinstance(message, wire.WorkerOutput)]
    assert (len(output.text), output.text[-7:], output.end) == (BOUND, "the end", 100_007)


def test_news_of_another_epoch_changes_nothing(session):
    """The question was about a group that has been left."""
    session._receive(wire.Leave(EPOCH - 1))
    session._receive(wire.Leave(EPOCH - 1, 4))
    session.committed(4)
    assert said(session) == []


def test_what_comes_while_one_listens_is_not_overheard(session):
    """A message arrives after the last look into the inbox: the next commit looks again."""

    class Late:
        def __init__(self, inner):
            self.inner, self.put, self.empty, self.message = inner, inner.put, inner.empty, wire.Leave(EPOCH)

        def get_nowait(self):
            try:
                return self.inner.get_nowait()
            except queue.Empty:
                message, self.message = self.message, None
                if message is not None:
                    session._receive(message)
                raise

    session._inbox = Late(session._inbox)
    session.attention = True
    session.committed(4)
    assert session.attention
    assert said(session) == [m.WorkerOffered(session.worker, EPOCH, 4)]


def test_a_new_driver_hears_that_a_promise_was_made(session):
    """And that an epoch that is over is not to be gone on with; what was said before is not said again."""
    session.job = session.account.job = "job"
    session.formation = Formation(EPOCH, 1, 2, 1, 2, 0, 1, "", 0, (), (("a", 2),))
    session.account.busy = session.account.formed = session.account.holds = True
    session._receive(wire.Leave(EPOCH))
    session._receive(wire.Welcome(2))
    (here,) = said(session)
    assert (here.job, here.busy, here.epoch, here.rank, here.size) == ("job", True, EPOCH, 1, 2)
    assert (here.formed, here.holds, here.bound, here.numbered, here.stopped) == (True, True, True, EPOCH, "")
    session._receive(wire.Abort(EPOCH + 1, "gone"))
    session._receive(wire.Welcome(3))
    session._receive(wire.Welcome(2))
    (here,) = said(session)
    assert (here.formed, here.holds, here.numbered) == (False, True, EPOCH + 1)


@pytest.mark.parametrize(("own", "stopped"), [(False, "the job is over"), (True, "")])
def test_a_new_driver_hears_who_was_told_to_stop(session, own, stopped):
    """Why, unless it was told to end with its own error."""
    session.job = session.account.job = "job"
    session._receive(wire.Quit("job", "the job is over", own=own))
    session._receive(wire.Welcome(2))
    (here,) = said(session)
    assert (here.job, here.stopped) == ("job", stopped)


def test_a_new_driver_hears_of_a_program_that_begins(session):
    """Its job's name and that it runs, and nothing of what is still there of the one before."""
    session.job = "job-1"
    session._receive(wire.Quit("job-1", "the job is over"))
    heard = []

    def warming():
        session._receive(wire.Welcome(2))
        heard.extend(said(session))

    session.warm_up.wait = warming
    session.account.begin("job-2")
    session.begin("job-2")
    (here,) = heard
    assert (here.job, here.busy, here.stopped, here.epoch, here.formed) == ("job-2", True, "", 0, False)
    session._receive(wire.Welcome(3))
    (here,) = said(session)
    assert (here.job, here.busy, here.stopped) == ("job-2", True, "")


def test_a_transfer_that_an_abort_does_not_wake_is_left_behind(session):
    """The main thread goes on; what the transfer writes to is used by nobody any more."""
    held = threading.Event()
    session._receive(wire.Abort(EPOCH, "gone"))
    with pytest.raises(WorldAborted):
        session.apart(held.wait)
    held.set()


def test_a_transfer_says_how_it_ended(session):
    """Its result, or its own error; also when the abort has come by then."""
    assert session.apart(lambda: 7) == 7
    session._receive(wire.Abort(EPOCH, "gone"))
    assert session.apart(lambda: 8) == 8
    with pytest.raises(RuntimeError, match="Connection closed"):
        session.apart(lambda: Failing().wait())


class Failing:
    def wait(self):
        raise RuntimeError("Connection closed by peer")


def test_a_worker_that_hangs_while_it_closes_a_group_ends(session, monkeypatch):
    """Nobody else waits for it in that epoch: it is replaced after some seconds."""
    ended = []
    monkeypatch.setattr(session, "_end_stuck", lambda: ended.append(1))
    monkeypatch.setattr("nbelastic.worker.stuck.Blocked.stuck_for", lambda *_: 1.0)
    session._left, session.group, session._left_at = session.group, None, time.monotonic()
    session._tick()
    assert ended == []
    session._left_at -= 60
    session._tick()
    assert ended == [1]
