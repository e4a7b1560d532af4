"""What the status has beside the world: curves, workers that are behind, and the remaining steps."""

from __future__ import annotations

import math
import sys
import threading
from types import SimpleNamespace

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState, Job, Stage, Worker, WorkerState
from nbelastic.driver import status
from nbelastic.driver.job_run import JobRun
from nbelastic.driver.status import snapshot
from nbelastic.driver.telemetry import MAX_POINTS, Curve, Telemetry
from nbelastic.protocol import worker_messages
from nbelastic.protocol.cluster_limits import Limits
from nbelastic.protocol.report_history import MAX_NAMES
from nbelastic.protocol.status import CopiesStatus, WorkerCopies
from tests.core.story import wid


@pytest.mark.parametrize("count", [1, 2, MAX_POINTS - 1, MAX_POINTS, 1000, 12345])
def test_a_curve_keeps_its_shape_in_few_points(count):
    """Any number of reports becomes fewer than 100 points, oldest first, from the first to one of the last."""
    curve = Curve()
    for i in range(count):
        curve.add(float(i))
    points = curve.points
    assert 0 < len(points) < MAX_POINTS
    assert list(points) == sorted(points)
    width = count / len(points)
    assert points[0] <= width
    assert points[-1] >= count - 3 * width


def test_the_total_has_no_curve():
    """A reported `total` sets the number of steps and has no curve; NaN, infinity and negative numbers are ignored."""
    telemetry = Telemetry()
    telemetry.add_report({"loss": 0.5, "total": 300.0})
    assert (telemetry.total, telemetry.report, set(telemetry.curves)) == (300, {"loss": 0.5}, {"loss"})
    for total in (math.nan, math.inf, -1.0):
        telemetry.add_report({"loss": 0.5, "total": total})
        assert telemetry.total is None


def test_a_job_that_reports_ever_new_names_has_few_curves():
    """Each status has all of them, and the driver saves them each second. Curves that have begun go on."""
    telemetry = Telemetry()
    for step in range(1000):
        telemetry.add_report({"loss": float(step), f"loss of shard {step}": 0.5})
    assert len(telemetry.curves) == MAX_NAMES
    assert max(telemetry.curves["loss"].points) > 900


def test_a_value_that_is_not_finite_is_reported_once_per_job():
    """Each name with a value that is not finite is reported once per job; text is not."""
    telemetry = Telemetry()
    assert telemetry.add_report({"loss": 0.5, "phase": "warmup"}) == ()
    assert telemetry.add_report({"loss": math.nan, "norm": math.inf, "phase": "nan"}) == ("loss", "norm")
    assert telemetry.add_report({"loss": math.nan, "norm": 1.0}) == ()
    assert telemetry.add_report({"loss": 0.5, "lr": -math.inf}) == ("lr",)
    telemetry.begin_job()
    assert telemetry.add_report({"loss": math.nan}) == ("loss",)
    after = Telemetry()
    after.load(telemetry.saved())
    assert after.add_report({"loss": math.nan}) == ()  # by another driver


def test_text_is_shown_and_has_no_curve():
    """Reported text is shown without a curve, and a `total` in text is ignored."""
    telemetry = Telemetry()
    for value in (1.0, 0.5):
        telemetry.add_report({"phase": "warmup", "loss": value, "total": "many"})
    assert (telemetry.report, set(telemetry.curves), telemetry.total) == (
        {"phase": "warmup", "loss": 0.5},
        {"loss"},
        None,
    )


def live_at(commits, **steps):
    telemetry = Telemetry(steps={wid(f"a/{name[1:]}#1"): step for name, step in steps.items()})
    for at, commit in commits:
        telemetry.add_commit(commit, at)
    return telemetry


def test_a_worker_without_a_commit_of_two_seconds_ago_is_behind():
    """A worker is behind if others made the next commits more than two seconds ago."""
    telemetry = live_at([(9.0, 5), (10.0, 8), (12.5, 9)], w0=9, w1=5)
    assert telemetry.behind(wid("a/1#1"), 12.6) == 3
    assert telemetry.behind(wid("a/0#1"), 12.6) == 0


def test_a_report_on_its_way_is_not_a_delay():
    """A worker is not behind because rank 0 reports more often."""
    telemetry = live_at([(10.0, 5), (11.0, 6)], w0=6, w1=5)
    assert telemetry.behind(wid("a/1#1"), 12.6) == 0


def test_a_newcomer_is_not_behind():
    """A newcomer without a commit is not behind."""
    telemetry = live_at([(10.0, 5000), (12.0, 5001)], w0=5001)
    assert telemetry.behind(wid("a/1#1"), 14.0) == 0


