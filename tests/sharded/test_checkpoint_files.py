"""A checkpoint of a sharded state: the files of all ranks are one checkpoint of torch, complete or not there."""

import pathlib
import pickle
import sys
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from nbelastic.errors import StateError
from nbelastic.sharded import checkpoint_files, checkpoints
from nbelastic.sharded.bound import Bound
from nbelastic.sharded.checkpoint_reading import Stored, find, newest
from nbelastic.sharded.checkpoint_restoring import Restoring
from nbelastic.sharded.chunks import owners_of
from tests.sharded.meshes import layouts, shapes
from tests.sharded.saved_models import layout_of, part_of, save, snapshot, trained, values, writers
from tests.support.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MESHES = [(1, 1, 1), (1, 4, 1), (2, 2, 1), (1, 9, 1), (2, 3, 1)]


@given(parameters=shapes().flatmap(lambda found: layouts(found, 1)))
def test_each_chunk_is_written_by_one_of_its_owners(parameters):
    """All chunks are in the checkpoint, and none is written twice."""
    written = [
        (name, chunk, rank)
        for rank in range(len(parameters.hosts))
        for name, chunk in checkpoint_files.chunks_to_write(parameters.parameters, rank).items()
    ]
    expected = [(name, chunk) for name, one in parameters.parameters.items() for chunk in owners_of(one.chunks)]
    assert sorted(map(repr, expected)) == sorted(repr((name, chunk)) for name, chunk, _ in written)
    for name, chunk, rank in written:
        assert rank in owners_of(parameters.parameters[name].chunks)[chunk]


@pytest.mark.parametrize("mesh", MESHES)
def test_plain_torch_reads_what_any_mesh_has_written(tmp_path, mesh):
    """`dcp.load` and `set_state_dict` in one process get all values, of shared parameters and buffers too."""
    model, optimizer = trained()
    path = save(tmp_path, model, optimizer, mesh)
    other, its_optimizer = trained(seed=1)
    own = dict(zip(("model", "optimizer"), get_state_dict(other, its_optimizer), strict=True))
    dcp.load(own, checkpoint_id=path, no_dist=True)
    set_state_dict(other, its_optimizer, model_state_dict=own["model"], optim_state_dict=own["optimizer"])
    torch.testing.assert_close(values(other, its_optimizer), values(model, optimizer), rtol=0, atol=0)


def test_the_keys_are_those_that_torch_writes(tmp_path):
    """Beside the one entry of nbelastic, no key is missing and none is added: tools for such checkpoints work."""
    model, optimizer = trained()
    path = save(tmp_path / "ours", model, optimizer)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=tmp_path / "torch", no_dist=True)
    ours, theirs = (pickle.loads((where / ".metadata").read_bytes()) for where in (path, tmp_path / "torch"))
    assert ours.state_dict_metadata.keys() - theirs.state_dict_metadata.keys() == {"nbelastic"}
    assert theirs.planner_data.items() <= ours.planner_data.items()


@pytest.mark.parametrize("mesh", MESHES)
def test_a_rank_of_any_other_mesh_reads_its_chunks(tmp_path, mesh):
    """What four ranks have written is read by the ranks of any mesh, each from the files alone."""
    model, optimizer = trained()
    bound = Bound({"model": model}, {"optimizer": optimizer})
    stored = Stored(save(tmp_path, model, optimizer))
    layout = layout_of(bound, mesh)
    whole = dict(model.named_parameters())
    for rank in range(len(layout.hosts)):
        for name, parameter in layout.parameters.items():
            chunk = parameter.chunks[rank]
            if chunk is not None:
                target = torch.full(chunk.sizes, torch.nan)
                stored.fill([(name, target, chunk)])
                assert torch.equal(target, whole[name.removeprefix("model.")][part_of(chunk)])


def test_a_restored_model_has_all_values(tmp_path):
    """Parameters, optimizer, options of its groups, and buffers."""
    model, optimizer = trained()
    stored = Stored(save(tmp_path, model, optimizer))
    other, its_optimizer = trained(seed=1)
    bound = Bound({"model": other}, {"optimizer": its_optimizer})
    Restoring(stored, bound, layout_of(bound, (1, 1, 1)), 0).own(stored.record())
    torch.testing.assert_close(values(other, its_optimizer), values(model, optimizer), rtol=0, atol=0)
    assert stored.record()["commits"] == stored.record()["small"]["step"] == 7


