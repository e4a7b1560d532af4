"""Checkpoints that other programs wrote with torch.distributed.checkpoint are read, and what they lack is reported."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from nbelastic.errors import StateError
from nbelastic.sharded.bound import Bound
from nbelastic.sharded.checkpoint_reading import Stored
from nbelastic.sharded.checkpoint_restoring import Restoring
from tests.sharded.saved_models import layout_of, trained, values

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def written(path, state):
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return Stored(path)


def state_of(model, optimizer, flat=False):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return get_state_dict(model, optimizer, options=options)


def restored(stored, model, optimizer, first_values=lambda: None):
    bound = Bound({"model": model}, {"optimizer": optimizer})
    return Restoring(stored, bound, layout_of(bound, (1, 1, 1)), 0).others(first_values)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("nested", ["model, optimizer", "app"])
def test_all_values_are_read(tmp_path, flat, nested):
    """With any names for model and optimizer, and with options per group or per parameter."""
    model, optimizer = trained()
    own, its_optimizer = state_of(model, optimizer, flat)
    state = {"model": own, "optimizer": its_optimizer}
    if nested == "app":
        state = {"app": {"net": own, "optim": its_optimizer}}
    other, other_optimizer = trained(seed=1)
    missing = restored(written(tmp_path, state), other, other_optimizer)
    assert missing == []
    torch.testing.assert_close(values(other, other_optimizer), values(model, optimizer), rtol=0, atol=0)


def test_a_checkpoint_of_the_model_alone(tmp_path):
    """The optimizer begins anew, and its absence is reported."""
    model, _ = trained()
    other, other_optimizer = trained(seed=1)
    missing = restored(written(tmp_path, model.state_dict()), other, other_optimizer)
    assert missing == ["tensors of optimizer", "options of optimizer"]
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert not other_optimizer.state_dict()["state"]


def test_buffers_that_are_not_in_it_get_first_values(tmp_path):
    """Buffers that no state_dict() has are made anew."""
    model, _ = trained()
    other, other_optimizer = trained(seed=1)
    other.register_buffer("angles", torch.zeros(2), persistent=False)
    missing = restored(written(tmp_path, model.state_dict()), other, other_optimizer, lambda: other.angles.fill_(3))
    assert other.angles.tolist() == [3, 3]
    assert "buffers of model" in missing


def test_a_missing_parameter_is_named(tmp_path):
    """One error says how many are missing, and one of their names."""
    model, _ = trained()
    state = model.state_dict()
    del state["1.weight"]
    with pytest.raises(StateError, match=r"lacks 1 of 4 parameters, 1\.weight for one"):
        restored(written(tmp_path, state), *trained(seed=1))


def test_a_parameter_of_another_shape_is_named(tmp_path):
    """The error has both shapes."""
    state = trained()[0].state_dict()
    state["1.bias"] = torch.zeros(3)
    with pytest.raises(StateError, match=r"model\.1\.bias is \(6,\) here and \(3,\) in"):
        restored(written(tmp_path, state), *trained(seed=1))


def test_an_entry_that_is_code_is_refused(tmp_path):
    """Values are read as plain data: an object of another class is not made."""
    model, optimizer = trained()
    own, its_optimizer = state_of(model, optimizer)
    its_optimizer["param_groups"][0]["lr"] = pytest.approx(1.0)
    with pytest.raises(StateError, match="is not plain data"):
        restored(written(tmp_path, {"model": own, "optimizer": its_optimizer}), *trained(seed=1))


def test_a_file_outside_is_refused(tmp_path):
    """A `.metadata` that names a file of another folder: values of that file would become those of the model."""
    for name in ("private", "downloaded"):
        written(tmp_path / name, {"weight": torch.zeros(4)})
    file = tmp_path / "downloaded" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"../private/{place.relative_path}"
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(StateError, match=r"it names a file outside, '\.\./private/"):
        Stored(tmp_path / "downloaded")
