"""A damaged checkpoint does not count, the newest usable one is used, and no code in a checkpoint is ever run."""

import errno
import hashlib
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nbelastic.errors import StateError
from nbelastic.state import checkpoint_files as checkpoint
from nbelastic.state import checkpoints as saving
from nbelastic.state.checkpoint_checksums import measured
from tests.state.kept import contents, count, counter, network, train, write, written
from tests.state.test_transfer import same


@pytest.fixture(autouse=True)
def nothing_under_way():
    yield
    saving._join_last()


# ---- damage ----


@pytest.fixture
def two(tmp_path):
    """A folder with two checkpoints: of commit 1 and of commit 2."""
    state = train(network())
    write(state, tmp_path)
    write(train(state), tmp_path)
    return tmp_path


def test_a_damaged_byte_anywhere_is_noticed(two):
    """Whichever byte of whichever file is changed, missing or added: `verify` raises."""
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
    ("file", "cut", "error"),
    [
        ("__0_0.distcp", 100, "__0_0.distcp has 100 bytes instead of"),
        ("__0_0.distcp", None, "__0_0.distcp is damaged: its checksum is wrong"),
        (".metadata", None, ".metadata is damaged: its checksum is wrong"),
        ("manifest", 100, "manifest is damaged: its checksum is wrong"),
        ("manifest", 0, "manifest is damaged: its checksum is wrong"),
    ],
)
def test_the_checkpoint_before_a_damaged_one_is_used(two, capsys, file, cut, error):
    """The checkpoint before a damaged one is loaded, and one line names the damage."""
    path = checkpoint.listed(two)[0] / file
    whole = path.read_bytes()
    path.write_bytes(whole[:cut] if cut is not None else whole[:-9] + b"!" + whole[-8:])
    state = network()
    saving.load(state, two)
    assert (state.epoch, state.commits) == (1, 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"nbelastic: checkpoint 000002-commit-2 is not used: {error}")
    assert line.endswith("; the one before it is tried.")


def test_no_usable_checkpoint(two):
    """Without a usable checkpoint the error names the fault of each, and the state is unchanged."""
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
    """`load` raises, whether the folder is empty or does not exist."""
    with pytest.raises(StateError, match="there is no checkpoint in"):
        saving.load(counter(), tmp_path)
    with pytest.raises(StateError, match="No such file or directory"):
        saving.load(counter(), tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("foreign", "error"),
    [
        (lambda: train(network(width=5)), r"it does not fit this state: model.0.weight is .*4, 3.* here and .*5, 3"),
        (lambda: counter(1), "it does not fit this state: '[a-z]+' is in the state here and not in"),
    ],
)
def test_a_checkpoint_of_another_state(two, capsys, foreign, error):
    """The error for a checkpoint of another state names the first difference; in a folder the one before is used."""
    path = write(foreign(), two)
    state = network()
    with pytest.raises(StateError, match=error):
        saving.load(state, path)
    saving.load(state, two)
    assert state.commits == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_checkpoint_that_an_object_refuses(tmp_path, capsys):
    """An error of a scheduler's or sampler's `load_state_dict` is printed, and the checkpoint before is used."""

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
    """Change a checkpoint and correct its checksums, as an attacker would."""
    manifest = json.loads((path / "manifest").read_bytes().partition(b"\n")[0])
    change(manifest)
    for name in manifest.get("files", ()):
        if "/" not in name:
            file = measured(path / name)
            manifest["files"][name] = {"size": file.size, "sha256": file.sha256}
    line = json.dumps(manifest).encode()
    (path / "manifest").write_bytes(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")


def test_a_format_of_another_version(two, capsys):
    """The line about a checkpoint of another format names its format and the one that can be read."""
    forge(checkpoint.listed(two)[0], lambda manifest: manifest.update(format=2, more="than there is today"))
    saving.load(network(), two)
    assert "it is of format 2, and this version of nbelastic reads format 1" in capsys.readouterr().err


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


def test_an_evil_metadata_file_is_never_opened(two, tmp_path):
    """The tensors are read without the metadata file, a pickle that may hold code although all checksums are right."""
    newest = checkpoint.listed(two)[0]

    def change(_):
        (newest / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "evil")))

    forge(newest, change)
    state = network()
    assert saving.load(state, two) == newest
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("named", ["description", "small/half"])
def test_evil_in_the_data_is_refused(two, tmp_path, named, capsys):
    """Code in place of a tensor or of other data is refused and not run; the checkpoint before is used."""
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
    """Files elsewhere, unknown types, wrong shapes and offsets are refused like any damage."""
    forge(checkpoint.listed(two)[0], change)
    state = network()
    saving.load(state, two)
    assert state.commits == 1


