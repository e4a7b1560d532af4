"""Agreeing on the commit to leave at, without any driver."""

from __future__ import annotations

import math
import queue
import threading
import time

import msgspec
import pytest
import torch

from nbelastic.protocol import events as ev
from nbelastic.protocol import messages, worker_messages
from nbelastic.transport.delivery import WINDOW
from nbelastic.worker.interrupts import WorldAborted, WorldLeft
from nbelastic.worker.output_buffer import MAX_TEXT
from nbelastic.worker.process_group import Group
from nbelastic.worker.protocol import EndProcess
from nbelastic.worker.session import Session

EPOCH = 7


@pytest.fixture
def session():
    """In the middle of a generation; what it says stays in its link."""
    settings = {"worker": "a/0#1", "address": "127.0.0.1", "backend": "gloo", "slots": 1, "relay": "/tmp"}
    settings["heartbeat"], settings["lease"] = 1.0, math.inf
    session = Session(settings)
    session.groups.present = Group(EPOCH, torch.device("cpu"), "gloo")
    session._protocol.generation, session._protocol.commits = EPOCH, 3
    return session


def said(session):
    return [msgspec.json.decode(frame, type=worker_messages.FromWorker) for frame in session.link._queue]


def test_a_question_is_answered_from_within_a_step(session):
    """The others have promised to stop, and this rank waits for them in a collective: it does not get to a commit."""
    session._link_thread.receive(worker_messages.Leave(EPOCH))
    assert said(session) == [ev.LeaveAcknowledged(session.worker, EPOCH, 3)]
    passed = threading.Event()

    def train():
        session.committed(4)
        passed.set()
        with pytest.raises(WorldLeft):
            session.committed(5)

    thread = threading.Thread(target=train)
    thread.start()
    assert not passed.wait(0.2)
    session._link_thread.receive(worker_messages.Leave(EPOCH, 5))
    thread.join(20)
    assert (passed.is_set(), session._protocol.commits) == (True, 5)


def test_a_change_that_is_called_off_holds_nobody(session):
    """Asked, told to stay and asked again before the main thread has looked: the last word counts."""
    session._link_thread.receive(worker_messages.Leave(EPOCH))
    session._link_thread.receive(worker_messages.Leave(EPOCH, worker_messages.Leave.STAY))
    session.committed(4)
    session.committed(5)
    assert not session._inbox.attention
    for message in (
        worker_messages.Leave(EPOCH),
        worker_messages.Leave(EPOCH, worker_messages.Leave.STAY),
        worker_messages.Leave(EPOCH),
        worker_messages.Leave(EPOCH, 7),
    ):
        session._link_thread.receive(message)
    session.committed(6)
    with pytest.raises(WorldLeft):
        session.committed(7)


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
        monkeypatch.setattr(session.groups.present, "leave", lambda: calls.append("leave"))
        return calls

    return pretend


def test_what_is_under_way_on_the_gpu_ends_before_a_group_is_left(session, gpu):
    """A collective after the last step is not cut off: the whole GPU is waited for, whichever stream it is on."""
    calls = gpu()
    session._link_thread.receive(worker_messages.Leave(EPOCH, 4))
    with pytest.raises(WorldLeft):
        session.committed(4)
    session.leave_group()
    assert calls == ["cuda:0", "stream", "leave"]


def test_a_collective_that_was_aborted_on_the_gpu_is_not_taken_for_complete(session, gpu):
    """The abort comes while the rank waits for it at the commit where all leave: this rank goes back."""
    gpu(lambda: session._link_thread.receive(worker_messages.Abort(EPOCH, "gone")))
    session._link_thread.receive(worker_messages.Leave(EPOCH, 4))
    with pytest.raises(WorldAborted):
        session.committed(4)


def test_without_a_gpu_nothing_is_waited_for(session, monkeypatch):
    """Nor is CUDA asked for a device."""
    monkeypatch.setattr(torch.cuda, "is_available", None)
    session._link_thread.receive(worker_messages.Leave(EPOCH, 4))
    with pytest.raises(WorldLeft):
        session.committed(4)


def test_output_waits_while_the_driver_confirms_nothing(session):
    """What is printed meanwhile is bounded; its end is sent when the driver has caught up."""
    session.facts.busy = True
    for _ in range(WINDOW):
        session.link._delivery.enqueue(b"word")
    session.output.write("out", "x" * 100_000)
    session._link_thread.tick()
    session.output.write("out", "the end")
    session._link_thread.tick()
    assert not [message for message in said(session) if isinstance(message, messages.WorkerOutput)]
    session.link._delivery.reset()
    session._link_thread.tick()
    (output,) = [message for message in said(session) if isinstance(message, messages.WorkerOutput)]
    assert (len(output.text), output.text[-7:], output.end) == (MAX_TEXT, "the end", 100_007)


def test_news_of_another_generation_changes_nothing(session):
    """The question was about a group that has been left."""
    session._link_thread.receive(worker_messages.Leave(EPOCH - 1))
    session._link_thread.receive(worker_messages.Leave(EPOCH - 1, 4))
    session.committed(4)
    assert said(session) == []


def test_what_comes_while_one_listens_is_not_overheard(session):
    """A message arrives after the last look into the inbox: the next commit looks again."""

    class Late:
        def __init__(self, inner):
            self.inner, self.put, self.empty, self.message = inner, inner.put, inner.empty, worker_messages.Leave(EPOCH)

        def get_nowait(self):
            try:
                return self.inner.get_nowait()
            except queue.Empty:
                message, self.message = self.message, None
                if message is not None:
                    session._link_thread.receive(message)
                raise

    session._inbox._queue = Late(session._inbox._queue)
    session._inbox.attention = True
    session.committed(4)
    assert session._inbox.attention
    assert said(session) == [ev.LeaveAcknowledged(session.worker, EPOCH, 4)]


def test_a_transfer_that_an_abort_does_not_wake_is_left_behind(session):
    """The main thread goes on; what the transfer writes to is used by nobody any more."""
    held = threading.Event()
    session._link_thread.receive(worker_messages.Abort(EPOCH, "gone"))
    with pytest.raises(WorldAborted):
        session.run_abortable(held.wait)
    held.set()


def test_a_transfer_says_how_it_ended(session):
    """Its result, or its own error; also when the abort has come by then."""
    assert session.run_abortable(lambda: 7) == 7
    session._link_thread.receive(worker_messages.Abort(EPOCH, "gone"))
    assert session.run_abortable(lambda: 8) == 8
    with pytest.raises(RuntimeError, match="Connection closed"):
        session.run_abortable(lambda: Failing().wait())


class Failing:
    def wait(self):
        raise RuntimeError("Connection closed by peer")


def test_a_worker_that_hangs_while_it_closes_a_group_ends(session, monkeypatch):
    """Nobody else waits for it in that generation: it is replaced after some seconds."""
    ended = []
    monkeypatch.setattr(session._link_thread, "_end_hung", lambda: ended.append(1))
    monkeypatch.setattr("nbelastic.worker.hang_detector.MainThread.hangs_for", lambda *_: 1.0)
    session.groups._closing, session.groups.present, session.groups._closing_since = (
        session.groups.present,
        None,
        time.monotonic(),
    )
    session._link_thread.tick()
    assert ended == []
    session.groups._closing_since -= 60
    session._link_thread.tick()
    assert ended == [1]


def test_a_worker_that_was_stopped_waits_for_what_was_sent_meanwhile(session, monkeypatch):
    """The lease does not run while its process does not: docker pauses it, say, with all the others."""
    session._protocol._lease = 5.0
    session.link.heard_at = time.monotonic() - 60.0
    session._link_thread._ticked_at = time.monotonic() - 30.0
    done = []
    monkeypatch.setattr(session._link_thread, "_carry_out", done.extend)
    session._link_thread.tick()
    session._link_thread.tick()
    assert not [action for action in done if isinstance(action, EndProcess)]
