"""Programs whose ranks do not hold the same values."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import nbelastic as nbe
from tests.process.programs import Log, any_rank_finds, checksum, generation, network

PAUSE = 0.15  # seconds; so slow that each commit is reported


def train_and_flip(folder: str) -> dict[str, Any]:
    """Train; once `folder/flip` exists, a bit of rank 2's model flips between two commits, as in a faulty memory."""
    import torch

    log = Log(folder)
    model, optimizer = network()
    state = nbe.TorchState(model=model, optimizer=optimizer, step=0)

    def flip() -> None:
        try:
            (Path(folder) / "flip").unlink()
        except FileNotFoundError:
            return
        bits = model[2].weight.data.view(torch.int32)
        bits[1, 7] ^= 1 << 3
        log(flipped=state.commits, rank=nbe.rank())

    @nbe.elastic
    def loop(state: Any) -> dict[str, Any]:
        ddp = torch.nn.parallel.DistributedDataParallel(state.model)
        while not any_rank_finds(folder, "finish"):
            loss = ddp(torch.randn(8, 16)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step += 1
            log(step=state.step, generation=generation(), sum=checksum(model))
            state.commit()
            time.sleep(PAUSE)
            if nbe.rank() == 2:
                flip()
        return {"step": state.step, "sum": checksum(model), "pid": os.getpid()}

    return loop(state)


def train_alone(folder: str) -> int:
    """Each rank trains for itself, with samples of its own."""
    import torch

    model, optimizer = network()
    state = nbe.TorchState(model=model, optimizer=optimizer, step=0)

    @nbe.elastic
    def loop(state: Any) -> int:
        torch.manual_seed(nbe.rank())
        while not any_rank_finds(folder, "finish"):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).pow(2).mean().backward()
            optimizer.step()
            state.commit()
            time.sleep(PAUSE)
        return state.commits

    return loop(state)


def train_slowly(folder: str) -> int:
    """Train; each batch of rank 1 takes 60 ms longer, until `folder/fast` exists."""
    import torch

    class Samples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8 * 100_000

        def __getitem__(self, index: int) -> Any:
            if index % 8 == 0 and nbe.rank() == 1 and not (Path(folder) / "fast").exists():
                time.sleep(0.06)
            return torch.ones(16)

    model, optimizer = network()
    state = nbe.TorchState(model=model, optimizer=optimizer, step=0)

    @nbe.elastic
    def loop(state: Any) -> int:
        ddp = torch.nn.parallel.DistributedDataParallel(state.model)
        for batch in torch.utils.data.DataLoader(Samples(), batch_size=8):
            if any_rank_finds(folder, "finish"):
                break
            optimizer.zero_grad()
            ddp(batch).pow(2).mean().backward()
            optimizer.step()
            state.commit()
            time.sleep(0.005)
        return int(state.commits)

    return loop(state)
