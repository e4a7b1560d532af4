"""Hashes of the state at commits: equal on equal ranks, another one after any flipped bit, and cheap."""

import random

import pytest
import torch
from torch import nn

from nbelastic import ObjectState, TorchState
from nbelastic.protocol.rank_reports import MOST_HASHES
from nbelastic.state import replica_hash
from nbelastic.state.contents import Contents
from nbelastic.state.replica_hash import thinned
from tests.state.conftest import FakeSession, formation
from tests.state.training import receive
from tests.support.fake_cuda import FakeCuda, OnGpu


@pytest.fixture(autouse=True)
def _with_group(group):
    """Commits of a group of one rank."""


class Rank:
    """One of three ranks that train alike: all get the same gradients."""

    def __init__(self, make, state=None):
        torch.manual_seed(1)
        self.model, self.optimizer = make()
        self.state = TorchState(model=self.model, optimizer=self.optimizer, step=0)
        self.session = FakeSession()
        self.state.begin(self.session)
        self.join()

    def join(self, generation=1):
        self.state.sync(formation(0, 1))
        self.session.hashes = self.state._replica.begin(formation(0, 3, generation=generation))

    def step(self):
        generator = torch.Generator().manual_seed(self.state.commits)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        self.optimizer.step()
        self.state.commit()

    def hashes(self):
        return self.session.hashes()

    def tensors(self):
        entries = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [*self.model.parameters(), *(value for value in entries if isinstance(value, torch.Tensor))]


def adam():
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3).bfloat16(), nn.Linear(150, 200), nn.BatchNorm1d(3))
    return model, torch.optim.AdamW(model.parameters())


def images():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 40, 3)).to(memory_format=torch.channels_last)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def columns():
    model = nn.Linear(3, 2)
    model.scale, model.shift = (nn.Parameter(torch.randn(9, 2)[:, part]) for part in (0, slice(1, 2)))
    model.rest = nn.Parameter(torch.randn(9)[1:])
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def flip(tensor, draw):
    """Flip one bit, as a faulty memory does: nothing counts it."""
    place = tensor.data if tensor.is_contiguous() else tensor.data.permute(0, 2, 3, 1)
    found = place.view(-1).view(torch.uint8)
    found[draw.randrange(found.numel())] ^= 1 << draw.randrange(8)


def in_windows(monkeypatch, count, make):
    """Shrink the budget until a state takes `count` windows."""
    rank, budget = Rank(make), 1 << 20
    rank.step()
    while True:
        monkeypatch.setitem(replica_hash.BUDGET, "cpu", budget)
        found = len(replica_hash.Plan(rank.state._contents).windows)
        if found >= count:
            return found
        budget = budget * 7 // 8


@pytest.mark.parametrize("make", [adam, images])
def test_a_flipped_bit_of_any_tensor_changes_the_hash_within_two_commits(monkeypatch, make):
    """In 100 of 100 trials, with a state of two windows; and the other rank's values never differ without that."""
    monkeypatch.setattr(replica_hash, "OVERHEAD", {"cpu": 0, "cuda": 0})
    monkeypatch.setattr(replica_hash, "PIECE", {"cpu": 1 << 12, "cuda": 1 << 12})
    assert in_windows(monkeypatch, 2, make) == 2
    draw, good, bad = random.Random(3), Rank(make), Rank(make)
    for trial in range(100):
        for rank in (good, bad):
            rank.join(generation=trial)
            rank.step()
        assert good.hashes() == bad.hashes()
        tensors = bad.tensors()
        victim = tensors[trial % len(tensors)]
        before = victim.clone()
        flip(victim, draw)
        for rank in (good, bad):  # no step changes them, so that the bit stays as it is
            for _ in range(2):
                rank.state.commits += 1
                rank.state._replica.add(rank.state.commits)
        ours, theirs = good.hashes().by_commit, bad.hashes().by_commit
        assert ours.keys() == theirs.keys()
        assert ours[good.state.commits] != theirs[good.state.commits]
        with torch.no_grad():
            victim.copy_(before)


