"""The driver's clock, on two machine clocks that the test sets."""

from types import SimpleNamespace

from nbelastic.driver.clients import Clients
from nbelastic.driver.clock import Clock
from nbelastic.transport.backlog import Unread
from tests.driver.fakes import settings_for

NOTHING = Unread(1)  # no message waits unread


class Machine:
    """The two clocks of a machine, and a driver's clock that reads them."""

    def __init__(self):
        self.monotonic, self.boottime = 1000.0, 5000.0
        self.clock = Clock(3.0, lambda: self.monotonic, lambda: self.boottime)

    def run(self, seconds):
        """Let time pass while the driver reads its clock each second."""
        for _ in range(seconds):
            self.stop(1)
            self.clock.now()

    def stop(self, seconds):
        self.monotonic += seconds
        self.boottime += seconds

    def suspend(self, seconds):
        self.boottime += seconds


def test_a_driver_that_runs_is_never_absent():
    """While the driver runs, its clock is as fast as the machine's, and no absence is counted."""
    machine = Machine()
    machine.run(100)
    assert (machine.clock.now(), machine.clock.absent) == (1100.0, 0.0)


def test_the_time_of_a_stop_is_skipped():
    """The clock of a stopped driver continues at the time of the stop, so deadlines come no nearer."""
    machine = Machine()
    machine.run(10)
    machine.stop(60)
    assert machine.clock.now() == 1010.0
    assert machine.clock.absent == 60.0
    machine.run(10)
    assert machine.clock.now() == machine.clock.read() == 1020.0
    assert machine.clock.absent == 60.0


def test_a_suspended_machine_was_absent():
    """After a suspend the clock skips nothing, as the monotonic clock stopped too, but the absence is counted."""
    machine = Machine()
    machine.run(10)
    machine.suspend(600)
    machine.run(1)
    assert machine.clock.now() == 1011.0
    assert machine.clock.absent == 600.0


def test_a_held_clock_stands_still_and_goes_on_where_it_stood():
    """While messages wait unread, no deadline comes nearer, and no thread reads another time."""
    machine = Machine()
    machine.run(10)
    machine.clock.hold(hold=True)
    machine.run(5)
    machine.stop(1)
    assert machine.clock.read() == machine.clock.now() == 1010.0
    machine.clock.hold(hold=True)
    machine.run(5)
    machine.clock.hold(hold=False)
    machine.run(5)
    assert machine.clock.read() == machine.clock.now() == 1015.0
    assert machine.clock.machine_time(machine.clock.now()) == machine.monotonic
    assert machine.clock.absent == 0.0


def test_a_clock_is_held_for_half_a_minute_at_most():
    """A driver that never reads all goes on with its deadlines; one that has read all may be late again."""
    machine = Machine()
    for _ in range(60):
        machine.clock.hold(hold=True)
        machine.run(1)
    assert machine.clock.now() == 1030.0
    assert not machine.clock.is_held
    machine.clock.hold(hold=False)
    machine.clock.hold(hold=True)
    machine.run(60)
    assert machine.clock.now() == 1060.0


def test_silence_during_an_absence_does_not_count():
    """Silence is counted again only when the driver has listened as long after an absence as before it."""
    machine = Machine()
    machine.run(10)
    received_at = machine.monotonic
    machine.run(5)
    assert machine.clock.silence(received_at, NOTHING) == 5.0
    machine.stop(14)
    assert machine.clock.silence(received_at, NOTHING) == 0.0
    machine.run(14)
    assert machine.clock.silence(received_at, NOTHING) == 0.0
    machine.run(6)
    assert machine.clock.silence(received_at, NOTHING) == 6.0


def test_a_long_absence_excuses_at_most_30_seconds():
    """At most 30 s after a long suspend are excused; then silence counts."""
    machine = Machine()
    machine.run(10)
    received_at = machine.monotonic
    machine.suspend(36000)
    machine.run(40)
    assert machine.clock.silence(received_at, NOTHING) == 9.0


def test_the_lease_of_a_kept_cluster_does_not_expire_during_a_stop(tmp_path):
    """A container that was paused for the night goes on in the morning: no client could have connected meanwhile."""
    machine = Machine()
    clients = Clients(SimpleNamespace(settings=settings_for(tmp_path, "a:1")), tmp_path, {}, 1, machine.clock.now)
    machine.run(10)
    machine.stop(30_000)
    assert clients.alone_for == 10.0


def test_what_is_measured_goes_on_while_deadlines_wait():
    """The speed of a training is not higher because the driver reads late. An absence does not count in either time."""
    machine = Machine()
    machine.run(10)
    machine.clock.hold(hold=True)
    machine.run(10)
    assert (machine.clock.now(), machine.clock.awake()) == (1010.0, 1020.0)
    machine.clock.hold(hold=False)
    machine.run(5)
    machine.stop(600)
    assert (machine.clock.now(), machine.clock.awake()) == (1015.0, 1025.0)


def test_a_driver_that_is_late_again_and_again_goes_on_with_its_deadlines():
    """Every half minute one check finds that nothing waits. In ten minutes its deadlines came 20 s nearer."""
    machine = Machine()
    for second in range(600):
        machine.clock.hold(hold=second % 30 != 0)
        machine.run(1)
    assert 300.0 <= machine.clock.now() - 1000.0 <= 360.0
