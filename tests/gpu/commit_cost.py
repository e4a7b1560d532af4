"""What a commit costs: steps per second with a commit after each step, and of plain DDP, by turns in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import nbelastic as nbe
from tests.gpu import models
from tests.gpu.bench import Bench

ROUNDS = 4
SECONDS = 0.7  # of each round, and of each side


def run(bench: Bench) -> None:
    """One line per model: milliseconds of a step on each side, and the ratio in each round."""
    options = bench.alone()
    with bench.cluster("localhost:1", min=1, **options) as cluster:
        for name in models.NAMES:
            for scaled in (False, True):
                label = f"{name}, AMP and GradScaler" if scaled else name
                with bench.results.case(label) as case:
                    rounds, seconds = bench.choose(ROUNDS, 2), bench.choose(SECONDS, 0.2, 0.05)
                    job = cluster.run(measure, name, scaled, not bench.has_gpu, rounds, seconds)
                    ((plain, commits, copied),) = job.result(timeout=bench.left)
                    case.record("steps/s with a commit, of those without", *(b / a for a, b in zip(plain, commits)))
                    case.note(plain_ms=_ms(plain), commit_ms=_ms(commits), copied_ms=_ms(copied))


def _ms(rates: list[float]) -> float:
    return round(1000 / sorted(rates)[len(rates) // 2], 4)


def measure(name: str, scaled: bool, small: bool, rounds: int, seconds: float) -> tuple[list[float], ...]:
    """Steps per second without a state, with a commit after each step, and with a copy at every fourth step."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    device = nbe.device()

    def one_side() -> tuple[Any, Any, Any, Any]:
        torch.manual_seed(1)
        model, loss = models.make(name, device, small=small)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
        return model, loss, optimizer, torch.amp.GradScaler(device.type, enabled=scaled)

    model, loss, optimizer, scaler = one_side()
    other = one_side()
    state = nbe.TorchState(model=model, optimizer=optimizer, scaler=scaler, step=0)
    kind = torch.float16 if device.type == "cuda" else torch.bfloat16

    def stepper(ddp: Any, loss: Any, optimizer: Any, scaler: Any) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast(device.type, kind, enabled=scaled):
                value = loss(ddp)
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()

        return step

    def rate(step: Callable[[], None], commit: Callable[[], None] | None, every: int = 1) -> float:
        """Steps per second; the clock is read at the end of work on the GPU."""
        count, begun = 0, time.monotonic()
        while time.monotonic() - begun < seconds:
            for number in range(4):
                step()
                if commit is not None and number % every == every - 1:
                    commit()
            count += 4
            if device.type == "cuda":
                torch.cuda.synchronize()
        return count / (time.monotonic() - begun)

    @nbe.elastic
    def loop(state: Any) -> tuple[list[float], ...]:
        with_state = stepper(DistributedDataParallel(state.model), loss, optimizer, scaler)
        without = stepper(DistributedDataParallel(other[0]), *other[1:])
        rates: tuple[list[float], ...] = ([], [], [])
        for _ in range(rounds + 1):
            rates[0].append(rate(without, None))
            rates[1].append(rate(with_state, state.commit))
        for _ in range(max(2, rounds // 2)):  # from the first of these on, commits copy
            rates[2].append(rate(with_state, state.commit, every=4))
        return tuple(found[1:] for found in rates)  # the first round warms up

    return tuple(loop(state))
