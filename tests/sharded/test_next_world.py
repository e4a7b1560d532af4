"""The models that the function makes in the next world go on from a commit with all that the program has changed meanwhile."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import fully_shard

import nbelastic as nbe
from nbelastic.errors import StateError
from nbelastic.sharded.bound import bind_values
from nbelastic.sharded.outside_changes import OutsideChanges
from nbelastic.worker import ranks
from tests.sharded.fake_world import fake_world
from tests.sharded.test_commits import Session
from tests.state.conftest import formation


@contextmanager
def worlds(monkeypatch, checkpoint=None, optimize=torch.optim.AdamW, **options):
    """`enter()` begins the next world, and returns the state with new models: it trains the last layer only."""
    monkeypatch.setattr(ranks, "device", lambda: torch.device("cpu"))
    state, generations = nbe.ShardedState(**options), iter(range(1, 9))
    if checkpoint is not None:
        state.load(checkpoint)
    state.begin(Session())
    with fake_world(0, 1) as mesh:

        def enter():
            generation = next(generations)
            if generation > 1:
                state.generation_ended(aborted=True)
            state.sync(formation(0, 1, generation=generation))
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
            model[0].requires_grad_(False)
            fully_shard(model, mesh=mesh)
            state.bind(model=model, optimizer=optimize(model[2].parameters(), lr=0.1))
            return state

        yield enter
    state.end()


def step(state):
    state.model(torch.ones(2, 4)).sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.commit()


def test_layers_that_were_unfrozen_are_trained_on(monkeypatch):
    """A loop writes `if state.step == 50: layer.requires_grad_(True)`, which the next world does not run again."""
    with worlds(monkeypatch) as enter:
        state = enter()
        state.model[0].requires_grad_(True)
        state.model[1].bias.requires_grad_(False)
        step(state)
        assert [one.requires_grad for one in enter().model.parameters()] == [True, True, True, False, True, True]


def test_groups_that_were_added_are_there_again(monkeypatch):
    """With their options, and with what the optimizer keeps for their parameters. It ended the job."""
    with worlds(monkeypatch) as enter:
        state = enter()
        state.optimizer.add_param_group({"params": list(state.model[1].parameters()), "lr": 0.02})
        step(state)
        first, state = state.optimizer, enter()
        assert [group["lr"] for group in state.optimizer.param_groups] == [0.1, 0.02]
        assert state.optimizer.param_groups[1]["params"] == list(state.model[1].parameters())
        assert len(state.optimizer.state) == len(first.state) == 4
        step(state)
        assert len(enter().optimizer.param_groups) == 2


def test_a_checkpoint_says_which_parameters_are_trained(monkeypatch, tmp_path, capsys):
    """So a job that goes on from one trains what was trained. A line says what the program has set otherwise."""
    with worlds(monkeypatch) as enter:
        state = enter()
        state.model[0].requires_grad_(True)
        step(state)
        path = state.save(tmp_path).wait(20)
    with worlds(monkeypatch, path) as enter:
        assert enter().model[0].weight.requires_grad
    line = f"requires_grad of model.0.weight and of 1 more is as in {path.name}, and not as the program has set it."
    assert line in capsys.readouterr().err


def test_a_checkpoint_has_groups_that_were_added(monkeypatch, tmp_path):
    """With what the optimizer keeps for their parameters. From the addition on, no checkpoint was written."""
    with worlds(monkeypatch) as enter:
        state = enter()
        state.optimizer.add_param_group({"params": list(state.model[1].parameters()), "lr": 0.02})
        step(state)
        path, trained = state.save(tmp_path).wait(20), state.optimizer.state[state.model[1].bias]["exp_avg"]
        trained = trained.full_tensor().clone()
    with worlds(monkeypatch, path) as enter:
        state = enter()
        assert [group["lr"] for group in state.optimizer.param_groups] == [0.1, 0.02]
        assert torch.equal(state.optimizer.state[state.model[1].bias]["exp_avg"].full_tensor(), trained)


def test_a_checkpoint_of_another_class_of_optimizer_is_refused(monkeypatch, tmp_path):
    """Its learning rate and entries mean something else there. The job trained on with them, without a word."""
    with worlds(monkeypatch) as enter:
        step(state := enter())
        path = state.save(tmp_path).wait(20)
    for other in (torch.optim.SGD, torch.optim.NAdam):
        with worlds(monkeypatch, path, other) as enter, pytest.raises(StateError, match="the class of optimizer is"):
            step(enter())


# ---- what changes between a commit and the next step ----


def counted(weight):
    with torch.no_grad():
        weight.lerp_(torch.ones_like(weight), 0.5)


def uncounted(weight):
    weight.data.copy_(weight.data * 0.5 + 0.5)


@pytest.mark.parametrize("move", [counted, uncounted])
def test_an_average_that_moves_after_a_commit_does_not_move_twice(monkeypatch, capsys, move):
    """The loop moves it again after a break. Replicas (HSDP) took the moved values of the survivors for those of the commit."""
    with worlds(monkeypatch, copies=0) as enter:
        state = enter()
        for _ in range(2):
            step(state)
            move(state.model[0].weight)
        step(state)
        for _ in range(2):
            average = state.model[0].weight.full_tensor().clone()
            move(state.model[0].weight)
            trained = state.model[2].weight.full_tensor().clone()
            state = enter()
            assert torch.equal(state.model[0].weight.full_tensor(), average)
            assert torch.equal(state.model[2].weight.full_tensor(), trained)
    assert capsys.readouterr().err.count("model.0.weight changes between a commit and the next step") == 1


@pytest.mark.parametrize("move", [counted, uncounted])
@pytest.mark.parametrize("steps", [3, 15])
def test_the_first_change_after_a_commit(monkeypatch, move, steps):
    """No copy has the values of that commit: the job goes on from an older one, or says that it has none."""
    with worlds(monkeypatch, every=2) as enter:
        state = enter()
        for _ in range(steps):
            step(state)
        move(state.model[0].weight)
        assert enter().commits == steps - 1
    with worlds(monkeypatch, copies=0) as enter:
        step(state := enter())
        move(state.model[0].weight)
        with pytest.raises(StateError, match="the training state is lost"):
            enter()


def test_values_that_are_not_numbers_are_equal(monkeypatch):
    """A weight that is NaN is equal to itself."""
    with worlds(monkeypatch, copies=0) as enter:
        state = enter()
        with torch.no_grad():
            state.model[0].bias.fill_(torch.nan)
        step(state)
        enter()


def test_parameters_of_several_devices_are_noted():
    """As with layers that are offloaded to the host: torch joins no tensors of two devices, and the first commit failed."""
    parameters = {"layer": nn.Parameter(torch.ones(3)), "offloaded": nn.Parameter(torch.ones(3, device="meta"))}
    outside = OutsideChanges(parameters)
    outside.note()
    with torch.no_grad():
        parameters["offloaded"].add_(1)
    assert outside._changed(reads=False) == {"offloaded"}


def test_conjugated_parameters_are_noted():
    """They are computed as they are read, so they have no bytes to compare: changes are counted only."""
    outside = OutsideChanges({"phases": nn.Parameter(torch.ones(3, dtype=torch.cfloat).conj())})
    outside.note()
    assert outside.find() is None


# ---- what no commit has ----


def test_a_sparse_buffer_is_refused():
    """As of a graph's edges: torch does not copy its values in place."""
    edges = nn.Linear(2, 2)
    edges.register_buffer("edges", torch.eye(2).to_sparse())
    with pytest.raises(StateError, match=r"model\.edges is not a dense tensor \(torch\.sparse_coo\)"):
        bind_values({"model": edges}, set())


