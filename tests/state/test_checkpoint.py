"""Checkpoints: saved and loaded, written while training continues, several in a folder; and a job's plan."""

import itertools
import os
import threading
from pathlib import Path

import pytest
import torch

import nbelastic as nbe
from nbelastic.errors import WaitTimeoutError
from nbelastic.state import checkpoint_files as checkpoint
from nbelastic.state import checkpoints as saving
from tests.state.conftest import formation
from tests.state.kept import contents, count, counter, network, train, write, written
from tests.state.test_transfer import same


@pytest.fixture(autouse=True)
def nothing_under_way():
    yield
    saving._join_last()


# ---- save and load ----


def test_a_loaded_state_equals_the_saved_one(tmp_path):
    """After a save and a load all contents are equal: model, optimizer, scheduler, sampler, counters, any tensor."""
    state = train(network(), 3)
    state.sampler.used = 4
    state.commit()
    was = contents(state)
    path = write(state, tmp_path / "here")
    other = network(seed=1)
    assert saving.load(other, tmp_path / "here") == path
    assert all(same(*pair) for pair in zip(contents(other), was, strict=True))
    assert other.commits == state.commits == 4


def test_training_continues_after_a_load_as_without_one(tmp_path):
    """Training after a load makes the same steps as training without one."""
    one = train(network(), 3)
    write(one, tmp_path)
    other = train(network(seed=1), 1)
    saving.load(other, tmp_path)
    for state in (one, other):
        torch.manual_seed(7)
        train(state, 3)
    assert all(same(*pair) for pair in zip(contents(one), contents(other), strict=True))


def test_later_steps_do_not_change_the_checkpoint(tmp_path, monkeypatch):
    """A checkpoint holds the state at the call of `save`: steps during the write do not change it."""
    trained = threading.Event()
    write = checkpoint.write

    def slow_disk(*args):
        assert trained.wait(30)
        return write(*args)

    monkeypatch.setattr(checkpoint, "write", slow_disk)
    state = train(network(), 2)
    was = contents(state)
    begun = saving.save(state, tmp_path)
    train(state, 3)
    assert not begun.done()
    with pytest.raises(WaitTimeoutError):
        begun.wait(0)
    trained.set()
    begun.wait()
    other = network(seed=1)
    saving.load(other, tmp_path)
    assert all(same(*pair) for pair in zip(contents(other), was, strict=True))


def test_a_second_save_waits_for_the_first(tmp_path):
    """Checkpoints are written one after the other, in the order of the calls."""
    state = counter()
    calls = [saving.save(count(state), tmp_path) for _ in range(5)]
    assert [call.done() for call in calls[:-1]] == [True] * 4
    assert calls[-1].wait().name == "000005-commit-5"
    assert written(tmp_path) == ["000003-commit-3", "000004-commit-4", "000005-commit-5"]


def test_a_state_s_own_methods(tmp_path, begun):
    """`state.save()` and `state.load()` work as the functions do; in a world only rank 0 writes."""
    state = begun(train(network(), 2))
    path = state.save(tmp_path / "kept").wait()
    assert network(seed=1).load(tmp_path / "kept") == path
    state._session.is_rank_0 = False
    assert state.save(tmp_path / "other").wait() is None
    assert os.listdir(tmp_path) == ["kept"]


def test_save_on_a_rank_that_does_not_write(tmp_path):
    """All ranks may call `save`: on a rank that does not write it returns at once, and makes no folder."""
    saved = saving.save(counter(1), tmp_path / "here", writes=False)
    assert saved.done()
    assert saved.wait() is None
    assert not (tmp_path / "here").exists()


def test_other_tools_can_read_a_checkpoint(tmp_path):
    """torch.distributed.checkpoint reads a checkpoint's tensors by their names in the state."""
    from torch.distributed.checkpoint import FileSystemReader, load

    state = train(network(), 2)
    path = write(state, tmp_path)
    wanted = {"modules/model/0.weight": torch.zeros(4, 3), "optimizers/optimizer/state/0/exp_avg": torch.zeros(4, 3)}
    with pytest.warns(UserWarning, match="single process"):
        load(wanted, storage_reader=FileSystemReader(path), no_dist=True)
    weight = state.model[0].weight
    assert torch.equal(wanted["modules/model/0.weight"], weight)
    assert torch.equal(wanted["optimizers/optimizer/state/0/exp_avg"], state.optimizer.state[weight]["exp_avg"])


def test_similar_names_are_kept_apart(tmp_path):
    """Keys with slashes, or a number and the same number as text, do not make one tensor overwrite another."""
    values = {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, 1: torch.ones(2), "1": torch.zeros(2)}
    state = nbe.ObjectState(values=values, description=torch.ones(3))
    write(state, tmp_path)
    other = nbe.ObjectState(values={}, description=torch.zeros(3))
    saving.load(other, tmp_path)
    assert same(other.values, values)
    assert torch.equal(other.description, torch.ones(3))


