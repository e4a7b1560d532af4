"""The parts of `python -m tests.gpu`, in the order in which they run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from tests.gpu.bench import Bench
from tests.gpu.found import Found

SHARED_NCCL = (2, 30)  # from this version on several ranks may share a GPU


@dataclass(frozen=True)
class Part:
    """`place`: the module of this folder and its function. It is killed after `seconds`."""

    name: str
    place: str
    seconds: float
    text: str
    needs: Callable[[Found], str] = lambda _: ""  # why it cannot run there; empty: it can

    def run(self, bench: Bench) -> None:
        module, _, function = self.place.partition(":")
        getattr(importlib.import_module(f"tests.gpu.{module}"), function)(bench)


def _ranks(found: Found) -> str:
    """Several ranks of NCCL: on as many GPUs, on one that they share, or with the double; with --cpu they use gloo."""
    if found.kind != "cuda" or found.gpus > 1 or found.nccl >= SHARED_NCCL:
        return ""
    return f"NCCL {'.'.join(map(str, found.nccl))} lets no two ranks share a GPU; 2.30 does"


def _nccl_only(found: Found) -> str:
    return "needs NCCL: a GPU, or --double" if found.kind == "cpu" else _ranks(found)


def _gloo(found: Found) -> str:
    return "this is about gloo" if found.kind == "double" else ""


PARTS = (
    Part("environment", "environment:report", 60, "versions, GPUs, links, variables"),
    Part("nccl-one", "nccl_alone:run", 60, "a world of one, on stock NCCL"),
    Part("gloo-faults", "faults:with_gloo", 80, "ranks that share a GPU over gloo: kill, stop, join, remove", _gloo),
    Part("no-sync", "no_sync:run", 60, "a backward pass of 1 s, while another rank is killed", _gloo),
    Part("commit-cost", "commit_cost:run", 100, "steps per second with a commit after each step, and without", _gloo),
    Part("pinned", "pinned:run", 40, "memory of the host that copies of the state take", _gloo),
    Part("gpu-errors", "gpu_errors:run", 90, "assertions, illegal addresses and no memory on the GPU", _gloo),
    Part("reinits", "reinits:run", 60, "the group is made 200 times in one process: nothing grows", _gloo),
    Part("nccl-times", "nccl_times:run", 40, "init, first large collective and abort", _nccl_only),
    Part("deaths", "faults:with_nccl", 150, "ranks killed in each place, and stopped", _ranks),
    Part("newcomers", "newcomers:run", 70, "newcomers that die in init, and while they receive the state", _ranks),
    Part("changes", "changes:run", 80, "100 planned changes", _ranks),
    Part("sharded", "sharded:run", 60, "FSDP2: a rank is lost", _ranks),
)
BY_NAME = {part.name: part for part in PARTS}
