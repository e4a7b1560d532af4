"""A StepLog through kills of the rank that writes: each step once, with the values of its last run."""

import sys
import time
from importlib.util import find_spec
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nbelastic as nbe
from nbelastic import StateError, StepLog, UsageError


class Disk:
    """The safe entries. As TensorBoard does, a new writer hides the steps from its first one on."""

    def __init__(self):
        self.entries, self.opened = [], []

    def open(self, first_step):
        self.opened.append(first_step)
        return Writer(self, first_step)


class Writer:
    """It loses what was not flushed, unless its process lives on."""

    def __init__(self, disk, first_step):
        self.disk = disk
        disk.entries = [entry for entry in disk.entries if entry[0] < first_step]
        self.buffer = []

    def write(self, step, values):
        self.buffer.append((step, values))

    def flush(self):
        self.disk.entries += self.buffer
        self.buffer = []

    def close(self):
        self.flush()


EVENTS = st.lists(
    st.tuples(
        st.integers(1, 12),  # commits
        st.integers(0, 3),  # entries that rank 0 logs for the next commit before it is killed
        st.booleans(),  # whether it has made that commit, and written it, when it is killed
        st.booleans(),  # whether its process could flush by itself what it had
    ),
    max_size=8,
)


@given(events=EVENTS, flush_every=st.integers(1, 7), per_commit=st.integers(1, 5))
def test_no_step_is_missing_or_double(events, flush_every, per_commit):
    """Rank 0 is killed again and again, before, in and after a flush: the next one writes what may not be safe."""
    disk = Disk()
    ranks = [StepLog(disk.open, flush_every=flush_every) for _ in range(2)]
    step = 0

    def commit(logs, writer):
        for log in logs:
            log.committed(writes=log is writer)

    for commits, begun, was_committed, flushes in [*events, (1, 0, False, False)]:
        for _ in range(commits):
            for _ in range(per_commit):
                step += 1
                for log in ranks:
                    log(step, x=step)
            commit(ranks, ranks[0])
        state = ranks[1].state_dict()
        for ahead in range(min(begun, per_commit)):
            for log in ranks:
                log(step + 1 + ahead, x=-1)  # these steps are made again
        if was_committed:
            commit(ranks[:1], ranks[0])
        if flushes and ranks[0]._writer is not None:
            ranks[0]._writer.flush()
        ranks = [ranks[1], StepLog(disk.open, flush_every=flush_every)]
        for log in ranks:
            log.load_state_dict(state)
        commit(ranks, ranks[0])
    ranks[0].close()
    assert disk.entries == [(number, {"x": number}) for number in range(1, step + 1)]


def test_few_entries_are_kept():
    """The state stays small: it has the entries since the flush before the last one."""
    log = StepLog(Disk().open, flush_every=5)
    for _ in range(100):
        log(x=1.0)
        log.committed(writes=False)
        assert len(log.state_dict()["kept"].splitlines()) <= 10


def test_nothing_is_opened_before_there_is_something_to_write():
    """Ranks that do not write, and a log that is never used, open no files."""
    disk = Disk()
    log = StepLog(disk.open)
    log.committed(writes=True)
    log(x=1.0)
    log.committed(writes=False)
    assert disk.opened == []
    log.committed(writes=True)
    assert disk.opened == [1]


def test_a_step_may_have_several_entries():
    """The next writer replaces whole steps, so entries of one step are kept or forgotten together."""
    disk = Disk()
    log = StepLog(disk.open, flush_every=2)
    for _ in range(3):
        log(7, x=1.0)
        log(7, y=2.0)
        log.committed(writes=True)
    other = StepLog(disk.open, flush_every=2)
    other.load_state_dict(log.state_dict())
    other.committed(writes=True)
    assert disk.entries == [(7, {"x": 1.0}), (7, {"y": 2.0})] * 3


def test_steps_do_not_decrease():
    """A log per epoch beside a log per step would hide each other's entries."""
    log = StepLog(Disk().open)
    log(5, x=1.0)
    log(y=1.0)
    with pytest.raises(UsageError, match="step 3 comes after step 6"):
        log(3, x=1.0)


def test_a_state_writes_at_its_commits():
    """As a value of a state, also outside a job; values that are not numbers are left out with a line."""
    disk = Disk()
    state = nbe.ObjectState(log=StepLog(disk.open, flush_every=1))
    state.log(loss=0.5)
    assert disk.entries == []
    state.commit()
    state.log(loss=0.25)
    state.undo()
    state.log(loss=0.75)
    state.commit()
    assert disk.entries == [(1, {"loss": 0.5}), (2, {"loss": 0.75})]


def test_refusals():
    """Each wrong use is one line."""
    with pytest.raises(UsageError, match="give a function that opens a writer"):
        StepLog("runs/one")
    with pytest.raises(StateError, match="not a state of a StepLog"):
        StepLog(Disk().open).load_state_dict({})
    with pytest.raises(UsageError, match="step must be a whole number"):
        StepLog(Disk().open)("loss", x=1.0)


def tensorboard_rows(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return [(row.step, row.value) for row in reader.Scalars("x")]


def mlflow_rows(folder):
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"file://{folder}/runs")
    (run,) = client.search_runs([client.get_experiment_by_name("one").experiment_id])
    history = client.get_metric_history(run.info.run_id, "x")
    return [(metric.step, metric.value) for metric in history]


TOOLS = {
    "tensorboard": (StepLog.tensorboard, tensorboard_rows),
    "mlflow": (lambda folder: StepLog.mlflow("one", tracking_uri=f"file://{folder}/runs"), mlflow_rows),
}


