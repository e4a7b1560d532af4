"""Stalls, and silent hosts."""

from types import SimpleNamespace

import pytest

from nbelastic.core.state import HostPhase
from nbelastic.driver.liveness import Liveness, StallDetector
from nbelastic.protocol.events import StallDetected, StallResolved


def test_a_world_that_commits_has_no_stall():
    """No stall is posted as long as the world commits."""
    detector = StallDetector()
    for second in range(100):
        detector.note_commits(1, second, float(second))
        assert detector.check(1, 5.0, second + 0.5) is None


def test_a_stall_is_posted_again_and_its_end_once():
    """A stall is posted each second with its length, and its end once."""
    detector = StallDetector()
    detector.note_commits(3, 10, 100.0)
    assert detector.check(3, 5.0, 104.9) is None
    assert detector.check(3, 5.0, 106.0) == StallDetected(3, 6.0)
    assert detector.check(3, 5.0, 106.5) is None
    assert detector.check(3, 5.0, 107.0) == StallDetected(3, 7.0)
    detector.note_commits(3, 11, 107.5)
    assert detector.check(3, 5.0, 108.0) == StallResolved(3)
    assert detector.check(3, 5.0, 108.5) is None


def test_a_world_that_never_commits_stalls_too():
    """The stall of a world without a commit is counted from the first check."""
    detector = StallDetector()
    assert detector.check(7, 5.0, 50.0) is None
    assert detector.check(7, 5.0, 56.0) == StallDetected(7, 6.0)


def test_a_new_generation_has_no_stall_yet():
    """The stall of the previous generation does not count."""
    detector = StallDetector()
    detector.note_commits(1, 5, 0.0)
    assert detector.check(1, 5.0, 10.0) == StallDetected(1, 10.0)
    assert detector.check(2, 5.0, 10.5) is None
    assert detector.check(2, 5.0, 14.0) is None


def test_rare_commits_are_not_a_stall():
    """With a commit every 30 s, a stall is posted only after five times that long."""
    detector = StallDetector()
    assert detector.check(1, 5.0, 0.0) is None
    for number in range(1, 5):
        detector.note_commits(1, number, 30.0 * number)
    assert detector.check(1, 5.0, 120.0 + 149.0) is None
    assert isinstance(detector.check(1, 5.0, 120.0 + 151.0), StallDetected)


def test_a_night_of_standing_still_delays_no_stall():
    """The training was paused for ten hours: afterwards a stall is posted as soon as before. It came half an hour late."""
    detector = StallDetector()
    assert detector.check(1, 5.0, 0.0) is None
    for number in range(1, 101):
        detector.note_commits(1, number, float(number))
    for second in range(100, 36100, 10):
        detector.excuse(float(second))
    detector.note_commits(1, 101, 36091.0)
    assert isinstance(detector.check(1, 5.0, 36097.0), StallDetected)


def test_late_reports_change_nothing():
    """A late report of an earlier commit or generation does not end a stall."""
    detector = StallDetector()
    detector.note_commits(2, 9, 10.0)
    detector.note_commits(2, 9, 20.0)
    detector.note_commits(1, 99, 20.0)
    assert isinstance(detector.check(2, 5.0, 20.0), StallDetected)


class Network:
    """Hosts by name, each with the time of its last message. It stands in for the driver's cluster and agents."""

    def __init__(self, silence: float = 10.0):
        self.now, self.last, self.phases = 0.0, {}, {}
        self.lost, self.records, self.local = [], [], set()
        heartbeat = min(1.0, silence / 4)
        settings = SimpleNamespace(silence=silence, heartbeat=heartbeat, lease=900.0)
        agents = SimpleNamespace(
            silence_of=lambda name: self.now - self.last[name] if name in self.last else 0.0,
            has_local_agent=self.local.__contains__,
            has_reconnected=lambda _: False,
            lose=lambda name, *_: self.lost.append(name),
        )
        self.liveness = Liveness(
            settings,
            agents,
            None,
            telemetry=None,
            clock=None,
            cluster=None,
            post=None,
            record=lambda record: self.records.append(record.kind),
        )
        self.heartbeat = heartbeat

    def add(self, *names: str, phase: HostPhase = HostPhase.UP) -> None:
        self.phases |= dict.fromkeys(names, phase)

    def run(self, until: float, *, quiet: tuple[str, ...] = ()) -> None:
        """Each host that is up sends a message each heartbeat, one a little later than the other, and the driver checks as often."""
        names = [name for name, phase in self.phases.items() if phase is HostPhase.UP]
        while self.now < until:
            self.now += self.heartbeat
            for number, name in enumerate(names):
                if name not in quiet:
                    self.last[name] = self.now - 0.9 * self.heartbeat * number / len(names)
            hosts = {name: SimpleNamespace(phase=phase) for name, phase in self.phases.items()}
            members = [SimpleNamespace(host=name) for name in names]
            cluster = SimpleNamespace(hosts=hosts, disconnected={}, phase="running", members=members, generation=1)
            self.liveness._check_hosts(cluster, self.now)


ALL = ("a", "b", "c")


@pytest.mark.parametrize("silence", [2.0, 10.0, 60.0])
@pytest.mark.parametrize("other", [None, HostPhase.STARTING, HostPhase.LOST])
def test_no_host_is_lost_while_the_drivers_network_is_down(silence, other):
    """Their last messages came at different moments, and another host may be starting, or lost since before."""
    network = Network(silence)
    network.add(*ALL)
    if other is not None:
        network.add("d", phase=other)
    network.run(5 * silence)
    network.run(10 * silence, quiet=ALL)
    assert network.lost == []
    assert network.records == ["driver-cut-off"]
    network.run(11 * silence)
    assert network.lost == []


def test_a_cluster_without_hosts_is_not_cut_off():
    """There is no host that could send anything."""
    network = Network(1.0)
    network.run(10.0)
    assert network.records == []


def test_a_host_that_dies_is_lost_though_the_others_pause():
    """A pause of the others that is shorter than `silence` does not delay that."""
    network = Network()
    network.add(*ALL)
    network.run(50.0)
    network.run(54.0, quiet=("a",))
    network.run(58.0, quiet=ALL)
    network.run(60.0, quiet=("a",))
    assert network.lost == []
    network.run(62.0, quiet=("a",))
    assert set(network.lost) == {"a"}


def test_a_local_host_needs_no_network():
    """If this machine's own host is silent, too, it is not the network."""
    network = Network()
    network.add(*ALL)
    network.local.add("c")
    network.run(50.0)
    network.run(62.0, quiet=ALL)
    assert set(network.lost) == set(ALL)