# ---- disks ----


def test_a_disk_that_is_full(tmp_path, capsys):
    """With a full disk training continues, one line gives the reason, and the checkpoint before stays."""
    write(counter(1), tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        failing = saving.save(counter(2), tmp_path)
        saving._join_last()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(StateError, match=os.strerror(errno.EFBIG)):
        failing.wait()
    error = f"nbelastic: the checkpoint of commit 2 was not written to {tmp_path}: {os.strerror(errno.EFBIG)}.\n"
    assert capsys.readouterr().err == error
    assert os.listdir(tmp_path) == ["000001-commit-1"]
    write(counter(3), tmp_path)
    assert written(tmp_path) == ["000001-commit-1", "000002-commit-3"]


FULL = """
import gc, resource, signal, sys, torch
import nbelastic as nbe

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
nbe.ObjectState(weights=torch.zeros(90_000)).save(sys.argv[1])._thread.join()
gc.collect()
"""


def test_a_disk_that_is_full_in_the_middle_of_a_tensor_is_one_line(tmp_path):
    """The disk's error is printed; the interpreter prints nothing about closed files."""
    command = [sys.executable, "-X", "dev", "-W", "ignore", "-c", FULL, str(tmp_path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True, timeout=100
    )
    line = f"nbelastic: the checkpoint of commit 0 was not written to {tmp_path}: {os.strerror(errno.EFBIG)}."
    assert done.stderr.splitlines() == [line]


@pytest.mark.timeout(30)
def test_a_name_that_the_disk_refuses(tmp_path, monkeypatch, capsys):
    """The checkpoint is written, but cannot be renamed: the error is reported, and no other name is tried."""

    rename = Path.rename

    def refuse(path, target):
        if "-commit-" in Path(target).name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(StateError, match=os.strerror(errno.EACCES)):
        write(counter(2), tmp_path)
    assert os.strerror(errno.EACCES) in capsys.readouterr().err


def test_another_process_takes_the_name_first(tmp_path, monkeypatch):
    """Of two jobs that write to one folder, the slower one takes the next number, and both checkpoints stay."""
    rename = Path.rename

    def too_late(path, target):
        if Path(target).name == "000001-commit-2":
            shutil.copytree(path, target)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", too_late)
    assert write(counter(2), tmp_path).name == "000002-commit-2"
    assert written(tmp_path) == ["000001-commit-2", "000002-commit-2"]


def test_a_folder_that_cannot_be(tmp_path):
    """A file has its name, or the name of its parent: `save` raises at once."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StateError, match=f"checkpoints cannot be written to {path} .*: give checkpoint another"):
            saving.save(counter(), path)


def test_data_that_is_not_plain_is_not_written(tmp_path, capsys):
    """A value that is not plain data is refused by the save, not by the load."""
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
from nbelastic.state import checkpoint_files as checkpoint, checkpoints as saving
from tests.state.kept import network, train

torch.set_num_threads(1)
base, out = sys.argv[1:]
state = network()
saving.load(state, base)
snapshot, _ = saving.CopyMemory().copy(train(state))

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


@pytest.mark.soak(seconds=30)
def test_killed_at_any_moment_there_is_a_checkpoint_to_use(two, tmp_path_factory, capsys):
    """A process is killed at each of its system calls, and at many bytes, while it writes one checkpoint and removes another.

    Each time the newest checkpoint is whole, nothing is printed, and the next save removes the dead process's files."""
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
