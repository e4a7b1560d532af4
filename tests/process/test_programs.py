"""Jobs and cells on a quiet cluster: values, errors, output, and who is who. No test harms a worker."""

import os
import re
import threading
import time

import pytest

import nbelastic as nbe
from tests.process import programs
from tests.support.waiting import until


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two hosts with two slots and one: packed by host, unevenly."""
    with nbe.Cluster("localhost:2,127.0.0.2:1", min=3, cooldown=(0, 0), log_dir=tmp_path_factory.mktemp("logs")) as one:
        until(lambda: all(w.pid for w in one.workers), what="the agents to tell of all processes")
        yield one


@pytest.fixture(autouse=True)
def same_workers(cluster):
    """Errors in user code end jobs, not workers: the same processes serve all these tests."""
    before = {w.id: w.pid for w in cluster.workers}
    yield
    if cluster.job is not None and not cluster.job.done():
        cluster.job.stop()
        cluster.job.wait(timeout=20)
    assert {w.id: w.pid for w in cluster.workers} == before
    assert {host.phase for host in cluster.hosts} == {"up"}
    cluster.wait(3, timeout=10)


def test_one_value_per_rank(cluster):
    """`result()` lists what the ranks returned, by rank; arguments arrive."""

    def program(factor, offset=0):
        @nbe.elastic
        def loop(_, factor, offset):
            return nbe.rank() * factor + offset

        return loop(nbe.ObjectState(), factor, offset=offset)

    job = cluster.run(program, 10, offset=1)
    assert job.result(timeout=20) == [1, 11, 21]
    assert (job.status, job.done(), job.exception()) == ("succeeded", True, None)


def test_a_program_without_a_world(cluster):
    """A function without an elastic loop just runs everywhere."""
    pids = cluster.run(os.getpid).result(timeout=20)
    assert sorted(pids) == sorted(w.pid for w in cluster.workers)


def test_ranks_and_groups(cluster):
    """Ranks are packed by host; local and cross ranks and sizes are exact, and so are their groups."""
    rows = cluster.run(programs.describe_ranks).result(timeout=20)
    assert [row["rank"] for row in rows] == [0, 1, 2]
    assert [row["size"] for row in rows] == [3, 3, 3]
    assert [row["local"] for row in rows] == [(0, 2), (1, 2), (0, 1)]
    assert [row["cross"] for row in rows] == [(0, 2), (0, 1), (1, 2)]
    assert [row["sums"] for row in rows] == [(1.0, 2.0), (1.0, 1.0), (2.0, 2.0)]


def raising(how, where="all", when=0):
    """Train `when` steps, then fail as `how` says, on rank 1 or on all of them."""

    class Unpicklable(Exception):
        def __init__(self, one, two):
            super().__init__(lambda: one)

    def the_users_own_function():
        match how:
            case "ValueError":
                raise ValueError("wrong number 7")
            case "RuntimeError":
                raise RuntimeError("user's own RuntimeError 4711")
            case "SystemExit":
                raise SystemExit(4711)
            case "KeyboardInterrupt":
                raise KeyboardInterrupt("4711")
            case "unpicklable":
                raise Unpicklable(7, 7)
            case "huge":
                raise ValueError("4711" * 1_000_000)
            case "surrogate":
                raise ValueError("4711 \udcff")

    import torch

    model, optimizer = programs.network()

    @nbe.elastic
    def loop(state):
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        while True:
            if state.step == when and (where == "all" or nbe.rank() == 1):
                the_users_own_function()
            ddp(torch.randn(8, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            state.commit()

    loop(nbe.TorchState(model=model, optimizer=optimizer, step=0))


@pytest.mark.parametrize("when", [0, 5], ids=["in the first step", "later"])
@pytest.mark.parametrize("where", ["one", "all"])
def test_an_exception_of_the_users_ends_the_job(cluster, where, when):
    """With the failing rank and its own traceback, and nothing of ours in it; the next job runs on the same workers."""
    error = cluster.run(raising, "ValueError", where, when).exception(timeout=20)
    assert isinstance(error, nbe.JobError)
    assert error.rank == 1 if where == "one" else error.rank in (0, 1, 2)
    assert error.worker in {w.id for w in cluster.workers}
    assert "ValueError: wrong number 7" in error.args[0]
    assert "the_users_own_function" in error.remote_traceback
    assert error.remote_traceback in f"{error}\n"
    assert not any(f"nbelastic/{folder}" in error.remote_traceback for folder in ("programs", "state", "worker"))
    assert cluster.run(os.getpid).result(timeout=20)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("RuntimeError", "RuntimeError: user's own RuntimeError 4711"),
        ("SystemExit", "SystemExit: 4711"),
        ("KeyboardInterrupt", "KeyboardInterrupt: 4711"),
        ("unpicklable", "Unpicklable: <function"),
        ("huge", "ValueError: 4711471147114711"),
        ("surrogate", "ValueError: 4711 "),
    ],
)
def test_odd_exceptions_end_the_job_too(cluster, how, said):
    """Whatever is raised: the job fails soon, and says what it was."""
    error = cluster.run(raising, how, "one", 3).exception(timeout=10)
    assert error.rank == 1
    assert said in str(error)
    assert len(error.args[0]) < 2000


def test_an_exception_outside_the_loop(cluster):
    """A program that fails before its elastic function begins fails the job as well."""

    def program():
        raise LookupError("before the loop")

    error = cluster.run(program).exception(timeout=20)
    assert "LookupError: before the loop" in str(error)
    assert error.rank is None or error.rank in (0, 1, 2)


def test_one_rank_fails_outside_the_loop(cluster):
    """The others wait for it in the loop; the job fails all the same."""
    victim = cluster.workers[0].pid

    def program(victim):
        if os.getpid() == victim:
            raise LookupError("one only")
        return raising("ValueError", "nobody", -1)

    error = cluster.run(program, victim).exception(timeout=20)
    assert "LookupError: one only" in str(error)


def test_a_value_that_cannot_be_sent(cluster):
    """Results travel by pickle: what cannot is the program's error, and says so."""
    error = cluster.run(lambda: (line for line in "abc")).exception(timeout=20)
    assert "generator" in str(error)


