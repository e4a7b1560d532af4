"""Commit, change, restore: the restored values, their cost, and what is refused."""

import pytest
import torch

import nbelastic as nbe
from nbelastic import ElasticSampler, ObjectState, StateError, TorchState
from nbelastic.state.checkpoints import Plan
from nbelastic.worker.interrupts import WorldLeft
from tests.state.conftest import FakeSession, formation
from tests.state.training import receive


def network(optimizer="sgd"):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    made = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.01),
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=0.01),
        "adamw amsgrad": lambda: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True),
        "adagrad": lambda: torch.optim.Adagrad(model.parameters(), lr=0.01),
    }
    return model, made[optimizer]()


def train_step(model, optimizer):
    loss = model(torch.randn(6, 4)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def all_values(model, optimizer):
    """All that training changes, as plain data."""
    kept = [
        {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state.get(p, {}).items()}
        for p in model.parameters()
    ]
    return {k: v.tolist() for k, v in model.state_dict().items()}, kept, optimizer.param_groups[0]["lr"]


def test_values_are_attributes():
    """Values are attributes: read and set by name; the error for an unknown name lists the known ones."""
    state = ObjectState(epoch=0, best=None)
    state.epoch += 1
    state.best = [1]
    assert (state.epoch, state.best) == (1, [1])
    with pytest.raises(StateError, match="no 'loss'"):
        state.loss = 1
    with pytest.raises(AttributeError, match="no 'loss'; it holds epoch, best"):
        state.loss


@pytest.mark.parametrize("name", ["commit", "restore", "sync", "commits", "_private", "reset_callbacks", "clean"])
def test_names_that_are_taken(name):
    """A value cannot have the name of one of the state's own attributes."""
    with pytest.raises(StateError, match="choose another"):
        ObjectState(**{name: 1})


def test_an_object_that_cannot_be_recovered_is_refused():
    """The constructor refuses an object that cannot be recovered, and names an alternative."""
    model, optimizer = network()
    with pytest.raises(StateError, match="LBFGS"):
        TorchState(model=model, optimizer=torch.optim.LBFGS(model.parameters()))
    state = TorchState(model=model, optimizer=optimizer)
    with pytest.raises(StateError, match="load new values into it"):
        state.model = network()[0]
    with pytest.raises(StateError, match="load new values into it"):
        state.optimizer = network()[1]
    state.model = model


def test_a_wrapped_model_is_refused():
    """DistributedDataParallel belongs to a world; the state outlives worlds."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        with pytest.raises(StateError, match="give the bare model"):
            TorchState(model=wrapped)
    finally:
        del wrapped
        torch.distributed.destroy_process_group()


def test_back_to_the_commit(begun):
    """Counters, lists, dicts, tensors: what changed since the commit is undone, also inside of lists and dicts."""
    state = begun(ObjectState(step=0, seen=[], best={"loss": 1.0}, weights=torch.zeros(3)))
    state.step = 5
    state.seen.append([1])
    state.commit()
    state.step += 1
    state.seen[0].append(2)
    state.seen.append(3)
    state.best["loss"] = 0.5
    state.weights += 1
    state.restore()
    assert (state.step, state.seen, state.best, state.weights.tolist()) == (5, [[1]], {"loss": 1.0}, [0, 0, 0])
    state.seen[0].append(9)
    state.restore()
    assert state.seen == [[1]]


def test_before_the_first_commit_the_beginning_is_restored(begun):
    """A break before any commit restores the first values."""
    state = begun(ObjectState(step=3))
    state.step = 4
    state.restore()
    assert (state.step, state.commits) == (3, 0)


def test_commits_are_counted_and_reported(begun):
    """The session receives the number of each commit."""
    state = begun(ObjectState())
    state.commit()
    state.commit()
    assert (state.commits, state._session.committed_at) == (2, [1, 2])


OPTIMIZERS = ["sgd", "momentum", "adam", "adamw amsgrad", "adagrad"]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_before_the_first_commit_are_undone(begun, kind):
    """A break before the first commit restores parameters, buffers and the optimizer's values of the beginning."""
    model, optimizer = network(kind)
    before = all_values(model, optimizer)
    state = begun(TorchState(model=model, optimizer=optimizer))
    train_step(model, optimizer)
    assert not state.clean
    state.restore()
    assert state.clean
    assert all_values(model, optimizer) == before


@pytest.mark.parametrize("way", ["resumed", "received", "loaded"])
def test_steps_before_the_first_commit_after_a_checkpoint_are_undone(begun, tmp_path, way):
    """How a program commits that goes on from a checkpoint is not known yet: it may commit less often than the one before."""
    first, trained_by = network("adam")
    old = begun(TorchState(model=first, optimizer=trained_by))
    train_step(first, trained_by)
    old.commit()
    old.save(tmp_path).wait()
    model, optimizer = network("adam")
    state, session = TorchState(model=model, optimizer=optimizer), FakeSession()
    if way == "resumed":
        session.checkpoints = Plan(str(tmp_path), 100, 3, lambda: True)
    begun(state, session)
    if way == "loaded":
        state.load(tmp_path)
    elif way == "received":
        old.load(tmp_path)
        receive(state, old)
        state.sync(formation(0, 1))
    before = all_values(model, optimizer)
    assert before == all_values(first, trained_by)
    for _ in range(3):
        train_step(model, optimizer)
    state.restore()
    assert all_values(model, optimizer) == before
    assert (state.commits, state.clean) == (1, True)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_several_steps_per_commit_are_copied_and_undone(begun, kind):
    """With more than one step between commits the tensors are copied, and a restore puts them back."""
    model, optimizer = network(kind)
    state = begun(TorchState(model=model, optimizer=optimizer, step=0))
    for _ in range(3):
        for _ in range(2):
            train_step(model, optimizer)
            state.step += 1
        state.commit()
    before = all_values(model, optimizer)
    train_step(model, optimizer)
    assert not state.clean
    state.restore()
    assert state.clean
    assert all_values(model, optimizer) == before
    assert state.step == 6


def test_one_step_per_commit_copies_nothing(begun):
    """With one step per commit nothing is copied; a step makes the state unclean until the next commit."""
    model, optimizer = network("momentum")
    state = begun(TorchState(model=model, optimizer=optimizer))
    for _ in range(3):
        train_step(model, optimizer)
        state.commit()
        assert not state._tensors._copies
        assert state.clean
    train_step(model, optimizer)
    assert not state.clean
    state.undo()
    assert not state.clean  # it cannot be undone here: another rank's will be taken
    with pytest.raises(StateError, match="nothing is copied"):
        state.restore()


def test_no_gradient_survives_a_restore(begun):
    """A restore removes the half-summed gradients of a broken step."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    model(torch.randn(6, 4)).sum().backward()
    state.restore()
    assert all(p.grad is None for p in model.parameters())


def test_no_gradient_survives_a_planned_change(begun):
    """The commit at which the ranks leave does not return, so the `zero_grad()` after it drops no gradient that was used."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer, epoch=0))
    train_step(model, optimizer)

    def leave(total):
        raise WorldLeft

    state._session.committed = leave
    with pytest.raises(WorldLeft):
        state.commit()
    state.generation_ended(aborted=False)
    assert all(p.grad is None for p in model.parameters())
    assert (state.commits, state.clean) == (1, True)


def test_buffers_follow(begun):
    """BatchNorm's running statistics change in forward passes; a restore undoes those of a broken step."""
    model, optimizer = network()
    state = begun(TorchState(model=model, optimizer=optimizer))
    train_step(model, optimizer)
    state.commit()
    before = model[1].running_mean.clone()
    for _ in range(2):
        model(torch.randn(6, 4))
    state.restore()
    assert torch.equal(model[1].running_mean, before)
    assert model[1].num_batches_tracked == 1


def test_schedulers_and_samplers_follow(begun):
    """A restore returns the learning rate and the position in the data to the commit."""
    model, optimizer = network()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    sampler = ElasticSampler(range(100))
    state = begun(TorchState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler))
    train_step(model, optimizer)
    scheduler.step()
    sampler.record_batch(10)
    state.commit()
    train_step(model, optimizer)
    scheduler.step()
    sampler.set_epoch(1)
    state.undo()
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (1, 0.005)
    assert (sampler.epoch, sampler.used) == (0, 10)


