"""`python -m tests.gpu` works: its parts run here on the CPU, and what it finds is kept as it comes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import table
from tests.gpu.__main__ import Sink, main
from tests.gpu.found import Found
from tests.gpu.parts import PARTS, Part
from tests.gpu.running import run_part

ROOT = Path(__file__).parents[2]
IN_EVERY_RUN = ("double", "newcomers")
SECONDS = {"commit-cost": 22.0, "deaths": 16.0}  # of the longest parts


def runs():
    """Each part with each kind of surroundings in which it runs without a GPU. All but one are long tests."""
    for kind in ("cpu", "double"):
        for part in PARTS[1:]:
            if not part.needs(Found(kind)):
                marks = (
                    () if (kind, part.name) == IN_EVERY_RUN else pytest.mark.soak(seconds=SECONDS.get(part.name, 10.0))
                )
                yield pytest.param(kind, part.name, marks=marks)


def command(*arguments):
    """Run it without a GPU; returns the process that has ended."""
    surroundings = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OUT": ""}
    words = [sys.executable, "-m", "tests.gpu", *arguments]
    return subprocess.run(words, cwd=ROOT, env=surroundings, check=False, capture_output=True, text=True, timeout=100)


@pytest.mark.soak(share=0.2)
@pytest.mark.parametrize(("kind", "part"), [*runs()])
def test_a_part_runs_without_a_gpu(tmp_path, kind, part):
    """It succeeds, its lines are in the file too, and each says where it is from. The environment comes first."""
    file = tmp_path / "gpu.jsonl"
    ended = command(f"--{kind}", "--quick", "--only", part, "--out", str(file))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert file.read_text() == ended.stdout
    lines = [json.loads(text) for text in ended.stdout.splitlines()]
    assert [line["part"] for line in (lines[0], lines[-1])] == ["environment", part]
    assert all(line["ok"] for line in lines)
    assert f"| `{part}` |" in table.markdown(lines)


def test_without_a_gpu_it_says_so_and_ends():
    """One line, and exit code 2."""
    ended = command()
    assert ended.returncode == 2
    assert ended.stderr == "tests.gpu: there is no GPU here that torch can use; --cpu shows what a CPU can.\n"


def test_a_part_that_takes_too_long_is_killed(tmp_path, capsys):
    """Its line says so, and the caller goes on."""
    sink = Sink(tmp_path / "gpu.jsonl")
    run_part(PARTS[0], Found("cpu"), 0.1, tmp_path, sink, quick=True)
    (line,) = sink.lines
    assert (line["ok"], line["error"]) == (False, "killed after 0 s")


def test_a_part_that_breaks_says_why(tmp_path, capsys):
    """Its process ends without a last line: the line has the end of what it has printed."""
    sink = Sink(tmp_path / "gpu.jsonl")
    run_part(Part("unknown", "nowhere:run", 60, ""), Found("cpu"), 60, tmp_path, sink, quick=True)
    (line,) = sink.lines
    assert not line["ok"]
    assert "exit code 2" in line["error"]
    assert "invalid choice" in line["error"]


def test_the_table_of_an_earlier_run(tmp_path, capsys):
    """`--from` makes it of a file, also of a run that was cut off."""
    file = tmp_path / "gpu.jsonl"
    sink = Sink(file)
    sink.say("environment", "torch", ok=True, value="2.13.0")
    sink.say("deaths", "killed in ddp", ok=True, min=0.1, median=0.2, max=0.3, count=3, unit="s", seconds=9)
    sink.say("deaths", "stopped", ok=False, seconds=9, error="it | failed")
    capsys.readouterr()
    assert main(["--from", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "torch 2.13.0",
        "",
        "| part | what | result |",
        "|---|---|---|",
        "| `deaths` | killed in ddp | 0.1 / **0.2** / 0.3 s (3) |",
        "| `deaths` | stopped | **failed**: it \\| failed |",
    ]
