"""When a commit copies tensors, when it need not, and what it does then: over a real group of one."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from nbelastic import StateError, TorchState
from nbelastic.state import optimizers
from nbelastic.state.ddp_patch import unchanged_by_ddp
from nbelastic.state.tensor_snapshot import ALIGNMENT, _allocate
from nbelastic.state.transfer import describe
from nbelastic.worker.interrupts import WorldAborted


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network(seed=1):
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def backward(model):
    """Gradients as DDP would have them: with a collective."""
    model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(torch.ones(1))


def step(model, optimizer):
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def weights(*models):
    return [p.tolist() for model in models for p in model.parameters()]


def copies(state):
    return len(state._tensors._copies)


def test_what_an_optimizer_keeps_is_noted_without_a_copy():
    """A note has the tensors themselves, which a commit need not copy, and copies of what is no tensor."""
    model, optimizer = network()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    kept = optimizer.state[model.weight]
    kept["seen"] = {"tensor": torch.ones(1), "steps": [1]}
    noted = optimizers.entries(optimizer)
    tensors = kept["momentum_buffer"], kept["seen"]["tensor"]
    kept["seen"]["steps"].append(2)
    optimizer.state.clear()
    optimizers.set_entries(optimizer, noted)
    found = optimizer.state[model.weight]
    assert found["momentum_buffer"] is tensors[0]
    assert found["seen"]["tensor"] is tensors[1]
    assert found["seen"]["steps"] == [1]


def test_a_collective_between_step_and_commit_is_noticed(group, begun, capsys):
    """A rank could be aborted there, in between two commits: from then on tensors are copied, and one line says why."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    step(model, optimizer)
    state.commit()
    assert copies(state) == 0
    for _ in range(2):
        step(model, optimizer)
        dist.all_reduce(torch.ones(1))
        state.commit()
        assert copies(state) == 4  # two parameters, and their momentum
    before = weights(model)
    step(model, optimizer)
    state.restore()
    assert weights(model) == before
    assert capsys.readouterr().err.count("a collective runs between optimizer.step() and state.commit()") == 1


def test_several_steps_a_commit_are_no_news(group, begun, capsys):
    """They are a choice: tensors are copied, and nothing is said."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    for _ in range(3):
        step(model, optimizer)
    state.commit()
    assert copies(state) == 4
    assert capsys.readouterr().err == ""


def test_two_optimizers_that_step_together_need_no_copies(group, begun):
    """Nothing can abort a rank between them."""
    one, first = network()
    two, second = network(2)
    state = begun(TorchState(one=one, two=two, first=first, second=second))
    for _ in range(3):
        backward(one)
        backward(two)
        first.step()
        second.step()
        state.commit()
        assert copies(state) == 0


def test_two_optimizers_that_step_in_turn_are_copied(group, begun):
    """As of a GAN: the second's backward pass is a collective after the first's step."""
    one, first = network()
    two, second = network(2)
    state = begun(TorchState(one=one, two=two, first=first, second=second))
    for _ in range(2):
        step(one, first)
        step(two, second)
        state.commit()
    before = weights(one, two)
    step(one, first)
    state.restore()
    assert weights(one, two) == before


def test_a_tensor_that_changes_outside_an_optimizer_is_named(group, begun, capsys):
    """Between a commit and the next step, or without any step: copied from then on, and said once, by name."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    step(model, optimizer)
    state.commit()
    with torch.no_grad():
        model.bias.clamp_(-0.01, 0.01)
    assert not state.clean
    step(model, optimizer)
    state.commit()
    before = weights(model)
    with torch.no_grad():
        model.bias.mul_(2)
    state.restore()
    assert weights(model) == before
    assert "nbelastic: model.bias changes outside an optimizer's step" in capsys.readouterr().err


def test_wrapping_the_model_is_no_change(group, begun, capsys):
    """DistributedDataParallel's constructor writes to the parameters what they are already."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    step(model, optimizer)
    state.commit()
    for _ in range(2):
        with unchanged_by_ddp(state._tensors):
            ddp = nn.parallel.DistributedDataParallel(model)
        assert state.clean
        step(ddp, optimizer)
        state.commit()
        del ddp
    assert (copies(state), capsys.readouterr().err) == (0, "")
    with torch.no_grad():
        model.bias.add_(1)
    with unchanged_by_ddp(state._tensors):
        ddp = nn.parallel.DistributedDataParallel(model)
    assert not state.clean
    del ddp


def test_averaged_weights_updated_after_the_step_need_no_copies(group, begun):
    """An exponential moving average is no optimizer's, but nothing can come between its change and the commit."""
    model, optimizer = network()
    average = torch.optim.swa_utils.AveragedModel(model)
    state = begun(TorchState(model=model, average=average, optimizer=optimizer))
    for _ in range(3):
        step(model, optimizer)
        average.update_parameters(model)
        state.commit()
        assert copies(state) == 0
        assert state.clean


