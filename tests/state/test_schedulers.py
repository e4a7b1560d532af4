"""A scheduler that a program has forgotten to give to its state is noticed: a worker that joins would begin it anew."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, SequentialLR, StepLR

from nbelastic import ElasticSampler, TorchState
from nbelastic.state.schedulers import without_scheduler


def parts():
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def sequence(optimizer):
    return SequentialLR(optimizer, [LinearLR(optimizer), StepLR(optimizer, 5)], [3])


@pytest.mark.parametrize("make", [lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)), sequence])
def test_a_scheduler_that_is_not_in_the_state_is_named_once(capsys, make):
    """Also if the function makes it, after the world has begun. The line says what to do."""
    values = parts()
    state = TorchState(**values)
    scheduler = make(values["optimizer"])
    for _ in range(3):
        state.commit()
    (line,) = capsys.readouterr().err.splitlines()
    assert "optimizer has a learning rate scheduler that is not in the state" in line
    assert "give the scheduler to the state too" in line
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize("make", [lambda optimizer: StepLR(optimizer, 5), sequence])
def test_a_scheduler_in_the_state_is_not_named(make):
    """Nor is an optimizer that has none."""
    values = parts()
    scheduler = make(values["optimizer"])
    assert without_scheduler({**values, "scheduler": scheduler}) == []
    assert without_scheduler({**values, "schedule": scheduler.state_dict()}) == []  # the function loads it
    assert without_scheduler(parts() | {"step": 0}) == []


class Several:
    """A program's own: one schedule for each part of a model."""

    def __init__(self, schedulers):
        self.parts = [{"scheduler": one} for one in schedulers]

    def state_dict(self):
        return {"parts": [one["scheduler"].state_dict() for one in self.parts]}

    def load_state_dict(self, state):
        for one, part in zip(self.parts, state["parts"], strict=True):
            one["scheduler"].load_state_dict(part)


def test_an_object_of_the_programs_own_may_have_the_scheduler():
    """However deep it keeps it. A sampler has none, and of a model's attributes only the layers are in the state."""
    values = parts()
    several = Several([StepLR(values["optimizer"], 5)])
    values["model"].schedule = several.parts[0]["scheduler"]
    assert without_scheduler({**values, "schedule": several}) == []
    others = {"sampler": ElasticSampler(range(4)), "scaler": torch.amp.GradScaler("cpu")}
    assert without_scheduler({**values, **others}) == ["optimizer"]


def test_each_optimizer_needs_its_own():
    """A GAN has two: the one without its scheduler is named."""
    first, second = parts(), parts()
    schedulers = [StepLR(one["optimizer"], 5) for one in (first, second)]
    values = {"first": first["optimizer"], "second": second["optimizer"]}
    assert without_scheduler({**values, "scheduler": schedulers[0]}) == ["second"]
    assert without_scheduler({**values, "one": schedulers[0], "other": schedulers[1]}) == []
