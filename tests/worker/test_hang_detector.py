"""Telling a main thread that is stuck in a dead collective from one that is busy."""

import os
import threading
import time

import pytest

from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import WorkerId
from nbelastic.worker.hang_detector import HANG_TIMEOUT, HangResponse, MainThread

W = WorkerId("a", 0, 1)
EPOCH = 7


def watched(main, seconds):
    """What the link's thread sees of the main thread while that runs `main()`: the longest it took it for stuck."""
    longest, over = [0.0], threading.Event()

    def look():
        blocked = MainThread(time.monotonic())
        while not over.wait(0.02):
            longest[0] = max(longest[0], blocked.hangs_for(time.monotonic()))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        main(seconds)
    finally:
        over.set()
        thread.join()
    return longest[0]


def wait_in(filename):
    """A function that sleeps, as if it stood in `filename`."""
    namespace = {"time": time}
    exec(compile("def wait(seconds):\n    time.sleep(seconds)", filename, "exec"), namespace)
    return namespace["wait"]


@pytest.mark.parametrize("where", ["torch/distributed/distributed_c10d.py", "torch/autograd/graph.py"])
def test_asleep_in_a_collective_is_stuck(where):
    """The thread sleeps inside torch's collectives and uses no processor: it is stuck, and for how long is told."""
    began = time.monotonic()
    assert 0.3 < watched(wait_in(f"/site-packages/{where}"), 1.0) <= time.monotonic() - began


def test_asleep_in_the_users_code_is_not():
    """Sleeping, reading, waiting elsewhere is the user's own business."""
    assert watched(wait_in("/home/me/train.py"), 0.3) == 0.0


def test_busy_in_a_collective_is_not():
    """As long as it computes, it moves."""

    def compute(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            os.getppid()

    namespace = {"compute": compute}
    code = "def work(seconds):\n    compute(seconds)"
    exec(compile(code, "/site-packages/torch/distributed/x.py", "exec"), namespace)
    assert watched(namespace["work"], 0.5) < 0.3


def test_it_starts_again_when_it_moves():
    """Two short waits are not one long one."""

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


class Ended(Exception):
    """In the place of this process's end."""


@pytest.fixture
def stuck(monkeypatch):
    """Its main thread sleeps in a collective of an aborted generation; what it says is in `said`."""
    monkeypatch.setattr(MainThread, "_read_stat", lambda _: (True, 0))
    monkeypatch.setattr(MainThread, "_is_in_collective", lambda _: True)

    def end():
        raise Ended

    said = []
    found = HangResponse(W, said.append, end)
    found.said = said
    began = time.monotonic() - 2 * HANG_TIMEOUT
    found.watch(EPOCH, began)
    assert not found.watch(EPOCH, began)
    assert found.watch(EPOCH, time.monotonic())
    return found


def until_kept(stuck):
    """Its thread has ended."""
    while not stuck._keeping.done():
        time.sleep(0.001)


def test_who_is_stuck_asks_until_it_is_answered(stuck):
    """Four times a second, and ends when it is told to."""
    for now in (100.0, 100.1, 100.3):
        stuck.ask(5, now)
    assert stuck.said == [ev.WorkerHung(W, EPOCH, 5)] * 2
    with pytest.raises(Ended):
        stuck.answer(None, "job", time.monotonic())


def test_the_state_is_kept_before_the_end(stuck):
    """It says at which commit, again and again, until it is told to end; one more order to keep it changes nothing."""
    now = time.monotonic()
    stuck.answer(lambda: 5, "job", now)
    stuck.answer(lambda: 6, "job", now)
    until_kept(stuck)
    for later in (0.1, 0.2, 0.4):
        stuck.continue_keeping(now + later)
    assert stuck.said == [ev.StateKept(W, "job", 5)] * 2
    with pytest.raises(Ended):
        stuck.answer(None, "job", now)


def test_while_it_is_being_kept_the_driver_is_told(stuck):
    """A large state takes its time; an order to end, which is older, waits for it."""
    go_on, now = threading.Event(), time.monotonic()

    def keep():
        go_on.wait()
        return 5

    stuck.answer(keep, "job", now)
    stuck.answer(None, "job", now)
    for later in (0.1, 1.0, 2.2):
        stuck.continue_keeping(now + later)
    assert stuck.said == [ev.WorkerHung(W, EPOCH, keeping=True)] * 2
    go_on.set()
    until_kept(stuck)
    stuck.continue_keeping(now + 9.0)
    assert stuck.said[-1] == ev.StateKept(W, "job", 5)


def test_what_cannot_be_kept_is_lost(stuck):
    """A full disk: the process ends, and does not say that it has kept anything."""

    def keep():
        raise OSError("full")

    stuck.answer(keep, "job", time.monotonic())
    until_kept(stuck)
    with pytest.raises(Ended):
        stuck.continue_keeping(time.monotonic())
    assert not stuck.said


def test_a_main_thread_that_has_moved_goes_on(stuck, monkeypatch):
    """It woke up while the driver was asked: no answer ends it, and nothing is kept."""
    monkeypatch.setattr(MainThread, "_read_stat", lambda _: (False, 1))
    stuck.answer(None, "job", time.monotonic())
    stuck.answer(lambda: 5, "job", time.monotonic())
    assert not stuck.is_keeping


def test_a_main_thread_that_wakes_while_its_state_is_kept_waits_for_that(stuck, monkeypatch):
    """It may have changed what was being written: that does not count, and it goes on with what it holds."""
    go_on, through = threading.Event(), threading.Event()

    def keep():
        go_on.wait()
        return 5

    stuck.answer(keep, "job", time.monotonic())
    main = threading.Thread(target=lambda: (stuck.enter(EPOCH + 1), through.set()))
    main.start()
    monkeypatch.setattr(MainThread, "_is_in_collective", lambda _: False)
    stuck.continue_keeping(time.monotonic())
    assert not through.wait(0.1)
    go_on.set()
    until_kept(stuck)
    stuck.continue_keeping(time.monotonic())
    main.join(20)
    assert (through.is_set(), stuck.is_keeping, stuck.said) == (True, False, [])


def test_a_main_thread_in_the_next_generation_keeps_nothing(stuck):
    """What it holds is not what it held when the question was asked."""
    stuck.enter(EPOCH + 1)
    stuck.answer(lambda: 5, "job", time.monotonic())
    assert not stuck.is_keeping
