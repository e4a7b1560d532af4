"""A script that reports what torchrun gave it, and then does each ACTION: `report.py FOLDER [ACTION …]`."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist


class Local:
    """A class of the main module, whose name its pickle must keep."""


def world() -> list[float]:
    """The sum of all ranks, and their number."""
    dist.init_process_group("gloo")
    total = torch.tensor([float(os.environ["RANK"]), 1.0])
    dist.all_reduce(total)
    return total.tolist()


def write_report(folder: Path) -> None:
    """Write this rank's report, and return when all ranks have written theirs: a later failure ends all ranks."""
    report = {
        "argv": sys.argv,
        "name": __name__,
        "file": __file__,
        "spec": str(getattr(__spec__, "name", None)),
        "main": sys.modules["__main__"].Local is Local,
        "pickled": pickle.loads(pickle.dumps(Local())).__class__.__module__,
        "path": sys.path[0],
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "threads": [thread.name for thread in threading.enumerate()],
        "pid": os.getpid(),
        "sum": world(),
    }
    (folder / f"{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}.json").write_text(json.dumps(report))
    dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()


def main() -> None:
    folder, actions = Path(sys.argv[1]), sys.argv[2:]
    rank = int(os.environ["RANK"])
    atexit.register((folder / f"{rank}.ended").touch)
    write_report(folder)
    print(f"rank {rank} speaks", flush=True)
    print(f"rank {rank} complains", file=sys.stderr)
    for action in actions:
        match action.partition("="):
            case "raise", _, which if which in (str(rank), "any"):
                raise KeyError(f"of rank {rank}")
            case "raise", _, _:
                time.sleep(600)
            case "flaky", _, count if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(count):
                raise RuntimeError("not yet")
            case "exit", _, code:
                sys.exit(int(code) if code.isdecimal() else code or None)
            case "leave", _, code:
                os._exit(int(code))
            case "sleep", _, seconds:
                time.sleep(float(seconds) * rank)


if __name__ == "__main__":
    main()