def test_a_larger_state_is_read_within_as_many_commits_as_it_has_windows(monkeypatch):
    """Each window is read once before any is read again; together they are all bytes."""
    count = in_windows(monkeypatch, 5, adam)
    good, bad = Rank(adam), Rank(adam)
    good.step(), bad.step()
    for tensor in range(len(bad.tensors())):
        good, bad = Rank(adam), Rank(adam)
        good.step(), bad.step()
        flip(bad.tensors()[tensor], random.Random(tensor))
        for rank in (good, bad):
            for commit in range(2, count + 2):
                rank.state._replica.add(commit)
        last = count + 1
        assert good.hashes().by_commit[last] != bad.hashes().by_commit[last]


def test_what_takes_longer_to_read_is_read_in_more_windows():
    """Elements in another order, and many small tensors: no commit takes longer than others."""

    def windows(*weights):
        state = TorchState(weights=nn.ParameterList(weights))
        return len(replica_hash.Plan(state._contents).windows)

    weight = torch.zeros(1024, 512)
    assert windows(weight.t()) > 2 * windows(weight)
    assert windows(*torch.zeros(200, 4)) == 2


@pytest.mark.parametrize("odd", [torch.ones(4, dtype=torch.cfloat).conj(), torch.empty(0)])
def test_what_has_no_bytes_to_read_is_not_hashed(odd):
    """Conjugated values are computed as they are read, and an empty tensor has none."""
    state = TorchState(weights=nn.ParameterList([odd, torch.ones(3)]))
    assert [place.shape for place in replica_hash.Plan(state._contents).places] == [(3,)]


def test_a_difference_stays_in_later_hashes():
    """Ranks that report other commits can be compared: a difference is not over when its window is."""
    good, bad = Rank(adam), Rank(adam)
    good.step(), bad.step()
    before = bad.model[0].weight.detach().clone()
    flip(bad.model[0].weight, random.Random(1))
    for rank in (good, bad):
        rank.state._replica.add(2)
    with torch.no_grad():
        bad.model[0].weight.copy_(before)
    for rank in (good, bad):
        rank.state._replica.add(3)
    ours, theirs = good.hashes().by_commit, bad.hashes().by_commit
    assert [commit for commit in ours if ours[commit] != theirs[commit]] == [2, 3]


@pytest.mark.parametrize("make", [adam, images])
def test_a_newcomer_has_the_same_hashes(make):
    """Received tensors are in another order in memory and in the optimizer. The commit is the same."""
    old, new = Rank(make), Rank(make)
    for _ in range(3):
        old.step()
    receive(new.state, old.state)
    for rank in (old, new):
        rank.join(generation=2)
        rank.step()
        rank.step()
    assert old.hashes() == new.hashes()
    assert old.state.commits == new.state.commits == 5


def test_a_parameter_with_gaps_in_memory_is_hashed_by_its_elements():
    """A column of a larger tensor, or its end, as of a weight that is split into parts."""
    good, bad = Rank(columns), Rank(columns)
    for rank in (good, bad):
        rank.step()
    assert good.hashes() == bad.hashes()
    with torch.no_grad():
        bad.model.shift[8] += 1
    for rank in (good, bad):
        rank.step()
    assert good.hashes() != bad.hashes()


def test_buffers_and_random_generators_are_not_hashed():
    """BatchNorm's statistics are those of the rank's own samples."""
    one, other = Rank(adam), Rank(adam)
    other.model[3].running_mean += 1
    torch.rand(1)
    one.step(), other.step()
    assert one.hashes() == other.hashes()


def test_a_replaced_tensor_is_read_where_it_is_now():
    """A view of the old memory would find neither flipped bits nor the right values."""
    one, other = Rank(adam), Rank(adam)
    one.step(), other.step()
    other.model[0].weight.data = other.model[0].weight.data.clone()  # alone: all else stays where it is
    one.step(), other.step()
    assert one.hashes().by_commit == other.hashes().by_commit
    entry = other.optimizer.state[other.model[0].weight]
    entry["exp_avg"] = entry["exp_avg"].clone()
    other.model[2].weight.data = other.model[2].weight.data.clone()
    other.optimizer.load_state_dict(other.optimizer.state_dict())
    one.step(), other.step()
    assert one.hashes().by_commit == other.hashes().by_commit
    flip(other.model[2].weight, random.Random(1))
    one.step(), other.step()
    assert one.hashes().by_commit != other.hashes().by_commit


