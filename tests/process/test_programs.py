"""Functions as jobs on a shared cluster, whose workers no test ends: values, ranks, errors, arguments and stops."""

import os
import threading
import time

import pytest

import nbelastic as nbe
from tests.process import programs
from tests.support.waiting import until


def test_one_value_per_rank(cluster):
    """`result()` lists the values that the ranks return, by rank; each rank gets the arguments."""

    def program(factor, offset=0):
        @nbe.elastic
        def loop(_, factor, offset):
            return nbe.rank() * factor + offset

        return loop(nbe.ObjectState(), factor, offset=offset)

    job = cluster.run(program, 10, offset=1)
    assert job.result(timeout=20) == [1, 11, 21]
    assert (job.status, job.done(), job.exception()) == ("succeeded", True, None)


def test_a_program_without_a_world(cluster):
    """A function without an elastic loop runs on all workers."""
    pids = cluster.run(os.getpid).result(timeout=20)
    assert sorted(pids) == sorted(w.pid for w in cluster.workers)


def forking():
    """Fork children of which one returns from the elastic function, one raises an error, and one ends itself."""

    @nbe.elastic
    def loop(_):
        ended = []
        for how in ("returns", "raises", "exits"):
            pid = os.fork()
            if pid == 0 and how == "returns":
                return "the child's value"
            if pid == 0:
                raise ValueError("in the child") if how == "raises" else SystemExit(3)
            ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return ended

    return loop(nbe.ObjectState())


def test_a_child_that_the_program_forks_is_no_second_worker(cluster):
    """It ends where the function ends, with the exit status that it would have in a script."""
    assert cluster.run(forking).result(timeout=20) == [[0, 1, 3]] * 3


def test_ranks_and_groups(cluster):
    """Ranks are packed by host; local and cross ranks and sizes are exact, and so are their groups."""
    rows = cluster.run(programs.describe_ranks).result(timeout=20)
    assert [row["rank"] for row in rows] == [0, 1, 2]
    assert [row["size"] for row in rows] == [3, 3, 3]
    assert [row["local"] for row in rows] == [(0, 2), (1, 2), (0, 1)]
    assert [row["cross"] for row in rows] == [(0, 2), (0, 1), (1, 2)]
    assert [row["sums"] for row in rows] == [(1.0, 2.0), (1.0, 1.0), (2.0, 2.0)]


def raising(how, where="all", when=0):
    """Train `when` steps; then raise the error `how`, on rank 1 or on all ranks. With `when=-1` train without end."""

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
def test_an_exception_of_the_user_fails_the_job(cluster, where, when):
    """The job's error names the rank and has the traceback without nbelastic's frames; the next job runs."""
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
    ("how", "shown"),
    [
        ("RuntimeError", "RuntimeError: user's own RuntimeError 4711"),
        ("SystemExit", "SystemExit: 4711"),
        ("KeyboardInterrupt", "KeyboardInterrupt: 4711"),
        ("unpicklable", "Unpicklable: <function"),
        ("huge", "ValueError: 4711471147114711"),
        ("surrogate", "ValueError: 4711 "),
    ],
)
def test_odd_exceptions_fail_the_job_too(cluster, how, shown):
    """Each kind of exception fails the job soon, and the job's error shows it, shortened."""
    error = cluster.run(raising, how, "one", 3).exception(timeout=10)
    assert error.rank == 1
    assert shown in str(error)
    assert len(error.args[0]) < 2000


def test_an_exception_outside_the_loop(cluster):
    """A program that fails before its elastic function begins fails the job as well."""

    def program():
        raise LookupError("before the loop")

    error = cluster.run(program).exception(timeout=20)
    assert "LookupError: before the loop" in str(error)
    assert error.rank is None or error.rank in (0, 1, 2)


def test_one_rank_fails_outside_the_loop(cluster):
    """When one rank fails outside the loop and the others wait for it in the loop, the job fails."""
    victim = cluster.workers[0].pid

    def program(victim):
        if os.getpid() == victim:
            raise LookupError("one only")
        return raising("ValueError", "none", -1)

    error = cluster.run(program, victim).exception(timeout=20)
    assert "LookupError: one only" in str(error)


def test_a_value_that_cannot_be_sent(cluster):
    """A result that cannot be pickled is an error of the program, which names the type."""
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
    """`run` pickles its arguments once: changes that the notebook makes afterwards do not reach the workers."""

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
    """`run` raises at once, and names the argument or the name in the function that cannot be pickled."""
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
    """A call that is impossible now raises one line that explains why or what to do."""
    job = cluster.run(raising, "", "none", -1)
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
    """When `run` returns, the status shows the job, cells and other jobs are refused, and the job can be stopped."""
    job = cluster.run(raising, "", "none", -1)
    assert cluster.status().job == job.name
    with pytest.raises(nbe.UsageError, match="cells run between jobs"):
        cluster.execute("1")
    with pytest.raises(nbe.UsageError, match=f"{job.name} is still running: .*%elastic_stop --job"):
        cluster.run(os.getpid)
    cluster.stop_job()
    assert job.wait(timeout=20).status == "stopped"


def test_a_job_is_stopped(cluster):
    """`job.stop()` ends a training without end, `result()` names the client, and a second stop has no effect."""
    job = cluster.run(raising, "", "none", -1)
    until(lambda: cluster.status().step > 10)
    job.stop()
    with pytest.raises(nbe.JobStoppedError, match="stopped by you"):
        job.result(timeout=20)
    assert job.status == "stopped"
    job.stop()
    assert cluster.run(os.getpid).result(timeout=20)


def test_a_job_is_stopped_before_its_world(cluster):
    """A job can be stopped before its first generation forms."""
    for _ in range(5):
        job = cluster.run(raising, "", "none", -1)
        job.stop()
        with pytest.raises(nbe.JobStoppedError):
            job.result(timeout=20)


def test_an_elastic_function_needs_a_state(cluster):
    """An elastic function without a state as its first argument fails the job with that reason."""

    def program():
        nbe.elastic(lambda state: None)({})

    assert "first argument must be an nbelastic state" in str(cluster.run(program).exception(timeout=20))


def test_one_elastic_function_per_job(cluster):
    """A second elastic function in a job fails the job, and the error advises two jobs."""

    def program():
        nbe.elastic(lambda state: None)(nbe.ObjectState())
        nbe.elastic(lambda state: None)(nbe.ObjectState())

    assert "run two jobs" in str(cluster.run(program).exception(timeout=20))


def test_ranks_count_the_same_commits_when_one_runs_a_backward_pass(cluster):
    """A commit without a step, before which only one rank made a backward pass, counts on no rank."""

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
    """The status of a running job has the newest report of rank 0; a loss that is not finite makes one event."""

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
    (text,) = (event.text for event in cluster.events if event.kind == "not-finite")
    assert text.startswith("loss is no longer a finite number: rank 0 reported this at commit ")
    job.stop()
    job.wait(timeout=20)
