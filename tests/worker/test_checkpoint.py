"""Checkpoints: whole or not at all, the newest that can be used is used, and nothing in one is ever run."""

import errno
import itertools
import json
import os
import pickle
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import nbelastic as nbe
from nbelastic.core.errors import StateError, WaitTimeoutError
from nbelastic.worker import checkpoint, saving
from nbelastic.worker.transfer import describe
from tests.worker.test_transfer import same


@pytest.fixture(autouse=True)
def nothing_under_way():
    yield
    saving._settle()


def network(width=4, seed=0):
    """A state with whatever a state can hold."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return nbe.TorchState(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=2),
        sampler=nbe.ElasticSampler(range(10)),
        half=torch.zeros(2, 3, dtype=torch.bfloat16),
        scalar=torch.tensor(0),
        empty=torch.zeros(0, 3),
        turned=torch.zeros(2, 3).t(),
        history=[],
        epoch=0,
    )


def train(state, steps=1):
    for _ in range(steps):
        loss = state.model(torch.randn(5, 3)).pow(2).mean()
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        state.scheduler.step()
        state.half = state.half + 1
        state.scalar = state.scalar + 1
        state.turned = (state.turned.t() + 1).t()
        state.history = [*state.history, (state.epoch, {"loss": loss.item()})]
        state.epoch += 1
        state.commit()
    return state


def contents(state):
    """All of a state, that nothing else changes."""
    tensors = []
    described = describe(state._contents(), tensors)
    return described, [tensor.clone() for tensor in tensors]


def counter(commits=0, **values):
    state = nbe.ObjectState(step=0, weights=torch.zeros(4), **values)
    return count(state, commits)


def count(state, commits=1):
    for _ in range(commits):
        state.step += 1
        state.weights = torch.full((4,), float(state.step))
        state.commit()
    return state


def written(folder):
    return [path.name for path in reversed(checkpoint.listed(folder))]


def write(state, folder, keep=3):
    return saving.save(state, folder, keep=keep).wait()


# ---- there and back ----


def test_there_and_back(tmp_path):
    """Model, buffers, Adam, scheduler, sampler, counters, and tensors of any type, shape and order come back as they were."""
    state = train(network(), 3)
    state.sampler.used = 4
    state.commit()
    was = contents(state)
    path = write(state, tmp_path / "here")
    other = network(seed=1)
    assert saving.load(other, tmp_path / "here") == path
    assert all(same(*pair) for pair in zip(contents(other), was, strict=True))
    assert other.commits == state.commits == 4


def test_the_training_goes_on_as_if_nothing_had_been(tmp_path):
    """Three steps, a checkpoint, three more; or three steps, then loaded elsewhere, and the same three more."""
    one = train(network(), 3)
    write(one, tmp_path)
    other = train(network(seed=1), 1)
    saving.load(other, tmp_path)
    for state in (one, other):
        torch.manual_seed(7)
        train(state, 3)
    assert all(same(*pair) for pair in zip(contents(one), contents(other), strict=True))


def test_what_follows_the_call_is_not_in_it(tmp_path, monkeypatch):
    """The copies are made when `save` returns: steps made while it writes change nothing."""
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
    """`state.save()` and `state.load()` do it; in a world only the rank that speaks writes."""
    state = begun(train(network(), 2))
    path = state.save(tmp_path / "kept").wait()
    assert network(seed=1).load(tmp_path / "kept") == path
    state._session.speaks = False
    assert state.save(tmp_path / "other").wait() is None
    assert os.listdir(tmp_path) == ["kept"]


def test_a_rank_that_does_not_write(tmp_path):
    """All ranks may call `save`; the one that does not write has nothing to wait for, and leaves no trace."""
    saved = saving.save(counter(1), tmp_path / "here", writes=False)
    assert saved.done()
    assert saved.wait() is None
    assert not (tmp_path / "here").exists()


def test_other_tools_can_read_it(tmp_path):
    """Tensors lie there for torch.distributed.checkpoint, under the names of their places."""
    from torch.distributed.checkpoint import FileSystemReader, load

    state = train(network(), 2)
    path = write(state, tmp_path)
    wanted = {"modules/model/0.weight": torch.zeros(4, 3), "optimizers/optimizer/state/0/exp_avg": torch.zeros(4, 3)}
    with pytest.warns(UserWarning, match="single process"):
        load(wanted, storage_reader=FileSystemReader(path), no_dist=True)
    weight = state.model[0].weight
    assert torch.equal(wanted["modules/model/0.weight"], weight)
    assert torch.equal(wanted["optimizers/optimizer/state/0/exp_avg"], state.optimizer.state[weight]["exp_avg"])


def test_names_that_would_be_the_same(tmp_path):
    """Keys with slashes, and numbers beside their text, do not make one tensor overwrite another."""
    values = {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, 1: torch.ones(2), "1": torch.zeros(2)}
    state = nbe.ObjectState(values=values, description=torch.ones(3))
    write(state, tmp_path)
    other = nbe.ObjectState(values={}, description=torch.zeros(3))
    saving.load(other, tmp_path)
    assert same(other.values, values)
    assert torch.equal(other.description, torch.ones(3))


def test_memory_is_used_again():
    """The next copy goes where the last one was, as long as it fits."""
    state, copies = train(network()), saving.Copies()
    first, _ = copies.take(state)
    again, _ = copies.take(train(state))
    assert [t.data_ptr() for t in first.tensors] == [t.data_ptr() for t in again.tensors]
    state.half = torch.zeros(5)
    other, _ = copies.take(state)
    assert sum(a is not b for a, b in zip(again.tensors, other.tensors, strict=True)) == 1


# ---- what the folder holds ----


def test_the_last_ones_stay(tmp_path):
    """`keep` of them; the numbers go on counting."""
    state = counter()
    for _ in range(4):
        write(count(state), tmp_path, keep=2)
    assert written(tmp_path) == ["000003-commit-3", "000004-commit-4"]
    write(count(state), tmp_path, keep=1)
    assert written(tmp_path) == ["000005-commit-5"]


def test_the_newest_is_the_last_that_was_written(tmp_path):
    """A training that went back to an older commit does not lose its new checkpoints to what it had left behind."""
    state = counter()
    paths = [write(count(state, 10), tmp_path) for _ in range(3)]
    saving.load(state, paths[0])
    assert state.commits == 10
    write(count(state), tmp_path, keep=2)
    assert written(tmp_path) == ["000003-commit-30", "000004-commit-11"]
    again = counter()
    saving.load(again, tmp_path)
    assert again.commits == again.step == 11


def test_what_a_kill_left_is_removed_and_what_is_being_written_is_not(tmp_path):
    """Leftovers do not count as checkpoints, and the next save tidies up; another process's work is left alone."""
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
    """`load` takes both, and a checkpoint that was given a name of its own."""
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


