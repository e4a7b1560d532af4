"""Text and HTML views of a cluster's status, for places without widgets. Pure functions of a `Status`.

All values are escaped. Process ids, addresses and times are left out, since stored outputs are compared when a notebook is
tested.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Self

from nbelastic.client.progress import is_whole, unit
from nbelastic.protocol.local_clusters import ClusterInfo
from nbelastic.protocol.status import HostStatus, Status, WorkerStatus
from nbelastic.system.tables import html_table, text_table

if TYPE_CHECKING:
    from nbelastic.client.cluster import Cluster
    from nbelastic.client.doctor import Finding

_HOST_COLUMNS = ("host", "slots", "state", "why")
NO_CLUSTER = "No cluster is running."
_CLUSTER_COLUMNS = ("cluster", "driver", "hosts", "job", "why")
_FINDING_COLUMNS = ("host", "state", "finding")
_WORKER_COLUMNS = ("rank", "worker", "state", "step", "restarts", "why")


class StatusView:
    """What `%elastic_status` shows; `status` is the snapshot itself. `failure`: why the job has failed, in one line."""

    def __init__(self, status: Status, failure: str = "") -> None:
        self.status, self._failure = status, failure

    @classmethod
    def of(cls, cluster: Cluster) -> Self:
        """The present state of a cluster."""
        status = cluster.status()
        failed = (record.text for record in reversed(cluster.events) if record.kind == "job-failed")
        failure = next(failed, "") if status.outcome == "failed" else ""
        return cls(status, failure.removeprefix(f"{status.job} failed: "))

    def __repr__(self) -> str:
        """Two tables in plain text."""
        status = self.status
        hosts = text_table(_HOST_COLUMNS, map(_host, status.hosts))
        tables = (hosts, text_table(_worker_columns(status), _workers(status)))
        return "\n".join([headline(status), *self._lines(), *(f"\n{table}" for table in tables if table)])

    def _repr_html_(self) -> str:
        status = self.status
        lines = "".join(f"<div>{escape(line)}</div>" for line in self._lines())
        hosts = html_table("Hosts", _HOST_COLUMNS, map(_host, status.hosts))
        workers = html_table("Workers", _worker_columns(status), _workers(status))
        return f"<div><strong>{escape(headline(status))}</strong>{lines}{hosts}{workers}</div>"

    def _lines(self) -> list[str]:
        return [*_progress(self.status), *([self._failure] if self._failure else [])]


class ClusterList:
    """What `%elastic_list` shows; `clusters` is the list itself. `attach` is the command that attaches to one."""

    def __init__(self, clusters: list[ClusterInfo], attach: str = "%elastic_attach") -> None:
        self.clusters, self._attach = clusters, attach

    def __repr__(self) -> str:
        return text_table(_CLUSTER_COLUMNS, self._rows()) or NO_CLUSTER

    def _repr_html_(self) -> str:
        return html_table("Clusters", _CLUSTER_COLUMNS, self._rows()) or f"<div>{NO_CLUSTER}</div>"

    def _rows(self) -> Iterable[tuple[str, ...]]:
        for info in self.clusters:
            driver = f"process {info.driver}" if info.driver else "none"
            why = info.problem or f"{self._attach} {info.name}"
            yield info.name, driver, ", ".join(info.hosts), info.job, why


class FindingList:
    """What `%elastic_doctor` shows; `findings` is the list itself."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.state != "wrong" for finding in self.findings)

    def __repr__(self) -> str:
        return text_table(_FINDING_COLUMNS, self.findings)

    def _repr_html_(self) -> str:
        return html_table("Hosts", _FINDING_COLUMNS, self.findings)


def limits(least: int, most: int | None) -> str:
    """`2–4`, `4` or `2 or more`."""
    if most is None:
        return f"{least} or more"
    return str(least) if least == most else f"{least}–{most}"


def print_unanswered(cluster: Cluster) -> None:
    """After a stop, print which hosts have not answered it, and when their agents end by themselves."""
    for record in cluster.events:
        if record.kind == "hosts-unanswered":
            print(f"{record.text}.")


