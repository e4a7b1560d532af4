"""The queue in which main threads wait beside signals."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty

import pytest

import nbelastic
from nbelastic.system.signal_safe_queue import SignalSafeQueue

WAITS = """
import signal
from queue import Empty
from nbelastic.system.signal_safe_queue import SignalSafeQueue

items = SignalSafeQueue()
signals = []
signal.signal(signal.SIGALRM, lambda *_: signals.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.0013, 0.0013)
empty = 0
while len(signals) < 300:
    try:
        items.get(0.001)
    except Empty:
        empty += 1
signal.setitimer(signal.ITIMER_REAL, 0)
items.put("the wait")
print(items.get(0.001), "ends" if empty else "never ended")
"""


def test_a_wait_ends_though_signals_come():
    """One that comes as the time is over, too: with the standard library's queue, the first seconds of this never end."""
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("the wait ends\n", "")


def test_no_other_queue_is_waited_for_with_a_limit():
    """In this package: each such wait is one of this queue, which is called without names of arguments."""
    for file in sorted(Path(nbelastic.__file__).parent.rglob("*.py")):
        assert not re.findall(r"\.get\((?:block=|timeout=|True\b).*", file.read_text("utf-8")), file


def test_items_come_in_order():
    """Those that were put before a wait or after one, and those of another thread; then there is none."""
    items = SignalSafeQueue()
    for item in (1, 2):
        items.put(item)
    assert (items.get(), items.get(5.0), items.empty()) == (1, 2, True)
    with pytest.raises(Empty):
        items.get()
    with pytest.raises(Empty):
        items.get(0.01)  # the lock is still open from the first items
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(lambda: [items.get(60.0) for _ in range(1000)])
        for item in range(1000):
            items.put(item)
        assert taken.result(60) == list(range(1000))


def test_a_handler_may_put_an_item_and_raise():
    """Neither loses an item: the next wait has it."""
    items = SignalSafeQueue()

    def note(*_):
        items.put("from the handler")
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, note)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        began = time.monotonic()
        with pytest.raises(InterruptedError):
            items.get(60.0)
        assert time.monotonic() - began < 30
    finally:
        signal.signal(signal.SIGALRM, before)
    assert items.get(5.0) == "from the handler"
