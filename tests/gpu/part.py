"""One part, in a process of its own: results go to stdout, and all else that is printed goes to stderr."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from tests.gpu.bench import Bench
from tests.gpu.parts import BY_NAME
from tests.gpu.results import Results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=BY_NAME)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def write(text: str) -> None:
        out.write(f"{text}\n")

    results = Results(given.name, write)
    end = time.monotonic() + given.seconds
    bench = Bench(given.kind, given.quick, given.gpus, given.folder, end, results)
    with results.case("whole part"):
        BY_NAME[given.name].run(bench)
    out.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread that hangs in CUDA does not keep the next part waiting


if __name__ == "__main__":
    main()