def test_an_optimizer_without_hooks_is_copied(group, begun):
    """One that nobody hears of still changes tensors, which autograd counts."""

    class Plain:
        def __init__(self, parameters):
            self.parameters, self.steps = list(parameters), 0

        def step(self):
            self.steps += 1
            with torch.no_grad():
                for p in self.parameters:
                    p.sub_(p.grad)

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    model, _ = network()
    optimizer = Plain(model.parameters())
    state = begun(TorchState(model=model, optimizer=optimizer))
    for _ in range(2):
        model.zero_grad()
        backward(model)
        optimizer.step()
        state.commit()
    before = weights(model)
    backward(model)
    optimizer.step()
    state.restore()
    assert (weights(model), optimizer.steps) == (before, 2)


def test_commits_while_gradients_accumulate_wait_for_the_step(group, begun):
    """Half of a sum cannot be returned to: its samples would count as used, and their gradients be lost."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer, seen=0))
    for micro in range(8):
        backward(model)
        state.seen += 1
        if micro % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        state.commit()
    assert state.commits == 2
    backward(model)
    state.seen += 1
    state.commit()
    state.restore()
    assert (state.commits, state.seen) == (2, 8)


def test_commits_without_a_step_count(group, begun):
    """At the end of an epoch, say: the counters are noted, gradients of the last step or not."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer, epoch=0))
    step(model, optimizer)
    state.commit()
    state.epoch = 1
    state.commit()
    state.epoch = 2
    state.restore()
    assert (state.commits, state.epoch) == (2, 1)


def test_gradients_that_were_thrown_away_do_not_hold_up_a_commit(group, begun):
    """A batch that is skipped: no step, and no gradients any more."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    backward(model)
    optimizer.zero_grad()
    state.commit()
    assert state.commits == 1


def test_a_commit_without_a_step_does_the_same_on_every_rank(group, begun):
    """Another rank has run a backward pass of its own, or this one has: both skip the commit, and count on alike after it."""
    counts = []
    for mine, others in ((False, True), (True, False), (False, False)):
        model, optimizer = network()
        state = begun(TorchState(model=model, optimizer=optimizer, seen=0))
        step(model, optimizer)
        optimizer.zero_grad()
        state.commit()
        if mine:
            model(torch.ones(2, 4)).sum().backward()
        state._session.others_accumulate = others
        state.commit()
        counts.append(state.commits)
    assert counts == [1, 1, 2]


def test_the_gpu_is_waited_for_only_where_a_commit_without_a_step_counts(group, begun):
    """A step has waited for it already, and while gradients accumulate it may go on."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    step(model, optimizer)
    state.commit()
    backward(model)
    state.commit()
    assert state._session.settled == 0
    optimizer.zero_grad()
    state.commit()
    assert state._session.settled == 1


def test_a_scaler_that_skips_a_step(group, begun):
    """GradScaler leaves a step out when gradients overflow: its scale is noted with the next commit that counts."""
    model, optimizer = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    state = begun(TorchState(model=model, optimizer=optimizer, scaler=scaler))
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        state.commit()
    assert (state.commits, scaler.get_scale(), copies(state)) == (2, 2.0, 0)
    scaler.update(new_scale=16.0)
    state.restore()
    assert scaler.get_scale() == 2.0


def test_groups_added_since_are_taken_away(group, begun):
    """A layer that is unfrozen late gets a group of its own; a break right after takes that back."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    state = begun(TorchState(model=model, optimizer=optimizer))
    step(model, optimizer)
    state.commit()
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
    state.restore()
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
    step(model, optimizer)
    state.commit()
    state.restore()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]


def receive(state, sender):
    """`state` becomes what `sender` is, as over a group."""
    outgoing = []
    described = describe(sender._live(), outgoing)

    def fill(places):
        with torch.no_grad():
            for place, tensor in zip(places, outgoing, strict=True):
                place.copy_(tensor)

    state._accept(described, torch.device("cpu"), fill)


def unfreezing(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torch.optim.Adam(model[1].parameters(), lr=0.1)
    return model, optimizer


def test_a_newcomer_gets_the_groups_that_were_added(group, begun):
    """Its own optimizer was made as in the beginning; what it lacks is made of its own parameters, by name."""
    (model, optimizer), (mine, fresh) = unfreezing(1), unfreezing(2)
    old = begun(TorchState(model=model, optimizer=optimizer))
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
    step(model, optimizer)
    old.commit()
    new = begun(TorchState(model=mine, optimizer=fresh))
    receive(new, old)
    assert weights(mine) == weights(model)
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.01]
    step(model, optimizer)
    step(mine, fresh)
    assert weights(mine) == weights(model)
    assert new.commits == 1


def test_other_groups_are_refused_and_nothing_is_changed(group, begun):
    """An optimizer with the same parameters in another order is another optimizer."""
    (model, optimizer), (mine, _) = unfreezing(1), unfreezing(2)
    old = begun(TorchState(model=model, optimizer=optimizer))
    other = torch.optim.Adam([{"params": [mine[1].bias]}, {"params": [mine[1].weight]}])
    new = begun(TorchState(model=mine, optimizer=other))
    before = weights(mine)
    with pytest.raises(StateError, match="have other parameters here"):
        receive(new, old)
    assert (weights(mine), len(other.param_groups)) == (before, 2)


def test_groups_of_which_only_one_differs_are_refused(group, begun):
    """Each group is compared: momentum of the second one's parameters does not go to other parameters, silently."""

    def grouped(seed, order):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        first, second = ([layer.weight, layer.bias] for layer in model)
        return model, torch.optim.Adam([{"params": first}, {"params": second[::order]}])

    (model, optimizer), (mine, other) = grouped(1, 1), grouped(2, -1)
    old, new = (begun(TorchState(model=m, optimizer=o)) for m, o in ((model, optimizer), (mine, other)))
    before = weights(mine)
    with pytest.raises(StateError, match="have other parameters here"):
        receive(new, old)
    assert weights(mine) == before