@pytest.mark.parametrize("tool", [name for name in TOOLS if name == "tensorboard" or find_spec(name)])
def test_a_real_tool_shows_each_step_once(tool, tmp_path, monkeypatch):
    """The rank that writes is killed twice, once just after a commit that no other rank has made."""
    pytest.importorskip(tool)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    make, rows = TOOLS[tool]
    log, dead = make(tmp_path), []
    for step in range(1, 71):
        log(x=step)
        state = log.state_dict()
        log.committed(writes=True)
        if step in (30, 55):
            log(x=step + 1)
            log.committed(writes=True)
            dead.append(log)
            log = make(tmp_path)
            log.load_state_dict(state)
            log.committed(writes=True)
    log.close()
    assert rows(tmp_path) == [(step, float(step)) for step in range(1, 71)]
    for one in dead:
        one.close()


class FakeWandB:
    """The part of wandb that a log uses. A run keeps the steps from its last one on, as W&B's server does."""

    def __init__(self):
        self.runs = {}

    def init(self, *, resume, project, **more):
        assert (resume, project) == ("allow", "one")
        return self.runs.setdefault(more["id"], self.Run())

    class Run:
        def __init__(self):
            self.step, self.rows, self.finished = 0, [], 0

        def log(self, values, step):
            self.step = step + 1
            self.rows.append((step, values))

        def finish(self):
            self.finished += 1


def test_weights_and_biases_resumes_one_run(monkeypatch):
    """The next writer goes on in the run of the first, and leaves the steps that it has as they are. On a stand-in."""
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = StepLog.wandb(project="one")
    for _ in range(30):
        log(x=1.0)
        log.committed(writes=True)
    other = StepLog.wandb(project="one")
    other.load_state_dict(log.state_dict())
    other(x=2.0)
    other.committed(writes=True)
    other.close()
    (run,) = fake.runs.values()
    assert run.rows == [(step, {"x": 1.0}) for step in range(1, 31)] + [(31, {"x": 2.0})]
    assert run.finished == 1


class Metric(NamedTuple):
    """In the order of MLflow's own."""

    key: str
    value: float
    timestamp: int
    step: int


class FakeMLflow:
    """The part of mlflow that a log uses: a server that takes at most 1000 metrics at once."""

    entities = SimpleNamespace(Metric=Metric)

    def __init__(self):
        self.experiments, self.runs, self.sizes = {}, [], []
        self.MlflowClient = lambda tracking_uri: self if tracking_uri == "http://server" else None

    def get_experiment_by_name(self, name):
        return self.experiments.get(name)

    def create_experiment(self, name):
        assert name not in self.experiments
        self.experiments[name] = SimpleNamespace(experiment_id=f"number of {name}")
        return self.experiments[name].experiment_id

    def search_runs(self, numbers, query):
        return [run for run in self.runs if numbers == [run.number] and query == f"tags.`nbelastic.log` = '{run.key}'"]

    def create_run(self, number, *, tags, run_name):
        info = SimpleNamespace(run_id=len(self.runs))
        run = SimpleNamespace(info=info, number=number, key=tags["nbelastic.log"], name=run_name, metrics=[], ended=0)
        self.runs.append(run)
        return run

    def get_metric_history(self, run_id, name):
        return [metric for metric in self.runs[run_id].metrics if metric.key == name]

    def log_batch(self, run_id, *, metrics):
        assert len(metrics) <= 1000
        self.sizes.append(len(metrics))
        self.runs[run_id].metrics += metrics

    def set_terminated(self, run_id):
        self.runs[run_id].ended += 1


@pytest.fixture
def fake_mlflow(monkeypatch):
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return fake


def mlflow_log():
    return StepLog.mlflow("one", run_name="mine", tracking_uri="http://server")


def test_mlflow_resumes_one_run(fake_mlflow):
    """The next writer goes on in the run of the first, and leaves the steps that it has as they are. Another log has its own."""
    log, other, next_writer = mlflow_log(), mlflow_log(), mlflow_log()
    for step in range(30):
        log(step, x=1.0)
        log.committed(writes=True)
    other(x=5.0)
    other.committed(writes=True)
    next_writer.load_state_dict(log.state_dict())
    next_writer(x=2.0)
    next_writer.committed(writes=True)
    next_writer.close()
    one, two = fake_mlflow.runs
    assert [metric[:2] + metric[3:] for metric in one.metrics] == [*(("x", 1.0, n) for n in range(30)), ("x", 2.0, 30)]
    assert (one.name, one.ended, two.ended, len(two.metrics)) == ("mine", 1, 0, 1)
    assert 0 <= time.time() - one.metrics[-1].timestamp / 1000 < 60


def test_many_numbers_reach_mlflow_in_pages(fake_mlflow):
    """A server refuses more than 1000 at once. As soon as there are so many, they are sent."""
    log = mlflow_log()
    for numbers in (2500, 500, 500, 10):
        log(**{f"x{number}": 1.0 for number in range(numbers)})
        log.committed(writes=True)
    assert fake_mlflow.sizes == [1000, 1000, 500, 1000]
    log.close()
    assert fake_mlflow.sizes[4:] == [10]


def test_a_tool_that_is_not_installed(monkeypatch):
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    log = StepLog.wandb()
    log(x=1.0)
    with pytest.raises(UsageError, match=r"wandb is not installed on this host .*pip install wandb"):
        log.committed(writes=True)
