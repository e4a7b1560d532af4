"""A StepLog through kills of the rank that writes: each step once, with the values of its last run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nbelastic as nbe
from nbelastic import StateError, StepLog, UsageError


class Disk:
    """What is safe: as TensorBoard does, a new writer hides the steps from its first one on."""

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
