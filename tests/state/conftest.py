"""A world of one process for code that asks for a rank; a real process group where a test needs one."""

import pytest
import torch.distributed as dist

from nbelastic.state import sampler
from nbelastic.worker.formation import Formation
from nbelastic.worker.worker_report import WorkerFacts


def formation(rank, size, root=0, receivers=(), generation=1):
    return Formation(generation, rank, size, rank, size, 0, 1, "127.0.0.1:1", root, receivers, (("a", size),))


@pytest.fixture
def as_rank(monkeypatch):
    """`as_rank(rank, size)`: samplers find this rank and world size from now on."""

    def at(rank, size):
        monkeypatch.setattr(sampler.session, "world", lambda: formation(rank, size))

    return at


class FakeSession:
    """A session that records the reports of a state."""

    def __init__(self):
        self.facts = WorkerFacts()
        self.committed_at = []
        self.checked = []
        self.settled = 0
        self.others_accumulate = False
        self.is_rank_0 = True
        self.checkpoints = None
        self.reported = {}

    def run_abortable(self, task):
        return task()

    def finish_gpu_work(self):
        self.settled += 1

    def on_any_rank(self, mine, group=None):
        return mine or self.others_accumulate

    def report(self, values):
        self.reported = values

    def report_hashes(self, source):
        self.hashes = source

    def check(self, where):
        self.checked.append(where)

    def committed(self, total):
        self.committed_at.append(total)


@pytest.fixture
def begun():
    """`begun(state, session)`: the state after the elastic loop has begun with it, in a world of one rank."""

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
