"""A new program takes over a commit of an old one's sharded models, by name."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from nbelastic.errors import StateError
from nbelastic.sharded.bound import Bound
from nbelastic.sharded.chunks import Chunk, Layout, Parameter, join
from nbelastic.sharded.filling import Filling
from nbelastic.sharded.holdings import Holdings, full_record, present_record
from nbelastic.sharded.initial_values import allocate
from nbelastic.sharded.takeover import common_parameters, merged_small, program_record
from nbelastic.sharded.whole_commits import Choice, Commit
from nbelastic.state.contents import Contents
from nbelastic.state.user_words import UserWords
from tests.sharded.fake_world import fake_world, sharded

OLD, NEW = 1, 2  # numbers of programs
COMMIT = Commit(1, 3)
CHOICE = Choice(COMMIT, {0: (0,)}, (0,))


class LoneSession:
    """Of a world with one rank."""

    def run_abortable(self, task):
        return task()

    def finish_gpu_work(self):
        pass


class Fixed(nn.Module):
    """A layer whose first values torch cannot make: it has no `reset_parameters`."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.scale


def head():
    return nn.Linear(4, 2)


def last_layer(parameters, lr):
    return torch.optim.AdamW([*parameters][-2:], lr=lr)


class Counting(nn.Module):
    """A layer that keeps the count of its calls beside parameters and buffers."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Trained(NamedTuple):
    """A model and what belongs to it, bound by one program."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: StepLR
    bound: Bound
    program: dict
    filling: Filling

    def train(self, steps=3):
        for step in range(steps):
            torch.manual_seed(step)
            self.model(torch.randn(5, 3)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return self

    def held(self):
        """What a rank holds after a commit."""
        held, shard = Holdings(), self.bound.shard()
        held.add_generation(self.filling.layout, 0)
        contents = Contents()
        contents.values = {"scheduler": self.scheduler, "step": 3}
        record = present_record(contents, self.bound, self.program)
        held.add_own(COMMIT, shard, full_record(record, self.bound, shard))
        return held

    def values(self):
        state = {**self.model.state_dict(), **self.optimizer.state_dict()["state"]}
        tensors = torch.utils._pytree.tree_leaves(state)
        return [one.full_tensor().clone() if hasattr(one, "full_tensor") else one.clone() for one in tensors]


def make(mesh, number=OLD, *, lr=0.1, width=4, more=(), optimize=torch.optim.AdamW, every=10):
    torch.manual_seed(number)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 4), *[one() for one in more])
    model = sharded(model, mesh)
    allocated = {"model": allocate(model, torch.device("cpu"))}
    optimizer = optimize(model.parameters(), lr=lr)
    scheduler = StepLR(optimizer, every)
    bound = Bound({"model": model}, {"optimizer": optimizer})
    small = {"scheduler": scheduler.state_dict(), "step": 0}
    program = program_record(
        number, small | {"optimizer": [dict(group) for group in bound.settings()["optimizer"]["groups"]]}, bound
    )
    layout = join(number, ["host"], [bound.own_chunks()])
    filling = Filling(LoneSession(), None, bound, layout, 0, allocated=allocated, init=None)
    return Trained(model, optimizer, scheduler, bound, program, filling)


def trained(mesh, **options):
    found = make(mesh, **options)
    found.filling.begin()
    return found.train()


def taken(new, old):
    found = new.filling.restore(CHOICE, old.held(), new.program, UserWords())
    new.scheduler.load_state_dict(found.record["small"]["scheduler"])
    return found


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_an_equal_program_goes_on_as_the_old_one_would():
    """Parameters, buffers, momentum and schedule: the next steps are the same to the last bit. The old tensors stay as they are."""
    with fake_world(0, 1) as mesh:
        old, new = trained(mesh), make(mesh, NEW)
        before = old.values()
        found = taken(new, old)
        assert (found.notes, found.record["small"]["step"]) == ([], 3)
        assert same(new.values(), before)
        after = new.train().values()
        assert same(old.values(), before)
        assert same(old.train().values(), after)


@pytest.mark.parametrize("number", [OLD, NEW], ids=["the same program", "a new one"])
def test_what_layers_keep_beside_parameters_goes_on(number):
    """`get_extra_state` of a layer is part of the commit."""
    with fake_world(0, 1) as mesh:
        old, new = trained(mesh, more=[Counting]), make(mesh, number, more=[Counting])
        taken(new, old)
        assert (old.model[3].calls, new.model[3].calls) == (3, 3)


def test_layers_that_were_unfrozen_stay_so():
    """The new program is that of the old one, which freezes a layer at first. A layer whose line the user has edited is as edited."""
    with fake_world(0, 1) as mesh:
        old = trained(mesh)
        old.program["requires_grad"] |= {"model.0.weight": False}
        old.model[1].weight.requires_grad_(False)
        new = make(mesh, NEW)
        new.program["requires_grad"] |= {"model.0.weight": False, "model.2.bias": False}
        for one in (new.model[0].weight, new.model[2].bias):
            one.requires_grad_(False)
        notes = taken(new, old).notes
        frozen = [name for name, one in new.model.named_parameters() if not one.requires_grad]
        assert (frozen, notes) == (["1.weight", "2.bias"], ["the new program sets requires_grad.model.2.bias"])


