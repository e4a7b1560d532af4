"""A program with a large model: it finds mixtures of two commits, and kills ranks in the middle of a transfer.

Every step adds 1 to each element, so each element of a whole state equals the number of its step.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbelastic as nbe
from tests.process import programs

TENSORS, ELEMENTS = 60, 300_000  # 72 MB; each tensor is large enough to be sent by itself
MANY = 1_000_000  # elements, for a transfer that takes long
AHEAD_AT = 5  # the step at which the last rank dies, when others may be one commit ahead
LAST = 9
SIZE = 4
ORIGINALS: dict[str, Any] = {}  # functions that a job replaces: the worker runs the next job too
HALF = 32  # operations in half a transfer: two for the description, then one per tensor


def once(folder: str, name: str) -> bool:
    """Whether this call is the first with this name in any process."""
    try:
        os.close(os.open(Path(folder) / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def wait_for(folder: str, pattern: str, count: int) -> None:
    """Wait at most 20 s until `count` files match the pattern."""
    end = time.monotonic() + 20
    while len(list(Path(folder).glob(pattern))) < count:
        assert time.monotonic() < end, f"not {count} files like {pattern}"
        time.sleep(0.001)


def interrupt(folder: str, roles: dict[str, int], dies: Callable[[str], bool]) -> None:
    """Halfway through the transfer after the first loss, wait for all ranks; then kill those for which `dies` is true.

    `roles`: how many ranks send and how many receive in that transfer.
    """
    from nbelastic.state import transfer

    begin, begun = transfer.Channel.begin, Counter[int]()

    def counted(self: Any, flat: Any) -> list[Any]:
        works = begin(self, flat)
        begun[programs.generation()] += 1
        if (
            begun[programs.generation()] == HALF
            and (Path(folder) / "dead").exists()
            and once(folder, f"half-{os.getpid()}")
        ):
            self._finish(works)  # the next receiver must get halfway too
            works = []  # each of them allows only one wait
            role = "sends" if self.sends else "receives"
            (Path(folder) / f"half-{role}-{os.getpid()}").touch()
            for name, count in roles.items():
                wait_for(folder, f"half-{name}-*", count)
            if dies(role):
                os.kill(os.getpid(), signal.SIGKILL)
        return works

    transfer.Channel.begin = counted  # type: ignore[method-assign]


def train(
    folder: str, ahead: int, dying: str, scarce: bool = False, steps: int = 1, elements: int = ELEMENTS
) -> list[tuple[Any, ...]]:
    """Kill the last rank when the ranks below `ahead` are one commit ahead; then kill `dying` in the transfer.

    `dying`: "sends", "receives" (one of them), "both" or "". `scarce`: there is no memory for a second copy of the state.
    `steps`: optimizer steps per commit; with two, each commit copies the tensors. `elements`: of each tensor.
    """
    import torch
    import torch.distributed as dist

    from nbelastic.state import transfer

    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(elements)) for _ in range(TENSORS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 / steps)
    state = nbe.TorchState(model=model, optimizer=optimizer, step=0)
    seen = []

    def dies(role: str) -> bool:
        if role == "sends":
            return dying in ("sends", "both") and once(folder, "one-sender")  # the next sender must survive
        return dying in ("receives", "both") and once(folder, "one-receiver")

    transfer.Channel.begin = ORIGINALS.setdefault("begin", transfer.Channel.begin)
    if dying:
        interrupt(folder, {"sends": 1, "receives": SIZE - 1 - ahead}, dies)
    original_fits = ORIGINALS.setdefault("fits", transfer.fits)
    transfer.fits = (lambda *_: False) if scarce else original_fits

    def record(where: str) -> None:
        values = [(float(p.min()), float(p.max())) for p in model]
        low, high = min(low for low, _ in values), max(high for _, high in values)
        whole = all(value == state.step for pair in values for value in pair)  # `min` passes over NaN
        seen.append((where, os.getpid(), state.step, whole, (low, high)))
        print("whole" if seen[-1][3] else "TORN", seen[-1], flush=True)

    @nbe.elastic
    def loop(state: Any) -> list[tuple[Any, ...]]:
        record("enter")
        while state.step < LAST:
            dead = (Path(folder) / "dead").exists()
            if nbe.size() < SIZE and not dead:  # the other ranks join later
                dist.all_reduce(torch.ones(1))
                state.commit()
                continue
            for p in model:
                p.grad = torch.full_like(p, -1.0)
            first = state.step == AHEAD_AT and nbe.size() == SIZE and not dead
            if first and nbe.rank() == SIZE - 1:
                wait_for(folder, "ahead-*", ahead)
                (Path(folder) / "dead").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if not first or nbe.rank() >= ahead:  # the ranks below `ahead` act as if their part was complete
                dist.all_reduce(torch.ones(1))
            for _ in range(steps):
                optimizer.step()
            state.step += 1
            state.commit()
            if first:
                (Path(folder) / f"ahead-{nbe.rank()}").touch()
        record("end")
        return seen

    found: list[tuple[Any, ...]] = loop(state)
    return found
