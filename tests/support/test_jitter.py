"""Delays that `--jitter` makes."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.startup import FOLDER

LOOP = """
import os, selectors, sys, time
slept = []
time.sleep = lambda seconds: slept.append(round(seconds, 9))
import sitecustomize
slept.clear()
with selectors.DefaultSelector() as selector:
    for _ in range(1000):
        selector.select(0)
print(slept)
"""


def run(code: str, seed: str) -> str:
    environment = {**os.environ, "TESTS_JITTER": seed, "PYTHONPATH": FOLDER}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def test_event_loops_stall_by_the_seed():
    """Now and then, for at most a tenth of a second; the same seed gives the same stalls."""
    stalls = eval(run(LOOP, "1"))
    assert 5 <= len(stalls) <= 50
    assert all(0.0 <= stall <= 0.1 for stall in stalls)
    assert eval(run(LOOP, "1")) == stalls
    assert eval(run(LOOP, "2")) != stalls
    assert eval(run(LOOP, "")) == []


def test_workers_start_late():
    """A fork of a template sleeps before it does anything; forks of other processes do not."""
    fork = """
import os, sys, time
sys.modules["nbelastic.programs.template"] = sys
slept = []
time.sleep = slept.append
if os.fork() == 0:
    print(len(slept) == 1 and 0 <= slept[0] <= 2.5, flush=True)
    os._exit(0)
os.wait()
print(slept)
"""
    assert run(fork, "1").splitlines() == ["True", "[]"]
    assert run(fork.replace("programs.template", "programs.another"), "1").splitlines() == ["False", "[]"]
