"""What a notebook gets of a training state."""

from __future__ import annotations

import pytest
import torch

import nbelastic as nbe
from nbelastic.errors import StateError
from nbelastic.programs.state_pull import values
from nbelastic.state.user_words import UserWords
from nbelastic.system import pickling


def test_each_value_is_plain_data():
    """Models, optimizers and samplers are their `state_dict()`; tensors need no gradient and carry no memory around them."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    sampler, part = nbe.ElasticSampler(range(10)), torch.ones(1000, 1000)[0, :3]
    state = nbe.TorchState(model=model, optimizer=optimizer, sampler=sampler, part=part, epoch=3)
    found = pickling.unpack(b"".join(pickling.pack(values(state))))
    assert list(found) == ["model", "optimizer", "sampler", "part", "epoch"]
    assert torch.equal(found["model"]["weight"], model.weight)
    assert not found["model"]["weight"].requires_grad
    assert torch.equal(
        found["optimizer"]["state"][0]["momentum_buffer"], optimizer.state[model.weight]["momentum_buffer"]
    )
    assert found["sampler"] == sampler.state_dict()
    assert found["part"].untyped_storage().nbytes() == 12
    assert values(state, "epoch") == 3
    with pytest.raises(
        StateError, match="this state has no 'weights'; it holds model, optimizer, sampler, part, epoch"
    ):
        values(state, "weights")


def test_a_sharded_state_is_refused_in_words():
    """No rank has all of it. Its small values can be had one by one."""
    state = nbe.ShardedState(step=7)
    assert values(state, "step") == 7
    with pytest.raises(StateError, match=r"the state is sharded, so no rank has all of it: save it with state.save"):
        values(state)


def test_a_sharded_state_of_an_integration_names_what_the_user_has():
    """The user of a Trainer has no variable with the state: the error names what saves the model there."""
    state = nbe.ShardedState(step=7)
    state._contents.user_words = UserWords(save="trainer.save_model(FOLDER) writes the model")
    with pytest.raises(StateError, match=r"so no rank has all of it: trainer.save_model\(FOLDER\) writes the model\."):
        values(state)
