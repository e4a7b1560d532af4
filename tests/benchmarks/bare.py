"""Processes that run rounds of torch without a driver: what a recovery cannot do without.

A task is an object with `round(store, ready)`: it calls `ready` once all ranks may begin, and returns marks, a name and a
time each.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 120.0


def _serve(kind: Callable[[int], Any], rank: int, threads: int, pipe: Any, barrier: Any) -> None:
    """Run a round at each message, which has the port of a store; rank 0 receives 0, makes the store, and sends its port."""
    import torch
    import torch.distributed as dist

    from nbelastic.worker.name_lookups import end_name_lookups

    end_name_lookups()  # as in nbelastic's workers: else one lost answer of a name server would be measured
    torch.set_num_threads(threads)
    task = kind(rank)
    while (port := pipe.recv()) is not None:
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        pipe.send(store.port)
        pipe.send(task.round(store, lambda: barrier.wait(PATIENCE)))
    os._exit(0)  # a thread may hang in gloo


@contextmanager
def processes(kind: Callable[[int], Any], count: int) -> Iterator[Callable[[], list[dict[str, float]]]]:
    """Start `count` processes; yield a function that runs a round and returns the marks of each rank."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count)
    threads = max(1, (os.cpu_count() or 1) // (count + 1))  # as nbelastic's workers, before one was lost
    pairs = [context.Pipe() for _ in range(count)]
    started = [
        context.Process(target=_serve, args=(kind, r, threads, pair[1], barrier)) for r, pair in enumerate(pairs)
    ]
    for process in started:
        process.start()
    pipes = [pair[0] for pair in pairs]

    def receive(pipe: Any) -> Any:
        if not pipe.poll(PATIENCE):
            raise TimeoutError(f"the bare processes did nothing for {PATIENCE:.0f} s")
        return pipe.recv()

    def one_round() -> list[dict[str, float]]:
        pipes[0].send(0)
        port = receive(pipes[0])
        for pipe in pipes[1:]:
            pipe.send(port)
            receive(pipe)
        return [dict(receive(pipe)) for pipe in pipes]

    try:
        one_round()  # the first time, everything is new
        yield one_round
    finally:
        for pipe in pipes:
            pipe.send(None)
        for process in started:
            process.join(10)
            process.kill()
