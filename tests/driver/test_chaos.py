"""The client's loop that injects faults, with a driver that is played by the test."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from nbelastic.client import chaos
from nbelastic.client.chaos import Chaos, plan
from nbelastic.errors import ClusterStoppedError, DriverLostError, UsageError
from nbelastic.protocol.status import EventRecord


class FakeDriver:
    """Answers requests for faults with `answers`, the last one again and again. "" records a fault, which `recovers`."""

    name = "fake"
    is_lost = False
    delay = 0.0  # seconds after which a client sees an event

    def __init__(self, *answers, recovers=True):
        self.answers, self.recovers = list(answers) or [""], recovers
        self.events = [EventRecord(1.0, "job-started", "job-1"), EventRecord(2.0, "training", "first", generation=1)]
        self.requests, self.lines, self.callbacks = [], [], []
        self.ended = False

    def ask(self, request):
        self.requests.append(request)
        if request.is_check and not isinstance(self.answers[0], UsageError):
            return ""
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            answer = answer() or ""
        if not answer:
            self.record("fault-kill", "chaos", worker="a/0#1", generation=self.generation)
            if self.recovers:
                self.record("training", "first step", generation=self.generation + 1)
        return answer

    @property
    def generation(self):
        return max(event.generation for event in self.events)

    def record(self, kind, text, **more):
        self.events.append(EventRecord(time.time(), kind, text, **more))

    def seen(self):
        return [event for event in self.events if event.time <= time.time() - self.delay]

    def running(self):
        if self.ended:
            raise ClusterStoppedError("the cluster 'fake' has stopped.")

    def status(self):
        return SimpleNamespace(reason="1 of min 2 workers ready")

    def run(self, **given):
        arguments = {"every": 0.02, "kinds": ("kill",), "duration": 0.3, "seed": 1, "below_min": False, "by": "a test"}
        subscriptions = SimpleNamespace(add=lambda callback: self.callbacks.append(callback) or (lambda: None))
        run = Chaos(self, subscriptions, self.seen, plan(**arguments | given), self.lines.append)
        return run.run()


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(chaos, "CHECK_INTERVAL", 0.01)


def test_faults_are_numbered_and_shown():
    """Each fault has the next number and one line; the time is over after `duration`."""
    driver = FakeDriver()
    report = driver.run()
    assert driver.requests[0].is_check
    numbers = [request.number for request in driver.requests[1:]]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(report.faults) == len(driver.lines) == len(numbers) > 0
    assert (report.ended, report.not_survived, report.withheld) == ("0.3 s are over", (), 0)


def test_a_fault_that_is_not_possible_is_tried_again():
    """A fault that is refused for a moment comes a little later, with the same number."""
    driver = FakeDriver("min is 2", "")
    report = driver.run(every=0.2, duration=1.0)
    assert [request.number for request in driver.requests[1:3]] == [1, 1]
    assert len(report.faults) >= 1
    assert report.withheld == 0


def test_a_fault_that_stays_impossible_is_withheld():
    """When the next one is due, it is given up; a line and the report have the reason."""
    driver = FakeDriver("min is 2")
    report = driver.run()
    assert report.faults == ()
    assert report.withheld == len(driver.lines) > 0
    assert all(line.endswith("is withheld: min is 2") for line in driver.lines)
    assert "min is 2" in repr(report)


def test_the_end_of_the_job_ends_it():
    """A fault that the job does not survive is the last one. Earlier jobs do not count."""
    driver = FakeDriver(recovers=False)
    driver.events.insert(0, EventRecord(0.5, "job-failed", "job-0 failed"))

    def fail():
        driver.record("fault-kill", "chaos", worker="a/0#1", generation=1)
        driver.record("job-failed", "job-1 failed: no")
        return "no job is running"

    driver.answers = [fail]
    report = driver.run(duration=None)
    assert report.ended == "job-1 failed: no"
    assert [fault.survived for fault in report.faults] == [False]
    assert report.withheld == 0


def test_ctrl_c_gives_the_report():
    """Also if it comes while the driver is asked: the fault is in the event log."""

    def interrupt():
        driver.record("fault-stop", "chaos", worker="a/0#1", generation=1)
        raise KeyboardInterrupt

    driver = FakeDriver(interrupt)
    report = driver.run(duration=None)
    assert report.ended == "interrupted"
    (fault,) = report.faults
    assert (fault.kind, fault.survived, fault.why) == ("stop", None, "no step was made before the chaos ended")


def test_a_lost_driver_is_waited_for():
    """Until another driver has taken over, faults are tried again; then they go on."""
    driver = FakeDriver("")

    def lose():
        driver.ended = driver.is_lost = True
        raise DriverLostError("the driver died")

    def take_over():
        driver.ended = driver.is_lost = False
        return "the driver died"

    driver.answers = ["", lose, take_over, ""]
    report = driver.run(duration=1.0)
    assert len(report.faults) > 1


def test_the_last_fault_is_in_the_report():
    """The driver's answer may come before the event: the report waits for it."""
    driver = FakeDriver()
    driver.delay = 0.2
    report = driver.run(duration=0.1)
    assert len(report.faults) == len([each for each in driver.events if each.kind == "fault-kill"]) > 0
    assert all(fault.survived for fault in report.faults)


def test_a_cluster_that_stops_ends_it():
    """The report has the reason."""
    driver = FakeDriver()
    driver.answers = ["", lambda: setattr(driver, "ended", True)]
    report = driver.run(duration=None)
    assert "has stopped" in report.ended


def test_a_recovery_that_does_not_come_is_not_survived(monkeypatch):
    """After a while the report says so, with the reason why the cluster waits; a line has said that it is late."""
    monkeypatch.setattr(chaos, "SETTLE", 0.2)
    monkeypatch.setattr(chaos, "LATE", 0.05)
    driver = FakeDriver(recovers=False)
    report = driver.run(every=0.2, duration=0.31)
    assert report.not_survived
    assert report.not_survived[0].why == "no step within 0.2 s: 1 of min 2 workers ready"
    assert any(line.endswith("no step yet: 1 of min 2 workers ready") for line in driver.lines)


def test_a_refusal_of_the_driver_is_raised():
    """A cluster that does not allow chaos: nothing is injected, and nothing waits."""
    driver = FakeDriver(UsageError("this cluster was started without chaos"))
    begun = time.monotonic()
    with pytest.raises(UsageError, match="without chaos"):
        driver.run(every=60.0)
    assert time.monotonic() - begun < 5
    assert len(driver.requests) == 1