# ---- what is wrong with one ----


@pytest.fixture
def two(tmp_path):
    """A folder with two checkpoints: of commit 1 and, the newer, of commit 2."""
    state = train(network())
    write(state, tmp_path)
    write(train(state), tmp_path)
    return tmp_path


def test_a_damaged_byte_anywhere_is_noticed(two):
    """Whatever byte of whatever file is changed, lost or added: the checkpoint does not pass as whole."""
    newest = checkpoint.listed(two)[0]
    assert checkpoint.verify(newest).commits == 2
    for file in newest.iterdir():
        whole = file.read_bytes()
        step = max(1, len(whole) // 150)
        for at in {*range(0, len(whole), step), len(whole) - 1}:
            for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], whole + b"\n"):
                file.write_bytes(damaged)
                with pytest.raises(StateError):
                    checkpoint.verify(newest)
        file.unlink()
        with pytest.raises(StateError, match=file.name):
            checkpoint.verify(newest)
        file.write_bytes(whole)
    assert checkpoint.verify(newest).commits == 2


@pytest.mark.parametrize(
    ("file", "cut", "said"),
    [
        ("__0_0.distcp", 100, "__0_0.distcp has 100 bytes instead of"),
        ("__0_0.distcp", None, "__0_0.distcp is damaged: its checksum is another one"),
        (".metadata", None, ".metadata is damaged: its checksum is another one"),
        ("manifest", 100, "manifest is damaged: its checksum is another one"),
        ("manifest", 0, "manifest is damaged: its checksum is another one"),
    ],
)
def test_the_one_before_a_damaged_one_is_used(two, capsys, file, cut, said):
    """One line says what is wrong with the newest."""
    path = checkpoint.listed(two)[0] / file
    whole = path.read_bytes()
    path.write_bytes(whole[:cut] if cut is not None else whole[:-9] + b"!" + whole[-8:])
    state = network()
    saving.load(state, two)
    assert (state.epoch, state.commits) == (1, 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"nbelastic: checkpoint 000002-commit-2 is not used: {said}")
    assert line.endswith("; the one before it is tried.")


