"""Runs one part in a process group of its own, and ends it with all that it has started at its time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from tests.gpu.found import Found
from tests.gpu.parts import Part

CLEAN_UP = 10.0  # seconds in which a cluster whose kernel was killed ends by itself


def run_part(part: Part, found: Found, seconds: float, folder: Path, sink: Any, *, quick: bool) -> None:
    """Run it, and pass its lines on as they come. A line says so if it was killed, or ended without a last line."""
    own = folder / part.name
    own.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.gpu.part", part.name, "--kind", found.kind, "--gpus", str(found.gpus)]
    command += ["--seconds", str(seconds), "--folder", str(own), *(["--quick"] if quick else [])]
    begun, is_whole = time.monotonic(), False
    with (own / "stderr").open("ab") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)

    def read() -> None:
        nonlocal is_whole
        assert process.stdout is not None
        for text in process.stdout:
            sink(text.rstrip("\n"))
            is_whole = is_whole or '"name": "whole part"' in text

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    killed = False
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        killed = True
    finally:
        end(process)
        reader.join(CLEAN_UP)
        if process.stdout is not None and not reader.is_alive():  # else a process that is left still has the other end
            process.stdout.close()
    took = round(time.monotonic() - begun, 3)
    if killed:
        sink.say(part.name, "whole part", ok=False, seconds=took, error=f"killed after {seconds:.0f} s")
    elif not is_whole:
        tail = (own / "stderr").read_text(errors="replace")[-1000:]
        sink.say(part.name, "whole part", ok=False, seconds=took, error=f"exit code {process.returncode}: {tail}")


def end(process: subprocess.Popen[str]) -> None:
    """Kill the process, and what it has started and is still there some seconds later: clusters end by themselves."""
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _, left = psutil.wait_procs(started, CLEAN_UP)
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
