"""Unmodified torchrun scripts on a cluster: their environment, their ends, their output and their status."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import nbelastic as nbe
from tests.process.script_training import REPORT, TRAIN, ScriptTraining, reports_by_rank, torchrun
from tests.support.processes import alive, run_folder
from tests.support.waiting import until

CONTRACT = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS"),
)
# set by both, to different values
DIFFERENT = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")
# LINES and COLUMNS are those of a terminal
OURS_ONLY = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "RES_OPTIONS", "LINES", "COLUMNS", "TORCHINDUCTOR_CACHE_DIR"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nbe.Cluster]:
    """A cluster of one host with two slots, which the tests use one after another."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with nbe.Cluster("localhost:2", min=2, cooldown=(0, 0), log_dir=tmp_path_factory.mktemp("logs")) as cluster:
        yield cluster
    del os.environ["OMP_NUM_THREADS"]


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The reports of a script that torchrun runs over its own c10d rendezvous."""
    folder = tmp_path_factory.mktemp("theirs")
    own = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--rdzv-id=theirs")
    with torchrun(*own, "--nproc-per-node=2", "--max-restarts=3", REPORT, folder, "word", OMP_NUM_THREADS="1") as run:
        assert run.wait(60) == 0, run.stdout.read()
    return reports_by_rank(folder)


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_a_script_gets_what_torchrun_gives(pair, by_torchrun, tmp_path, cold):
    """Environment, arguments, `__main__`, path, folder and the end are as under torchrun, in forks and in new interpreters."""
    (folder := tmp_path / "ours").mkdir()
    pair.run_script(REPORT, folder, "word", max_restarts=3, cold=cold).result(timeout=60)
    ours = reports_by_rank(folder)
    assert len(ours) == len(by_torchrun) == 2
    for mine, theirs in zip(ours, by_torchrun, strict=True):
        given, expected = mine["environment"], theirs["environment"]
        assert {name: given.get(name) for name in CONTRACT} == {name: expected.get(name) for name in CONTRACT}
        assert [name for name in DIFFERENT if not given.get(name)] == []
        assert set(given) - set(expected) <= OURS_ONLY
        assert set(expected) - set(given) == set()
        assert mine["argv"][0] == theirs["argv"][0] == str(REPORT)
        for what in ("name", "file", "spec", "main", "pickled", "path", "cwd", "sum"):
            assert mine[what] == theirs[what], what
    assert {path.name for path in folder.glob("*.ended")} == {"0.ended", "1.ended"}


def test_a_module(pair, tmp_path):
    """`module=True` runs a module from the working folder, with the arguments after its name."""
    pair.run_script("tests.process.scripts.report", tmp_path, "--flag", module=True).result(timeout=60)
    first = reports_by_rank(tmp_path)[0]
    assert first["argv"][1:] == [str(tmp_path), "--flag"]
    assert first["argv"][0] == str(REPORT)
    assert (first["name"], first["main"]) == ("__main__", True)


def test_a_program(pair, tmp_path):
    """`no_python=True` runs any executable, and its output is shown."""
    program = tmp_path / "program.sh"
    program.write_text('#!/bin/sh\necho "$RANK of $WORLD_SIZE says $1, $OURS"\n')
    program.chmod(0o755)
    job = pair.run_script(program, "hello", no_python=True, env={"OURS": "yes"})
    assert job.result(timeout=60) == [None, None]
    until(lambda: len(job.logs().splitlines()) == 2, what="both lines")
    assert job.logs(rank=1) == "1 of 2 says hello, yes"


@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["warm", "cold"])
def test_the_error_of_the_first_rank_that_fails(pair, tmp_path, cold):
    """The error names the first failed rank and has the traceback of the script alone; the other ranks are ended."""
    job = pair.run_script(REPORT, tmp_path, "raise=1", cold=cold)
    with pytest.raises(nbe.JobError, match="rank 1 on localhost failed: ") as caught:
        job.result(timeout=60)
    assert caught.value.rank == 1
    lines = caught.value.remote_traceback.splitlines()
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "KeyError: 'of rank 1'"), lines
    assert [line.split(",")[0] for line in lines if line.startswith("  File")] == [f'  File "{REPORT}"'] * 2
    until(lambda: "KeyError" in job.logs(rank=1), what="what it printed")
    until(lambda: not list(run_folder(pair).rglob("*.pickle")), what="torch's error files to be deleted")
    until(lambda: not [one["pid"] for one in reports_by_rank(tmp_path) if alive(one["pid"])], what="both to end")


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("exit=3", "exit code 3"),
        ("leave=4", "exit code 4"),
        ("exit=sorry", "exit code 1: sorry"),
        ("exit=", ""),
        ("leave=0", ""),
    ],
)
def test_how_scripts_end(pair, tmp_path, action, error):
    """`sys.exit` and `os._exit` give the same exit code as in a fresh interpreter."""
    error_or_none = pair.run_script(REPORT, tmp_path, action).exception(timeout=60)
    assert (error in str(error_or_none)) if error else error_or_none is None


def test_a_flaky_script(pair, tmp_path):
    """A script that fails twice is restarted with the count of restarts; with fewer restarts the job fails."""
    job = pair.run_script(REPORT, tmp_path, "flaky=2", max_restarts=2)
    assert job.result(timeout=60) == [None, None]
    assert [len(reports_by_rank(tmp_path, restarts)) for restarts in range(3)] == [2, 2, 2]
    (again := tmp_path / "again").mkdir()
    with pytest.raises(nbe.JobError, match="not yet after 1 restarts"):
        pair.run_script(REPORT, again, "flaky=2", max_restarts=1).result(timeout=60)


def test_redirected_streams_are_only_in_files(pair, tmp_path):
    """`redirects` and `tee` choose streams by local rank, as torchrun's options do."""
    job = pair.run_script(REPORT, tmp_path, redirects="0:3,1:1", tee="1:0")
    job.result(timeout=60)
    until(lambda: "complains" in job.logs(), what="the output of rank 1")
    assert job.logs().split(" | ", 1)[1] == "rank 1 complains"
    files = sorted(path.name for path in (pair.log_dir / job.name).glob("localhost-*-1.*"))
    assert files == [f"localhost-{rank}-1.{ending}" for rank in range(2) for ending in ("err", "out")]
    assert (pair.log_dir / job.name / "localhost-0-1.out").read_text() == "rank 0 speaks\n"
    assert not [path for path in (pair.log_dir / job.name).iterdir() if path.stat().st_mode & 0o077]