def test_layers_that_come_after_bind_are_refused_by_the_next_commit(monkeypatch):
    """The next world had the old layer, with its old values. A layer without parameters, as a loss, changes nothing."""
    with worlds(monkeypatch) as enter:
        state = enter()
        state.model.criterion = nn.Identity()
        step(state)
        step(state)
        before = state.commits
        state.model[1] = nn.Linear(4, 4)
        with pytest.raises(StateError, match="a layer or parameter was added, replaced or removed after bind"):
            step(state)
        assert (before, enter().commits) == (2, 2)


def test_a_model_for_a_name_that_had_none_is_refused(monkeypatch):
    """It stayed that of the survivors, and newcomers had None."""
    with worlds(monkeypatch, best=None) as enter:
        state = enter()
        with pytest.raises(StateError, match=r"best is a Linear: .* give it to bind\(best=…\) instead"):
            state.best = nn.Linear(4, 4)
        state.best = 0.5
        step(state)
        assert enter().best == 0.5


def test_sharded_tensors_as_small_values_are_refused(monkeypatch):
    """They are parts of the present world. The next one failed with an error of torch that names nothing."""
    with worlds(monkeypatch, average=None) as enter:
        state = enter()
        state.average = {"weights": [one.detach().clone() for one in state.model.parameters()]}
        with pytest.raises(StateError, match="average holds a tensor that is sharded over the ranks of this world"):
            step(state)


def test_sharded_tensors_in_an_attribute_of_an_optimizer_are_refused(monkeypatch):
    """As the slow weights of a Lookahead: each world makes the optimizer anew. A list of its own parameters is fine."""
    with worlds(monkeypatch) as enter:
        state = enter()
        state.optimizer.watched = list(state.model[2].parameters())
        step(state)
        state.optimizer.slow = [one.detach().clone() for one in state.model[2].parameters()]
        with pytest.raises(StateError, match="optimizer keeps sharded tensors in its attribute 'slow'"):
            step(state)
        del state.optimizer.slow
        step(state)


def test_a_number_in_an_attribute_of_an_optimizer_is_fine(monkeypatch):
    """As the norm of the last gradients, which FSDP2 gives as a DTensor too: it is not split."""
    with worlds(monkeypatch) as enter:
        state = enter()
        state.model(torch.ones(2, 4)).sum().backward()
        state.optimizer.norm = nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
        step(state)
        assert state.commits == 1


def checkpointed(model):
    apply_activation_checkpointing(model, check_fn=lambda layer: isinstance(layer, nn.Linear))


def compiled(model):
    model[1] = torch.compile(model[1], backend="eager")


@pytest.mark.parametrize("wrap", [checkpointed, compiled])
def test_layers_that_are_wrapped_after_bind(monkeypatch, wrap):
    """Activation checkpointing and torch.compile add nothing that a commit lacks."""
    with worlds(monkeypatch) as enter:
        state = enter()
        wrap(state.model)
        step(state)
        trained, state = state.model[2].bias.full_tensor().clone(), enter()
        assert state.commits == 1
        assert torch.equal(state.model[2].bias.full_tensor(), trained)
