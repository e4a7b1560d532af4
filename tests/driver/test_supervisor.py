"""The driver restarts ipyparallel's controller."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from nbelastic.ipp import supervisor
from nbelastic.ipp.supervisor import MAX_PAUSE, MIN_PAUSE, Supervisor, heartbeat_period
from nbelastic.system.process_identity import is_alive
from tests.support.driver_lease import until_the_end


class SupervisorOfFailingController(Supervisor):
    """The supervisor of a controller that ends as soon as it has started."""

    started = 1

    async def wait_for_end(self) -> None:
        """Return at once: the controller has ended."""

    async def restart(self) -> None:
        self.started += 1
        if self.started > 12:
            raise asyncio.CancelledError

    def last_line(self) -> str:
        return "OSError: [Errno 24] Too many open files"


def test_a_controller_that_ends_at_once_is_started_after_longer_and_longer_pauses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The pauses before restarts of a failing controller grow. Its restarts are reported until these have their full length.

    In a night there would be thousands of events, and a driver keeps 10,000.
    """
    pauses: list[float] = []
    reports: list[str] = []
    restarts: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def story() -> None:
        monkeypatch.setattr(supervisor.asyncio, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            await SupervisorOfFailingController(
                tmp_path,
                "name",
                5.0,
                until_the_end(tmp_path),
                on_problem=reports.append,
                on_restart=lambda: restarts.append(pauses[-1]),
            )._watch()

    asyncio.run(story())
    assert pauses[:3] == [MIN_PAUSE, 2 * MIN_PAUSE, 4 * MIN_PAUSE]
    assert pauses[-1] == MAX_PAUSE
    assert restarts == [pause for pause in pauses if pause < MAX_PAUSE]
    assert len(reports) == len(restarts) < len(pauses)
    assert all(text.endswith("Too many open files") for text in reports)


@pytest.mark.parametrize(("workers", "milliseconds"), [(4, 100), (100, 100), (500, 500), (5000, 1000)])
def test_the_heartbeats_of_many_engines_are_rarer(workers: int, milliseconds: int) -> None:
    """Up to a thousand engines' heartbeats cost the controller no more than a hundred's."""
    assert heartbeat_period(workers) == milliseconds


def test_a_controller_that_hangs_at_its_start_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After several tries the error says for how long each was waited for. No process and no descriptor is left."""
    monkeypatch.setattr(supervisor, "CODE", "import time; time.sleep(600)")
    monkeypatch.setattr(supervisor, "START_TIMEOUT", 0.2)
    processes: set[str] = set()

    async def story() -> None:
        hanging = Supervisor(tmp_path / "ipython", "hangs", 5.0, until_the_end(tmp_path))
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(RuntimeError, match=r"it could not serve 0\.2 s after its start, and was killed"):
            await hanging.start_new()
        processes.add(hanging.process)
        hanging._held_ports.close()
        assert len(os.listdir("/proc/self/fd")) == before
        with pytest.raises(RuntimeError, match="could not serve"):
            await hanging.start()
        processes.add(hanging.process)
        await hanging.stop()

    asyncio.run(story())
    assert len(processes) == 2
    assert not any(map(is_alive, processes))


def test_a_controller_that_is_killed_does_not_show_the_error_of_an_earlier_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its log has the output of all its starts. The kernel's memory killer leaves no word."""

    async def story() -> None:
        controller = Supervisor(tmp_path, "name", 5.0, until_the_end(tmp_path))
        for folder in ("log", "security"):
            (tmp_path / folder).mkdir()
        monkeypatch.setattr(supervisor, "CODE", "raise SystemExit('address in use')")
        with pytest.raises(RuntimeError, match="at its start: address in use"):
            await controller.restart()
        monkeypatch.setattr(supervisor, "CODE", "import os; os.kill(os.getpid(), 9)")
        with pytest.raises(RuntimeError, match="at its start: it printed nothing"):
            await controller.restart()
        assert controller.last_line() == ""
        await controller.stop()

    asyncio.run(story())
