"""The first process of a pod in which an agent starts through the API."""

import signal

import pytest

from nbelastic.agent import pod


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only in `sleep`; SIGTERM as before at the end."""
    now = [0.0]
    monkeypatch.setattr(pod.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pod.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    before = signal.getsignal(signal.SIGTERM)
    yield now
    signal.signal(signal.SIGTERM, before)


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
