"""The programs of `tests.benchmarks.sharded`: 25 M parameters in 24 layers, sharded by FSDP2, with AdamW (302 MB in all)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import nbelastic as nbe

LAYERS, WIDTH = 24, 1024
BATCH = 8


def sharded(mesh: Any) -> tuple[Any, Any]:
    """Return the model, made on the meta device and sharded layer by layer, and its optimizer."""
    import torch
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def one_step(model: Any, optimizer: Any, batch: int = BATCH) -> None:
    """Do one step on a random batch."""
    import torch

    model(torch.randn(batch, WIDTH)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Marks:
    """Lines with the time at which something happened; each process has its own file in `folder`."""

    def __init__(self, folder: str) -> None:
        self._file = (Path(folder) / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def write(self, what: str, **values: Any) -> None:
        """Write a line, at once."""
        self._file.write(json.dumps({"t": time.time(), "what": what, "pid": os.getpid(), **values}) + "\n")


def record(folder: str, steps: int, every: int = 1) -> int:
    """Train until this step; mark each part of a recovery and each step. It stands still while `pause` exists."""
    from nbelastic.worker import session

    state = nbe.ShardedState(step=0, every=every)
    marks, pause = Marks(folder), Path(folder) / "pause"

    @nbe.elastic
    def train(state: Any) -> int:
        where = {"rank": nbe.rank(), "world": nbe.size(), "generation": session.world().generation}
        marks.write("called", **where)
        try:
            model, optimizer = sharded(nbe.device_mesh())
            marks.write("sharded", **where)
            state.bind(model=model, optimizer=optimizer)
            marks.write("bound", **where)
            while state.step < steps:
                while pause.exists():
                    time.sleep(0.02)
                one_step(model, optimizer)
                state.step += 1
                marks.write("step", step=state.step, **where)
                state.commit()
            return int(state.step)
        finally:
            marks.write("left", **where)

    return int(train(state))


def steady(copies: int, every: int, batch: int, steps: int) -> dict[str, Any]:
    """Make some steps; return seconds of each, seconds of each commit, CPU seconds, and bytes of the copies' memory."""
    state = nbe.ShardedState(step=0, every=every, copies=copies)
    found: dict[str, Any] = {"step": [], "commit": []}

    @nbe.elastic
    def train(state: Any) -> dict[str, Any]:
        model, optimizer = sharded(nbe.device_mesh())
        state.bind(model=model, optimizer=optimizer)
        used = 0.0
        while state.step < every + steps:
            if state.step == every:  # memory is allocated by then
                used = time.process_time()
            begun = time.perf_counter()
            one_step(model, optimizer, batch)
            state.step += 1
            stepped = time.perf_counter()
            state.commit()
            if state.step > every:
                found["step"].append(time.perf_counter() - begun)
                found["commit"].append(time.perf_counter() - stepped)
        found["CPU"] = (time.process_time() - used) / steps
        found["arenas"] = state._replication.nbytes if state._replication is not None else 0
        found["shard"] = sum(tensor.nbytes for tensor in state._bound.shard().values())
        return found

    result: dict[str, Any] = train(state)
    return result