def headline(status: Status) -> str:
    """Return the phase, its reason, the world (between jobs: the ready workers) and the generation in one line."""
    why = f": {status.reason}" if status.reason else ""
    ready = sum(worker.state == "ready" for worker in status.workers)
    size = f"world {status.world_size}" if _training(status) else f"ready {ready}"
    return f"{status.phase}{why} · {size} / {limits(status.min, status.max)} · generation {status.generation}"


def stable_text(status: Status) -> str:
    """Describe the cluster by what does not change, so that stored outputs of a notebook can be compared."""
    return f"<elastic cluster of {limits(status.min, status.max)} workers>"


def stable_html(status: Status) -> str:
    """Return the same as `stable_text` for a browser without widgets."""
    return (
        f"<div><strong>Elastic cluster of {escape(limits(status.min, status.max))} workers.</strong> "
        "The live view is a widget, which is not shown here: <code>%elastic_status</code> lists hosts and workers, "
        "<code>%elastic_logs</code> prints their output.</div>"
    )


def _training(status: Status) -> bool:
    return bool(status.job) and not status.outcome


def _progress(status: Status) -> list[str]:
    """Return the lines of the job, if there is a job."""
    if not status.job:
        return []
    parts = [f"{status.job} {status.outcome or 'running'}", f"{unit(status)} {status.step}"]
    if _training(status) and status.steps_per_second is not None:
        parts.append(f"{status.steps_per_second:.1f} {unit(status)}s/s")
    line = " · ".join([*parts, *(f"{name} {_value(value)}" for name, value in status.report.items())])
    return [line, *_copies(status)]


def _copies(status: Status) -> list[str]:
    """Return the line about copies of a sharded model, if there are any."""
    copies = status.copies
    if copies is None:
        return []
    workers = f"{copies.workers} worker{'' if copies.workers == 1 else 's'}"
    memory = f"copies {_bytes(copies.memory)} ({workers})"
    if copies.commit is None:
        return [f"no whole commit yet · {memory}"]
    age = f"whole commit {copies.commit}, {_seconds(status.time - copies.made_at)} old"
    return [" · ".join([age, *([memory] if copies.workers else []), f"copied in {_seconds(copies.seconds)}"])]


def _bytes(count: int) -> str:
    if count >= 1_000_000_000:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 10_000_000 else f"{count / 1e6:.1f} MB"


def _seconds(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 0.1:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _value(value: float | str) -> str:
    """Four significant digits, and all of a whole number, such as a step that the program counts."""
    if isinstance(value, str):
        return value
    return str(int(value)) if is_whole(value) else f"{value:.4g}"


def _host(host: HostStatus) -> tuple[str, ...]:
    until = f"{host.backoff_until:.0f} s to go" if host.backoff_until > 0 else ""
    if host.ends_in is not None:
        until = f"ends within {host.ends_in:.0f} s"
    return host.name, str(host.slots), host.phase, "; ".join(filter(None, (host.reason, until)))


def _workers(status: Status) -> Iterable[tuple[str, ...]]:
    """Return the rows of the workers by rank; workers without a rank come last."""
    rows = sorted(status.workers, key=lambda w: (w.rank is None, w.rank or 0, w.id))
    if status.copies is None:
        return map(_worker, rows)
    return ((*_worker(w)[:-1], _worker_copies(w), w.reason) for w in rows)


def _worker_columns(status: Status) -> tuple[str, ...]:
    """Return the columns of the table of workers: with copies only if the job has any."""
    columns = tuple(unit(status) if column == "step" else column for column in _WORKER_COLUMNS)
    return columns if status.copies is None else (*columns[:-1], "copies", columns[-1])


def _worker_copies(worker: WorkerStatus) -> str:
    """Return the memory of a worker's copies, and where the copy of its shard is."""
    if worker.copies is None:
        return ""
    memory, on = _bytes(worker.copies.memory), ", ".join(slot_name(id_) for id_ in worker.copies.copied_to)
    if on:
        return f"{memory}, copy on {on}"
    return f"{memory}, shared on {worker.host}" if worker.copies.shared else memory


def slot_name(worker: str) -> str:
    """`host/slot` of a worker's id."""
    return worker.rpartition("#")[0]


def _worker(worker: WorkerStatus) -> tuple[str, ...]:
    rank = "–" if worker.rank is None else str(worker.rank)
    return rank, worker.id, worker.state, str(worker.step), str(worker.restarts), worker.reason
