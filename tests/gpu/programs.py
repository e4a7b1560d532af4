"""The training whose ranks are killed in each place. It logs each step with a checksum, as tests/process/programs.py does.

A rank dies at a place when it finds the file `die-<place>` there: the last rank, or the next newcomer. It leaves `dead-<place>`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nbelastic as nbe
from nbelastic.system.private_files import replace_private
from tests.process.programs import Log, generation

DELAY = 0.005  # seconds from the beginning of a transfer to the death in it


def die(folder: str, place: str) -> None:
    """Die here, if a file says so and no other process has done so."""
    _note_death(folder, place)
    os.kill(os.getpid(), signal.SIGKILL)


def dies(folder: str, place: str, *, chosen: bool = True) -> bool:
    """Whether this process is the one that dies in this place."""
    file = Path(folder) / f"die-{place}"
    if not (chosen and file.exists()):
        return False
    with contextlib.suppress(FileNotFoundError):
        file.rename(file.with_name(f"dying-{place}"))  # only one process succeeds
        return True
    return False


def _note_death(folder: str, place: str) -> None:
    fact = {"t": time.time(), "pid": os.getpid(), "generation": 0}
    with contextlib.suppress(nbe.NoWorldError):
        fact["generation"] = generation()
    replace_private(Path(folder) / f"dead-{place}", [json.dumps(fact).encode()])


def checksum(model: Any, optimizer: Any) -> str:
    """Of all bits of the parameters and of what the optimizer keeps for them, computed where they are."""
    own = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    sums = []
    for tensor in [*(p.detach() for p in model.parameters() if p.requires_grad), *own]:
        bits = tensor.reshape(-1).contiguous().view(torch.uint8).to(torch.int64)
        sums.append((bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum())
    return str(torch.stack([one.cpu() for one in sums]).tolist())


def network(ballast: int) -> tuple[Any, Any]:
    """A small network, different in each process, with `ballast` MB that no step changes."""
    torch.manual_seed(os.getpid())
    layers = [torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.ReLU(), torch.nn.Linear(256, 8)]
    model = torch.nn.Sequential(*layers).to(nbe.device())
    if ballast:
        values = torch.full((ballast << 18,), float(os.getpid()), device=nbe.device())
        model.register_parameter("ballast", torch.nn.Parameter(values, requires_grad=False))
    return model, torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.01, momentum=0.9)


def train(
    folder: str, *, ballast: int = 0, large: int = 0, groups: bool = False, every: int = 1, pause: float = 0.0
) -> dict[str, Any]:
    """Train until `folder/finish` exists: a commit each `every` steps, which count as one step here.

    `large`: MB of one more all_reduce in each step.
    """
    log, device = Log(folder), nbe.device()
    if dies(folder, "newcomer-memory"):
        fill_memory(device)
    model, optimizer = network(ballast)
    state = nbe.TorchState(model=model, optimizer=optimizer, step=0)
    if dies(folder, "sync"):
        threading.Thread(target=_die_when_formed, args=(folder,), daemon=True).start()

    @nbe.elastic
    def loop(state: Any) -> dict[str, Any]:
        def is_last() -> bool:
            return nbe.size() > 1 and nbe.rank() == nbe.size() - 1

        _log_ballast(log, model)
        if groups:
            if dies(folder, "split", chosen=is_last()):
                die(folder, "split")
            nbe.local_group()
        if dies(folder, "ddp", chosen=is_last()):
            die(folder, "ddp")
        ddp = torch.nn.parallel.DistributedDataParallel(state.model)
        filling = torch.ones(max(1, large << 18), device=device)
        passes = 0
        while True:
            over = torch.tensor([float((Path(folder) / "finish").exists())], device=device)
            dist.all_reduce(over, dist.ReduceOp.MAX)
            for _ in range(every):
                if dies(folder, "all-reduce", chosen=is_last()):
                    dist.all_reduce(filling, dist.ReduceOp.MAX, async_op=True)
                    die(folder, "all-reduce")
                if large:
                    dist.all_reduce(filling, dist.ReduceOp.MAX)
                for name, fault in FAULTS.items():
                    if dies(folder, name, chosen=is_last()):
                        fault(device)
                # Before its second pass DDP sends sizes of rank 0, and uses what it receives without a check.
                if dies(folder, "rebuild", chosen=passes == 1 and nbe.size() > 1 and nbe.rank() == 0):
                    die(folder, "rebuild")
                loss = ddp(torch.randn(16, 64, device=device)).square().mean()
                if dies(folder, "backward", chosen=is_last()):
                    model[0].weight.register_hook(lambda _: die(folder, "backward"))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()  # it waits for the GPU, and raises if a collective of this step was aborted
            if dies(folder, "step", chosen=is_last()):
                die(folder, "step")
            passes += 1
            done = count_step(state, log)
            ended = bool(over.item())
            state.commit()
            if ended:
                return done
            time.sleep(pause)

    return dict(loop(state))


def count_step(state: Any, log: Log) -> dict[str, Any]:
    """Count a step and log it; returns what a rank returns if it is the last one."""
    state.step += 1
    total = checksum(state.model, state.optimizer)
    log(step=state.step, generation=generation(), world=nbe.size(), rank=nbe.rank(), sum=total)
    return {"step": state.step, "sum": total, "device": str(nbe.device()), "pid": os.getpid()}


def fill_memory(device: torch.device) -> None:
    """Ask for more memory than there is. On the CPU the error is another one, so this raises the GPU's."""
    if device.type != "cuda":
        raise torch.OutOfMemoryError("CUDA out of memory, as a GPU has it")
    torch.empty(1 << 50, dtype=torch.uint8, device=device)


