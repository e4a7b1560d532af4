"""How a state gets from one rank to others: described, sent, rebuilt, in place where possible."""

import functools
import os
import pathlib
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nbelastic as nbe
from nbelastic.errors import StateError
from nbelastic.state import transfer
from nbelastic.state.transfer import compare, describe, destinations, rebuild
from tests.support.soak import examples
from tests.support.waiting import until

pytestmark = pytest.mark.warm
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    return torch.ones(shape, dtype=draw(st.sampled_from(DTYPES))) * draw(st.integers(0, 1))


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    PLAIN | tensors(),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
    ),
    max_leaves=20,
)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return type(other) is dict and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@settings(max_examples=examples(100))
@given(VALUES)
def test_taken_apart_and_put_together(value):
    """`rebuild` is the inverse of `describe`; the description itself contains no tensor."""
    taken = []
    description = describe(value, taken)
    assert same(rebuild(description, dict(enumerate(taken))), value)
    assert describe(description, []) == description


@settings(max_examples=examples(100))
@given(theirs=VALUES, mine=VALUES)
def test_every_tensor_has_a_destination(theirs, mine):
    """Each received tensor has one destination of its shape and type, whatever the receiver holds."""
    taken = []
    description = describe(theirs, taken)
    places = dict(destinations(description, mine, CPU))
    assert sorted(places) == list(range(len(taken)))
    for index, place in places.items():
        assert (place.shape, place.dtype) == (taken[index].shape, taken[index].dtype)
    assert same(rebuild(description, {i: t.clone() for i, t in enumerate(taken)}), theirs)


def test_tensors_are_received_in_place():
    """A tensor of the same name, shape and type is overwritten; parameters stay the same objects."""
    mine = {"weight": torch.nn.Parameter(torch.zeros(3)), "other": torch.zeros(2), "more": [torch.zeros(1)]}
    taken = []
    description = describe({"weight": torch.ones(3), "other": torch.ones(5), "new": torch.ones(1)}, taken)
    places = dict(destinations(description, mine, CPU))
    assert places[0].data_ptr() == mine["weight"].data_ptr()
    assert places[1].shape == (5,)
    assert places[2].shape == (1,)


@settings(max_examples=examples(100))
@given(st.lists(tensors(), max_size=20), st.integers(1, 100))
def test_buckets(several, bound):
    """Each tensor that is not empty is in one bucket; a bucket has one type, and is closed once it is large."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(transfer, "LARGE", bound)
        buckets = list(transfer._buckets(several))
    assert sorted(id(t) for bucket in buckets for t in bucket) == sorted(id(t) for t in several if t.numel())
    for bucket in buckets:
        assert len({t.dtype for t in bucket}) == 1
        assert len(bucket) == 1 or all(t.nbytes < bound for t in bucket)
        assert sum(t.nbytes for t in bucket[:-1]) < bound


def described(small="", **weights):
    model = {name: torch.zeros(shape) for name, shape in weights.items()}
    return describe({"small": dict.fromkeys(small), "modules": {"model": model}, "optimizers": {}}, [])


def test_states_of_other_contents_are_refused():
    """The error names one difference, the same on each rank: the first value by name, or a tensor with both shapes."""
    received = "in the received state."
    for theirs, mine, error in [
        (described(), described("dbfaec"), "'a' is in the state here and not in the received one."),
        (described("dbfaec"), described(), "'a' is not in the state here and in the received one."),
        (described(w=2), described(w=3), f"model.w is ((3,), 'float32') here and ((2,), 'float32') {received}"),
        (described(w=2), described(w=2, b=1), f"model.b is ((1,), 'float32') here and None {received}"),
        (described(w=2, b=1), described(w=2), f"model.b is None here and ((1,), 'float32') {received}"),
    ]:
        with pytest.raises(StateError, match=f"^{re.escape(error)}$"):
            compare(theirs, mine)
    compare(described("ab", w=2), described("ba", w=2))


def test_numpy_s_numbers_are_sent_as_python_s():
    """A `numpy.float64` in a state is sent as a Python float."""
    assert describe({"best": np.float64(0.5), "step": np.int64(3)}, []) == {"best": 0.5, "step": 3}
    assert type(describe(np.float64(0.5), [])) is float


class Work:
    """A collective that is under way."""

    def __init__(self, error=None):
        self.waited_for, self._error = False, error

    def wait(self):
        self.waited_for = True
        if self._error is not None:
            raise self._error


def test_all_collectives_are_awaited_after_an_error():
    """After the first error all collectives are awaited, as they may still write to tensors; then it is raised."""
    works = [Work(), Work(RuntimeError("first")), None, Work(RuntimeError("second")), Work()]
    with pytest.raises(RuntimeError, match="first"):
        transfer.wait_for_all(works)
    assert all(work.waited_for for work in works if work is not None)


# ---- over a real group of three ----


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with nbe.Cluster("localhost:3", min=3, cooldown=(0, 0), log_dir=tmp_path_factory.mktemp("logs")) as one:
        yield one


def in_a_world(program, *args):
    """Call `program(rank)` in a world."""
    return nbe.elastic(lambda _: program(nbe.rank(), *args))(nbe.ObjectState())


def channel(root, receivers, rank):
    return transfer.Channel(root, receivers, rank, 3, CPU)


def move_all_kinds(rank, root, receivers):
    """Send a description and tensors of each type. Returns what this rank has afterwards."""
    one = channel(root, receivers, rank)
    if not one.takes_part:
        return None
    value = one.move_object({"a": [1, 2.5, "x", None, True, b"y", (3, 4), {5}]} if one.sends else None)
    dtypes = [*DTYPES, torch.int32, torch.int16, torch.int8, torch.complex64]
    there = [torch.full((2, 3), rank, dtype=torch.float32).to(dtype) for dtype in dtypes]
    there += [torch.full((), float(rank)), torch.empty(0), torch.full((3, 2), float(rank)).t()]
    there += [torch.full((600, 600), float(rank)), torch.full((600, 700), float(rank)).t()]  # large ones
    one.move_tensors(there)
    return value, [t.to(torch.complex64).real.flatten().tolist() for t in there]


@pytest.mark.parametrize(("root", "receivers"), [(1, (0, 2)), (1, (2,)), (2, (0,)), (0, (1, 2))])
def test_moving_over_a_real_group(cluster, root, receivers):
    """By broadcast and from one rank to one: receivers end with the root's values, of each type; other ranks keep theirs."""
    results = cluster.run(in_a_world, move_all_kinds, root, receivers).result(timeout=20)
    for rank, result in enumerate(results):
        if rank == root or rank in receivers:
            assert result == results[root]
            assert result[0] == {"a": [1, 2.5, "x", None, True, b"y", (3, 4), {5}]}
            assert all(x in (root, 1) for values in result[1] for x in values)
        else:
            assert result is None