class Counted:
    """Counts how often the notebook pickles it."""

    def __init__(self):
        self.pickled = 0

    def __reduce__(self):
        self.pickled += 1
        return str, ("arrived",)


def test_arguments_are_pickled_once_for_all_workers(cluster):
    """Three workers get the same bytes; what the notebook changes in an argument after `run` no longer matters."""

    def program(one, two):
        @nbe.elastic
        def loop(_):
            return one, bytes(two)

        return loop(nbe.ObjectState())

    argument, array = Counted(), bytearray(b"before")
    job = cluster.run(program, argument, array)
    array[:] = b"after!"
    assert job.result(timeout=20) == [("arrived", b"before")] * 3
    assert argument.pickled == 1


def test_a_function_that_cannot_be_sent(cluster):
    """It is refused at once, and what cannot be pickled is named: an argument, or what the function or one of its helpers uses."""
    lock = threading.Lock()

    def helper():
        return lock

    def outer():
        return helper()

    for call, why in (
        (lambda: cluster.run(print, 1, lock), "'print' cannot be sent to the workers: argument 2: TypeError: .*lock"),
        (lambda: cluster.run(outer), "cannot be sent to the workers: it uses 'lock', a lock: TypeError"),
    ):
        with pytest.raises(nbe.UsageError, match=why):
            call()


