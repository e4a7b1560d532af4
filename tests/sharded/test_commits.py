"""Commits of a sharded state without a step, and the modes of its models when the function is called again."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import lr_scheduler

import nbelastic as nbe
from nbelastic.errors import StateError
from nbelastic.protocol.worker_messages import Copies
from nbelastic.sharded.chunks import Layout
from nbelastic.sharded.replication import Replication, Whole
from nbelastic.sharded.whole_commits import Commit
from nbelastic.worker import ranks
from tests.sharded.fake_world import fake_world
from tests.state.conftest import FakeSession, formation


class Session(FakeSession):
    programs = SimpleNamespace(program=0, on_trial=False)

    def report_copies(self, source):
        pass


def bind(state, mesh, scheduled=None):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    fully_shard(model, mesh=mesh)
    model[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    more = {} if scheduled is None else {"scheduler": scheduled(optimizer)}
    state.bind(model=model, optimizer=optimizer, **more)


@contextmanager
def begun(monkeypatch, **options):
    """A state and the mesh of a world of one rank, to which nothing is bound yet."""
    monkeypatch.setattr(ranks, "device", lambda: torch.device("cpu"))
    state = nbe.ShardedState(**options)
    with fake_world(0, 1) as mesh:
        state.begin(Session())
        state.sync(formation(0, 1))
        yield state, mesh
        state.end()


@contextmanager
def bound(monkeypatch, *, copies=0, **small):
    """A state of a world of one rank, to which a sharded model and its optimizer are bound."""
    with begun(monkeypatch, copies=copies, **small) as (state, mesh):
        bind(state, mesh)
        yield state


def backward(state):
    state.model(torch.ones(2, 4)).sum().backward()


def test_a_commit_counts_while_used_gradients_are_there(monkeypatch):
    """A loop drops gradients before its next backward pass: until then a counter that it sets can be committed."""
    with bound(monkeypatch, done=0) as state:
        state.optimizer.zero_grad()
        backward(state)
        state.optimizer.step()
        state.commit()
        state.done = 1
        state.commit()
        assert (state.commits, state._live_record["small"]) == (2, {"done": 1})


def test_a_commit_that_cannot_record_a_value_is_none(monkeypatch):
    """No rank may go on from the weights of one commit with the counters of another."""
    with bound(monkeypatch, loss=0.0) as state:
        backward(state)
        state.optimizer.step()
        state.loss = state.model(torch.ones(2, 4)).sum()
        with pytest.raises(StateError, match="loss holds a tensor that autograd still needs"):
            state.commit()
        assert not state.clean
        state.generation_ended(aborted=True)
        assert [held.commit.number for held in state._holdings.shards] == []


def test_a_commit_waits_for_the_step_while_any_rank_accumulates(monkeypatch):
    """Recovery cannot return to half of a sum. All ranks skip the commit, so that their counts stay equal."""
    with bound(monkeypatch) as state:
        backward(state)
        state.commit()
        assert state.commits == 0
        state.optimizer.step()
        state.commit()
        state._session.others_accumulate = True
        state.commit()
        assert state.commits == 1
        state._session.others_accumulate = False
        state.commit()
        assert state.commits == 2


def test_without_copies_a_break_within_a_step_names_the_commit_that_is_lost(monkeypatch):
    """No rank holds anything then: the job goes on from a checkpoint, or ends with the line."""
    with bound(monkeypatch) as state:
        for _ in range(2):
            backward(state)
            state.optimizer.step()
            state.commit()
        backward(state)
        state.optimizer.step()
        state.generation_ended(aborted=True)
        with pytest.raises(StateError, match=r"the training state is lost: .* so commit 2 is not whole"):
            state.sync(formation(0, 1, generation=2))


@pytest.mark.parametrize("aborted", [True, False])
def test_each_call_begins_with_the_modes_of_the_first(monkeypatch, aborted):
    """Integrations shard the same model again in each world: an evaluation that a break has ended leaves it in train mode."""
    with bound(monkeypatch) as state:
        model = state.model
        model.eval()
        state.generation_ended(aborted=aborted)
        assert [layer.training for layer in model.modules()] == [True, True, False, True]


class Aborted(Exception):
    pass


def test_after_an_aborted_step_a_scaler_unscales_the_gradients_of_each_optimizer(monkeypatch):
    """The new optimizer may have the id of the old one, whose gradients were unscaled when the abort came."""

    def abort(*_):
        raise Aborted

    scaler = torch.amp.GradScaler("cpu")
    with bound(monkeypatch, scaler=scaler) as state:
        state.optimizer.register_step_pre_hook(abort)
        scaler.scale(state.model(torch.ones(2, 4)).sum()).backward()
        with pytest.raises(Aborted):
            scaler.step(state.optimizer)
        state.generation_ended(aborted=True)
        state.sync(formation(0, 1, generation=2))
        assert not scaler._per_optimizer_states


def test_a_commit_in_inference_mode(monkeypatch):
    """A loop evaluates and commits there: the commits after it still write into its copies."""
    with bound(monkeypatch, copies=1) as state:
        for mode in (True, False, False):
            with torch.inference_mode(mode):
                state.commit()
        assert state.commits == 3


def warm_up(optimizer):
    return lr_scheduler.LinearLR(optimizer)


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, 20)


@pytest.mark.parametrize(
    ("there", "here", "is_refused"), [(cosine, warm_up, True), (None, warm_up, False), (cosine, None, False)]
)
@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_a_scheduler_of_another_class_is_refused(monkeypatch, tmp_path, there, here, is_refused, from_checkpoint):
    """The numbers of one class would give another learning rate in another. A program may bind one in some calls only."""
    with begun(monkeypatch) as (state, mesh):
        bind(state, mesh, there)
        state.commit()
        state.save(tmp_path).wait()
        if from_checkpoint:
            state.begin(Session())
            state.load(tmp_path)
        else:
            state.generation_ended(aborted=False)
        state.sync(formation(0, 1, generation=2))
        problem = "the class of scheduler is LinearLR here and CosineAnnealingLR in the commit that is restored"
        with pytest.raises(StateError, match=problem) if is_refused else nullcontext():
            bind(state, mesh, here)


def test_the_status_shows_no_age_before_a_commit_is_copied():
    """A report is sent four times a second, also while the first copy is being made."""
    layout = Layout(1, ("a", "b"), {})
    replication = Replication(layout, 0, 1, None, pinned=False)
    assert replication.report(5.0) == Copies(0, buddies=(1,), wards=(1,))
    replication.whole = Whole(Commit(1, 7), 3.0, 0.5)
    assert replication.report(5.0) == Copies(0, 7, 2.0, 0.5, (1,), (1,))
