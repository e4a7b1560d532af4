"""Several processes write checkpoints to one folder: which is the newest, and what a file system without locks changes."""

import errno
import os
from types import SimpleNamespace

import pytest

from nbelastic.errors import StateError
from nbelastic.state import checkpoint_files as checkpoint
from nbelastic.state import checkpoints as saving
from tests.state.kept import count, counter, write, written


@pytest.fixture
def meanwhile(tmp_path, monkeypatch):
    """`meanwhile(commits)`: another process writes a checkpoint of so many commits while this one writes its next one."""
    write_tensors = checkpoint._write_tensors

    def of(commits):
        def slow(path, tensors):
            monkeypatch.setattr(checkpoint, "_write_tensors", write_tensors)
            checkpoint.write(tmp_path, saving.CopyMemory(used_again=False).copy(counter(commits))[0], 3)
            return write_tensors(path, tensors)

        monkeypatch.setattr(checkpoint, "_write_tensors", slow)

    return of


@pytest.mark.parametrize("commits", [6, 4])
def test_a_late_writer_does_not_make_its_checkpoint_the_newest(tmp_path, meanwhile, commits):
    """A partitioned rank 0 completes its checkpoint after the next one has written another: the job goes on from that one.

    That may be of an older commit, if the ranks that were left had only that.
    """
    meanwhile(commits)
    write(counter(5), tmp_path)
    assert written(tmp_path) == ["000001-commit-5", f"000002-commit-{commits}"]
    again = counter()
    saving.load(again, tmp_path)
    assert again.commits == commits


def test_a_late_checkpoint_that_is_too_many(tmp_path, meanwhile, capsys):
    """If enough newer ones are kept, the late one is dropped, and one line says so."""
    meanwhile(6)
    with pytest.raises(StateError, match="newer ones were written meanwhile"):
        write(counter(5), tmp_path, keep=1)
    assert written(tmp_path) == ["000002-commit-6"]
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF])
def test_a_file_system_without_locks(tmp_path, monkeypatch, error):
    """Checkpoints are written all the same. What another process may still be writing stays."""

    def without_locks(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(checkpoint.fcntl, "flock", without_locks)
    (tmp_path / ".writing-000001").mkdir()
    write(counter(2), tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".writing-000001", "000002-commit-2"]


def test_a_rank_0_that_was_cut_off_saves_no_old_commit(tmp_path):
    """Its host lost the driver, and the others trained on: what it saves at its lease's end must not be the newest checkpoint."""
    checkpoint.write(tmp_path, saving.CopyMemory(used_again=False).copy(counter(10))[0], 3)
    plan = saving.Plan(str(tmp_path), 100, 3, lambda: True)
    plan.ended(counter(7), turn=1)
    plan.finish()
    assert written(tmp_path) == ["000001-commit-10"]
    plan.ended(counter(12), turn=1)
    plan.finish()
    assert written(tmp_path)[-1] == "000002-commit-12"


def test_a_rank_that_cannot_return_to_the_last_commit_does_not_save_it(tmp_path, monkeypatch):
    """An optimizer step was interrupted: the rank holds half of one."""
    plan, state = saving.Plan(str(tmp_path), 100, 3, lambda: True), counter(7)
    monkeypatch.setattr(type(state), "clean", False)
    plan.ended(state, turn=0)
    plan.finish()
    assert written(tmp_path) == []
    monkeypatch.setattr(type(state), "clean", True)
    plan.ended(state, turn=0)
    plan.finish()
    assert written(tmp_path) == ["000001-commit-7"]


@pytest.mark.parametrize("rank_0_lives", [True, False])
def test_the_next_rank_gives_rank_0_time_to_save_the_last_commit(tmp_path, monkeypatch, rank_0_lives):
    """There is no driver: rank 1 waits while rank 0 may still write the last checkpoint, and writes it only after that."""
    zero, one = (saving.Plan(str(tmp_path), 100, 3, lambda rank=rank: rank == 0) for rank in (0, 1))
    state, clock = counter(7), [1000.0]

    def sleep(seconds):
        clock[0] += seconds
        if rank_0_lives and written(tmp_path) == [] and clock[0] > 1001:
            zero.ended(state, turn=0)
            zero.finish()

    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    one.ended(state, turn=2)
    one.finish()
    assert written(tmp_path) == ["000001-commit-7"]
    assert one.saved == (0 if rank_0_lives else 7)
    assert clock[0] == pytest.approx(1001 if rank_0_lives else 1000 + saving.TURN_TIMEOUT, abs=2 * saving.POLL)


@pytest.mark.parametrize("step", ["verify", "read_description"])
def test_a_reader_gets_the_newer_one_that_a_job_writes_meanwhile(tmp_path, monkeypatch, step):
    """A job keeps one checkpoint, and writes the next one just as another process, such as an evaluation, loads the last."""
    state, other = count(counter()), counter()
    write(state, tmp_path, keep=1)
    read, late = getattr(checkpoint, step), iter(range(2))

    def read_late(*arguments):
        if next(late, None) is not None:
            write(count(state), tmp_path, keep=1)
        return read(*arguments)

    monkeypatch.setattr(checkpoint, step, read_late)
    assert saving.load(other, tmp_path) == tmp_path / "000003-commit-3"
    assert other.step == other.commits == 3


def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    """A power failure leaves no checkpoint with half a file, and loses none that was reported to a program."""
    on_disk, rename, fsync = {}, checkpoint.rename, os.fsync

    def flush(descriptor):
        on_disk[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size
        fsync(descriptor)

    def named(temporary, *rest):
        assert {str(path): path.stat().st_size for path in (temporary, *temporary.iterdir())} == on_disk
        on_disk.clear()
        return rename(temporary, *rest)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(checkpoint, "rename", named)
    assert write(counter(1), tmp_path)
    assert on_disk.keys() == {str(tmp_path)}


def within(error, other):
    error.__context__ = other
    return error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left"), "No space left"),
        (OSError(errno.EACCES, "Permission denied", "/data/x"), "Permission denied: /data/x"),
        (within(RuntimeError("torch's writer failed"), OSError(errno.ENOSPC, "No space left")), "No space left"),
        (RuntimeError("an invalid\nargument"), "RuntimeError: an invalid"),
        (within(KeyError("name"), OSError(errno.ENOSPC, "No space left")), "KeyError: 'name'"),
        (StateError("of another model"), "of another model"),
    ],
)
def test_an_error_in_words(error, text):
    """An error of the disk is shown without its Python type, any other with it."""
    assert checkpoint.reason(error) == text