def test_errors_of_use_are_clear(cluster):
    """What cannot be asked for is refused in one line that says what to do."""
    job = cluster.run(raising, "", "nobody", -1)
    with pytest.raises(nbe.UsageError, match="is still running"):
        cluster.run(os.getpid)
    with pytest.raises(nbe.UsageError, match="cells run between jobs"):
        cluster.execute("1")
    with pytest.raises(nbe.UsageError, match=r"no host 'nowhere'; the hosts are localhost, 127\.0\.0\.2"):
        cluster.remove_host("nowhere")
    with pytest.raises(nbe.UsageError, match="min=5 is more than max=2"):
        cluster.scale(5, 2)
    until(lambda: cluster.status().phase == "running")
    with pytest.raises(nbe.WaitTimeoutError, match=r"0.1 s were not enough for job-\d+: .*train"):
        job.result(timeout=0.1)
    job.stop()
    job.wait(timeout=20)


def test_a_job_counts_from_its_submission(cluster):
    """When `run` returns the status has the job: cells and other jobs are refused, and it can be stopped."""
    job = cluster.run(raising, "", "nobody", -1)
    assert cluster.status().job == job.name
    with pytest.raises(nbe.UsageError, match="cells run between jobs"):
        cluster.execute("1")
    with pytest.raises(nbe.UsageError, match=f"{job.name} is still running"):
        cluster.run(os.getpid)
    cluster.stop_job()
    assert job.wait(timeout=20).status == "stopped"


def test_a_job_is_stopped(cluster):
    """`job.stop()` ends a training that would go on for ever; `result()` says by whom. Twice is fine."""
    job = cluster.run(raising, "", "nobody", -1)
    until(lambda: cluster.status().step > 10)
    job.stop()
    with pytest.raises(nbe.JobStoppedError, match="stopped by you"):
        job.result(timeout=20)
    assert job.status == "stopped"
    job.stop()
    assert cluster.run(os.getpid).result(timeout=20)


def test_a_job_is_stopped_before_its_world(cluster):
    """Stopping works in the very first moment, too."""
    for _ in range(5):
        job = cluster.run(raising, "", "nobody", -1)
        job.stop()
        with pytest.raises(nbe.JobStoppedError):
            job.result(timeout=20)


def test_the_loop_must_get_a_state(cluster):
    """An elastic function without a state is an error that says so."""

    def program():
        nbe.elastic(lambda state: None)({})

    assert "first argument must be an nbelastic state" in str(cluster.run(program).exception(timeout=20))


def test_one_elastic_function_a_job(cluster):
    """A second one is refused with what to do."""

    def program():
        nbe.elastic(lambda state: None)(nbe.ObjectState())
        nbe.elastic(lambda state: None)(nbe.ObjectState())

    assert "run two jobs" in str(cluster.run(program).exception(timeout=20))


def test_ranks_count_the_same_commits_whichever_runs_a_backward_pass(cluster):
    """One rank looks at gradients of its own before a commit without a step: that commit counts on no rank."""

    def program():
        import torch

        model = torch.nn.Linear(2, 2)
        state = nbe.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

        @nbe.elastic
        def loop(state):
            counts = []
            for number in range(4):
                if (nbe.rank(), number) == (1, 1):
                    state.model(torch.ones(1, 2)).sum().backward()
                state.commit()
                state.optimizer.zero_grad()
                counts.append(state.commits)
            return counts

        return loop(state)

    assert cluster.run(program).result(timeout=20) == [[1, 1, 2, 3]] * 3


def test_reports_reach_the_status(cluster):
    """What rank 0 last reported is in the status while the job runs; a loss that is no number is an event, once."""

    def program():
        @nbe.elastic
        def loop(state):
            while True:
                state.step += 1
                state.report(step=state.step, rank=nbe.rank(), loss=float("nan"))
                state.commit()
                time.sleep(0.02)

        loop(nbe.ObjectState(step=0))

    job = cluster.run(program)
    until(lambda: cluster.status().report.get("step", 0) > 5)
    assert cluster.status().report["rank"] == 0
    until(lambda: cluster.status().step > 5)  # a report may be sent before its commit is made
    until(lambda: (cluster.status().steps_per_second or 0) > 1)
    (told,) = (event.text for event in cluster.events if event.kind == "not-finite")
    assert told.startswith("loss is no longer a finite number: rank 0 reported this at commit ")
    job.stop()
    job.wait(timeout=20)