def test_telemetry_may_be_read_while_it_is_written():
    """Other threads may read the telemetry while the driver's thread changes it."""
    telemetry, stop = Telemetry(), threading.Event()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def write():
        for i in range(20_000):
            telemetry.add_commit(i, i / 1000)
            telemetry.add_report({f"value {i % 7}": 1.0})
            if i % 500 == 0:
                telemetry.begin_job()
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while not stop.is_set():
            assert telemetry.behind(wid("a/0#1"), 3.0) == 0
            assert 0 <= snapshot("s", ClusterState(Limits()), telemetry, 1.0).step < 20_000
    finally:
        writer.join()
        sys.setswitchinterval(before)


def test_the_time_of_a_status_follows_a_clock_that_is_set(monkeypatch):
    """`time` and `failed_at` follow the wall clock when it is set; small drift does not change them."""
    monkeypatch.setattr(status, "time", clocks := SimpleNamespace(time=lambda: 1000.0, monotonic=lambda: 10.0))
    wall = status._WallClock()
    monkeypatch.setattr(status, "wall", wall)
    clocks.time = lambda: 1000.1
    assert snapshot("c", ClusterState(Limits()), Telemetry(), 10.0).time == 1000.0
    clocks.time = lambda: 4600.0
    assert snapshot("c", ClusterState(Limits()), Telemetry(), 10.0).time == 4600.0


def test_the_error_of_a_failed_job_names_its_checkpoints():
    """The error of a failed job names its checkpoints, if it has any."""
    for plan, hint in (
        (None, ""),
        (("/runs/one", 100, 3), "; run it again with checkpoint='/runs/one' to go on from its newest checkpoint"),
    ):
        run = JobRun("job-1", worker_messages.Program("job-1", "", plan, "code"))
        run.end(cmd.EndJob("job-1", "failed", "all workers died", ()))
        assert str(run.future.exception()) == f"job-1 failed: all workers died{hint}"


def training(*members, generation=3):
    """A cluster state in which these workers train."""
    workers = {wid(name): Worker(wid(name), WorkerState.RUNNING, 0.0) for name in members}
    return ClusterState(
        Limits(),
        generation=generation,
        workers=workers,
        members=tuple(workers),
        stage=Stage.RUNNING,
        job=Job("job-1"),
    )


def test_the_status_shows_the_copies_of_a_sharded_model(monkeypatch):
    """The newest whole commit as rank 0 knows it, when it was made, the memory of all copies, and who keeps whose."""
    monkeypatch.setattr(status, "wall", lambda now: 1000 + now)
    telemetry, cluster = Telemetry(), training("a/0#1", "b/0#2")
    assert snapshot("s", cluster, telemetry, 5.0).copies is None
    telemetry.add_copies(wid("b/0#2"), 3, worker_messages.Copies(200, 9, 0.1, 0.3, (0,), (0,)), 5.0, is_rank_0=False)
    telemetry.add_copies(
        wid("a/0#1"), 3, worker_messages.Copies(100, 8, 0.5, 0.4, (1,), (1, 7), shared=True), 5.0, is_rank_0=True
    )
    shown = snapshot("s", cluster, telemetry, 6.0)
    assert shown.copies == CopiesStatus(8, 1004.5, 0.4, 300, 2)
    assert shown.workers[0].copies == WorkerCopies(100, ("b/0#2",), ("b/0#2",), shared=True)  # there is no rank 7
    assert shown.workers[1].copies == WorkerCopies(200, ("a/0#1",), ("a/0#1",))


def test_a_whole_commit_is_known_until_the_next_one():
    """While a world forms, the ranks of the copies are not valid; the commit is. The next job begins without one."""
    telemetry = Telemetry()
    telemetry.add_copies(wid("a/0#1"), 3, worker_messages.Copies(100, 8, 0.5, 0.4, (1,)), 5.0, is_rank_0=True)
    later = training("a/0#1", "b/0#2", generation=4)
    telemetry.add_copies(wid("a/0#1"), 4, worker_messages.Copies(0), 6.0, is_rank_0=True)
    copies = snapshot("s", later, telemetry, 6.0).copies
    assert (copies.commit, copies.memory, copies.workers) == (8, 0, 0)
    telemetry.add_copies(wid("a/0#1"), 4, worker_messages.Copies(50, 8, 9.0, 0.4, (1,)), 7.0, is_rank_0=True)
    assert snapshot("s", later, telemetry, 7.0).copies.commit == 8
    telemetry.begin_job()
    assert snapshot("s", later, telemetry, 7.0).copies is None
