"""Layouts as `fully_shard` and tensor parallelism make them: a mesh of ranks, and how each parameter is split over it."""

from hypothesis import strategies as st

from nbelastic.sharded.chunks import Chunk, Layout, Parameter


def pieces(length, count):
    """`torch.chunk`: the (start, length) of each piece, the last ones smaller or empty."""
    step = -(-length // count) if length else 0
    return [(min(i * step, length), max(0, min((i + 1) * step, length) - min(i * step, length))) for i in range(count)]


def chunks_of(shape, mesh, shard_dim=0, tensor_dim=None):
    """The chunk of each rank. `mesh`: (replicas, shards, tensor). The tensor dimension is split first."""
    replicas, shards, tensor = mesh
    found = []
    for rank in range(replicas * shards * tensor):
        s, t = rank // tensor % shards, rank % tensor
        offsets, sizes = [0] * len(shape), list(shape)
        if tensor_dim is not None:
            start, length = pieces(shape[tensor_dim], tensor)[t]
            offsets[tensor_dim], sizes[tensor_dim] = start, length
        if shard_dim is not None:
            start, length = pieces(sizes[shard_dim], shards)[s]
            offsets[shard_dim], sizes[shard_dim] = offsets[shard_dim] + start, length
        found.append(Chunk(tuple(offsets), tuple(sizes)) if all(sizes) else None)
    return tuple(found)


def hosts_of(size, per_host):
    return tuple(f"host-{rank // per_host}" for rank in range(size))


@st.composite
def shapes(draw):
    """By name, the shapes of a few small parameters."""
    shape = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
    return {f"p{i}": one for i, one in enumerate(draw(st.lists(shape, min_size=1, max_size=3)))}


@st.composite
def layouts(draw, parameters, generation):
    """Any mesh of at most 12 ranks; each parameter is sharded in a dimension of its own, or replicated."""
    mesh = (draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    size = mesh[0] * mesh[1] * mesh[2]
    found = {}
    for name, shape in parameters.items():
        dims = [None, *range(len(shape))]
        split = draw(st.sampled_from(dims)), draw(st.sampled_from(dims))
        found[name] = Parameter(shape, "float32", chunks_of(shape, mesh, *split))
    return Layout(generation, hosts_of(size, draw(st.integers(1, 4))), found)
