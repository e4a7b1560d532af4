"""Everything that can be shown on a GPU, in at most nine minutes: `python -m tests.gpu`. See docs/gpu.md.

Results are JSON, one line each, on stdout and in a file; they are written as they come, so a run that is cut off keeps what
it had. Without a GPU this says so and ends with code 2, unless `--cpu` or `--double` runs what a CPU can show.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu import table
from tests.gpu.found import Found
from tests.gpu.parts import BY_NAME, PARTS
from tests.gpu.running import run_part

LIMIT = 540.0  # seconds of the whole run
RESERVE = 5.0  # of these, to end the last part
LEAST = 10.0  # a part is not begun for less


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="gloo and CPU tensors of small sizes, without a GPU")
    parser.add_argument("--double", action="store_true", help="as --cpu, and the parts of NCCL with a double of it")
    parser.add_argument("--quick", action="store_true", help="each thing once or twice")
    parser.add_argument("--only", metavar="PART,…", help=f"some of: {', '.join(BY_NAME)}")
    parser.add_argument("--seconds", type=float, default=LIMIT, help="of the whole run (540)")
    parser.add_argument(
        "--out", type=Path, help="file for the results; by default gpu.jsonl in the folder $OUT, if set"
    )
    parser.add_argument("--markdown", action="store_true", help="print a table for docs/gpu.md at the end")
    parser.add_argument("--from", dest="source", type=Path, help="print the table of an earlier run's file, and end")
    given = parser.parse_args(arguments)
    unknown = set(filter(None, (given.only or "").split(","))) - set(BY_NAME)
    if unknown:
        parser.error(f"no part is called {', '.join(sorted(unknown))}: {', '.join(BY_NAME)}")
    if given.out is None and os.environ.get("OUT"):
        given.out = Path(os.environ["OUT"]) / "gpu.jsonl"
    return given


class Sink:
    """Writes each line to stdout and to the file, and keeps it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        self.lines: list[dict[str, Any]] = []

    def __call__(self, text: str) -> None:
        print(text, flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"{text}\n")
        self.lines.append(json.loads(text))

    def say(self, part: str, name: str, *, ok: bool, **more: Any) -> None:
        self(json.dumps({"part": part, "name": name, "ok": ok, **more}))


def found_in(lines: list[dict[str, Any]], kind: str) -> Found:
    """What the environment report says of this machine."""
    values = {line["name"]: line["value"] for line in lines if "value" in line}
    version = tuple(int(number) for number in str(values.get("nccl", "")).split(".") if number.isdecimal())
    return Found(kind, 0 if kind != "cuda" else values.get("gpus", 0), version)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    if given.source is not None:
        print(table.markdown([json.loads(text) for text in given.source.read_text().splitlines()]))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the present part is ended, too
    kind = "double" if given.double else "cpu" if given.cpu else "cuda"
    if kind == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif kind == "double":  # it gives each worker a GPU that does not exist
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    chosen = set(filter(None, (given.only or "").split(","))) or set(BY_NAME)
    end = time.monotonic() + given.seconds - RESERVE
    sink, found = Sink(given.out), Found(kind)
    beside = given.out.parent if given.out is not None else None
    folder = Path(tempfile.mkdtemp(prefix="gpu-logs-", dir=beside))
    for part in PARTS:
        if part.name != "environment" and part.name not in chosen:
            continue
        left = end - time.monotonic()
        missing = part.needs(found)
        if missing or left < LEAST:
            sink.say(part.name, "whole part", ok=True, skipped=missing or f"{max(left, 0):.0f} s are left")
            continue
        run_part(part, found, min(part.seconds, left), folder, sink, quick=given.quick)
        if part.name == "environment":
            found = found_in(sink.lines, kind)
            if kind == "cuda" and not found.gpus:
                print(
                    "tests.gpu: there is no GPU here that torch can use; --cpu shows what a CPU can.", file=sys.stderr
                )
                return 2
    if given.markdown:
        print(table.markdown(sink.lines))
    return 0 if all(line["ok"] for line in sink.lines) else 1


if __name__ == "__main__":
    sys.exit(main())