def test_none_that_can_be_used(two):
    """The error names each and what is wrong with it; the state is as it was."""
    one, other = checkpoint.listed(two)
    (one / "manifest").unlink()
    (other / ".metadata").unlink()
    state = network()
    was = contents(state)
    with pytest.raises(StateError) as caught:
        saving.load(state, two)
    text = str(caught.value)
    assert "000002-commit-2 is not used: it has no manifest; " in text
    assert "000001-commit-1 is not used: No such file or directory" in text
    assert all(same(*pair) for pair in zip(contents(state), was, strict=True))


def test_no_checkpoint_at_all(tmp_path):
    """Asked for by name that is an error, whether the folder is empty or not there."""
    with pytest.raises(StateError, match="there is no checkpoint in"):
        saving.load(counter(), tmp_path)
    with pytest.raises(StateError, match="No such file or directory"):
        saving.load(counter(), tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("foreign", "said"),
    [
        (lambda: train(network(width=5)), r"it does not fit this state: model.0.weight is .*4, 3.* here and .*5, 3"),
        (lambda: counter(1), "it does not fit this state: '[a-z]+' is in the state here and not in"),
    ],
)
def test_a_checkpoint_of_another_state(two, capsys, foreign, said):
    """The first difference is said, the one before is used; with nothing else there it is an error."""
    path = write(foreign(), two)
    state = network()
    with pytest.raises(StateError, match=said):
        saving.load(state, path)
    saving.load(state, two)
    assert state.commits == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_checkpoint_that_an_object_refuses(tmp_path, capsys):
    """Whatever a scheduler's or sampler's own `load_state_dict` raises is said, and the one before is used."""

    class Picky:
        def __init__(self, kind):
            self.kind = kind

        def state_dict(self):
            return {"kind": self.kind}

        def load_state_dict(self, state):
            if state["kind"] != self.kind:
                raise KeyError(self.kind)

    state = counter(1, picky=Picky("a"))
    write(state, tmp_path)
    state.picky.kind = "b"
    write(count(state), tmp_path)
    again = counter(picky=Picky("a"))
    saving.load(again, tmp_path)
    assert again.step == 1
    assert "it does not fit this state: KeyError: 'a'" in capsys.readouterr().err


def forge(path, change):
    """Change a checkpoint and make its checksums right again, as somebody with bad intentions would."""
    manifest = json.loads((path / "manifest").read_bytes().partition(b"\n")[0])
    change(manifest)
    for name in manifest.get("files", ()):
        if "/" not in name:
            file = checkpoint._measure(path / name)
            manifest["files"][name] = {"size": file.size, "sha256": file.sha256}
    line = json.dumps(manifest).encode()
    (path / "manifest").write_bytes(line + b"\n" + checkpoint.hashlib.sha256(line).hexdigest().encode() + b"\n")


def test_a_format_of_another_version(two, capsys):
    """It is said which one, and which can be read."""
    forge(checkpoint.listed(two)[0], lambda manifest: manifest.update(format=2, more="than there is today"))
    saving.load(network(), two)
    assert "it is of format 2, and this version of nbelastic reads format 1" in capsys.readouterr().err


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


