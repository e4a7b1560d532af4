"""The first process of a pod in which an agent starts through the API."""

import signal
import subprocess
import sys

import pytest

from nbelastic.agent import pod
from nbelastic.system.processes import children_of
from tests.support.waiting import until


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only in `sleep`; signals as before at the end."""
    now = [0.0]
    monkeypatch.setattr(pod.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pod.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGCHLD)}
    yield now
    for each, handler in before.items():
        signal.signal(each, handler)


def test_it_waits_for_a_first_agent(clock, monkeypatch):
    """It ends when no agent has come, and ignores SIGTERM until then."""
    monkeypatch.setattr(pod.running_agents, "find", list)
    pod.main()
    assert clock[0] == pod.WAIT
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_it_waits_while_an_agent_runs(clock, monkeypatch):
    """The wait begins anew when the last agent has ended."""
    monkeypatch.setattr(pod.running_agents, "find", lambda: ["agent"] if 50 <= clock[0] < 500 else [])
    pod.main()
    assert clock[0] == pytest.approx(500 + pod.WAIT, abs=2 * pod.CHECK)


ADOPTS = """
import ctypes, subprocess
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: as the first process of a container is one
from nbelastic.agent import pod
pod.running_agents.find = lambda: print("waits", flush=True) or ["agent"]
subprocess.run(["sh", "-c", "exec 3<&0; (read line <&3) & (read line <&3) &"])
pod.main()
"""


def test_it_keeps_no_ended_processes():
    """Processes that lost workers have started become its children. Too many ended ones would forbid new processes."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", ADOPTS], stdin=pipe, stdout=pipe) as first:
        try:
            assert first.stdout.readline() == b"waits\n"
            assert len(children_of(first.pid)) == 2
            first.stdin.close()
            until(lambda: not children_of(first.pid), what="no ended child")
        finally:
            first.kill()