def test_a_model_without_an_optimizer_is_always_copied(begun):
    """Each commit copies a model without an optimizer, because no step announces its changes."""
    model = torch.nn.Linear(2, 2)
    state = begun(TorchState(model=model))
    with torch.no_grad():
        model.weight.fill_(1)
    state.commit()
    with torch.no_grad():
        model.weight.fill_(2)
    state.restore()
    assert model.weight.eq(1).all()


def test_an_optimizer_that_keeps_plain_numbers(begun):
    """A restore from copies also restores an optimizer's values that are not tensors."""

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for p in self.param_groups[0]["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1

    model = torch.nn.Linear(4, 2)
    optimizer = Counting(model.parameters(), lr=0.01)
    state = begun(TorchState(model=model, optimizer=optimizer))
    for _ in range(2):
        for _ in range(2):
            train_step(model, optimizer)
        state.commit()
    train_step(model, optimizer)
    state.restore()
    assert {optimizer.state[p]["count"] for p in model.parameters()} == {4}


def test_reset_callbacks_are_kept_in_order():
    """Reset callbacks run in the order of their registration, over several calls."""
    state, called = ObjectState(), []
    state.register_reset_callbacks([lambda: called.append(1), lambda: called.append(2)])
    state.register_reset_callbacks([lambda: called.append(3)])
    for callback in state.reset_callbacks:
        callback()
    assert called == [1, 2, 3]


def test_reports_are_numbers(begun):
    """`report` takes what can be converted to a number; outside a job it has no effect."""
    ObjectState().report(loss=1)
    state = begun(ObjectState())
    state.report(loss=torch.tensor(0.5), step=3)
    assert state._session.reported == {"loss": 0.5, "step": 3.0}


@pytest.mark.parametrize(
    ("value", "kind"), [("warmup", "str"), (torch.ones(2), "a tensor of 2"), (10**400, "one of this size")]
)
def test_a_value_that_is_not_a_number_is_left_out_of_a_report(begun, capsys, value, kind):
    """Such a value does not end the job: one line per name reports it."""
    state = begun(ObjectState())
    for _ in range(2):
        state.report(phase=value, loss=0.5)
    assert state._session.reported == {"loss": 0.5}
    assert capsys.readouterr().err == f"nbelastic: report(phase=…) is left out: a report is a number, not {kind}.\n"


def test_the_state_classes_are_public():
    """The package itself exports all three state classes."""
    assert issubclass(nbe.TorchState, nbe.State)
    assert issubclass(nbe.ObjectState, nbe.State)


def test_two_optimizers_that_begin_at_different_times(begun):
    """The copies of two optimizers are kept apart, whichever begins first."""
    one, two = torch.nn.Linear(3, 5), torch.nn.Linear(7, 2)
    first = torch.optim.Adam(one.parameters())
    second = torch.optim.Adam(two.parameters())
    state = begun(TorchState(one=one, two=two, first=first, second=second))

    def step(model, optimizer, width):
        model(torch.randn(4, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step(two, second, 7)
    state.commit()
    for _ in range(2):
        step(one, first, 3)
    state.commit()
    before = all_values(one, first), all_values(two, second)
    step(one, first, 3)
    step(two, second, 7)
    state.restore()
    assert (all_values(one, first), all_values(two, second)) == before
