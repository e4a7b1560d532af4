"""Sharded models of many kinds lose a rank, grow again and leave a host: their weights are those of undisturbed training."""

import pytest

import nbelastic as nbe
from nbelastic.protocol.exit_codes import HUNG
from tests.process import sharded_exchanges, sharded_features, sharded_parts
from tests.process.sharded_features import FULL_AT, KILL_AT, LESS_AT, SIZE
from tests.process.sharded_parts import COMPILED, MESHES, PARTS
from tests.support.nccl_double import CLUSTERS
from tests.support.waiting import until

pytestmark = pytest.mark.on_both
LAST = "127.0.0.2"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, backend):
    """Two hosts with two workers each; the tests use the cluster one after another."""
    logs = tmp_path_factory.mktemp("logs")
    with nbe.Cluster(
        f"localhost:2,{LAST}:2", min=1, max=SIZE, cooldown=(0, 0), log_dir=logs, **CLUSTERS[backend]
    ) as one:
        yield one


@pytest.fixture
def run(cluster, tmp_path):
    """Start a job on four workers. At the end of the test, add the host again that it removed."""
    if LAST not in {host.name for host in cluster.hosts}:
        cluster.add_host(f"{LAST}:2")
    until(lambda: sum(worker.state == "ready" for worker in cluster.workers) == SIZE)
    return lambda program, *args: cluster.run(program, str(tmp_path), *args)


@pytest.mark.on_both(seconds=20)
@pytest.mark.parametrize(
    ("parts", "init"),
    [
        pytest.param(PARTS, None, id="parts", marks=pytest.mark.soak(share=0.2)),
        pytest.param(MESHES, sharded_parts.set_values, id="meshes", marks=pytest.mark.soak(seconds=20)),
        pytest.param(COMPILED, None, id="compiled", marks=pytest.mark.soak(seconds=20)),
    ],
)
def test_weights_through_a_kill_a_growth_and_a_removal(cluster, run, tmp_path, parts, init):
    """4 -> 3 -> 4 -> 2 ranks: each world begins with exactly the last commit, and the end is that of one process.

    After the kill, gloo does not wake about one survivor in a hundred. It is replaced, and has seen fewer worlds.
    """
    earlier = len(cluster.events)
    job = run(sharded_features.train, parts, init)
    until(lambda: (tmp_path / f"waits-{LESS_AT}").exists() or job.done(), 100)
    cluster.remove_host(LAST)
    first, *others = job.result(timeout=60)
    if any(f"exit code {HUNG}" in event.text for event in cluster.events[earlier:]):
        assert first["worlds"][LESS_AT] == [2]
        assert first["equal"] > 0
    else:
        assert first["worlds"] == {0: [4], KILL_AT: [3], FULL_AT: [4], LESS_AT: [2]}
        assert [one["equal"] for one in (first, *others)] == [3, 3]
    expected = sharded_parts.trained_whole(parts, sharded_features.END, init)
    for name, part in parts.items():
        for key, wanted in expected[name].items():
            got = first["values"][f"{name}.{key}"]
            error, size = (got - wanted).double().norm(), wanted.double().norm()
            assert error <= part.tolerance * size, (name, key, got, wanted)


def test_ranks_send_each_other_tensors_of_all_kinds(run):
    """All pairs at once, whatever the types, sizes and places in memory are; and data of different lengths."""
    assert run(sharded_exchanges.exchange_all).result(timeout=30) == [True] * SIZE


def test_copies_are_sent_where_memory_cannot_be_mapped(run):
    """A commit is whole only with copies: if one worker cannot map the others' memory, each sends its copy to another."""
    found = run(sharded_exchanges.copy_without_shared_memory).result(timeout=30)
    assert sorted(copy for copies in found for copy in copies) == [[rank, float(rank)] for rank in range(SIZE)]


def test_copies_arrive_at_the_buddies(run):
    """Each commit's copies are whole and of that commit. The error for ranks with different tensors names them."""
    found = run(sharded_exchanges.copy_to_buddies).result(timeout=30)

    def second(shard):
        return [shard + 10.0] * 2 if shard < SIZE - 1 else []

    assert sorted(ward for wards, *_ in found for ward in wards) == list(range(SIZE - 1))  # the last has nothing
    for rank, (wards, held, mapped, text) in enumerate(found):
        assert held == {ward: second(ward) for ward in wards}
        neighbour = rank ^ 1  # on the same host, with arenas of two commits for its shard and its ward's
        for shard in (neighbour, *found[neighbour][0]):
            assert mapped[2, shard] == second(shard)
        assert text.startswith("rank 1 has optimizer.w.more (float32) in its shard, and rank 0 has not")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("twice", "bind() was called already: give it all models and optimizers at once"),
        ("whole", "model: no parameter is sharded, so each rank would train a model of its own. Call fully_shard("),
        ("uneven", "rank 0 has optimizer.model.0.bias.momentum_buffer (float32) in its shard, and rank 1 has not"),
        ("other", "model.0.weight is float32 (8, 4) here and float32 (4, 4) in the commit that is restored"),
    ],
)
def test_programs_that_are_refused(run, what, message):
    """A mistake ends the job with one line that names what differs and what to do."""
    assert message in str(run(sharded_exchanges.refused, what).exception(timeout=30))
