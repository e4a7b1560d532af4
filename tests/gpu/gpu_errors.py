"""Errors that a GPU keeps: which of them end the job, and that the next job has healthy workers again."""

from __future__ import annotations

import nbelastic as nbe
from tests.gpu import programs
from tests.gpu.bench import Bench
from tests.gpu.faults import TIMEOUT
from tests.process.training import Training
from tests.support.waiting import until

FAIL = {"memory": "memory", "assertion": "assert"}  # of the program: the job fails, and its error has this word
ON_CPU = {"memory": "memory", "assertion": "index"}


def run(bench: Bench) -> None:
    """Two workers share what there is. The program asks for too much, and fails an assertion; the GPU reads a wrong address."""
    words = FAIL if bench.has_gpu else ON_CPU
    with bench.cluster("localhost:2", min=1, max=2, backend="gloo") as cluster:
        for fault, word in words.items():
            with bench.results.case(fault) as case:
                training = begin(bench, cluster)
                (training.folder / f"die-{fault}").touch()
                error = training.job.exception(timeout=TIMEOUT)
                case.note(outcome=str(error).splitlines()[0])
                assert word in str(error).lower()
                probe(cluster)
        for fault in ("illegal-address", "newcomer-memory"):
            with bench.results.case(fault) as case:
                training, before = begin(bench, cluster), len(cluster.events)
                victim = max(training.cluster.workers, key=lambda worker: worker.rank or 0)
                (training.folder / f"die-{fault}").touch()
                if fault == "newcomer-memory":
                    cluster.restart(victim.id)
                until(lambda: settled(training, victim.id), TIMEOUT, lambda: cluster.status().reason)
                training.finish(TIMEOUT)
                case.note(outcome="; ".join(event.text for event in cluster.events[before:] if event.worker))
                probe(cluster)


def settled(training: Training, victim: str) -> bool:
    """The worker has a successor that trains, or one that failed and will not be tried again in this job."""
    workers = training.cluster.workers
    others = [worker for worker in workers if worker.id != victim]
    return training.job.done() or (
        len(others) == len(workers) == 2 and all(w.rank is not None or w.state == "failed" for w in others)
    )


def begin(bench: Bench, cluster: nbe.Cluster) -> Training:
    training = Training(cluster, bench.new_folder("steps"), programs.train)
    training.wait_for_world(2, TIMEOUT)
    return training


def probe(cluster: nbe.Cluster) -> None:
    """In the next job both workers can use their device."""
    until(
        lambda: cluster.run(multiply).result(timeout=TIMEOUT) == [64.0**3] * 2, TIMEOUT, "two workers of the next job"
    )


def multiply() -> float:
    import torch

    one = torch.ones(64, 64, device=nbe.device())
    return float((one @ one).sum())
