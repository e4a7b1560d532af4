"""States of clusters, events and answers of the kernel, as the dashboard's Python side sends them."""

from __future__ import annotations

import math

NOW = 1_753_000_000.0  # the kernel's clock in each test
VERSIONS = {"Python": "3.11.2", "nbelastic": "0.1.0", "torch": "2.13.0+cpu", "ipyparallel": ""}
CHANGE = {"detect": 3.2, "abort": 12.4, "form": 29.0, "sync": 4.5, "first step": 18.1, "all": 71.2}


def worker(rank=None, state="running", behind=0, restarts=0, pid=4711, cpu=97, memory=320, reason="", gpu=None):
    return [rank, state, behind, restarts, pid, cpu, memory, reason, gpu]


def host(workers, slots=None, **more):
    """`workers`: a list with one worker per slot, or a dict as in the contract."""
    named = workers if isinstance(workers, dict) else {f"{slot}#1": row for slot, row in enumerate(workers)}
    plain = {"address": "10.0.0.1", "slots": slots or len(named), "phase": "up", "reason": "", "backoff_until": 0}
    usage = {"cpu": 63, "memory": 41_200, "memory_total": 128_000, "gpus": []}
    return {**plain, **usage, "workers": named, "slots_backoff_until": {}, **more}


def event(n, kind="host-up", text="gpu1 is up", *, ago=0.0, size=4, **more):
    known = {"host": "", "worker": "", "generation": 3, "took": {}}
    return {"n": n, "time": NOW - ago, "kind": kind, "text": text, "size": size, **known, **more}


def request_status(id_, word, why="", by="dashboard", text="the request"):
    return {"id": id_, "by": by, "text": text, "word": word, "why": why}


def state(**more):
    """A cluster of two hosts that train with four workers."""
    hosts = {"gpu1": host([worker(0), worker(1)]), "gpu2": host([worker(2), worker(3)], address="10.0.0.2")}
    world = {
        "n": 1,
        "time": NOW,
        "name": "fake",
        "phase": "running",
        "generation": 3,
        "world_size": 4,
        "min": 2,
        "max": 8,
    }
    job = {"job": "job-1", "outcome": "", "step": 1234, "total": None, "steps_per_second": 55.123, "report": {}}
    driver = {"pid": 812, "since": NOW - 7500, "restarts": 1, "lease": 3600.0, "versions": VERSIONS}
    more = {"driver": driver, "summary": None, "checkpoints": None, **more}
    rest = {"failed_at": None, "copies": None, "hosts": hosts, "events": [event(6)], "orders": []}
    return {**world, "reason": "4 workers train in generation 3", **job, **rest, **more}


def sharded(**more):
    """The same cluster with a sharded model; each rank keeps the copy of a rank of the other host."""
    rows = {
        f"gpu{h}": {f"{s}#1": [1240, [f"gpu{3 - h}/{s}"], [f"gpu{3 - h}/{s}"], True] for s in (0, 1)} for h in (1, 2)
    }
    hosts = {
        "gpu1": host([worker(0), worker(1)], copies=rows["gpu1"]),
        "gpu2": host([worker(2), worker(3)], address="10.0.0.2", copies=rows["gpu2"]),
    }
    copies = {"commit": 1232, "made_at": NOW - 184, "seconds": 0.42, "memory": 4960, "workers": 4}
    return state(hosts=hosts, copies=copies, **more)


HISTORY = [
    event(1, "world-formed", "a world of 4", ago=300, size=4),
    event(2, "worker-lost", "gpu2/1#1 was killed", ago=200, size=3),
    event(3, "world-broken", "gpu2/1#1 died", ago=199.9, size=3),
    event(4, "training", "first step of generation 2", ago=199.8, size=3, took=CHANGE),
    event(5, "worker-ready", "gpu2/1#2 is ready", ago=190, size=3),
]
WRITERS = [["gpu1/0#1", 0], ["gpu1/1#1", 1], ["gpu2/0#1", 2], ["gpu2/1#1", 3]]
STACKS = [
    {"workers": WRITERS[:2], "place": "train.py:88 in train", "text": "line 88, in train", "note": ""},
    {"workers": WRITERS[2:3], "place": "data.py:12 in load", "text": "line 12, in load", "note": "3 commits behind"},
]


