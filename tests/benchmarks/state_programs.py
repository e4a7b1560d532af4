"""The programs of `tests.benchmarks.state`: each function is a job's program."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import nbelastic as nbe
from tests.benchmarks import programs


def milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1000


def commits(rounds: int, every: int) -> dict[str, Any]:
    """Time each step and each commit in ms, with `every` steps per commit, 0 for none; memory at the end is in MB.

    Where tensors are copied, the same number of bytes is copied bare after each commit.
    """
    import psutil
    import torch

    model, optimizer = programs.large_model_and_optimizer()
    state = nbe.TorchState(model=model, optimizer=optimizer) if every else nbe.ObjectState()
    live = [p.detach() for p in model.parameters()] * 2
    bare = [torch.empty_like(t) for t in live] if every > 1 else []
    found: dict[str, Any] = {"step": [], "commit": [], "memcpy": []}

    @nbe.elastic
    def train(state: Any) -> None:
        ddp = torch.nn.parallel.DistributedDataParallel(model, init_sync=False)
        for _ in range(rounds):
            for _ in range(max(1, every)):
                found["step"].append(milliseconds(lambda: programs.one_large_step(ddp, optimizer)))
            if every:
                found["commit"].append(milliseconds(state.commit))
            if bare:
                found["memcpy"].append(milliseconds(lambda: [a.copy_(b) for a, b in zip(bare, live, strict=True)]))

    train(state)
    return {**found, "MB": psutil.Process().memory_info().rss / 1e6}


def hashed_commits(megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Time commits of a state of this size in ms, in turn with the hash of the replica and without it."""
    import torch

    width, layers = (204, 2) if megabytes == 1 else (600, 3) if megabytes == 10 else (1000, 9)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters())
    state = nbe.TorchState(model=model, optimizer=optimizer)
    found: dict[str, list[float]] = {"hashed": [], "not hashed": [], "MB": []}

    @nbe.elastic
    def train(state: Any) -> None:
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        add = state._replica.add
        for number in range(2 * rounds):
            state._replica.add = add if number % 2 else lambda _: None
            optimizer.zero_grad()
            ddp(torch.randn(32, width)).pow(2).mean().backward()
            optimizer.step()
            found["hashed" if number % 2 else "not hashed"].append(milliseconds(state.commit))
        found["MB"].append(sum(tensor.nbytes for tensor in state._equal_tensors()) / 1e6)

    train(state)
    return found


def gpu_commits(rounds: int) -> dict[str, list[float]]:
    """Commit every third step on one GPU; time the call, the arrival of the copy, and a bare copy."""
    import torch

    model, optimizer = programs.large_model_and_optimizer()
    model.to(nbe.device())
    state = nbe.TorchState(model=model, optimizer=optimizer)
    live = [p.detach() for p in model.parameters()] * 2
    bare = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in live]
    found: dict[str, list[float]] = {"commit": [], "copied": [], "bare": []}

    def copy() -> None:
        for place, tensor in zip(bare, live, strict=True):
            place.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    @nbe.elastic
    def train(state: Any) -> None:
        for _ in range(rounds):
            for _ in range(3):
                model(torch.randn(8, programs.LARGE, device=nbe.device())).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.synchronize()
            found["commit"].append(milliseconds(state.commit))
            found["copied"].append(found["commit"][-1] + milliseconds(torch.cuda.synchronize))
            found["bare"].append(milliseconds(copy))

    train(state)
    return found


def words(seconds: float) -> dict[str, list[float]]:
    """Time in µs, over `seconds`, a commit of a counter and its part that counts it and checks for requests."""
    state = nbe.ObjectState(step=0)
    found: dict[str, list[float]] = {"commit": [], "news": []}

    @nbe.elastic
    def train(state: Any) -> None:
        session, end = state._session, time.monotonic() + seconds
        counted = session.committed

        def committed(total: int) -> None:
            found["news"].append(milliseconds(lambda: counted(total)) * 1000)

        session.committed = committed
        try:
            while time.monotonic() < end:
                found["commit"].append(milliseconds(state.commit) * 1000)
                time.sleep(0.001)
        finally:
            session.committed = counted

    train(state)
    return found


def sync(rounds: int) -> dict[str, Any]:
    """Send a state from rank 0 to all ranks and to the last one, and the same bytes bare; times are in ms."""
    import torch
    import torch.distributed as dist

    from nbelastic.state.transfer import Channel, describe, destinations

    model, optimizer = programs.large_model_and_optimizer()
    model(torch.randn(8, programs.LARGE)).sum().backward()
    optimizer.step()
    state = nbe.TorchState(model=model, optimizer=optimizer)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()] * 2)
    found: dict[str, Any] = {"all": [], "bare all": [], "one": [], "bare one": []}

    def ours(receivers: range) -> None:
        channel = Channel(0, receivers, nbe.rank(), nbe.size(), torch.device("cpu"))
        if channel.takes_part:
            tensors: list[Any] = []
            described = channel.move_object(describe(state._live(), tensors))
            places = dict(destinations(described, state._live(), torch.device("cpu")))
            channel.move_tensors([places[index] for index in sorted(places)] if channel.receives else tensors)

    def bare_to_last() -> None:
        last = nbe.size() - 1
        if nbe.rank() == 0:
            dist.send(flat, last)
        elif nbe.rank() == last:
            dist.recv(flat, 0)

    cases: dict[str, Callable[[], object]] = {
        "all": lambda: ours(range(1, nbe.size())),
        "bare all": lambda: dist.broadcast(flat, 0),
        "one": lambda: ours(range(nbe.size() - 1, nbe.size())),
        "bare one": bare_to_last,
    }

    @nbe.elastic
    def run(_: Any) -> None:
        for _ in range(rounds):
            for name, case in cases.items():
                dist.barrier()
                found[name].append(milliseconds(lambda case=case: (case(), dist.barrier())))

    run(nbe.ObjectState())
    return found


def floor(rounds: int) -> list[float]:
    """Form a bare gloo group over a fresh store and do one step of DDP; times are in ms, of the slowest rank.

    The ranks are ready when the clock starts, and no rank needs another one's state.
    """
    import torch
    import torch.distributed as dist

    model, optimizer = programs.large_model_and_optimizer()
    found: list[float] = []

    @nbe.elastic
    def run(_: Any) -> None:
        rank, size = nbe.rank(), nbe.size()
        for number in range(rounds):
            ddp = torch.nn.parallel.DistributedDataParallel(model, init_sync=False)
            programs.one_large_step(ddp, optimizer)
            del ddp
            port = [0]
            store = None
            if rank == 0:
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                port = [store.port]
            dist.broadcast_object_list(port, 0)
            dist.barrier()
            start = time.perf_counter()
            if store is None:
                store = dist.TCPStore("127.0.0.1", port[0], is_master=False, wait_for_workers=False)
            backend = dist.ProcessGroupGloo(dist.PrefixStore(f"bare/{number}", store), rank, size)
            group = dist.ProcessGroup(dist.PrefixStore("g", store), rank, size)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
            again = torch.nn.parallel.DistributedDataParallel(model, process_group=group, init_sync=False)
            programs.one_large_step(again, optimizer)
            took = torch.tensor([(time.perf_counter() - start) * 1000])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            found.append(took.item())
            del again

    run(nbe.ObjectState())
    return found
