"""A main thread that hangs in an aborted collective, and one that is busy."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed._functional_collectives import wait_tensor

from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.worker import hang_detector
from nbelastic.worker.hang_detector import GPU_HANG_TIMEOUT, HANG_TIMEOUT, HangResponse, MainThread
from tests.support.waiting import until

W = WorkerId("a", 0, 1)
GENERATION = 7


def watched(main, seconds, *, with_gpu=False):
    """The longest hang that the link thread measures while the main thread runs `main(seconds)`."""
    longest, over = [0.0], threading.Event()

    def measure():
        blocked = MainThread(time.monotonic(), with_gpu=with_gpu)
        while not over.wait(0.02):
            longest[0] = max(longest[0], blocked.hangs_for(time.monotonic()))

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        main(seconds)
    finally:
        over.set()
        thread.join()
    return longest[0]


def wait_in(filename, block=time.sleep):
    """A function that waits in `block`, with `filename` as its file."""
    namespace = {"block": block}
    exec(compile("def wait(*arguments):\n    block(*arguments)", filename, "exec"), namespace)
    return namespace["wait"]


@pytest.mark.parametrize("where", ["torch/distributed/distributed_c10d.py", "torch/autograd/graph.py"])
def test_asleep_in_a_collective_is_a_hang(where):
    """The thread sleeps inside torch's collectives and uses no CPU time: it hangs, and the duration is measured."""
    began = time.monotonic()
    assert 0.3 < watched(wait_in(f"/site-packages/{where}"), 1.0) <= time.monotonic() - began


def test_asleep_in_a_collective_of_dtensor_is_a_hang():
    """It waits for the work of a tensor in an operator, which torch calls from `torch/_ops.py`."""
    tensor, future = torch.ones(1), torch.futures.Future()
    c10d._register_work(tensor, c10d._create_work_from_future(future))
    timer = threading.Timer(1.0, future.set_result, ([tensor],))
    timer.start()
    assert watched(lambda _: wait_tensor(tensor), 0) > 0.3
    timer.join()


def test_asleep_in_the_users_code_is_not():
    """The user's code may sleep, read or wait elsewhere."""
    assert watched(wait_in("/home/me/train.py"), 0.3) == 0.0


def test_busy_in_a_collective_is_not():
    """A thread that uses CPU time does not hang."""

    def compute(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            os.getppid()

    namespace = {"compute": compute}
    code = "def work(seconds):\n    compute(seconds)"
    exec(compile(code, "/site-packages/torch/distributed/x.py", "exec"), namespace)
    assert watched(namespace["work"], 0.5) < 0.3


def test_it_starts_again_when_it_moves():
    """Two short waits are not one long wait."""

    waits = []

    def twice(seconds):
        for _ in range(2):
            began = time.monotonic()
            wait_in("/site-packages/torch/distributed/x.py")(seconds)
            waits.append(time.monotonic() - began)
            end = time.monotonic() + 0.1
            while time.monotonic() < end:
                pass

    assert watched(twice, 0.3) < sum(waits)


@pytest.mark.parametrize(("where", "hangs"), [("torch/cuda/streams.py", True), ("home/me/train.py", False)])
def test_with_a_gpu_one_long_call_of_torchs_is_a_hang(where, hangs):
    """It is in one call for too long: nothing wakes it. The user's own code may take its time."""
    assert (watched(wait_in(f"/{where}"), 0.8, with_gpu=True) > 0.2) is hangs


def test_with_a_gpu_a_backward_pass_that_computes_is_no_hang():
    """The main thread sleeps in autograd for longer than a hang may last, while a thread of autograd computes."""
    over, ended, durations = SimpleQueue(), threading.Event(), []

    def compute():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_autograd_0")
        while not ended.is_set():
            sum(range(1000))

    def measure():
        try:
            main = MainThread(0.0, with_gpu=True)
            until(main._is_in_collective)
            for now in (0.0, 2 * GPU_HANG_TIMEOUT, 4 * GPU_HANG_TIMEOUT):
                before = hang_detector._autograd_times()
                until(lambda before=before: hang_detector._autograd_times() != before)
                durations.append(main.hangs_for(now))
        finally:
            ended.set()
            over.put(None)

    with ThreadPoolExecutor(2) as pool:
        threads = [pool.submit(compute), pool.submit(measure)]
        wait_in("/torch/autograd/graph.py", over.get)(True, 60)
        for thread in threads:
            thread.result(20)
    assert durations == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("with_gpu", "patience"), [(False, HANG_TIMEOUT), (True, GPU_HANG_TIMEOUT)])