def move_many(rank):
    """Send more than one bucket holds."""
    transfer.LARGE = 1000
    several = [torch.full((size,), float(rank)) for size in (10, 500, 1, 200, 200, 0, 7)]
    channel(0, (1, 2), rank).move_tensors(several)
    return all(t.eq(0).all().item() for t in several)


def test_moving_bucket_by_bucket(cluster):
    """Small buckets, tensors larger than one, empty ones: all arrive."""
    assert cluster.run(in_a_world, move_many).result(timeout=20) == [True] * 3


def move_object(rank, value):
    return channel(0, (1, 2), rank).move_object(value)


@pytest.mark.parametrize(
    ("value", "named"),
    [(functools.partial(os.system, "exit 1"), "functools.partial"), (pathlib.PurePosixPath("x"), "PurePosixPath")],
    ids=["something that runs a command", "an object of another class"],
)
def test_only_plain_data_is_received(cluster, value, named):
    """Other objects could run code when they are read: the error names the class and a remedy."""
    error = cluster.run(in_a_world, move_object, [value]).exception(timeout=20)
    assert "StateError: the state holds something that is not plain data" in str(error)
    assert named in str(error)
    assert "keep numbers, text, lists, dicts and tensors in it" in str(error)
    assert len(error.args[0]) < 600


def move_a_function(rank):
    return move_object(rank, lambda: None)


def test_what_cannot_even_be_sent(cluster):
    """The sending rank raises the same error."""
    error = cluster.run(in_a_world, move_a_function).exception(timeout=20)
    assert "StateError: the state holds something that is not plain data" in str(error)


def sync_everything(folder):
    """Train a rich state that differs in each process. Returns the state after the world has grown."""
    import time
    from pathlib import Path

    import numpy as np

    from tests.process import programs

    torch.manual_seed(os.getpid())
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    model.register_buffer("mask", torch.rand(8) > 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 + os.getpid() / 1e9, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100_000)
    sampler = nbe.ElasticSampler(range(10_000), seed=1)
    state = nbe.TorchState(
        model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler,
        step=0, seen=[], best={"loss": None}, average=torch.zeros(3),
    )  # fmt: skip

    @nbe.elastic
    def loop(state):
        ddp = torch.nn.parallel.DistributedDataParallel(state.model)
        while not programs.any_rank_finds(folder, "finish"):
            loss = ddp(torch.randn(5, 4)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            sampler.record_batch(1)
            state.step += 1
            state.seen = [*state.seen[-3:], state.step]
            state.best = {"loss": np.float64(state.step), "where": (state.step, "x")}
            state.average += 1
            state.commit()
            if nbe.size() == 2 and state.step > 10:
                (Path(folder) / "finish").touch()
            time.sleep(0.01)
        kept = [{k: v.sum().item() for k, v in optimizer.state[p].items()} for p in model.parameters()]
        group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        parameters = [p.double().sum().item() for p in model.parameters()]
        buffers = [model.mask.tolist(), model[1].num_batches_tracked.item()]
        counters = [state.step, state.seen, state.best, state.average.tolist(), state.commits]
        return repr((parameters, buffers, kept, group, scheduler.state_dict(), sampler.state_dict(), counters))

    return loop(state)


def test_a_newcomer_gets_everything(tmp_path):
    """Parameters, buffers of any type, optimizer, scheduler, sampler, counters: after joining all ranks are equal."""
    with nbe.Cluster("localhost:1", min=1, cooldown=(0, 0), log_dir=tmp_path / "logs") as cluster:
        job = cluster.run(sync_everything, str(tmp_path))
        until(lambda: cluster.status().step >= 5 or job.done(), what="five steps")
        cluster.add_host("127.0.0.2:1")
        one, two = job.result(timeout=30)
        assert one == two
        assert "'loss': 0" not in one