def speak():
    import subprocess
    import sys

    print(f"out of {os.getpid()}")
    print("err of", os.getpid(), file=sys.stderr)
    sys.stdout.write("no newline")
    print("\nstrange \udcff text")
    os.write(1, b"straight to the descriptor\n")
    subprocess.run(["echo", "from a child"], check=True)


def test_each_worker_has_its_log_files(cluster):
    """stdout and stderr apart, whoever wrote it, a file per worker and job; nothing is overwritten by the next job."""
    job = cluster.run(speak)
    job.result(timeout=20)
    folder = cluster.log_dir / job.name
    for w in cluster.workers:
        stem = w.id.replace("/", "-").replace("#", "-")
        out = (folder / f"{stem}.out").read_text()
        assert f"out of {w.pid}\n" in out
        assert "no newline\nstrange ? text\n" in out
        assert "straight to the descriptor\n" in out
        assert "from a child\n" in out
        assert "err of" not in out
        assert (folder / f"{stem}.err").read_text() == f"err of {w.pid}\n"
        assert (folder / f"{stem}.out").stat().st_mode & 0o777 == 0o600
    before = {file: file.read_bytes() for file in folder.iterdir()}
    cluster.run(print, "next").result(timeout=20)
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_jobs_in_quick_succession_keep_their_words_apart(cluster):
    """Each ends with its words on their way, and the next begins at once: all of them arrive, where they belong."""
    jobs = []
    for number in range(20):
        jobs.append(cluster.run(print, f"job {number}"))
        jobs[-1].result(timeout=20)
    until(lambda: all(len(job.logs().splitlines()) >= 3 for job in jobs))
    for number, job in enumerate(jobs):
        assert [line.partition(" | ")[2] for line in job.logs().splitlines()] == [f"job {number}"] * 3


def test_logs_of_a_job(cluster):
    """`job.logs()` shows what was printed: of all, of one rank, of one worker."""

    def program():
        @nbe.elastic
        def loop(_):
            for number in range(5):
                print(f"rank {nbe.rank()} line {number}")

        loop(nbe.ObjectState())

    job = cluster.run(program)
    job.result(timeout=20)
    until(lambda: len(job.logs().splitlines()) == 15)
    assert job.logs(rank=1, tail=2) == "rank 1 line 3\nrank 1 line 4"
    w = cluster.workers[2]
    assert len(job.logs(worker=w.id).splitlines()) == 5
    assert f"{w.id} | rank " in job.logs()
    with pytest.raises(nbe.UsageError, match="no rank 7"):
        job.logs(rank=7)


BARS = """
import os, pathlib, sys, time
from tqdm import tqdm
from tqdm.auto import tqdm as auto
for step, (name, bar) in enumerate((("plain", tqdm), ("auto", auto))):
    with bar(total=4, desc=name) as shown:
        shown.update(2)
        shown.refresh()
        while not pathlib.Path({file!r} + str(step)).exists():
            time.sleep(0.01)
        shown.update(2)
print("the last", "words", end="")
"""


def test_what_has_no_newline_is_shown(cluster, tmp_path):
    """Progress bars while they run, `tqdm.auto` as text; each is one line in the end. The last words need no newline."""
    file = tmp_path / "go on "
    job = cluster.run_cell(BARS.format(file=str(file)))
    for step, name in enumerate(("plain", "auto")):
        until(lambda name=name: all(f"{name}:  50%" in job.logs(worker=w.id) for w in cluster.workers))
        file.with_name(f"go on {step}").touch()
    job.result(timeout=20)
    for ending in ("auto: 100%", "the last words"):  # of two streams, which come one after the other
        until(lambda ending=ending: all(ending in job.logs(worker=w.id) for w in cluster.workers))
    for worker in cluster.workers:
        lines = job.logs(worker=worker.id).split("\n")
        assert [line.partition("|")[0] for line in lines] == ["plain: 100%", "auto: 100%", "the last words"]
        assert not any("\r" in line or "\x1b" in line for line in lines)