def test_a_checkpoint_without_the_part_of_a_rank_is_not_there(tmp_path, monkeypatch, capsys):
    """Rank 0 reports which rank did not write, after a while without growth, and the training goes on."""
    monkeypatch.setattr(checkpoints, "PATIENCE", 0.3)
    model, optimizer = trained()
    bound = Bound({"model": model}, {"optimizer": optimizer})
    layout = layout_of(bound, (1, 3, 1))
    present = writers(bound, layout)[:2]
    savings = [w.save(tmp_path, 3, lambda r=r: snapshot(bound, layout, r, 5)) for r, w in enumerate(present)]
    with pytest.raises(StateError, match=r"commit 5 was not written .* ranks 2 have not come"):
        savings[0].wait(20)
    assert newest(tmp_path) is None
    assert capsys.readouterr().err.count("\n") == 1


def test_the_last_checkpoint_waits_for_a_slow_disk(tmp_path, monkeypatch):
    """While a rank flushes a large file, no file of data grows. Rank 0 has patience as long as that rank lives."""
    monkeypatch.setattr(checkpoints, "HURRY", 1.0)
    monkeypatch.setattr(checkpoint_files, "SIGN", 0.02)
    model, optimizer = trained()
    bound = Bound({"model": model}, {"optimizer": optimizer})
    layout = layout_of(bound, (1, 2, 1))
    first, second = writers(bound, layout)
    flush = checkpoint_files.flush

    def slow(path):
        if path.name.startswith("__1_"):
            signs = path.parent / "part-1.signs"
            until(lambda: signs.exists() and signs.stat().st_size > 70)
        flush(path)

    monkeypatch.setattr(checkpoint_files, "flush", slow)
    saving = first.save(tmp_path, 3, lambda: snapshot(bound, layout, 0, 5))
    first.hurry()
    second.save(tmp_path, 3, lambda: snapshot(bound, layout, 1, 5))
    path = saving.wait(20)
    assert sorted(one.name for one in path.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums"]


def test_rank_0_does_not_wait_for_a_rank_that_cannot_write(tmp_path, capsys):
    """The reason of the other rank is in rank 0's line."""
    model, optimizer = trained()
    bound = Bound({"model": model}, {"optimizer": optimizer})
    layout = layout_of(bound, (1, 2, 1))
    first, second = writers(bound, layout)

    def fail():
        raise OSError(28, "No space left on device")

    saving = first.save(tmp_path, 3, lambda: snapshot(bound, layout, 0, 5))
    with pytest.raises(OSError, match="No space"):
        second.save(tmp_path, 3, fail)
    with pytest.raises(StateError, match="rank 1 could not write its part: No space left on device"):
        saving.wait(20)
    assert "No space left" in capsys.readouterr().err


def test_checkpoints_that_fail_do_not_fill_the_disk(tmp_path):
    """A rank without memory, for example, fails each: the files of the other ranks are removed before the next one."""
    model, optimizer = trained()
    bound = Bound({"model": model}, {"optimizer": optimizer})
    layout = layout_of(bound, (1, 2, 1))
    first, second = writers(bound, layout)

    def fail():
        raise MemoryError

    for commits in (1, 2, 3):
        saving = first.save(tmp_path, 3, lambda: snapshot(bound, layout, 0, commits))
        with pytest.raises(MemoryError):
            second.save(tmp_path, 3, fail)
        with pytest.raises(StateError):
            saving.wait(20)
    assert [path.name for path in tmp_path.glob(".parts-*")] == [".parts-token-3"]


def test_the_training_may_go_on_while_its_copy_is_written(tmp_path, monkeypatch):
    """A step after `save` does not change the checkpoint."""
    model, optimizer = trained()
    expected = model[0].weight.detach().clone()
    bound = Bound({"model": model}, {"optimizer": optimizer})
    layout = layout_of(bound, (1, 1, 1))
    (writer,) = writers(bound, layout)
    stepped = threading.Event()
    write = checkpoint_files.write_part
    monkeypatch.setattr(checkpoint_files, "write_part", lambda *args: (stepped.wait(10), write(*args)))
    saving = writer.save(tmp_path, 3, lambda: checkpoints.Snapshot(*snapshot(bound, layout, 0, 5)))
    with torch.no_grad():
        model[0].weight.zero_()
    assert writer.busy
    stepped.set()
    stored = Stored(saving.wait(20))
    assert torch.equal(stored.values(["model.0.weight"])["model.0.weight"], expected)


def test_the_newest_are_kept_and_the_rest_of_broken_generations_is_removed(tmp_path):
    """A generation that breaks leaves a temporary folder; the next checkpoint of the same process removes it."""
    model, optimizer = trained()
    for commits in (1, 2, 3):
        save(tmp_path, model, optimizer, commits=commits, keep=2)
    bound = Bound({"model": model}, {"optimizer": optimizer})
    layout = layout_of(bound, (1, 2, 1))
    first, second = writers(bound, layout)
    second.save(tmp_path, 2, lambda: snapshot(bound, layout, 1, 4)).wait(20)
    assert list(tmp_path.glob(".parts-*"))
    second.enter("next")
    second.bound(layout_of(bound, (1, 1, 1)), checkpoints.Names(bound), 0)
    second.save(tmp_path, 2, lambda: snapshot(bound, layout_of(bound, (1, 1, 1)), 0, 5)).wait(20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000003-commit-3", "000004-commit-5"]
    until(lambda: not first.busy)


def test_a_late_checkpoint_does_not_become_the_newest(tmp_path, monkeypatch):
    """Rank 0 of a world that broke completes its checkpoint after the next world has written one: that stays the newest."""
    model, optimizer = trained()
    bound = Bound({"model": model}, {"optimizer": optimizer})
    layout = layout_of(bound, (1, 1, 1))
    ((late,), (other,)), reached, resumed = (
        (writers(bound, layout) for _ in range(2)),
        threading.Event(),
        threading.Event(),
    )
    collect = checkpoint_files.collect

    def slow(*args):
        reached.set()
        assert resumed.wait(10)
        return collect(*args)

    monkeypatch.setattr(checkpoint_files, "collect", slow)
    saving = late.save(tmp_path, 3, lambda: snapshot(bound, layout, 0, 5))
    assert reached.wait(10)
    monkeypatch.setattr(checkpoint_files, "collect", collect)
    other.tokens.clear()  # a newcomer does not know the old world's temporary folder
    other.enter("next")
    other.bound(layout, checkpoints.Names(bound), 0)
    path = other.save(tmp_path, 3, lambda: snapshot(bound, layout, 0, 4)).wait(20)
    resumed.set()
    assert (saving.wait(20).name, path.name) == ("000001-commit-5", "000002-commit-4")
    assert newest(tmp_path).path == path


def test_a_damaged_checkpoint_is_skipped(tmp_path, capsys):
    """A file that was cut, or a `.metadata` that is not torch's: the line says why, and the one before it is used."""
    model, optimizer = trained()
    good, cut, odd, damaged = (save(tmp_path, model, optimizer, commits=commits, keep=4) for commits in (1, 2, 3, 4))
    (cut / "__1_0.distcp").write_bytes((cut / "__1_0.distcp").read_bytes()[:-100])
    (odd / ".metadata").write_bytes(pickle.dumps(pytest.approx))
    (damaged / ".metadata").write_bytes(b"\x80\x04\x95" + b"\xff" * 40)
    capsys.readouterr()
    assert newest(tmp_path).path == good
    lines = capsys.readouterr().err.splitlines()
    assert "its .metadata is damaged (ValueError: frame size" in lines[0]
    assert "which is not read" in lines[1]
    assert "__1_0.distcp has" in lines[2]
    with pytest.raises(StateError, match="cannot be used: __1_0"):
        find(cut)


CHANGES = {
    "a class": b"cpathlib\nPosixPath\nN}\x8c\x06existscpathlib\nPurePosixPath\ns\x86b.",
    "a function": b"ctorch.serialization\n_get_layout\n}\x8c\x06existscpathlib\nPurePosixPath\nsb.",
    "nothing": b"b.",
}


@pytest.mark.parametrize("changes", CHANGES)
def test_a_checkpoint_changes_no_class(tmp_path, changes):
    """A `.metadata` that sets a method of `Path`, for example, is refused, and all paths stay as they are."""
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + CHANGES[changes])
    with pytest.raises(StateError, match="changes a class" if changes != "nothing" else "is damaged"):
        Stored(tmp_path)
    assert "exists" not in vars(pathlib.PosixPath)
    assert "exists" not in vars(torch.serialization._get_layout)


def test_a_checkpoint_of_python_3_13_is_read_by_others(tmp_path, monkeypatch):
    """torch pickles the path of the folder, whose class is in `pathlib._local` there, and only there."""
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "pathlib._local", pathlib)
        patched.setattr(type(tmp_path), "__module__", "pathlib._local")
        path = save(tmp_path, *trained())
    assert b"pathlib._local" in (path / ".metadata").read_bytes()
    assert Stored(path).record()["commits"] == 7


def test_no_checkpoint_is_one_clear_error(tmp_path):
    """The error names the path and what was looked for."""
    with pytest.raises(StateError, match=r"there is no checkpoint in .*: it has no \.metadata"):
        find(tmp_path)
    with pytest.raises(StateError, match="there is no checkpoint"):
        find(tmp_path / "missing")