def test_a_hang_is_reported_after_its_patience(with_gpu, patience, monkeypatch):
    """Without a GPU after a third of a second; with one an abort may take longer than that."""
    monkeypatch.setattr(hang_detector, "read_stat", lambda _: ("S", 0))
    monkeypatch.setattr(MainThread, "_is_in_collective", lambda _: True)
    monkeypatch.setattr(hang_detector, "_autograd_times", list)
    monkeypatch.setattr(
        hang_detector.sys, "_current_frames", lambda frame=sys._getframe(): {threading.get_ident(): frame}
    )
    main_thread = MainThread(0.0, with_gpu=with_gpu)
    assert [main_thread.hangs(now) for now in (0.0, patience, patience + 0.01)] == [False, False, True]


class Ended(Exception):
    """Raised instead of ending this process."""


@pytest.fixture
def hung(monkeypatch):
    """Its main thread sleeps in a collective of an aborted generation; `sent` has its messages."""
    monkeypatch.setattr(hang_detector, "read_stat", lambda _: ("S", 0))
    monkeypatch.setattr(MainThread, "_is_in_collective", lambda _: True)

    def end():
        raise Ended

    sent = []
    found = HangResponse(W, sent.append, end)
    found.sent = sent
    began = time.monotonic() - 2 * HANG_TIMEOUT
    found.watch(GENERATION, began)
    assert not found.watch(GENERATION, began)
    assert found.watch(GENERATION, time.monotonic())
    return found


def until_kept(hung):
    """Wait until the thread that writes the state has ended."""
    while not hung._keeping.done():
        time.sleep(0.001)


def test_a_hung_worker_asks_until_it_is_answered(hung):
    """It asks four times a second, and ends when the driver's answer says so."""
    for now in (100.0, 100.1, 100.3):
        hung.ask(5, now)
    assert hung.sent == [ev.WorkerHung(W, GENERATION, 5)] * 2
    with pytest.raises(Ended):
        hung.answer(None, "job", time.monotonic())


def test_the_state_is_kept_before_the_end(hung):
    """It reports the commit repeatedly until the driver ends it; a second request to keep the state has no effect."""
    now = time.monotonic()
    hung.answer(lambda: 5, "job", now)
    hung.answer(lambda: 6, "job", now)
    until_kept(hung)
    for later in (0.1, 0.2, 0.4):
        hung.continue_keeping(now + later)
    assert hung.sent == [ev.StateKept(W, "job", 5)] * 2
    with pytest.raises(Ended):
        hung.answer(None, "job", now)


def test_the_driver_learns_that_the_state_is_being_kept(hung):
    """A large state takes time; an older request to end waits for it."""
    go_on, now = threading.Event(), time.monotonic()

    def keep():
        go_on.wait()
        return 5

    hung.answer(keep, "job", now)
    hung.answer(None, "job", now)
    for later in (0.1, 1.0, 2.2):
        hung.continue_keeping(now + later)
    assert hung.sent == [ev.WorkerHung(W, GENERATION, keeping=True)] * 2
    go_on.set()
    until_kept(hung)
    hung.continue_keeping(now + 9.0)
    assert hung.sent[-1] == ev.StateKept(W, "job", 5)


def test_what_cannot_be_kept_is_lost(hung):
    """With a full disk the process ends, and does not report a kept state."""

    def keep():
        raise OSError("full")

    hung.answer(keep, "job", time.monotonic())
    until_kept(hung)
    with pytest.raises(Ended):
        hung.continue_keeping(time.monotonic())
    assert not hung.sent


def test_a_main_thread_that_has_moved_goes_on(hung, monkeypatch):
    """It woke up while the driver was asked: no answer ends it, and no state is kept."""
    monkeypatch.setattr(hang_detector, "read_stat", lambda _: ("R", 1))
    hung.answer(None, "job", time.monotonic())
    hung.answer(lambda: 5, "job", time.monotonic())
    assert not hung.is_keeping


def test_a_main_thread_that_wakes_while_its_state_is_kept_waits_for_that(hung, monkeypatch):
    """It could have changed the state that is being written: the file does not count, and the thread goes on."""
    go_on, through = threading.Event(), threading.Event()

    def keep():
        go_on.wait()
        return 5

    hung.answer(keep, "job", time.monotonic())
    main = threading.Thread(target=lambda: (hung.enter(GENERATION + 1), through.set()))
    main.start()
    monkeypatch.setattr(MainThread, "_is_in_collective", lambda _: False)
    hung.continue_keeping(time.monotonic())
    assert not through.wait(0.1)
    go_on.set()
    until_kept(hung)
    hung.continue_keeping(time.monotonic())
    main.join(20)
    assert (through.is_set(), hung.is_keeping, hung.sent) == (True, False, [])


def test_a_main_thread_in_the_next_generation_keeps_nothing(hung):
    """Its state is not the one that the driver was asked about."""
    hung.enter(GENERATION + 1)
    hung.answer(lambda: 5, "job", time.monotonic())
    assert not hung.is_keeping