def test_copies_take_little_more_memory_than_what_they_copy():
    """Each copy begins at an aligned place: at most that much is lost for each tensor."""
    tensors = [torch.ones(1000), torch.ones(3), torch.ones(5, dtype=torch.uint8)]
    places = _allocate(tensors, pinned=False)
    assert [(p.shape, p.dtype) for p in places] == [(t.shape, t.dtype) for t in tensors]
    assert all(place.data_ptr() % ALIGNMENT == places[0].data_ptr() % ALIGNMENT for place in places)
    taken, needed = places[0].untyped_storage().nbytes(), sum(tensor.nbytes for tensor in tensors)
    assert needed <= taken <= needed + len(tensors) * ALIGNMENT


def test_an_optimizer_needs_its_model(group, begun):
    """Parameters that are in no model of the state would not be recovered: said where the state is made."""
    _, optimizer = network()
    with pytest.raises(StateError, match="optimizer trains 2 parameters of no model in the state"):
        TorchState(optimizer=optimizer)


def test_a_parameter_of_its_own(group, begun):
    """A single nn.Parameter in the state stays the object that the optimizer holds."""
    scale = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([scale], lr=0.5)
    state = begun(TorchState(scale=scale, optimizer=optimizer))
    for _ in range(2):
        for _ in range(2):
            (scale * 1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state.commit()
    with torch.no_grad():
        scale.fill_(7)
    state.restore()
    assert (state.scale is scale, scale.item()) == (True, -1.0)


def test_buffers_that_are_replaced(group, begun):
    """`self.mean = …` in a forward pass makes a new tensor: the committed one comes back, in its place."""
    model, optimizer = network()
    model.register_buffer("mean", torch.zeros(2))
    model.register_buffer("large", torch.zeros(1 << 19))
    state = begun(TorchState(model=model, optimizer=optimizer))
    model.mean = torch.ones(2)
    model.large += 1
    state.commit()
    kept = model.mean
    model.mean = torch.full((2,), 5.0)
    model.large[3] = 9
    state.restore()
    assert model.mean is kept
    assert (model.mean.tolist(), model.large.max().item()) == ([1, 1], 1)


@pytest.mark.filterwarnings("ignore:Guards may run slower")  # torch warns so with Python 3.13.0
def test_a_compiled_model(group, begun):
    """`torch.compile` wraps the module; its parameters are the same ones."""
    model, _ = network()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.Adam(compiled.parameters())
    state = begun(TorchState(model=compiled, optimizer=optimizer))
    for _ in range(2):
        for _ in range(2):
            step(compiled, optimizer)
        state.commit()
    before = weights(model)
    step(compiled, optimizer)
    state.restore()
    assert weights(model) == before


def test_outside_a_job_every_commit_is_copied():
    """There is no world that could tell, and `restore()` is called by hand."""
    model, optimizer = network()
    state = TorchState(model=model, optimizer=optimizer, step=0)
    start = weights(model)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    state.restore()
    assert weights(model) == start
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state.step = 1
    state.commit()
    before, momentum = weights(model), copy.deepcopy(optimizer.state_dict())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state.restore()
    assert (weights(model), state.step) == (before, 1)
    assert str(optimizer.state_dict()) == str(momentum)


def test_no_step_is_begun_in_a_broken_world(group, begun):
    """An abort that is known before a step stops the rank at its last commit; within a burst of steps it goes on."""
    one, first = network()
    two, second = network(2)
    state = begun(TorchState(one=one, two=two, first=first, second=second))
    backward(one)
    backward(two)
    broken = []

    def check(where):
        if broken:
            raise WorldAborted

    state._session.check = check
    first.step()
    broken.append(True)
    second.step()
    state.commit()
    assert state.clean
    backward(one)
    with pytest.raises(WorldAborted):
        first.step()
    assert state.clean


@pytest.mark.parametrize("value", [object(), {1: np.zeros(3)}, [lambda: 0]])
def test_what_is_no_plain_data_is_refused_at_once(begun, value):
    """Not when a newcomer comes, hours later."""
    with pytest.raises(StateError, match="not plain data"):
        begun(TorchState(thing=value))