def reports(steps=400, *, version="v1", sizes=((1, 4), (150, 3), (170, 4), (320, 8))):
    """The reports of a training: a loss, an accuracy, a learning rate and a name that is long. The world changes at `sizes`."""
    rows = []
    for step in range(1, steps + 1):
        generation = sum(step >= first for first, _ in sizes)
        noise = math.sin(step * 12.9898) * 0.08
        loss = 2.3 * math.exp(-step / 120) + 0.21 + noise / (1 + step / 100)
        time = NOW - 300 + step * 0.7 + 4 * (generation - 1)
        values = [round(loss, 5), round(1 - loss / 2.6, 5), 0.1 if step < 300 else 0.01, step * 2.0]
        rows.append([step, time, generation, sizes[generation - 1][1], *values])
    names = ["loss", "accuracy", "lr", "a-report-with-a-rather-long-name"]
    return {"version": version, "start": 0, "names": names, "rows": rows}


def step_times(ranks=4, columns=60, *, slow=2, since=40):
    """One rank becomes slower; it is replaced on the way, and has no times meanwhile."""
    rows = []
    for rank in range(ranks):
        times = [round(8 + math.sin(i * 7.1 + rank), 2) for i in range(columns)]
        if rank == slow:
            times[since - 4 : since] = [None] * 4
            times[since:] = [time * 5 for time in times[since:]]
        rows.append([f"gpu{1 + rank // 2}/{rank % 2}#1", times])
    return {"span": 5, "end": NOW, "rows": rows, "texts": {str(slow): "is 5.0 times as slow as the others"}}


NO_REPORTS = {"version": "", "start": 0, "names": [], "rows": []}
ANSWERS = {
    "reports": NO_REPORTS,
    "hello": {},
    "history": {"events": HISTORY, "oldest": 1},
    "stacks": {"stacks": STACKS, "silent": WRITERS[3:]},
    "step_times": step_times(),
    "trace": {"trace": {"traceEvents": [{"name": "form", "ph": "X"}]}},
}


def logs(*lines, first=1, job="job-1", unfinished=(), speakers=WRITERS, more=False):
    """An answer with these lines, each given as a rank, a stream and a text; one per second."""
    numbered = [[n, stream, text, [[rank, rank]], NOW + n] for n, (rank, stream, text) in enumerate(lines, first)]
    pending = [[0, stream, text, runs, NOW] for runs, stream, text in unfinished]
    rest = {"next": first + len(lines) - 1, "more": more, "writers": WRITERS, "speakers": speakers}
    return {"job": job, "lines": numbered, "unfinished": pending, **rest}


def crowd():
    """Long names and reasons, each state of a slot, GPUs, reports, copies on several hosts."""
    long = "gpu-node-with-a-rather-long-name.cluster.example.org"
    slots = {"0#1": worker(3), "1#2": worker(None, "ready", restarts=1), "2#1": worker(None, "lost", reason="signal 9")}
    hosts = {
        "localhost": host(
            [worker(0, gpu=0), worker(1, behind=3), worker(2), worker(None, "starting")],
            gpus=[[93, 61.0, 80.0, 71]],
            copies={"1#1": [1240, [f"{long}/0", "gpu3/1"], [f"{long}/0", "gpu3/1"], True]},
        ),
        long: host(
            slots,
            slots=5,
            slots_backoff_until={"3": NOW + 3030},
            phase="draining",
            reason="to leave at the next commit",
        ),
        "gpu3": host(
            [], slots=2, phase="backoff", reason="ssh said: connection refused", backoff_until=NOW + 3030, cpu=None
        ),
    }
    report = {"loss": 0.2134, "a-report-with-a-rather-long-name": 123456, "lr": "nan"}
    events = [event(6, "order-refused", "a-word-of-one-hundred-letters-" * 4), event(7, "training", took=CHANGE)]
    orders = [{"id": "another-1", "by": "%elastic_add", "text": f"add {long}:8", "word": "under way", "why": ""}]
    copies = {"commit": 1_232_123, "made_at": NOW - 4000, "seconds": 12.3, "memory": 123_456, "workers": 100}
    figures = {"report": report, "total": 20_000, "failed_at": NOW - 190, "copies": copies}
    figures["summary"] = {"failures": 3, "lost": 0, "trained": 98.7}
    figures["checkpoints"] = {"commit": 1200, "made_at": NOW - 4000, "size": 123_456.0, "every": 100}
    return state(hosts=hosts, events=events, orders=orders, **figures)
