"""Every element of every new chunk comes from one holder, whatever the old mesh, the losses and the new mesh are."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nbelastic.sharded.chunks import box, owners_of
from nbelastic.sharded.resharding import moves
from nbelastic.sharded.whole_commits import Choice, Commit, Held, Lost, Origin, Statement, choose
from tests.sharded.meshes import layouts, shapes

COMMIT = Commit(1, 7)


@st.composite
def worlds(draw):
    """An old layout, a new one, and which old shards each new rank holds: its own, copies, or none."""
    parameters = draw(shapes())
    old, new = draw(layouts(parameters, 1)), draw(layouts(parameters, 2))
    ranks = draw(st.permutations(range(len(old.hosts))))
    held = []
    for rank in range(len(new.hosts)):
        own = {ranks[rank]} if rank < len(ranks) and draw(st.booleans()) else set()
        held.append(own | (draw(st.sets(st.sampled_from(range(len(old.hosts))), max_size=2)) if own else set()))
    return old, new, ranks, held


def statements(old, ranks, held):
    origin = {1: Origin(old.hosts, old.owners())}
    return [
        Statement(tuple(Held(COMMIT, shard) for shard in sorted(own)), origin, {1: ranks[rank]}, recoverable=True)
        if own
        else Statement()
        for rank, own in enumerate(held)
    ]


@given(worlds())
def test_every_element_comes_once_or_the_missing_chunks_are_named(world):
    """Either the moves fill each new chunk exactly once with the right elements, or the lost chunks are named."""
    old, new, ranks, held = world
    choice = choose(statements(old, ranks, held))
    present = frozenset().union(*held)
    if choice is None:
        assert not present
        return
    if isinstance(choice, Lost):
        absent = old.missing(present)
        assert absent
        assert choice.shards
        assert all(any(rank in choice.shards for rank in ranks) for ranks in old.owners() if ranks.isdisjoint(present))
        return
    assert isinstance(choice, Choice)
    assert old.missing(present) == []
    whole = {name: np.arange(np.prod(p.shape, dtype=int)).reshape(p.shape) + 1 for name, p in old.parameters.items()}
    filled, counts = {}, {}
    for name, parameter in new.parameters.items():
        for rank, chunk in enumerate(parameter.chunks):
            if chunk is not None:
                filled[name, rank] = np.zeros(chunk.sizes, dtype=int)
                counts[name, rank] = np.zeros(chunk.sizes, dtype=int)
    for move in moves(old, new, choice.holders):
        assert move.shard in held[move.sender]
        chunk = old.parameters[move.name].chunks[move.shard]
        shard = whole[move.name][box(chunk.offsets, chunk.sizes)]
        target = box(move.into, move.sizes)
        filled[move.name, move.receiver][target] = shard[box(move.start, move.sizes)]
        counts[move.name, move.receiver][target] += 1
    for (name, rank), values in filled.items():
        chunk = new.parameters[name].chunks[rank]
        assert (counts[name, rank] == 1).all()
        assert (values == whole[name][box(chunk.offsets, chunk.sizes)]).all()


@given(worlds(), st.data())
def test_a_rank_finds_the_moves_that_it_takes_part_in(world, data):
    """Sender and receiver list the same moves in the same order, though each lists only its own."""
    old, new, ranks, held = world
    choice = choose(statements(old, ranks, held))
    if not isinstance(choice, Choice):
        return
    rank = data.draw(st.sampled_from(range(len(new.hosts))))
    every = list(moves(old, new, choice.holders))
    assert list(moves(old, new, choice.holders, rank)) == [m for m in every if rank in (m.sender, m.receiver)]


@given(worlds())
def test_a_rank_that_holds_a_chunk_takes_it_from_itself(world):
    """Nothing is sent that the receiver has."""
    old, new, ranks, held = world
    choice = choose(statements(old, ranks, held))
    if not isinstance(choice, Choice):
        return
    for move in moves(old, new, choice.holders):
        if move.sender != move.receiver:
            parameter = old.parameters[move.name]
            owners = owners_of(parameter.chunks)[parameter.chunks[move.shard]]
            assert owners.isdisjoint(held[move.receiver])
