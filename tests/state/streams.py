"""Streams in tests: ranks as threads of the test, which exchange the rows of their batches without a process group."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from tests.state.conftest import formation

GROUP = SimpleNamespace(WORLD=SimpleNamespace(_get_backend=lambda _: SimpleNamespace(name=lambda: "gloo")))
DEADLINE = 20  # seconds for an exchange


class Ranks:
    """`size` ranks. `each(task)` calls `task(rank)` in a thread per rank, and returns what they return."""

    def __init__(self, monkeypatch, size):
        self.exchanges = 0
        self._size = size
        self._here = threading.local()
        self._barrier = threading.Barrier(size)
        self._rows = [None] * size
        monkeypatch.setattr("nbelastic.worker.session.world", lambda: formation(self._here.rank, size))
        monkeypatch.setattr(
            "nbelastic.state.stream.dist", SimpleNamespace(all_gather_into_tensor=self._gather, group=GROUP)
        )

    def each(self, task):
        def run(rank):
            self._here.rank = rank
            try:
                return task(rank)
            except BaseException:
                self._barrier.abort()  # the others must not wait for this rank
                raise

        with ThreadPoolExecutor(self._size) as threads:
            futures = [threads.submit(run, rank) for rank in range(self._size)]
        errors = [future.exception() for future in futures]
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def _gather(self, received, sent):
        rank = self._here.rank
        self._rows[rank] = sent
        self._barrier.wait(DEADLINE)
        for number, part in enumerate(received.split(len(sent))):
            part.copy_(self._rows[number])
        self.exchanges += rank == 0
        self._barrier.wait(DEADLINE)


def read(stream, batch_size=4, **options):
    """All samples of an epoch that is recorded to its end."""
    samples = []
    for batch in stream.loader(batch_size, **options):
        samples += batch.tolist()
        stream.record_batch()
    return samples