@pytest.mark.parametrize("edited", [False, True])
def test_groups_that_were_added_are_taken_over(edited):
    """A loop added one at a commit that the new program does not run. If the user trains its parameters from the start, they count."""
    with fake_world(0, 1) as mesh:
        old = make(mesh, optimize=last_layer)
        old.filling.begin()
        old.optimizer.add_param_group({"params": list(old.model[0].parameters()), "lr": 0.02})
        old.train()
        new = make(mesh, NEW, optimize=torch.optim.AdamW if edited else last_layer)
        taken(new, old)
        rates = [group["lr"] for group in new.optimizer.param_groups]
        assert rates == ([0.1] if edited else [0.1, 0.02])
        own, theirs = (one.optimizer.state[one.model[0].bias]["exp_avg"].full_tensor() for one in (new, old))
        assert torch.equal(own, theirs)


def test_what_the_user_has_edited_counts():
    """A new learning rate is used, also under a scheduler, whose position goes on. A note says what was set."""
    with fake_world(0, 1) as mesh:
        old, new = trained(mesh, every=2), make(mesh, NEW, lr=0.5, every=7)
        found = taken(new, old)
        assert new.optimizer.param_groups[0]["lr"] == 0.5
        assert (new.scheduler.step_size, new.scheduler.last_epoch) == (7, 3)
        assert any("optimizer.lr" in note and "scheduler.step_size" in note for note in found.notes), found.notes


def test_what_is_new_begins_afresh():
    """Layers of other shapes and new ones get first values and no momentum. All others go on."""
    with fake_world(0, 1) as mesh:
        old, new = trained(mesh), make(mesh, NEW, width=6, more=[head])
        text = " ".join(taken(new, old).notes)
        assert "new parameters" in text
        bias, new_bias = old.model[2].bias, new.model[2].bias
        assert torch.equal(bias.full_tensor(), new_bias.full_tensor())
        assert new.optimizer.state[new_bias]["step"] == 3
        assert not new.optimizer.state.get(new.model[0].weight)
        assert new.model[3].weight.full_tensor().abs().sum() > 0
        assert new.model[1].running_mean.tolist() == [0.0] * 6
        new.train()


def test_new_buffers_are_named_in_one_order():
    """Each rank reports the notes: they are equal."""
    with fake_world(0, 1) as mesh:
        old, new = trained(mesh), make(mesh, NEW, more=[partial(nn.BatchNorm1d, 4, affine=False)])
        (note,) = taken(new, old).notes
        names = ["model.3.num_batches_tracked", "model.3.running_mean", "model.3.running_var"]
        assert sorted(names, key=note.index) == names


def test_a_layer_that_is_taken_over_needs_no_first_values():
    """Only the new layer is made: the other one has no function that could make it."""
    with fake_world(0, 1) as mesh:
        old = make(mesh, more=[Fixed])
        old.filling._init = lambda model: [nn.init.ones_(one) for one in model.parameters()]
        old.filling.begin()
        old.train()
        new = make(mesh, NEW, more=[Fixed, head])
        taken(new, old)
        assert torch.equal(new.model[3].scale.full_tensor(), old.model[3].scale.full_tensor())
        with pytest.raises(StateError, match=r"model.4 .* was made on the meta device"):
            taken(make(mesh, NEW, more=[nn.Identity, Fixed]), old)


def test_an_optimizer_that_keeps_tensors_from_its_constructor_on():
    """Adagrad makes them there: those of a new layer stay, those of the others are taken over."""
    with fake_world(0, 1) as mesh:
        old = trained(mesh, optimize=torch.optim.Adagrad)
        new = make(mesh, NEW, optimize=torch.optim.Adagrad, more=[head])
        with torch.no_grad():
            for parameter in new.model.parameters():  # on the meta device they would have no memory
                new.optimizer.state[parameter]["sum"] = torch.zeros_like(parameter)
        taken(new, old)
        old_sum, new_sum = (one.optimizer.state[one.model[0].weight]["sum"] for one in (old, new))
        assert torch.equal(old_sum.full_tensor(), new_sum.full_tensor())
        new.train()


def test_another_optimizer_begins_afresh():
    """It keeps other things for its parameters."""
    with fake_world(0, 1) as mesh:
        old, new = trained(mesh), make(mesh, NEW, optimize=torch.optim.SGD)
        assert any("new parameters optimizer" in note for note in taken(new, old).notes)
        assert not new.optimizer.state
        new.train()


def test_the_program_itself_is_strict():
    """A later call of the same program that builds another model is refused."""
    with fake_world(0, 1) as mesh:
        old, new = trained(mesh), make(mesh, OLD, width=6)
        with pytest.raises(StateError, match="build the same model in every call"):
            taken(new, old)


def test_small_values_are_merged_once():
    """A commit of the present program has the present values."""
    record = {"program": {"number": OLD, "initial": {"step": 0, "limit": 5}}, "small": {"step": 7, "limit": 5}}
    assert merged_small(record, OLD, {"step": 0, "limit": 9}, ()) == {}
    assert merged_small(record, NEW, {"step": 0, "limit": 9, "best": 1.0}, ()) == {"step": 7, "limit": 9, "best": 1.0}


def test_a_parameter_of_another_shape_or_type_is_another_one():
    """Their chunks would not fit."""

    def layout(**kinds):
        chunk = (Chunk((0,), (2,)),)
        return Layout(1, ("a",), {name: Parameter((size,), dtype, chunk) for name, (size, dtype) in kinds.items()})

    old = layout(a=(2, "float32"), b=(2, "float32"), c=(2, "float32"), d=(2, "float32"))
    new = layout(a=(2, "float32"), b=(3, "float32"), c=(2, "bfloat16"), e=(2, "float32"))
    assert common_parameters(old, new) == {"a"}
