"""How long 200 MB take into the workers and out of a training: `python -m tests.benchmarks.push_pull [--json FILE]`.

`push` is `Cluster.push` of a tensor, until each worker has read all of it. `pull` is `Job.state_dict("model")` of a training
whose step takes 20 ms, with the wait for its next commit; the kernel reads all of it. `standstill` is by how much the
longest step was longer during the pulls than before them. The peers, in the same run: `push` and `pull` of ipyparallel, the pull of
an idle engine, and a file in the run folder with `torch.save` and `torch.load`, without any training.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import nbelastic as nbe
from nbelastic.system.folder_paths import runs_folder

ROUNDS, FEW_ROUNDS, SLOW = 7, 2, 5.0
READ = "float(data.sum())"


def train(count: int, folder: str) -> list[float]:
    """Train with a model of `count` numbers, of which few change, until the file `stop` exists; returns the steps' ends."""
    model = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.ones(count), requires_grad=False), torch.nn.Parameter(torch.ones(8))]
    )
    optimizer = torch.optim.SGD([model[1]], lr=0.1)
    state = nbe.TorchState(model=model, optimizer=optimizer, stopping=0)

    @nbe.elastic
    def run(state: Any) -> list[float]:
        ends, stopping = [], torch.zeros(1)
        while not state.stopping:
            stopping.fill_(Path(folder, "stop").exists())
            torch.distributed.all_reduce(stopping)
            time.sleep(0.02)
            state.model[1].grad = torch.ones(8)
            state.optimizer.step()
            state.stopping = int(stopping.item())
            state.commit()
            ends.append(time.monotonic())
        return ends

    return run(state)


def timed(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def repeated(call: Callable[[], object]) -> list[float]:
    """The seconds of each round, without the first one, which warms up. What takes long is measured less often."""
    rounds = ROUNDS if timed(call) < SLOW else FEW_ROUNDS
    return [timed(call) for _ in range(rounds)]


def measure_push(cluster: nbe.Cluster, data: torch.Tensor, folder: Path) -> dict[str, list[float]]:
    client = cluster.client

    def push() -> None:
        cluster.push(data=data)
        outputs = cluster.execute(READ)
        assert not any(error for *_, error in outputs), outputs

    def push_by_ipyparallel() -> None:
        client[:].push({"data": data}, block=True)
        client[:].execute(READ, block=True)

    def push_by_file() -> None:
        torch.save(data, folder / "in.pt")
        cluster.execute(f"import torch; data = torch.load({str(folder / 'in.pt')!r}, mmap=True); {READ}")

    cases = {"push": push, "ipyparallel push": push_by_ipyparallel, "torch.save, load": push_by_file}
    return {name: repeated(case) for name, case in cases.items()}


def measure_pull(cluster: nbe.Cluster, count: int, folder: Path) -> dict[str, list[float]]:
    client = cluster.client
    cluster.execute(f"import torch; data = torch.ones({count})")

    def pull_by_file() -> None:
        client[0].execute(f"torch.save(data, {str(folder / 'out.pt')!r})", block=True)
        torch.load(folder / "out.pt", mmap=True).sum()

    def pull_by_ipyparallel() -> None:
        client[0].pull("data", block=True).sum()

    found = {}
    for name, case in {"ipyparallel pull": pull_by_ipyparallel, "torch.save, load out": pull_by_file}.items():
        found[name] = repeated(case)
    job = cluster.run(train, count, str(folder))

    def pull() -> None:
        assert job.state_dict("model")["0"].sum() == count

    job.state_dict("stopping")  # the training has begun
    time.sleep(2.0)
    began = time.monotonic()
    found["pull"] = repeated(pull)
    (folder / "stop").touch()
    ends = job.result(timeout=100)[0]
    (folder / "stop").unlink()
    steps = [(end, end - start) for start, end in itertools.pairwise(ends)]
    before = max(took for end, took in steps if began - 1.5 < end < began)
    found["standstill"] = sorted(took - before for end, took in steps if end >= began)[-ROUNDS:]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--megabytes", type=int, default=200)
    options = parser.parse_args()
    count, cases = options.megabytes * 1_000_000 // 4, {}
    runs_folder().mkdir(parents=True, exist_ok=True)
    for workers in (2, 4):
        with (
            nbe.Cluster(f"localhost:{workers}", min=workers, max=workers) as cluster,
            TemporaryDirectory(dir=runs_folder().parent) as folder,
        ):
            found = measure_push(cluster, torch.ones(count), Path(folder))
            found |= measure_pull(cluster, count, Path(folder))
        for name, times in found.items():
            cases[f"{options.megabytes} MB {name}, {workers} workers"] = times
            low, middle, high = min(times), statistics.median(times), max(times)
            case = f"{options.megabytes} MB {name}, {workers} workers"
            print(f"{case:40} min {low:7.3f}   median {middle:7.3f}   max {high:7.3f}   n={len(times)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(cases))


if __name__ == "__main__":
    main()