def test_more_workers_than_slots(pair, tmp_path):
    """`nproc` sets the workers per host, as torchrun's `--nproc-per-node` does; `role` sets their role."""
    pair.run_script(REPORT, tmp_path, nproc=3, role="trainer").result(timeout=60)
    assert [one["environment"]["ROLE_NAME"] for one in reports_by_rank(tmp_path)] == ["trainer"] * 3
    assert reports_by_rank(tmp_path)[0]["sum"] == [3.0, 3.0]


def test_one_job_at_a_time(pair, tmp_path):
    """While a script runs, another job is refused; when the script is stopped, a function can run."""
    training = ScriptTraining(pair, tmp_path / "training")
    pids = {worker.pid for worker in training.wait_for_world(2)}
    with pytest.raises(nbe.UsageError, match="is still running"):
        pair.run(len, [])
    training.job.stop()
    assert isinstance(training.job.exception(timeout=30), nbe.JobStoppedError)
    until(lambda: not any(alive(pid) for pid in pids), what="its workers to end")
    assert pair.run(len, []).result(timeout=30) == [0, 0]
    assert pair.status().job != training.job.name


def test_the_status_of_a_running_script(pair, tmp_path):
    """The status of a script shows one row per rank, and the state of the host's worker group."""
    training = ScriptTraining(pair, tmp_path / "training")
    rows = training.wait_for_world(2)
    status = pair.status()
    assert (status.phase, status.world_size, status.job, status.outcome) == ("running", 2, training.job.name, "")
    assert [(row.id, row.rank, row.state) for row in rows] == [
        ("localhost/0#1", 0, "running"),
        ("localhost/1#1", 1, "running"),
    ]
    assert status.hosts[0].reason == "worker group HEALTHY"
    until(lambda: all(row.memory for row in pair.workers), what="samples")
    training.finish()


@pytest.mark.soak(share=0.2)
def test_the_parameters_are_those_of_torchrun(pair, tmp_path):
    """A script gets the same parameters, to the bit, under torchrun's c10d rendezvous and on a cluster."""
    (theirs := tmp_path / "theirs").mkdir()
    own = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")
    with torchrun(*own, "--nproc-per-node=2", TRAIN, theirs, 20, OMP_NUM_THREADS="1") as run:
        assert run.wait(60) == 0, run.stdout.read()
    ours = ScriptTraining(pair, tmp_path / "ours", steps=20)
    ours.job.result(timeout=60)
    one, other = (torch.load(folder / "checkpoint.pt") for folder in (theirs, ours.folder))
    assert one["step"] == other["step"] == 20
    assert all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())


def test_wrong_options(pair, tmp_path):
    """A wrong option raises one line before anything is started."""
    for options, text in (
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"nproc": 0}, "nproc=0"),
        ({"redirects": "4"}, "redirects='4'"),
        ({"module": True, "no_python": True}, "exclude each other"),
    ):
        with pytest.raises(nbe.UsageError, match=text):
            pair.run_script(REPORT, **options)
    with pytest.raises(nbe.UsageError, match="there is no file"):
        pair.run_script(tmp_path / "nothing.py")
