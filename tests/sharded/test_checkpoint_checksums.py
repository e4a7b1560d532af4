"""Changed bytes in the files of a sharded checkpoint: torch reads them without a word, as wrong weights."""

from types import SimpleNamespace

import pytest

from nbelastic.errors import StateError
from nbelastic.sharded import checkpoint_start
from nbelastic.sharded.bound import Bound
from nbelastic.sharded.checkpoint_reading import Stored, check_files
from nbelastic.sharded.checkpoint_restoring import Restoring
from nbelastic.sharded.checkpoint_start import Start
from nbelastic.state.checkpoints import Plan
from tests.sharded.saved_models import layout_of, save, trained, values
from tests.state.conftest import formation

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SESSION = SimpleNamespace(run_abortable=lambda task: task(), checkpoints=None)


def flip(file, at=0.5):
    data = bytearray(file.read_bytes())
    data[int(at * len(data))] ^= 1
    file.write_bytes(data)


def files_of(path):
    return sorted(file.name for file in path.iterdir())


def start_of(folder=None):
    """The start of a job that has checkpoints in `folder`."""
    start, session = Start(), SimpleNamespace(**vars(SESSION))
    if folder is not None:
        session.checkpoints = Plan(str(folder), every=1, keep=3, is_rank_0=lambda: True)
    start.begin(session)
    return start


def choose(start, lost=None):
    return start.choose(SESSION, formation(0, 1), None, lost, {"step": 0})


def test_torch_does_not_notice_a_changed_byte(tmp_path):
    """If this fails, torch has learned it, and the checksums may go."""
    model, optimizer = trained()
    path = save(tmp_path, model, optimizer, mesh=(1, 1, 1))
    data = (path / "__0_0.distcp").read_bytes()
    place = data.index(model[0].weight.detach().numpy().tobytes())
    flip(path / "__0_0.distcp", at=(place + 0.5) / len(data))
    other, its_optimizer = trained(seed=1)
    bound, stored = Bound({"model": other}, {"optimizer": its_optimizer}), Stored(path)
    Restoring(stored, bound, layout_of(bound, (1, 1, 1)), 0).own(stored.record())
    assert not other[0].weight.equal(model[0].weight)
    assert str(values(other, its_optimizer)[1]) == str(values(model, optimizer)[1])


def test_each_file_has_a_checksum(tmp_path):
    """Also `.metadata`, and the checksums themselves. So many processes each look at some files."""
    path = save(tmp_path, *trained())
    assert files_of(path) == [".metadata", *(f"__{rank}_0.distcp" for rank in range(4)), "checksums"]
    check_files(path)
    for name in files_of(path):
        whole = (path / name).read_bytes()
        if not whole:  # its rank has no element
            continue
        flip(path / name)
        with pytest.raises(StateError, match=f"^{name} is damaged: its checksum is wrong$"):
            check_files(path)
        found = []
        for number in range(3):
            try:
                check_files(path, number, 3)
            except StateError:
                found.append(number)
        assert len(found) == (3 if name == "checksums" else 1)
        (path / name).write_bytes(whole)


def test_the_ranks_of_a_world_check_all_files(tmp_path):
    """Each checks other files: whichever is damaged, one rank finds it."""
    path = save(tmp_path, *trained())
    for name in files_of(path):
        whole = (path / name).read_bytes()
        if whole:
            flip(path / name)
            found = [checkpoint_start._problem(str(path), formation(rank, 3), None) for rank in range(3)]
            assert any(f"{name} is damaged" in problem for problem in found)
            (path / name).write_bytes(whole)


def test_a_file_that_is_missing_is_named(tmp_path):
    path = save(tmp_path, *trained())
    (path / "__2_0.distcp").unlink()
    with pytest.raises(StateError, match="__2_0"):
        check_files(path)


def test_a_checkpoint_of_an_older_version_has_no_checksums(tmp_path):
    path = save(tmp_path, *trained())
    (path / "checksums").unlink()
    flip(path / "__1_0.distcp")
    assert choose(start_of(tmp_path))["checkpoint"] == str(path)


def test_the_job_goes_on_from_the_newest_checkpoint_that_is_whole(tmp_path, capsys):
    """Two lines say why the others are not used; where the training continues is said once."""
    good, *bad = (save(tmp_path, *trained(), commits=commits, keep=4) for commits in (1, 2, 3))
    for path in bad:
        flip(path / "__1_0.distcp")
    capsys.readouterr()
    message = choose(start_of(tmp_path))
    assert (message["checkpoint"], message["record"]["commits"], message["small"]) == (str(good), 1, {"step": 0})
    lines = capsys.readouterr().err.splitlines()
    assert sum("is not used: __1_0.distcp is damaged: its checksum is wrong" in line for line in lines) >= 2
    assert [line for line in lines if "continues" in line] == [
        f"nbelastic: the training continues at commit 1, from {good}."
    ]


def test_a_damaged_checkpoint_that_the_program_loads_is_an_error(tmp_path):
    """There is no other that the user has asked for."""
    start = start_of()
    flip(start.load(save(tmp_path, *trained()))[0] / "__0_0.distcp")
    with pytest.raises(StateError, match=r"^the checkpoint .* cannot be used: __0_0.distcp is damaged"):
        choose(start)


def test_no_checkpoint_means_first_values():
    assert choose(start_of())["checkpoint"] == ""