def test_cells_run_on_all_workers(cluster):
    """What a cell prints comes back from each, its error too; names stay for the next cell and the next job."""
    rows = cluster.execute(
        "import os, sys\nx = 5\nprint('pid', os.getpid())\nprint('bad', file=sys.stderr)", timeout=20
    )
    assert [row[0] for row in rows] == [w.id for w in cluster.workers]
    assert [row[1] for row in rows] == [f"pid {w.pid}\n" for w in cluster.workers]
    assert [row[2:] for row in rows] == [("bad\n", None)] * 3
    rows = cluster.execute("print(x)\n1 / 0", timeout=20)
    assert [row[1] for row in rows] == ["5\n"] * 3
    assert len({row[3] for row in rows}) == 1  # without the count of each engine's prompts
    assert re.search(r"^Cell, line 2\n.*^-+> 2 1 / 0$", rows[0][3], re.DOTALL | re.MULTILINE)
    assert rows[0][3].endswith("\nZeroDivisionError: division by zero")
    assert cluster.run_cell("x + 1").result(timeout=20) == [6, 6, 6]


def test_no_output_of_a_cell_is_lost(cluster):
    """Thirty cells in a row: each one's output is there, all of it, and of no other."""
    for number in range(30):
        rows = cluster.execute(f"print('cell {number}'); print('x' * 10000)", timeout=20)
        assert [row[1] for row in rows] == [f"cell {number}\n{'x' * 10000}\n"] * 3


def test_a_cell_as_a_program(cluster):
    """A cell's last expression is its value; its traceback shows its own lines."""
    job = cluster.run_cell("def f():\n    raise KeyError('in a cell')\n\nf()")
    error = job.exception(timeout=20)
    assert re.search(r"line 4, in <module>\n +f\(\)", error.remote_traceback)
    assert "raise KeyError('in a cell')" in error.remote_traceback


def test_a_cell_with_a_syntax_error(cluster):
    """It is found in the kernel: the error has the line that is wrong, and no job is used up."""
    before = cluster.job
    for run in (cluster.run_cell, cluster.execute):
        with pytest.raises(SyntaxError) as caught:
            run("good = 1\nx = = 1")
        assert (caught.value.lineno, caught.value.text.strip()) == (2, "x = = 1")
    assert cluster.job is before


def test_names_outside_a_world(cluster):
    """`rank()` without a world is an error that says where it works; `device()` works anywhere on a worker."""
    rows = cluster.execute(
        "import nbelastic as nbe\nprint(nbe.device())\ntry:\n    nbe.rank()\nexcept nbe.NoWorldError as e:\n    print(e)",
        timeout=20,
    )
    assert all(out.startswith(("cpu\n", "cuda:")) and "there is no world here" in out for _, out, _, _ in rows)


CELL_WITH_A_DATA_SET = """
import os
from torch.utils.data import DataLoader, Dataset

class Mine(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index, os.getppid()

found = [(numbers.tolist(), set(parents.tolist())) for numbers, parents in DataLoader(Mine(), batch_size=4, num_workers=1)]
found, os.getpid()
"""


def test_data_loaders_fork_as_anywhere(cluster):
    """A data set that a cell defines can be loaded by worker processes, which start fast: they are forks of the worker."""
    for found, pid in cluster.run_cell(CELL_WITH_A_DATA_SET).result(timeout=30):
        assert found == [([0, 1, 2, 3], {pid}), ([4, 5, 6, 7], {pid})]


def test_a_lot_of_output(cluster):
    """Megabytes of output hold nobody up; the files have all of it."""

    def program():
        for number in range(30_000):
            print(f"{number:099d}")

    job = cluster.run(program)
    job.result(timeout=30)
    for file in (cluster.log_dir / job.name).glob("*.out"):
        assert file.stat().st_size == 3_000_000
