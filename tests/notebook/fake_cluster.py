"""A cluster without processes, with the interface of `Cluster`, for tests of the magics and the dashboard.

A request for the host `refused` is refused; all other requests are carried out at once. `update()` calls the subscribers,
as the driver's thread does.
"""

# ruff: noqa: A002  # `Cluster` has the parameters min and max
from __future__ import annotations

import time
from types import SimpleNamespace

from msgspec.structs import replace

from nbelastic.client.cell_syntax import check_cell
from nbelastic.errors import UsageError
from nbelastic.protocol.host_parsing import parse_host
from nbelastic.protocol.output_buffer import Line
from nbelastic.protocol.report_history import ReportHistory
from nbelastic.protocol.requests import Piece
from nbelastic.protocol.status import DriverFacts, EventRecord, HostStatus, Status, StepTimes, WorkerStack, WorkerStatus


def merge(target: dict, patch: dict) -> dict:
    """Apply a JSON merge patch (RFC 7386), as a view does."""
    merged = dict(target)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict):
            merged[name] = merge(merged[name] if isinstance(merged.get(name), dict) else {}, value)
        else:
            merged[name] = value
    return merged


class FakeJob:
    def __init__(self, source: str = "") -> None:
        self.name = "job-1"
        self.source = source
        self.error: BaseException | None = None
        self.waited: list[float | None] = []
        self.lines: list[tuple[str, Line]] = []
        self.unfinished: list[tuple[str, Line]] = []
        self.status = "running"
        self._values: list[object] | None = None

    def done(self) -> bool:
        return self.status != "running"

    def result(self, timeout: float | None = None) -> list[object]:
        self.waited.append(timeout)
        if self.error:
            raise self.error
        self._values = [None, None]
        return self._values

    def state_dict(self, name: str | None = None, timeout: float | None = None) -> object:
        self.waited.append(timeout)
        state = {"model": {"weight": 1.0}, "step": 7}
        return state[name] if name else state

    def logs(self, rank: int | None = None, worker: str | None = None, tail: int = 100) -> str:
        return f"rank={rank} worker={worker} tail={tail}\n"

    def lines_since(self, number: int, worker: str | None = None, most: int = 1000):
        found = [pair for pair in self.lines if pair[1].number > number and worker in (None, pair[0])]
        return found[-most:]

    def unfinished_lines(self, worker: str | None = None):
        return [pair for pair in self.unfinished if worker in (None, pair[0])]

    @property
    def writers(self):
        return sorted({(w, int(w[-3])) for w, _ in self.lines})

    def __repr__(self) -> str:
        return "<Job job-1: running, 2 workers>"


