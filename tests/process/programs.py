"""Programs for the workers of these tests. Each process logs to a file of its own, one JSON line per step."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import linecache
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import nbelastic as nbe
from nbelastic.system.private_files import replace_private

PAUSE = 0.06
CELLS = itertools.count(1)


def notebook_function(source):
    """The function `program` that a notebook's cell defines."""
    return notebook_names(source)["program"]


def notebook_names(source):
    """What a notebook's cell defines, whose source can be found."""
    name = f"<cell {next(CELLS)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), names)
    return names


class Log:
    """The log of one process."""

    def __init__(self, folder: str) -> None:
        self._file = (Path(folder) / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def __call__(self, **line: Any) -> None:
        self._file.write(json.dumps({"t": time.time(), "pid": os.getpid(), **line}) + "\n")


def generation() -> int:
    from nbelastic.worker import session

    return session.world().generation


def any_rank_finds(folder: str, name: str) -> bool:
    """Whether any rank finds `folder/name`; all ranks get the same answer."""
    import torch
    import torch.distributed as dist

    there = torch.tensor([float((Path(folder) / name).exists())])
    dist.all_reduce(there, dist.ReduceOp.MAX)
    return bool(there.item())


def checksum(model: Any) -> str:
    digest = hashlib.sha1()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def network() -> Any:
    """A small network and its optimizer, different in every process: the training state must make them equal."""
    import torch

    torch.manual_seed(os.getpid())
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(folder: str, *, pause: float = PAUSE, slow: dict[str, float] | None = None) -> dict[str, Any]:
    """Train and commit every step until `folder/finish` exists. The first rank that finds a file sleeps `slow[file]` s."""
    import torch

    log = Log(folder)
    model, optimizer = network()
    state = nbe.TorchState(model=model, optimizer=optimizer, step=0)
    state.register_reset_callbacks([lambda: log(reset=generation(), world=nbe.size())])

    @nbe.elastic
    def loop(state: Any) -> dict[str, Any]:
        ddp = torch.nn.parallel.DistributedDataParallel(state.model)
        log(begin=state.step, generation=generation(), world=nbe.size(), rank=nbe.rank())
        while not any_rank_finds(folder, "finish"):
            loss = ddp(torch.randn(8, 16)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step += 1
            log(step=state.step, generation=generation(), world=nbe.size(), rank=nbe.rank(), sum=checksum(model))
            state.report(loss=loss.item(), step=state.step)
            state.commit()
            time.sleep(pause)
            _sleep_once(folder, slow or {})
        return {"step": state.step, "sum": checksum(model), "rank": nbe.rank(), "world": nbe.size(), "pid": os.getpid()}

    result: dict[str, Any] = loop(state)
    return result


def train_after_warm_up(folder: str) -> dict[str, Any]:
    """Train; a new worker first makes a step by itself, and waits until `folder/go` exists."""
    import torch

    @nbe.warmup
    def first_step(state: Any) -> None:
        state.model(torch.randn(8, 16)).sum().backward()
        state.optimizer.step()
        state.step += 1
        (Path(folder) / f"warm-{os.getpid()}").touch()
        while not (Path(folder) / "go").exists():
            time.sleep(PAUSE)

    return train(folder)


def train_and_hang(folder: str) -> dict[str, Any]:
    """Train; once `folder/stick` exists, rank 0 of two stops itself in a collective, and rank 1 hangs.

    Rank 1 sleeps when the collective fails, as gloo leaves about one rank in a hundred.
    """
    import torch
    import torch.distributed as dist

    sleep = compile("__import__('time').sleep(1000)", "/site-packages/torch/distributed/dead.py", "exec")
    begin, entered = Path(folder) / "stick", Path(folder) / "entered"
    counts: Counter[int] = Counter()  # collectives per generation; equal on both ranks

    def stop_in(number: str) -> None:
        """Stop if rank 1 waits in this collective, where it makes no commit. Rank 1 may enter before `begin` exists."""
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            if entered.exists() and entered.read_text() == number:
                begin.unlink()
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.01)

    def hanging(collective: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[generation()] += 1
            number = f"{counts[generation()]} of generation {generation()}"
            if not begin.exists():
                return collective(*args, **kwargs)
            if nbe.rank() == 0:
                stop_in(number)
            else:
                replace_private(entered, [number.encode()])
            try:
                return collective(*args, **kwargs)
            except Exception:
                exec(sleep)
                raise

        return run

    dist.all_reduce, torch.Tensor.backward = hanging(dist.all_reduce), hanging(torch.Tensor.backward)
    return train(folder)


def train_and_hold_lock(folder: str) -> dict[str, Any]:
    """Train; the first rank that finds `folder/hold` makes `folder/held`, and holds the interpreter lock.

    `release_lock` releases it.
    """

    def wait() -> None:
        file = Path(folder) / "hold"
        while True:
            with contextlib.suppress(FileNotFoundError):
                file.rename(file.with_name("taken"))  # only one process succeeds
                os.mkfifo(file.with_name("held"))
                ctypes.PyDLL(None).open(
                    bytes(file.with_name("held")), os.O_RDONLY
                )  # blocks until `release_lock` opens it
            time.sleep(0.05)

    threading.Thread(target=wait, daemon=True).start()
    return train(folder)


def release_lock(folder: str | Path) -> None:
    """Let the rank that holds the interpreter lock go on."""
    os.close(os.open(Path(folder) / "held", os.O_WRONLY))


def _sleep_once(folder: str, slow: dict[str, float]) -> None:
    for name, seconds in slow.items():
        file = Path(folder) / name
        with contextlib.suppress(FileNotFoundError):
            file.rename(file.with_suffix(".taken"))  # only one process succeeds
            (Path(folder) / f"{name}.begun").write_text(str(os.getpid()))
            time.sleep(seconds)


def count(folder: str) -> int:
    """Commit an ObjectState without a network in every step, until `folder/finish` exists."""
    import torch
    import torch.distributed as dist

    log = Log(folder)
    state = nbe.ObjectState(total=0, history=[])

    @nbe.elastic
    def loop(state: Any) -> int:
        while not any_rank_finds(folder, "finish"):
            one = torch.ones(1)
            dist.all_reduce(one)
            if one.item() != nbe.size():  # NCCL raises nothing after an abort
                raise RuntimeError(f"the sum of {nbe.size()} ones is {one.item()}")
            state.total += 1
            state.history = [*state.history[-9:], int(one.item())]
            log(step=state.total, generation=generation(), world=nbe.size(), rank=nbe.rank(), sum=str(state.history))
            state.commit()
            time.sleep(PAUSE)
        return int(state.total)

    return int(loop(state))


def use_samples(folder: str, samples: int, batch: int, workers: int, pause: float = 0.02) -> int:
    """Make passes over a data set with an ElasticSampler and a DataLoader, until `folder/finish` exists.

    Each rank logs its samples before the step (`meant`), and logs that the step is made (`done`).
    """
    import torch
    from torch.utils.data import DataLoader

    log = Log(folder)
    data = list(range(samples))
    model, optimizer = network()
    sampler = nbe.ElasticSampler(data, seed=3)
    state = nbe.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)

    @nbe.elastic
    def loop(state: Any) -> int:
        ddp = torch.nn.parallel.DistributedDataParallel(state.model)
        for state.epoch in itertools.count(state.epoch):
            sampler.set_epoch(state.epoch)
            if sampler.used == 0 and any_rank_finds(folder, "finish"):
                break
            for indices in DataLoader(data, batch_size=batch, sampler=sampler, num_workers=workers):
                line = {"step": state.step + 1, "generation": generation(), "pass": state.epoch}
                log(meant=indices.tolist(), **line)
                twice = indices.repeat(2)  # batch normalisation refuses a batch of one, as the last one may be
                loss = ddp(twice[:, None].expand(-1, 16).float() / samples).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state.step += 1
                log(done=True, **line)
                sampler.record_batch(batch)
                state.commit()
                time.sleep(pause)
        return int(state.step)

    return int(loop(state))


def describe_ranks() -> dict[str, Any]:
    """Form one short world; each rank returns its ranks, sizes, groups and device."""

    @nbe.elastic
    def loop(_: Any) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        one = torch.tensor([float(nbe.rank())])
        local, cross = one.clone(), one.clone()
        dist.all_reduce(local, group=nbe.local_group())
        dist.all_reduce(cross, group=nbe.cross_group())
        return {
            "rank": nbe.rank(),
            "size": nbe.size(),
            "local": (nbe.local_rank(), nbe.local_size()),
            "cross": (nbe.cross_rank(), nbe.cross_size()),
            "sums": (local.item(), cross.item()),
            "device": str(nbe.device()),
            "pid": os.getpid(),
        }

    found: dict[str, Any] = loop(nbe.ObjectState())
    return found


def print_rank(folder: str) -> str:
    """Print and return the rank, without a training."""

    @nbe.elastic
    def loop(_: Any) -> str:
        return f"rank {nbe.rank()}"

    name = loop(nbe.ObjectState())
    print(f"I am {name}")
    return name


def fail_later(folder: str) -> None:
    """Train; rank 1 raises an error of the program once `folder/go` exists."""
    import torch
    import torch.distributed as dist

    @nbe.elastic
    def loop(state: Any) -> None:
        while True:
            dist.all_reduce(torch.ones(1))
            (Path(folder) / "begun").touch()
            if nbe.rank() == 1 and (Path(folder) / "go").exists():
                (Path(folder) / "failed").touch()
                raise ValueError("no such luck")
            state.commit()
            time.sleep(PAUSE)

    loop(nbe.ObjectState())