def test_another_layout_or_hardware_is_another_kind(monkeypatch):
    """Such ranks may compute other bits: their hashes are not compared."""
    one, other = Rank(adam), Rank(images)
    one.step(), other.step()
    kind = one.hashes().kind
    assert other.hashes().kind != kind
    monkeypatch.setattr(replica_hash.torch, "get_num_threads", lambda: 17)
    third = Rank(adam)
    third.step()
    assert third.hashes().kind != kind


def test_the_whole_state_was_read_after_a_turn_of_all_windows(monkeypatch):
    """`whole_at` is the first commit by which the present layout has been read once."""
    count, rank = in_windows(monkeypatch, 5, adam), Rank(adam)
    rank.step()
    assert rank.hashes().whole_at == count


def test_a_rank_alone_and_a_state_without_tensors_hash_nothing(begun):
    """There is nothing to compare, so a commit costs nothing more."""
    rank = Rank(adam)
    rank.session.hashes = rank.state._replica.begin(formation(0, 1))
    rank.step()
    assert rank.hashes() is None
    session = FakeSession()
    state = begun(ObjectState(step=0), session)
    take = state._replica.begin(formation(0, 3))
    state.commit()
    assert take() is None


@pytest.mark.parametrize("count", [1, 8, 9, 17, 1000])
def test_many_commits_are_thinned_out_alike(count):
    """Ranks with other periods have some commits in common: those of the longer period."""
    few, many = (thinned([(commit, 0) for commit in range(1000, 1000 + n)]) for n in (count, 4 * count))
    assert 0 < len(many) <= MOST_HASHES
    assert {commit for commit, _ in many if commit < 1000 + count} <= {commit for commit, _ in few}


class FakeEvent:
    """An event of a GPU that reaches it when the test sets `reached`."""

    reached = False
    waited = 0

    def record(self):
        pass

    def query(self):
        return FakeEvent.reached

    def synchronize(self):
        FakeEvent.waited += not FakeEvent.reached


def test_nothing_waits_for_a_gpu(monkeypatch):
    """The hash of a commit is found when the GPU has come so far. Then it is that of the values at that commit."""
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(replica_hash, "PLAIN", (torch.Tensor, nn.Parameter, OnGpu))
    monkeypatch.setattr(FakeEvent, "waited", 0)
    found = []
    for late in (True, False):
        contents = Contents()
        contents.values = {"weight": nn.Parameter(torch.zeros(300_000).as_subclass(OnGpu))}
        contents.survey()
        (weight,) = contents.names
        hashed = replica_hash.ReplicaHash(contents)
        take = hashed.begin(formation(0, 3))
        for commit in (1, 2, 3):
            monkeypatch.setattr(FakeEvent, "reached", not late)
            hashed.add(commit)
            assert len(hashed._pending) == (commit if late else 1)
            with torch.no_grad():
                weight.as_subclass(torch.Tensor).add_(1)
        monkeypatch.setattr(FakeEvent, "reached", True)
        hashed.add(4)
        found.append(take())
    assert found[0] == found[1]
    assert len(set(found[0].by_commit.values())) == 3
    assert FakeEvent.waited == 0
    assert "synchronize" not in cuda.calls


def test_a_gpu_that_is_far_behind_is_waited_for(monkeypatch):
    """At most 64 commits wait, so that pinned memory is bounded."""
    FakeCuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(replica_hash, "PLAIN", (torch.Tensor, nn.Parameter, OnGpu))
    monkeypatch.setattr(FakeEvent, "waited", 0)
    contents = Contents()
    contents.values = {"weight": nn.Parameter(torch.zeros(30).as_subclass(OnGpu))}
    contents.survey()
    hashed = replica_hash.ReplicaHash(contents)
    hashed.begin(formation(0, 3))
    for commit in range(100):
        hashed.add(commit)
    assert (len(hashed._pending), FakeEvent.waited) == (64, 36)