def test_an_evil_metadata_file_is_never_opened(two, tmp_path):
    """A pickle with code in it, with all checksums right: it is not run, and the tensors are read without it."""
    newest = checkpoint.listed(two)[0]

    def change(_):
        (newest / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "evil")))

    forge(newest, change)
    state = network()
    assert saving.load(state, two) == newest
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("named", ["description", "small/half"])
def test_evil_in_the_data_is_refused(two, tmp_path, named, capsys):
    """Code in the place of a tensor, or within what is no tensor: refused, not run, and the one before is used."""
    newest = checkpoint.listed(two)[0]
    evil = {"small": Evil(tmp_path / "evil")}

    def change(manifest):
        entry = next(entry for entry in manifest["tensors"] if entry["name"] == named)
        entry["file"], entry["offset"] = "more", 0
        value = evil
        if named == "description":
            torch.save(evil, newest / "inner")
            value = torch.frombuffer(bytearray((newest / "inner").read_bytes()), dtype=torch.uint8)
            (newest / "inner").unlink()
            entry["shape"] = list(value.shape)
        torch.save(value, newest / "more")
        entry["length"] = (newest / "more").stat().st_size
        manifest["files"]["more"] = {}

    forge(newest, change)
    state = network()
    saving.load(state, two)
    assert state.commits == 1
    assert "000002-commit-2 is not used" in capsys.readouterr().err
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["files"].update({"../000001-commit-1/manifest": {"size": 1, "sha256": ""}}),
        lambda manifest: manifest["tensors"][0].update(file="/etc/passwd"),
        lambda manifest: manifest["tensors"][3].update(dtype="load"),
        lambda manifest: manifest["tensors"][3].update(shape=[10**15]),
        lambda manifest: manifest["tensors"][-1].update(offset=-5),
        lambda manifest: manifest["tensors"].pop(),
        lambda manifest: manifest.update(tensors=[]),
        lambda manifest: manifest.update(commits="two"),
        lambda manifest: manifest.pop("files"),
    ],
)
def test_a_manifest_that_lies(two, change):
    """Files elsewhere, types that are none, shapes and places that are wrong: refused like any damage."""
    forge(checkpoint.listed(two)[0], change)
    state = network()
    saving.load(state, two)
    assert state.commits == 1


# ---- disks ----


def test_a_disk_that_is_full(tmp_path, capsys):
    """The training goes on, one line says why, nothing half is left, and the checkpoint before is still there."""
    write(counter(1), tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        failing = saving.save(counter(2), tmp_path)
        saving._settle()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(StateError, match=os.strerror(errno.EFBIG)):
        failing.wait()
    said = f"nbelastic: the checkpoint of commit 2 was not written to {tmp_path}: {os.strerror(errno.EFBIG)}.\n"
    assert capsys.readouterr().err == said
    assert os.listdir(tmp_path) == ["000001-commit-1"]
    write(counter(3), tmp_path)
    assert written(tmp_path) == ["000001-commit-1", "000002-commit-3"]


def test_a_folder_that_cannot_be(tmp_path):
    """A file in its place, or in its way: said at the call."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StateError, match=f"checkpoints cannot be written to {path} .*: give checkpoint another"):
            saving.save(counter(), path)


def test_what_could_not_be_read_back_is_not_written(tmp_path, capsys):
    """A value that is no plain data is refused when it is saved, not when it is needed."""
    state = counter(1)
    state.step = Path("x")
    with pytest.raises(StateError, match="not plain data"):
        saving.save(state, tmp_path).wait()
    state.step = lambda: None
    with pytest.raises(StateError, match="cannot be saved"):
        saving.save(state, tmp_path)
    assert os.listdir(tmp_path) == []
    assert len(capsys.readouterr().err.splitlines()) == 1


DYING = """
import os, resource, shutil, signal, sys
import torch
from nbelastic.worker import checkpoint, saving
from tests.worker.test_checkpoint import network, train

torch.set_num_threads(1)
base, out = sys.argv[1:]
state = network()
saving.load(state, base)
snapshot, _ = saving.Copies().take(train(state))

def die_at_call(number):
    seen = 0
    def count(event, args):
        nonlocal seen
        if event.startswith(("os.", "shutil.", "open", "fcntl.")):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)

def die_at_byte(number):
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))

def attempt(die, number):
    folder = os.path.join(out, f"{die.__name__}-{number}")
    shutil.copytree(base, folder)
    pid = os.fork()
    if pid == 0:
        die(number)
        checkpoint.write(checkpoint.Path(folder), snapshot, 2)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)

number = 1
while attempt(die_at_call, number):
    number += 1
size = 0
while attempt(die_at_byte, size):
    size = size * 3 // 2 + 300
