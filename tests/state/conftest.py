"""A place in a world for code that asks for one, without any process group."""

import pytest
import torch.distributed as dist

from nbelastic.state import sampler
from nbelastic.worker.formation import Formation
from nbelastic.worker.worker_report import WorkerFacts


def formation(rank, size, root=0, receivers=()):
    return Formation(1, rank, size, rank, size, 0, 1, "127.0.0.1:1", root, receivers, (("a", size),))


@pytest.fixture
def stand(monkeypatch):
    """`stand(rank, size)`: samplers asked from now on are this rank's."""

    def at(rank, size):
        monkeypatch.setattr(sampler.session, "world", lambda: formation(rank, size))

    return at


class FakeSession:
    """What a state tells its session, and nothing else."""

    def __init__(self):
        self.facts = WorkerFacts()
        self.committed_at = []
        self.checked = []
        self.settled = 0
        self.others_accumulate = False
        self.speaks = True
        self.checkpoints = None
        self.reported = {}

    def run_abortable(self, task):
        return task()

    def finish_gpu_work(self):
        self.settled += 1

    def on_any_rank(self, mine):
        return mine or self.others_accumulate

    def report(self, values):
        self.reported = values

    def check(self, where):
        self.checked.append(where)

    def committed(self, total):
        self.committed_at.append(total)


@pytest.fixture
def begun():
    """`begun(state, session)`: the state as the elastic loop begins with it, in a world that gave it nothing."""

    states = []

    def begin(state, session=None):
        states.append(state)
        state.begin(session or FakeSession())
        state.sync(formation(0, 1))
        return state

    yield begin
    for state in states:
        state.end()


@pytest.fixture
def group():
    """A real process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
