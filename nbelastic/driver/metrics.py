"""The cluster's figures as text in the OpenMetrics format. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from nbelastic.protocol.status import Status

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
MEGABYTE = 1_000_000
Sample = tuple[Mapping[str, str], float | None]  # labels and a value; None: not known, so left out


class Text:
    """Lines of metric families, each with its samples."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, kind: str, description: str, samples: Iterable[Sample]) -> None:
        """Add a family, unless it has no samples. Counters get the suffix that the format wants."""
        suffix = "_total" if kind == "counter" else ""
        known = [(labels, value) for labels, value in samples if value is not None]
        if not known:
            return
        full = f"nbelastic_{name}"
        self._lines += [f"# TYPE {full} {kind}", f"# HELP {full} {_escaped(description)}"]
        self._lines += [f"{full}{suffix}{_labels(labels)} {_number(value)}" for labels, value in known]

    def finish(self) -> str:
        return "\n".join([*self._lines, "# EOF"]) + "\n"


def metrics(status: Status, events: Mapping[str, int]) -> str:
    """The text for a status. `events`: records of this driver's event log by kind."""
    text = Text()
    _cluster(text, status)
    _job(text, status)
    _hosts(text, status)
    _workers(text, status)
    kinds: list[Sample] = [({"kind": kind}, count) for kind, count in sorted(events.items())]
    text.add("events", "counter", "Records of the event log since this driver started, such as worker-lost.", kinds)
    return text.finish()


def _cluster(text: Text, status: Status) -> None:
    text.add("phase", "gauge", "The phase of the cluster, as a label.", [({"phase": status.phase}, 1)])
    text.add("world_size", "gauge", "Workers that train together.", [({}, status.world_size)])
    text.add("min_workers", "gauge", "The least workers with which a job trains.", [({}, status.min)])
    text.add("max_workers", "gauge", "The most workers that train.", [({}, status.max)])
    text.add("generation", "gauge", "The number of the present generation.", [({}, status.generation)])
    text.add(
        "last_failure_seconds", "gauge", "When a worker or host was last lost, since 1970.", [({}, status.failed_at)]
    )


def _job(text: Text, status: Status) -> None:
    if status.job is None:
        return
    labels = {"job": status.job}
    text.add("job_outcome", "gauge", "How the job ended, as a label.", [({**labels, "outcome": status.outcome}, 1)])
    text.add("job_steps", "gauge", "Commits of the present or last job.", [(labels, status.step)])
    text.add("job_expected_steps", "gauge", "Commits that the job will make.", [(labels, status.total)])
    text.add("job_steps_per_second", "gauge", "Commits per second.", [(labels, status.steps_per_second)])
    reported: list[Sample] = [
        ({**labels, "name": name}, value) for name, value in status.report.items() if not isinstance(value, str)
    ]
    text.add("job_report", "gauge", "The newest numbers that rank 0 has reported.", reported)


def _hosts(text: Text, status: Status) -> None:
    def add(name: str, description: str, value: dict[str, float | None]) -> None:
        text.add(name, "gauge", description, [({"host": host}, one) for host, one in value.items()])

    hosts = status.hosts
    phases: list[Sample] = [({"host": host.name, "phase": host.phase}, 1) for host in hosts]
    text.add("host_phase", "gauge", "The phase of a host, as a label.", phases)
    add("host_slots", "Slots of a host.", {host.name: host.slots for host in hosts})
    counts = Counter((worker.host, worker.state) for worker in status.workers)
    states: list[Sample] = [({"host": host, "state": state}, count) for (host, state), count in sorted(counts.items())]
    text.add("host_workers", "gauge", "Workers of a host, by state.", states)
    cpu = {host.name: None if host.cpu is None else host.cpu / 100 for host in hosts}
    add("host_cpu_ratio", "The used part of all cores.", cpu)
    add("host_memory_bytes", "Used memory.", {host.name: host.memory for host in hosts})
    add("host_memory_size_bytes", "Memory in total.", {host.name: host.memory_total for host in hosts})
    gpus = [({"host": host.name, "gpu": str(n)}, gpu) for host in hosts for n, gpu in enumerate(host.gpus)]
    busy: list[Sample] = [(labels, None if gpu.busy is None else gpu.busy / 100) for labels, gpu in gpus]
    text.add("gpu_utilization_ratio", "gauge", "Utilization of a GPU.", busy)
    used: list[Sample] = [(labels, _bytes(gpu.memory)) for labels, gpu in gpus]
    text.add("gpu_memory_bytes", "gauge", "Used memory of a GPU.", used)
    sizes: list[Sample] = [(labels, _bytes(gpu.memory_total)) for labels, gpu in gpus]
    text.add("gpu_memory_size_bytes", "gauge", "Memory of a GPU in total.", sizes)
    heat: list[Sample] = [(labels, gpu.temperature) for labels, gpu in gpus]
    text.add("gpu_temperature_celsius", "gauge", "Temperature of a GPU.", heat)


def _bytes(megabytes: int | None) -> int | None:
    return None if megabytes is None else megabytes * MEGABYTE


def _workers(text: Text, status: Status) -> None:
    slots = [({"host": worker.host, "slot": str(worker.slot)}, worker) for worker in status.workers]
    text.add("worker_rank", "gauge", "The rank of a member.", [(labels, worker.rank) for labels, worker in slots])
    text.add("worker_steps", "gauge", "Commits of a worker.", [(labels, worker.step) for labels, worker in slots])
    text.add("worker_memory_bytes", "gauge", "Resident memory.", [(labels, worker.memory) for labels, worker in slots])
    restarts: list[Sample] = [(labels, worker.restarts) for labels, worker in slots]
    text.add("slot_restarts", "counter", "Restarts of a slot's worker.", restarts)


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
