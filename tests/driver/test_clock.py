"""The driver's clock, read from two clocks that the test turns by hand."""

from nbelastic.driver.clock import Clock


class Machine:
    """Its two clocks, and a driver's clock on it."""

    def __init__(self):
        self.monotonic, self.boottime = 1000.0, 5000.0
        self.clock = Clock(3.0, lambda: self.monotonic, lambda: self.boottime)

    def run(self, seconds):
        """The driver looks at its clock every second."""
        for _ in range(seconds):
            self.stop(1)
            self.clock.now()

    def stop(self, seconds):
        self.monotonic += seconds
        self.boottime += seconds

    def suspend(self, seconds):
        self.boottime += seconds


def test_a_driver_that_runs_is_never_absent():
    """Its clock goes as fast as the machine's."""
    machine = Machine()
    machine.run(100)
    assert (machine.clock.now(), machine.clock.absent) == (1100.0, 0.0)


def test_the_time_of_a_stop_is_skipped():
    """Deadlines come no nearer while the driver is stopped: it goes on at the time at which it stopped."""
    machine = Machine()
    machine.run(10)
    machine.stop(60)
    assert machine.clock.now() == 1010.0
    assert machine.clock.absent == 60.0
    machine.run(10)
    assert machine.clock.now() == machine.clock.read() == 1020.0
    assert machine.clock.absent == 60.0


def test_a_suspended_machine_was_absent():
    """Its monotonic clock stood still, so nothing is skipped; for other machines time has passed."""
    machine = Machine()
    machine.run(10)
    machine.suspend(600)
    machine.run(1)
    assert machine.clock.now() == 1011.0
    assert machine.clock.absent == 600.0


def test_silence_during_an_absence_means_nothing():
    """Who was not heard because the driver did not listen has as much time again; then its silence counts."""
    machine = Machine()
    machine.run(10)
    heard_at = machine.monotonic
    machine.run(5)
    assert machine.clock.silence(heard_at) == 5.0
    machine.stop(14)
    assert machine.clock.silence(heard_at) == 0.0
    machine.run(14)
    assert machine.clock.silence(heard_at) == 0.0
    machine.run(6)
    assert machine.clock.silence(heard_at) == 6.0


def test_a_long_absence_excuses_nobody_for_long():
    """A host that vanished while the machine slept is missed 30 s after it woke up, plus the usual silence."""
    machine = Machine()
    machine.run(10)
    heard_at = machine.monotonic
    machine.suspend(36000)
    machine.run(40)
    assert machine.clock.silence(heard_at) == 9.0
