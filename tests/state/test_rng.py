"""Random generators are part of a commit: torch's, Python's, numpy's and the GPU's."""

import random
import sys

import numpy as np
import torch

from nbelastic import ObjectState


def test_random_numbers_repeat_after_a_restore(begun):
    """After a restore, torch's, Python's and numpy's generators repeat the numbers that followed the commit."""
    state = begun(ObjectState())

    def draw():
        return torch.rand(2).tolist(), random.random(), np.random.rand(2).tolist()  # noqa: NPY002  (the global generator is meant)

    draw()
    state.commit()
    first = draw()
    draw()
    state.restore()
    assert draw() == first


def test_a_gpus_random_numbers_repeat_after_a_restore(begun, monkeypatch):
    """If a GPU is in use, a restore also sets its generator back to the commit."""
    generator_states = ["at the commit"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: generator_states[-1])
    monkeypatch.setattr(torch.cuda, "set_rng_state", generator_states.append)
    state = begun(ObjectState())
    state.commit()
    generator_states.append("later")
    state.restore()
    assert generator_states[-1] == "at the commit"


def test_a_program_may_import_numpy_after_a_commit(begun, monkeypatch):
    """The commit has no state of its generator, and a restore leaves that alone."""
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "numpy")
        state = begun(ObjectState())
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    state.restore()
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002
