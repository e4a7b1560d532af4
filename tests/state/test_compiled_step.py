"""An optimizer's step that torch compiles."""

import pytest
import torch

from nbelastic import TorchState
from tests.state.training import network


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself
def test_a_compiled_step_is_noticed(group, begun):
    """`torch.compile` traces an optimizer's hooks: what counts collectives cannot be traced."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        compiled()
        assert state._steps.has_stepped
        state.commit()
    assert not state._steps.copying