class FakeCluster:
    def __init__(self, hosts=None, *, min=1, max=None, **options) -> None:
        if max is not None and min > max:
            raise UsageError(f"min={min} is more than max={max}: lower --min.")
        self.client = SimpleNamespace(activate=lambda: None)
        self.options = {"hosts": hosts, "min": min, "max": max, **options}
        self.calls: list[tuple[object, ...]] = []
        self.events: list[EventRecord] = []
        self.count = 0  # of all events
        self.setup_cells: dict[str, str] = {}
        self.history = ReportHistory()
        self.shown_stacks: list[WorkerStack] = []
        self.shown_step_times: StepTimes | None = StepTimes(5.0, 100.0, ())
        self.subscribers: list[object] = []
        self.died = False
        self.driver = DriverFacts(4711, 1_753_000_000.0, 2, 3600.0, {"Python": "3.11.2", "torch": "2.13.0"})
        self.job: FakeJob | None = None
        self.raises: BaseException | None = None
        self.outputs: list[tuple[str, str, str, str | None]] = []
        self.pieces: list[Piece] = []  # of a cell's output, before its outputs
        self._status = Status("fake", "finished", "not started", 0, 0, min, max, (), (), None, "")

    # The methods of `Cluster`.
    def start(self, wait: bool = True, timeout: float | None = None) -> FakeCluster:
        self.calls.append(("start", wait, timeout))
        for host in (self.options["hosts"] or "localhost:2").split(","):
            self.add_host(host)
        self._raise()
        return self

    def stop(self, timeout: float | None = None) -> None:
        self.calls.append(("stop",))
        self.update(phase="finished", reason="stopped by hand", hosts=(), workers=(), world_size=0)

    def close(self) -> None:
        if self.died:
            self.calls.append(("close",))
        else:
            self.stop()

    def detach(self) -> None:
        self.calls.append(("detach",))
        self.update(phase="finished", reason="detached", hosts=(), workers=(), world_size=0)

    def run_cell(self, source: str, **options) -> FakeJob:
        check_cell(source, awaits=False)
        self.job = FakeJob(source)
        self.job.options = options
        self.job.error = self.raises
        return self.job

    def run_script(self, path: str, *arguments: str, **options: object) -> FakeJob:
        self.job = FakeJob(" ".join((path, *arguments)))
        self.job.options = options
        return self.job

    def execute(self, source: str, *, at_commit: bool = False, on_output=None, **options):
        if not at_commit:
            return self._execute(source, on_output=on_output, **options)
        check_cell(source, awaits=False)
        self.calls.append(("execute at commit", source, options))
        on_output([Piece(row.worker, "out", "", row.rank) for row in self.outputs])
        for row in self.outputs:
            texts = ("out", row.stdout), ("err", row.stderr), *(("display", text) for text in row.displays)
            on_output([Piece(row.worker, *text, row.rank) for text in texts])
        self._raise()
        return self.outputs

    def push(self, values=None, /) -> None:
        self.calls.append(("push", values))
        self._raise()

    def pause(self, **options) -> None:
        self.calls.append(("pause", options))

    def resume(self, **options) -> None:
        self.calls.append(("resume", options))

    def step(self, steps: int = 1, **options) -> None:
        self.calls.append(("step", steps, options))

    def _execute(self, source: str, *, setup=False, key=None, timeout=None, on_output=None):
        check_cell(source, awaits=True)
        self.calls.append(("execute", source, setup, key, timeout))
        if setup:
            self.setup_cells[key or "cell-1"] = source
        if on_output is not None:
            on_output(self.pieces)
            texts = [(row[0], kind, text) for row in self.outputs for kind, text in zip(("out", "err"), row[1:3])]
            on_output([Piece(*text) for text in texts])
        self._raise()
        return self.outputs

    def clear_setup(self, key: str | None = None) -> None:
        if key is None:
            self.setup_cells.clear()
        elif self.setup_cells.pop(key, None) is None:
            raise UsageError(f"there is no setup cell {key!r}; there are {', '.join(self.setup_cells) or 'none'}.")

    def add_host(self, host: str, by: str = "you") -> None:
        self.calls.append(("add_host", host, by))
        spec = parse_host(host, 2)
        if spec.name == "refused":
            self.record("order-refused", f"{spec.name} cannot be reached")
            return
        self.record("host-added", f"{spec.name} with {spec.slots} slots by {by}", host=spec.name)
        first = len(self._status.workers)
        workers = tuple(
            WorkerStatus(
                f"{spec.name}/{i}#1", spec.name, i, first + i, i, 100 + i, "running", 0, 0, "/logs", "", 97.0, 3e8
            )
            for i in range(spec.slots)
        )
        hosts = (*self._status.hosts, HostStatus(spec.name, "10.0.0.1", spec.slots, "up", "", 0.0, 12.5, 4_000_000_000))
        self.update(hosts=hosts, workers=self._status.workers + workers, **self._world(first + spec.slots))

    def remove_host(self, host: str, now: bool = False, by: str = "you", *, within: float | None = None) -> None:
        self.calls.append(("remove_host", host, now, by, *([within] if within else [])))
        if all(one.name != host for one in self._status.hosts):
            raise UsageError(f"there is no host {host!r}.")
        self.record("host-removed", f"{host} will leave at the next commit, by {by}", host=host)
        hosts = tuple(one for one in self._status.hosts if one.name != host)
        left = [worker for worker in self._status.workers if worker.host != host]
        workers = tuple(replace(worker, rank=rank) for rank, worker in enumerate(left))
        self.update(hosts=hosts, workers=workers, **self._world(len(workers)))

    def scale(self, min: int | None = None, max: int | None = None, by: str = "you") -> None:
        self.calls.append(("scale", min, max, by))

    def stop_job(self, by: str = "you") -> None:
        self.calls.append(("stop_job", by))
        self.record("job-stopped", f"job-1 stopped: by {by}")
        self.update(outcome="stopped")

    def wait(self, world: int, timeout: float = 60.0) -> None:
        self.calls.append(("wait", world, timeout))
        self._raise()

    def restart(self, worker: str, by: str = "you") -> None:
        self.calls.append(("restart", worker, by))

    def stacks(self, timeout: float = 2.0):
        self.calls.append(("stacks", timeout))
        return self.shown_stacks

    def ask_stacks(self, done, timeout: float = 2.0) -> None:
        done(self.shown_stacks)

    def ask_step_times(self, done) -> None:
        done(self.shown_step_times)

    def report_history(self):
        return self.history

    def trace(self):
        return {"traceEvents": []}

    def numbered_events(self):
        return list(self.events), self.count

    def show_again(self) -> None:
        self.update()

    def order(self, message: dict[str, object], by: str) -> None:
        self.calls.append(("order", message, by))
        try:
            match message:
                case {"order": "add_host", "host": host}:
                    self.add_host(host, by=by)
                case {"order": "remove_host", "host": host}:
                    self.remove_host(host, now=bool(message.get("now")), by=by)
                case {"order": "stop_job"}:
                    self.stop_job(by=by)
                case {"order": "stop"}:
                    self.stop()
        except UsageError as error:
            self.record("order-refused", str(error))
            self.update()

    def status(self) -> Status:
        return self._status

    @property
    def hosts(self):
        return self._status.hosts

    @property
    def workers(self):
        return self._status.workers

    def subscribe(self, callback):
        self.subscribers.append(callback)
        return lambda: self.subscribers.remove(callback)

    # For tests.
    def record(self, kind: str, text: str, *, host: str = "", worker: str = "", **took: float) -> None:
        self.events.append(EventRecord(time.time(), kind, text, host, worker, self._status.generation, took))
        self.count += 1

    def update(self, **changes: object) -> None:
        self._status = replace(self._status, **changes)
        for callback in self.subscribers:
            callback(self._status)

    def run_for_show(self) -> None:
        """Set the state of a cluster in the middle of a training."""
        self.record("worker-lost", "localhost/1#1 died (SIGKILL)", host="localhost", worker="localhost/1#1")
        self.record("world-formed", "world of 2 at generation 2", notice=3.2, form=14.0)
        report = {"loss": 0.2317, "accuracy": 0.957}
        self.update(job="job-1", step=1203, steps_per_second=55.1, report=report, **self._world(len(self.workers)))

    def _world(self, size: int) -> dict[str, object]:
        return {
            "phase": "running",
            "reason": f"world of {size}",
            "generation": self._status.generation + 1,
            "world_size": size,
        }

    def _raise(self) -> None:
        if self.raises:
            raise self.raises