def test_memory_is_used_again():
    """The next copy uses the memory of the last one again, for each tensor that fits."""
    state, copies = train(network()), saving.CopyMemory()
    first, _ = copies.copy(state)
    again, _ = copies.copy(train(state))
    assert [t.data_ptr() for t in first.tensors] == [t.data_ptr() for t in again.tensors]
    state.half = torch.zeros(5)
    other, _ = copies.copy(state)
    assert sum(a is not b for a, b in zip(again.tensors, other.tensors, strict=True)) == 1


# ---- what the folder holds ----


def test_the_newest_checkpoints_stay(tmp_path):
    """The newest `keep` checkpoints stay, and their numbers are not used again."""
    state = counter()
    for _ in range(4):
        write(count(state), tmp_path, keep=2)
    assert written(tmp_path) == ["000003-commit-3", "000004-commit-4"]
    write(count(state), tmp_path, keep=1)
    assert written(tmp_path) == ["000005-commit-5"]


def test_the_newest_is_the_last_that_was_written(tmp_path):
    """The newest checkpoint is the last one written, also if it is of an older commit."""
    state = counter()
    paths = [write(count(state, 10), tmp_path) for _ in range(3)]
    saving.load(state, paths[0])
    assert state.commits == 10
    write(count(state), tmp_path, keep=2)
    assert written(tmp_path) == ["000003-commit-30", "000004-commit-11"]
    again = counter()
    saving.load(again, tmp_path)
    assert again.commits == again.step == 11


def test_a_killed_process_s_files_are_removed_and_another_s_are_not(tmp_path):
    """The next save removes what a killed process left, but no folder to which another process is writing."""
    write(counter(1), tmp_path)
    leftovers = [tmp_path / f"{kind}0123" for kind in (".writing-", ".removing-")]
    for path in (*leftovers, tmp_path / ".writing-other"):
        path.mkdir()
        (path / "__0_0.distcp").write_bytes(b"half of")
    with checkpoint._locked(tmp_path / ".writing-other"):
        write(counter(2), tmp_path)
        assert sorted(os.listdir(tmp_path)) == [".writing-other", "000001-commit-1", "000002-commit-2"]
    write(counter(3), tmp_path)
    assert ".writing-other" not in os.listdir(tmp_path)


def test_one_checkpoint_or_a_folder_of_them(tmp_path):
    """`load` takes a folder of checkpoints or a single checkpoint, which may have another name."""
    state = counter()
    first = write(count(state), tmp_path)
    write(count(state), tmp_path)
    other = counter()
    saving.load(other, first)
    assert other.step == 1
    saving.load(other, first.rename(tmp_path / "the best"))
    assert other.step == 1
    saving.load(other, str(tmp_path))
    assert other.step == 2


# ---- a job's plan ----


class Job:
    """A checkpoint plan of a job on one worker; the test sets its rank."""

    def __init__(self, folder, every=10, keep=3):
        self.rank = 0
        self.plan = saving.Plan(str(folder), every, keep, lambda: self.rank == 0)
        self.plan.prepare()
        self.state = counter()

    def commits(self, number):
        for _ in range(number):
            count(self.state)
            self.plan.committed(self.state)
            saving._join_last()
        return self


def test_a_plan_saves_at_multiples_of_every(tmp_path):
    """A plan saves at multiples of `every`, on rank 0 only; a new rank 0 saves from the next multiple on."""
    one, other = Job(tmp_path), Job(tmp_path)
    other.rank = 1
    one.commits(25)
    other.commits(25)
    assert written(tmp_path) == ["000001-commit-10", "000002-commit-20"]
    other.rank = 0
    other.commits(10)
    assert written(tmp_path) == ["000001-commit-10", "000002-commit-20", "000003-commit-30"]


def test_a_plan_with_every_commit(tmp_path):
    """A plan of every commit saves the first commit too."""
    Job(tmp_path, every=1, keep=2).commits(3)
    assert written(tmp_path) == ["000002-commit-2", "000003-commit-3"]


def test_a_newcomer_saves_at_the_next_multiple(tmp_path):
    """A newcomer that starts between two multiples of `every` saves at the next multiple."""
    job = Job(tmp_path)
    job.state.commits = 123
    job.commits(7)
    assert written(tmp_path) == ["000001-commit-130"]


def test_a_slow_disk_makes_checkpoints_fewer_and_the_training_no_slower(tmp_path, monkeypatch, capsys):
    """During a write the next checkpoint is delayed; training does not wait, and one line reports the delay."""
    go_on = threading.Semaphore(0)
    write = checkpoint.write

    def slow_disk(*args):
        assert go_on.acquire(timeout=30)
        return write(*args)

    monkeypatch.setattr(checkpoint, "write", slow_disk)
    job = Job(tmp_path)
    for _ in range(45):
        count(job.state)
        job.plan.committed(job.state)
    go_on.release()
    saving._join_last()
    count(job.state)
    job.plan.committed(job.state)
    go_on.release()
    job.plan.finish()
    assert written(tmp_path) == ["000001-commit-10", "000002-commit-46"]
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "fewer" in line] == [
        "nbelastic: writing a checkpoint takes longer than 10 commits: there are fewer than requested."
    ]


