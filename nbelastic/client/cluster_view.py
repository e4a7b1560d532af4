"""What a cluster shows: its status, events and stacks, and what it survives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nbelastic.client.chaos import Chaos, plan
from nbelastic.client.chaos_report import ChaosReport
from nbelastic.client.driver_link import DriverLink
from nbelastic.client.engine_client import EngineClient
from nbelastic.client.notebook_line import in_notebook
from nbelastic.client.report_table import ReportTable
from nbelastic.client.subscriptions import Subscriptions
from nbelastic.protocol import requests
from nbelastic.protocol.chaos import KINDS
from nbelastic.protocol.report_history import ReportHistory
from nbelastic.protocol.status import DriverFacts, EventRecord, HostStatus, Status, StepTimes, WorkerStack, WorkerStatus


class ClusterView:
    """The part of `Cluster` that watches it."""

    name: str
    _link: DriverLink
    _subscriptions: Subscriptions
    _engines: EngineClient

    @property
    def died(self) -> bool:
        """Whether the driver has died and was not replaced. The cluster lives on until its lease has expired."""
        return self._link.is_lost

    def wait(self, world: int, timeout: float = 60.0) -> Status:
        """Wait until `world` workers run in one world or, with no job, are ready. WaitTimeoutError with the reason.

        Each of them has answered since the call, so one that was just killed does not count. A script's workers are not asked.
        """
        status: Status = self._link.ask(requests.WaitForWorld(world), timeout, f"a world of {world}", cancel=True)
        return status

    def status(self) -> Status:
        """An immutable snapshot, at any time."""
        return self._link.status()

    @property
    def hosts(self) -> tuple[HostStatus, ...]:
        return self.status().hosts

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        return self.status().workers

    @property
    def events(self) -> list[EventRecord]:
        """The event log so far."""
        return self.numbered_events()[0]

    def numbered_events(self) -> tuple[list[EventRecord], int]:
        """The events that are kept, and the number of all events so far."""
        driver = self._link.latest
        return driver.events() if driver is not None else ([], 0)

    @property
    def reports(self) -> ReportTable:
        """What rank 0 reported over the present or last job: a notebook shows charts, `pandas.DataFrame(cluster.reports)` a table.

        Each row has `step`, `time` (seconds since 1970), `generation`, `size` (of the world), and up to 16 reported numbers.
        There are at most 2,000 rows; in a long job each row is the mean of equally many reports.
        """
        return ReportTable(self.report_history())

    def report_history(self) -> ReportHistory:
        """The same, to read only."""
        driver = self._link.latest
        return driver.reports if driver is not None else ReportHistory()

    def stacks(self, timeout: float = 2.0) -> list[WorkerStack]:
        """Where every worker is at this moment: the Python stack of its main thread, taken by another of its threads.

        A worker that has not answered after `timeout` seconds has no text: its process is suspended, or C code holds the GIL.
        """
        stacks: list[WorkerStack] = self._link.ask(requests.ShowStacks(timeout), None, "stacks")
        return stacks

    def ask_stacks(self, done: Callable[[list[WorkerStack]], object], timeout: float = 2.0) -> None:
        """As `stacks`, but without waiting: `done(stacks)` is called in another thread, and must not block."""
        answer = self._link.running().request(requests.ShowStacks(timeout))
        answer.add_done_callback(lambda future: done([] if future.exception() else future.result()))

    def step_times(self) -> StepTimes:
        """How long each rank's steps took without waiting for others, over the last minutes: the slowest makes all wait.

        They are measured every 5 s, on CPUs only.
        """
        times: StepTimes = self._link.ask(requests.ShowStepTimes(), None, "step times")
        return times

    def ask_step_times(self, done: Callable[[StepTimes | None], object]) -> None:
        """As `step_times`, but without waiting: `done(times)` is called in another thread, and must not block."""
        answer = self._link.running().request(requests.ShowStepTimes())
        answer.add_done_callback(lambda future: done(None if future.exception() else future.result()))

    def chaos(
        self,
        every: float = 60.0,
        kinds: str | Sequence[str] = KINDS,
        *,
        duration: float | None = None,
        seed: int | None = None,
        below_min: bool = False,
        on_line: Callable[[str], object] | None = None,
        by: str = "you",
    ) -> ChaosReport:
        """Inject faults about every `every` seconds for `duration` seconds (None: until the job ends), and report what they led to.

        Kinds: `kill` and `stop` a worker's process, kill the agent of a `host`. `on_line(text)` gets one line per fault; without
        it they are printed. Ctrl-C ends it. At least `min` workers stay, except with `below_min`. `seed` makes the same choices
        again. UsageError if the cluster was not started with `chaos=True`, or if no job runs.
        """
        chosen = plan(every=every, kinds=kinds, duration=duration, seed=seed, below_min=below_min, by=by)
        return Chaos(self._link, self._subscriptions, lambda: self.events, chosen, on_line or print).run()

    def trace(self) -> dict[str, Any]:
        """The event log as Chrome trace JSON: write it to a file and open that in Perfetto."""
        from nbelastic.client.trace import trace

        return trace(self.events, self.name)

    @property
    def driver(self) -> DriverFacts | None:
        """The driver's process and versions; None before the first start."""
        connection = self._link.latest
        return connection.driver if connection is not None else None

    @property
    def log_dir(self) -> Path | None:
        """The folder with the logs of the present (or last) start."""
        driver = self._link.latest
        return driver.log_dir if driver is not None else self._link.configuration.log_dir

    @property
    def client(self) -> Any:
        """ipyparallel's client, created on first use. It knows all ready workers; one that cannot become an engine is printed.

        ClusterStoppedError if the cluster does not run; HostError if no controller starts or no worker can connect to it;
        WaitTimeoutError after 30 s, and 0.1 s per worker; UsageError during a job, if no worker is an engine yet.
        """
        return self._engines.connected()

    def subscribe(self, callback: Callable[[Status], object]) -> Callable[[], None]:
        """Call `callback(status)` after changes, at most 4 times per second, from another thread. Returns what ends that."""
        return self._subscriptions.add(callback)

    def show_again(self) -> None:
        """Call all subscribers soon, whether or not something has changed."""
        self._subscriptions.notify()

    def dashboard(self) -> Any:
        """The widget, which a notebook can show."""
        import importlib

        return importlib.import_module("nbelastic.notebook.dashboard").Dashboard(self)

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        """In a notebook, a cluster at the end of a cell is its dashboard; elsewhere it is a line of text."""
        if not in_notebook():
            return {"text/plain": repr(self)}
        import importlib

        dashboard = importlib.import_module("nbelastic.notebook.shown_dashboards").dashboard_of(self)
        bundle: dict[str, Any] = dashboard._repr_mimebundle_()
        return bundle

    def __repr__(self) -> str:
        status = self.status()
        return f"<Cluster {self.name}: {status.phase}, {len(status.workers)} workers on {len(status.hosts)} hosts>"