def fail_assertion(device: torch.device) -> None:
    """Use an index that is too large. On a GPU the kernel's assertion fails, and the process can use its GPU no more."""
    torch.ones(4, device=device)[torch.tensor([100], device=device)].sum().item()


def read_illegal_address(device: torch.device) -> None:
    """Read where there is no memory. A GPU reports an illegal address; on the CPU the process dies of it."""
    if device.type != "cuda":
        ctypes.string_at(0)
    code = "template <typename T> T read(T x) { return x + *reinterpret_cast<T*>(0x10); }"
    kernel = torch.cuda.jiterator._create_jit_fn(code)
    kernel(torch.ones(4, device=device)).sum().item()


FAULTS = {"memory": fill_memory, "assertion": fail_assertion, "illegal-address": read_illegal_address}


def _log_ballast(log: Log, model: Any) -> None:
    """The values that this rank has received: a transfer that was cut off must not leave others."""
    if hasattr(model, "ballast"):
        low, high = model.ballast.aminmax()
        log(ballast=[float(low), float(high)], generation=generation())


def _die_when_formed(folder: str) -> None:
    while True:
        with contextlib.suppress(nbe.NoWorldError):
            nbe.rank()
            time.sleep(DELAY)
            die(folder, "sync")
        time.sleep(0.0005)


def accumulate(folder: str, seconds: float) -> dict[str, Any]:
    """Each step begins with a backward pass of `seconds` under no_sync, in which no collective can wake a rank."""
    log, device = Log(folder), nbe.device()
    model, optimizer = network(0)
    state = nbe.TorchState(model=model, optimizer=optimizer, step=0)

    @nbe.elastic
    def loop(state: Any) -> dict[str, Any]:
        ddp = torch.nn.parallel.DistributedDataParallel(state.model)
        while True:
            over = torch.tensor([float((Path(folder) / "finish").exists())], device=device)
            optimizer.zero_grad()
            with ddp.no_sync():
                (Path(folder) / f"backward-{os.getpid()}").touch()
                Slow.apply(ddp(torch.randn(16, 64, device=device)), seconds).square().mean().backward()
            dist.all_reduce(over, dist.ReduceOp.MAX)
            ddp(torch.randn(16, 64, device=device)).square().mean().backward()
            optimizer.step()
            done = count_step(state, log)
            ended = bool(over.item())
            state.commit()
            if ended:
                return done

    return dict(loop(state))


class Slow(torch.autograd.Function):
    """The identity, whose backward pass keeps the device busy."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        filling, end = torch.ones(256, 256, device=gradient.device), time.monotonic() + context.seconds
        while time.monotonic() < end:
            filling = (filling @ filling).clamp(max=1)
            if gradient.is_cuda:
                torch.cuda.synchronize()
        return gradient, None