def test_the_last_commit_is_saved_too(tmp_path):
    """The last commit is saved once, on the rank that is to do so, unless a checkpoint of it exists."""
    job = Job(tmp_path).commits(13)
    job.plan.ended(job.state, turn=None)
    for _ in range(2):
        job.plan.ended(job.state, turn=0)
        job.plan.finish()
    assert written(tmp_path) == ["000001-commit-10", "000002-commit-13"]
    again = Job(tmp_path)
    again.plan.resume(again.state)
    again.plan.ended(again.state, turn=0)
    again.plan.finish()
    assert len(written(tmp_path)) == 2


def test_without_a_driver_the_next_rank_saves_the_last_commit(tmp_path, monkeypatch):
    """Rank 1 writes the last checkpoint only if rank 0 was lost."""
    monkeypatch.setattr(saving, "TURN_TIMEOUT", 0.0)
    zero, one = Job(tmp_path), Job(tmp_path)
    one.rank = 1
    for dead, saved in [(False, "000001-commit-3"), (True, "000002-commit-6")]:
        for job in (zero, one):
            job.commits(3)
        if not dead:
            zero.plan.ended(zero.state, turn=1)
            zero.plan.finish()
        one.plan.ended(one.state, turn=2)
        one.plan.finish()
        assert written(tmp_path)[-1] == saved


def test_a_job_continues_from_the_newest_checkpoint(tmp_path, capsys):
    """A job loads the newest checkpoint before its first world only; with an empty folder it starts anew."""
    first = Job(tmp_path)
    first.plan.resume(first.state)
    assert capsys.readouterr().err == ""
    first.commits(20)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"nbelastic: the first checkpoint, {tmp_path / '000001-commit-10'}, has 0.0 MB and took ")
    second = Job(tmp_path)
    second.plan.resume(second.state)
    assert second.state.commits == second.state.step == 20
    where = tmp_path / "000002-commit-20"
    assert capsys.readouterr().err == f"nbelastic: the training continues at commit 20, from {where}.\n"
    second.plan.begun = True
    second.state.step = 0
    second.plan.resume(second.state)
    assert second.state.step == 0
    second.commits(10)
    assert written(tmp_path)[-1] == "000003-commit-30"


@pytest.mark.parametrize(("rank", "step"), [(0, 20), (1, 0)])
def test_the_root_of_a_jobs_first_world_reads_the_checkpoint(tmp_path, begun, rank, step):
    """Only the root of a job's first world reads the checkpoint; later worlds continue from their members' state."""
    Job(tmp_path).commits(20)
    job = Job(tmp_path)
    state = begun(job.state)
    state._session.checkpoints = job.plan
    state.sync(formation(rank, 2))
    assert state.step == step
    count(state).sync(formation(rank, 2))
    assert state.step == step + 1


def test_a_plan_continues_after_a_failed_save(tmp_path, capsys):
    """A failed save prints one line, and later checkpoints are written."""
    job = Job(tmp_path)
    job.state._contents.values["step"] = Unsaved()
    for job.state.commits in (10, 20):
        job.plan.committed(job.state)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("there is no checkpoint of commit" in line for line in lines)
    job.state._contents.values["step"] = 3
    for job.state.commits in itertools.count(21):
        job.plan.committed(job.state)
        if job.state.commits == 30:
            break
    job.plan.finish()
    assert written(tmp_path) == ["000001-commit-30"]


class Unsaved:
    def __reduce__(self):
        raise TypeError("cannot be pickled")


# ---- the kept state of a hung worker ----


def test_a_successor_loads_the_kept_state(tmp_path):
    """A successor loads the kept state of the hung worker, at the same commit."""
    state = train(network(), 3)
    was = contents(state)
    other = network(seed=1)
    saving.write_kept(state, tmp_path / "kept")
    saving.load_kept(other, tmp_path / "kept", 3)
    assert all(same(*pair) for pair in zip(contents(other), was, strict=True))
    assert other.commits == 3


def test_an_unusable_kept_state_raises(tmp_path):
    """A kept state that is missing, damaged or of another commit raises: training must not continue from it."""
    with pytest.raises(nbe.StateError, match="no checkpoint"):
        saving.load_kept(network(), tmp_path / "kept", 3)
    saving.write_kept(train(network(), 3), tmp_path / "kept")
    with pytest.raises(nbe.StateError, match=r"has commit 3 instead of commit 4"):
        saving.load_kept(network(), tmp_path / "kept", 4)
    next((tmp_path / "kept").glob("*/manifest")).write_bytes(b"{")
    with pytest.raises(nbe.StateError, match="damaged"):
        saving.load_kept(network(), tmp_path / "kept", 3)


def test_a_newcomer_comes_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """Rank 0 removes temporary folders, also the one with which a newcomer checks that it can write there."""
    remove = Path.rmdir

    def removed_already(path):
        checkpoint.tidy(tmp_path)
        remove(path)

    monkeypatch.setattr(Path, "rmdir", removed_already)
    checkpoint.prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []
