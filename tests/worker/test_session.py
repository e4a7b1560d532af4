"""Agreeing on the leave point, aborts and the GPU, without any driver."""

from __future__ import annotations

import math
import queue
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import torch

from nbelastic.protocol import cell_messages, messages, worker_messages
from nbelastic.protocol import events as ev
from nbelastic.transport.delivery import WINDOW
from nbelastic.worker import process_group
from nbelastic.worker.interrupts import WorldAborted, WorldLeft
from nbelastic.worker.link_thread import LinkThread
from nbelastic.worker.output_buffer import MAX_TEXT
from nbelastic.worker.process_group import Group
from nbelastic.worker.protocol import EndProcess
from nbelastic.worker.session import Session
from nbelastic.worker.threads import run_in_thread

GENERATION = 7


@pytest.fixture
def session():
    """It is in a generation; what it sends stays in its link."""
    settings = {"worker": "a/0#1", "address": "127.0.0.1", "relay": "/tmp"}
    settings["heartbeat"], settings["lease"] = 1.0, math.inf
    session = Session(settings)
    session.groups.present = Group(GENERATION)
    session._protocol.generation, session._protocol.commits = GENERATION, 3
    return session


def sent(session):
    return [msgspec.json.decode(frame, type=worker_messages.FromWorker) for frame in session.link._queue]


def test_a_question_is_answered_from_within_a_step(session):
    """Ranks that have answered stop at a commit. This rank waits for them in a collective, before its own commit."""
    session._link_thread.receive(worker_messages.Leave(GENERATION))
    assert sent(session) == [ev.LeaveAcknowledged(session.worker, GENERATION, 3)]
    passed = threading.Event()

    def train():
        session.committed(4)
        passed.set()
        with pytest.raises(WorldLeft):
            session.committed(5)

    thread = threading.Thread(target=train)
    thread.start()
    assert not passed.wait(0.2)
    session._link_thread.receive(worker_messages.Leave(GENERATION, 5))
    thread.join(20)
    assert (passed.is_set(), session._protocol.commits) == (True, 5)


def test_a_worker_reports_once_that_it_has_left_a_broken_world(session):
    """It has not read the abort of that world, as NCCL raises nothing: that makes it report nothing again."""
    session._link_thread.receive(worker_messages.Abort(GENERATION, "a worker was lost"))
    gathering = run_in_thread(lambda: session.gather(SimpleNamespace(position=(4, True))))
    formation = worker_messages.Formation(GENERATION + 1, (("a", (0,)),), "127.0.0.1:1", 0, ())
    session._link_thread.receive(formation)
    assert gathering.result(10)[0].generation == GENERATION + 1
    assert [type(one) for one in sent(session)] == [ev.WorkerReady]


def test_a_cancelled_change_stops_no_rank(session):
    """The driver asks, cancels and asks again before the main thread reads its inbox: the newest message counts."""
    session._link_thread.receive(worker_messages.Leave(GENERATION))
    session._link_thread.receive(worker_messages.Leave(GENERATION, worker_messages.Leave.STAY))
    session.committed(4)
    session.committed(5)
    assert not session._inbox.attention
    for message in (
        worker_messages.Leave(GENERATION),
        worker_messages.Leave(GENERATION, worker_messages.Leave.STAY),
        worker_messages.Leave(GENERATION),
        worker_messages.Leave(GENERATION, 7),
    ):
        session._link_thread.receive(message)
    session.committed(6)
    with pytest.raises(WorldLeft):
        session.committed(7)


@pytest.fixture
def gpu(session, monkeypatch):
    """`gpu(then)`: pretend a GPU that calls `then()` when it has finished its work. Returns the list of calls."""
    calls = []

    def pretend(then=lambda: None):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: (calls.append("all streams"), then()))
        monkeypatch.setattr(session.groups.present, "leave", lambda **_: calls.append("leave"))
        return calls

    return pretend


def test_what_is_under_way_on_the_gpu_ends_before_a_group_is_left(session, gpu):
    """Leaving waits for all streams of the GPU, so that a collective after the last step completes."""
    calls = gpu()
    session._link_thread.receive(worker_messages.Leave(GENERATION, 4))
    with pytest.raises(WorldLeft):
        session.committed(4)
    session.leave_group()
    assert calls == ["all streams", "leave"]


def test_a_collective_that_was_aborted_on_the_gpu_is_not_taken_for_complete(session, gpu):
    """The abort arrives while the rank waits for the GPU at the leave point: this rank restores its commit."""
    gpu(lambda: session._link_thread.receive(worker_messages.Abort(GENERATION, "gone")))
    session._link_thread.receive(worker_messages.Leave(GENERATION, 4))
    with pytest.raises(WorldAborted):
        session.committed(4)


def test_without_a_gpu_nothing_is_waited_for(session, monkeypatch):
    """CUDA is not asked for a device either."""
    monkeypatch.setattr(torch.cuda, "is_available", None)
    session._link_thread.receive(worker_messages.Leave(GENERATION, 4))
    with pytest.raises(WorldLeft):
        session.committed(4)