"""


def test_killed_at_any_moment_there_is_a_checkpoint_to_use(two, tmp_path_factory, capsys):
    """A process is killed at each of its calls to the system, and at many bytes, while it writes the third and removes the
    first: every time the newest is whole, without a word, and the next save leaves nothing of the dead one's."""
    out = tmp_path_factory.mktemp("out")
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", DYING, str(two), str(out)], cwd=root, check=True, timeout=100)
    found = []
    for folder in out.iterdir():
        state = network()
        saving.load(state, folder)
        found.append(state.commits)
        assert capsys.readouterr().err == ""
        write(train(state), folder, keep=2)
        assert len(written(folder)) == len(os.listdir(folder)) == 2
    assert {commits: found.count(commits) > 5 for commits in found} == {2: True, 3: True}
    assert len(found) > 30


# ---- a job's plan ----


class Job:
    """A plan of a job on one worker, whose rank is told."""

    def __init__(self, folder, every=10, keep=3):
        self.rank = 0
        self.plan = saving.Plan(str(folder), every, keep, lambda: self.rank == 0)
        self.plan.prepare()
        self.state = counter()

    def commits(self, number):
        for _ in range(number):
            count(self.state)
            self.plan.committed(self.state)
            saving._settle()
        return self


def test_a_plan_saves_every_so_many_commits(tmp_path):
    """At the multiples, on rank 0 only; a rank that becomes 0 takes over at the next one."""
    one, other = Job(tmp_path), Job(tmp_path)
    other.rank = 1
    one.commits(25)
    other.commits(25)
    assert written(tmp_path) == ["000001-commit-10", "000002-commit-20"]
    other.rank = 0
    other.commits(10)
    assert written(tmp_path) == ["000001-commit-10", "000002-commit-20", "000003-commit-30"]


def test_a_plan_with_every_commit(tmp_path):
    """Also the first."""
    Job(tmp_path, every=1, keep=2).commits(3)
    assert written(tmp_path) == ["000002-commit-2", "000003-commit-3"]


def test_a_newcomer_keeps_the_rhythm(tmp_path):
    """It begins in the middle, and saves at the next multiple."""
    job = Job(tmp_path)
    job.state.commits = 123
    job.commits(7)
    assert written(tmp_path) == ["000001-commit-130"]


def test_a_slow_disk_makes_checkpoints_fewer_and_the_training_no_slower(tmp_path, monkeypatch, capsys):
    """While one is being written the next is put off, not left out and not waited for; that is said once."""
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
    saving._settle()
    count(job.state)
    job.plan.committed(job.state)
    go_on.release()
    job.plan.finish()
    assert written(tmp_path) == ["000001-commit-10", "000002-commit-46"]
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "fewer" in line] == [
        "nbelastic: writing a checkpoint takes longer than 10 commits: there are fewer than asked for."
    ]


def test_the_end_is_saved_too(tmp_path):
    """What was committed last, once; on rank 0, and not if it is there already."""
    job = Job(tmp_path).commits(13)
    job.rank = 1
    job.plan.ended(job.state)
    job.rank = 0
    for _ in range(2):
        job.plan.ended(job.state)
        job.plan.finish()
    assert written(tmp_path) == ["000001-commit-10", "000002-commit-13"]
    again = Job(tmp_path)
    again.plan.resume(again.state)
    again.plan.ended(again.state)
    again.plan.finish()
    assert len(written(tmp_path)) == 2


def test_a_job_goes_on_where_the_last_one_was(tmp_path, capsys):
    """The newest checkpoint, before the first world only; an empty folder is where a job begins."""
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
    assert capsys.readouterr().err == f"nbelastic: the training goes on at commit 20, from {where}.\n"
    second.plan.begun = True
    second.state.step = 0
    second.plan.resume(second.state)
    assert second.state.step == 0
    second.commits(10)
    assert written(tmp_path)[-1] == "000003-commit-30"


def test_a_plan_that_fails_to_save_goes_on(tmp_path, capsys):
    """One line each time, and the next one may be written again."""
    job = Job(tmp_path)
    job.state._values["step"] = Unsaved()
    for job.state.commits in (10, 20):
        job.plan.committed(job.state)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("there is no checkpoint of commit" in line for line in lines)
    job.state._values["step"] = 3
    for job.state.commits in itertools.count(21):
        job.plan.committed(job.state)
        if job.state.commits == 30:
            break
    job.plan.finish()
    assert written(tmp_path) == ["000001-commit-30"]


class Unsaved:
    def __reduce__(self):
        raise TypeError("of no use elsewhere")
