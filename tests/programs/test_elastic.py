"""How the loop of an elastic function ends."""

import threading
from types import SimpleNamespace

import pytest
import torch

import nbelastic as nbe
from nbelastic.errors import JobStoppedError
from nbelastic.programs import elastic
from nbelastic.protocol.exit_codes import GPU_LOST
from nbelastic.state import backward_hooks as backward
from nbelastic.worker import own_errors


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """This is a test's process, not a worker's: leave its imports unwatched."""
    monkeypatch.setattr(elastic, "frameworks", lambda: None)


class StoppedInAStep:
    """Its job is stopped after the program has changed a value, and before the next commit."""

    used = False
    warm_ups = ()
    last_turn = 0
    link = SimpleNamespace(disconnected=False)
    facts = SimpleNamespace(holds_state=True)
    programs = SimpleNamespace(outer=None, on_trial=False)

    def __init__(self, state):
        self.state, self.saved = state, []
        self.checkpoints = SimpleNamespace(
            committed=lambda state: None, ended=lambda state, turn: self.saved.append(state.n)
        )

    def finish_gpu_work(self):
        pass

    def check(self, where):
        pass

    def committed(self, total):
        pass

    def gather(self, holder):
        self.state.n = 1
        self.state.commit()
        self.state.n = 99
        raise JobStoppedError("stopped by hand")


def test_the_last_checkpoint_of_a_stopped_job_is_its_last_commit():
    """Values that changed since then are not in it."""
    state = nbe.ObjectState(n=0)
    session = StoppedInAStep(state)
    with pytest.raises(JobStoppedError):
        elastic._Loop(session, state, lambda: None).run()
    assert session.saved == [1]


def test_a_state_that_is_refused_is_not_kept():
    """No hook on backward passes refers to it, which would keep its model in memory."""
    before = {*backward._hooks}  # of states of other tests, whose process this is, too
    state = nbe.ObjectState(n=object())
    with pytest.raises(nbe.StateError):
        elastic._Loop(StoppedInAStep(state), state, lambda: None).run()
    assert {*backward._hooks} == before


def test_a_gpu_that_does_not_finish_does_not_keep_a_hung_worker(monkeypatch, tmp_path):
    """The last checkpoint, or a state to keep, is read from the GPU: if a kernel hangs, both fail in time, with the reason."""
    monkeypatch.setattr(elastic, "GPU_TIMEOUT", 0.01)
    never = threading.Event()
    state = nbe.ObjectState(n=0)
    session = StoppedInAStep(state)
    session.groups = SimpleNamespace(uses_gpu=True, synchronize=lambda all_streams: never.wait())
    holder = elastic._Loop(session, state, lambda: None)
    monkeypatch.setattr(type(state), "undo", lambda _: pytest.fail("it would wait for the GPU"))
    for write in (holder.write_last_checkpoint, lambda: holder.write_kept_state(tmp_path)):
        with pytest.raises(nbe.StateError, match="the GPU does not finish its work within"):
            write()
    assert not session.saved
    never.set()


def test_a_gpu_that_fails_while_its_rank_leaves_a_world_is_lost(monkeypatch):
    """A fault of several GPUs: one rank reports it, and the others leave before they have seen their own error."""

    def fail(**_):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    def end(code):
        raise SystemExit(code)

    state = nbe.ObjectState(n=0)
    session = StoppedInAStep(state)
    session.groups = SimpleNamespace(present=None, synchronize=fail)
    monkeypatch.setattr(elastic._Loop, "_run_generation", lambda *_: ("aborted", None))
    monkeypatch.setattr(nbe.ObjectState, "generation_ended", lambda _, aborted: fail())
    monkeypatch.setattr(own_errors.os, "_exit", end)
    with pytest.raises(SystemExit, match=str(GPU_LOST)):
        elastic._Loop(session, state, lambda: None).run()


def test_what_a_warm_up_changes_is_undone():
    """Weights, gradients, modes, the optimizer's entries and counters are as before, and a second job does not call it."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    state = nbe.TorchState(model=model, optimizer=torch.optim.Adam(model.parameters()), n=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    session = StoppedInAStep(state)

    def one_step(state):
        state.model(torch.ones(2, 4)).sum().backward()
        state.optimizer.step()
        state.n += 1
        state.model.eval()

    def gather(holder):
        assert all(layer.training for layer in model.modules())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not state.optimizer.state
        assert (state.n, state.commits, holder.position) == (0, 0, (0, True))
        raise JobStoppedError("stopped by hand")

    session.warm_ups, session.gather = [one_step], gather
    with pytest.raises(JobStoppedError):
        elastic._Loop(session, state, lambda: None).run()
    assert session.warm_ups == []


def test_a_warm_up_changes_no_sharded_state():
    """Counters and random generators are as before, although no model is bound yet."""
    state = nbe.ShardedState(n=0)
    session, before = StoppedInAStep(state), torch.get_rng_state()
    session.report_copies = lambda _: None

    def draw(state):
        state.n += 1
        torch.rand(1)

    def gather(_):
        assert (state.n, torch.equal(torch.get_rng_state(), before)) == (0, True)
        raise JobStoppedError("stopped by hand")

    session.warm_ups, session.gather = [draw], gather
    session.facts = SimpleNamespace(holds_state=False)
    with pytest.raises(JobStoppedError):
        elastic._Loop(session, state, lambda: None).run()


def test_outside_a_worker_a_warm_up_is_an_ordinary_function():
    """A module that decorates one can be imported anywhere."""
    assert nbe.warmup(abs) is abs
    with pytest.raises(nbe.UsageError, match="decorates a function"):
        nbe.warmup(3)