def test_output_waits_while_the_driver_confirms_nothing(session):
    """The buffered output is bounded; its end is sent when the driver has acknowledged messages."""
    session.facts.busy = True
    for _ in range(WINDOW):
        session.link._delivery.enqueue(b"word")
    session.output.write("out", "x" * 100_000)
    session._link_thread.tick()
    session.output.write("out", "the end")
    session._link_thread.tick()
    assert not [message for message in sent(session) if isinstance(message, messages.WorkerOutput)]
    session.link._delivery.reset()
    session._link_thread.tick()
    (output,) = [message for message in sent(session) if isinstance(message, messages.WorkerOutput)]
    assert (len(output.text), output.text[-7:], output.end) == (MAX_TEXT, "the end", 100_007)


def test_an_error_in_one_action_loses_no_other(session, monkeypatch):
    """The output cannot be sent: the program's result is, and the job ends."""
    session._protocol.program_ended(worker_messages.ProgramResult(session.worker, "job"))
    monkeypatch.setattr(session.output, "take", lambda: 1 / 0)
    session._link_thread.tick()
    assert worker_messages.ProgramResult in map(type, sent(session))


def test_a_message_about_another_generation_changes_nothing(session):
    """The question was about a group that was left."""
    session._link_thread.receive(worker_messages.Leave(GENERATION - 1))
    session._link_thread.receive(worker_messages.Leave(GENERATION - 1, 4))
    session.committed(4)
    assert sent(session) == []


def test_a_message_that_arrives_while_the_inbox_is_read_is_not_lost(session):
    """A message arrives after the inbox was read: the next commit reads it again."""

    class Late:
        def __init__(self, inner):
            self.inner, self.put, self.empty, self.message = (
                inner,
                inner.put,
                inner.empty,
                worker_messages.Leave(GENERATION),
            )

        def get(self, timeout):
            try:
                return self.inner.get(timeout)
            except queue.Empty:
                message, self.message = self.message, None
                if message is not None:
                    session._link_thread.receive(message)
                raise

    session._inbox._queue = Late(session._inbox._queue)
    session._inbox.attention = True
    session.committed(4)
    assert session._inbox.attention
    assert sent(session) == [ev.LeaveAcknowledged(session.worker, GENERATION, 4)]


def test_a_transfer_that_an_abort_does_not_wake_is_left_behind(session):
    """The main thread goes on; nothing else uses the memory that the transfer writes to."""
    held = threading.Event()
    session._link_thread.receive(worker_messages.Abort(GENERATION, "gone"))
    with pytest.raises(WorldAborted):
        session.run_abortable(held.wait)
    held.set()


def test_a_transfer_returns_its_result_or_raises(session):
    """`run_abortable` returns its result or raises its error, also after an abort."""
    assert session.run_abortable(lambda: 7) == 7
    session._link_thread.receive(worker_messages.Abort(GENERATION, "gone"))
    assert session.run_abortable(lambda: 8) == 8
    with pytest.raises(RuntimeError, match="Connection closed"):
        session.run_abortable(lambda: Failing().wait())


class Failing:
    def wait(self):
        raise RuntimeError("Connection closed by peer")


def test_a_worker_that_hangs_while_it_closes_a_group_ends(session, monkeypatch):
    """No other rank waits for it in that generation: it is replaced after some seconds."""
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
    """The lease does not run while the process is frozen, for example in a paused container."""
    session._protocol._lease = 5.0
    session.link.heard_at = time.monotonic() - 60.0
    session._link_thread._ticked_at = time.monotonic() - 30.0
    done = []
    monkeypatch.setattr(session._link_thread, "_carry_out", done.extend)
    session._link_thread.tick()
    session._link_thread.tick()
    assert not [action for action in done if isinstance(action, EndProcess)]


def test_the_main_thread_ends_its_world_while_the_driver_asks(session, monkeypatch):
    """The link's thread still passes on the interrupt of a cell, and answers where the worker is."""
    worlds, holders = (
        iter([SimpleNamespace(_device_types=()), None]),
        iter([SimpleNamespace(commit_cells=Cells()), None]),
    )
    monkeypatch.setattr(LinkThread, "holder", property(lambda _: next(holders)), raising=False)
    monkeypatch.setattr(process_group.dist, "group", Worlds(worlds))
    passed = []
    session._link_thread.run = passed.append
    session._link_thread.receive(cell_messages.InterruptCell(3))
    session._link_thread.receive(worker_messages.QueryPosition(GENERATION))
    assert passed == [cell_messages.InterruptCell(3)]
    assert [type(message) for message in sent(session)] == [ev.PositionReported]


class Cells:
    def interrupt(self, number):
        """No cell runs at a commit."""


class Worlds:
    def __init__(self, worlds):
        self._worlds = worlds

    @property
    def WORLD(self):
        return next(self._worlds)
