"""How the loop of an elastic function ends."""

import threading
from types import SimpleNamespace

import pytest

import nbelastic as nbe
from nbelastic.errors import JobStoppedError
from nbelastic.programs import elastic
from nbelastic.state import backward_hooks as backward


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """This is a test's process, not a worker's: leave its imports unwatched."""
    monkeypatch.setattr(elastic, "frameworks", lambda: None)


class StoppedInAStep:
    """Its job is stopped after the program has changed a value, and before the next commit."""

    used = False
    link = SimpleNamespace(disconnected=False)
    facts = SimpleNamespace(holds_state=True)

    def __init__(self, state):
        self.state, self.saved = state, []
        self.checkpoints = SimpleNamespace(
            committed=lambda state: None, ended=lambda state, rank: self.saved.append(state.n)
        )

    def finish_gpu_work(self):
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
        elastic._Loop(session, state).run(lambda: None)
    assert session.saved == [1]


def test_a_state_that_is_refused_is_not_kept():
    """No hook on backward passes refers to it, which would keep its model in memory."""
    state = nbe.ObjectState(n=object())
    with pytest.raises(nbe.StateError):
        elastic._Loop(StoppedInAStep(state), state).run(lambda: None)
    assert not backward._hooks


def test_a_gpu_that_does_not_finish_does_not_keep_a_hung_worker(monkeypatch, tmp_path):
    """The last checkpoint, or a state to keep, is read from the GPU: if a kernel hangs, both fail in time, with the reason."""
    monkeypatch.setattr(elastic, "GPU_TIMEOUT", 0.01)
    never = threading.Event()
    state = nbe.ObjectState(n=0)
    session = StoppedInAStep(state)
    session.groups = SimpleNamespace(uses_gpu=True, synchronize=lambda all_streams: never.wait())
    holder = elastic._Loop(session, state)
    monkeypatch.setattr(type(state), "undo", lambda _: pytest.fail("it would wait for the GPU"))
    for write in (holder.write_last_checkpoint, lambda: holder.write_kept_state(tmp_path)):
        with pytest.raises(nbe.StateError, match="the GPU does not finish its work within"):
            write()
    assert not session.saved
    never.set()
