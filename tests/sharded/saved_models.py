"""A small model that one process holds whole, and what each rank of a made-up generation would hold of it."""

import copy

import torch

from nbelastic.sharded.bound import Bound
from nbelastic.sharded.checkpoint_names import Names
from nbelastic.sharded.checkpoints import Snapshot, Writer
from nbelastic.sharded.chunks import Layout, Parameter, box
from nbelastic.sharded.whole_commits import Commit
from tests.sharded.meshes import chunks_of, hosts_of

TOKEN = "token"


def trained(seed=0):
    """A model with a shared parameter and buffers, and its optimizer, after one step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 6, bias=False))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    model(torch.randn(5, 6)).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def layout_of(bound, mesh, generation=1, sharded=True):
    """All parameters split in their first dimension over `mesh`: (replicas, shards, tensor)."""
    size = mesh[0] * mesh[1] * mesh[2]
    parameters = {
        name: Parameter(tuple(one.shape), "float32", chunks_of(tuple(one.shape), mesh, 0 if sharded else None))
        for name, one in bound.parameters.items()
    }
    return Layout(generation, hosts_of(size, 2), parameters)


def snapshot(bound, layout, rank, commits):
    """What this rank holds of one commit."""
    shard = {}
    for one, tensor in bound.shard().items():
        chunk = layout.parameters[one.parameter].chunks[rank]
        shard[one] = tensor[part_of(chunk)].clone() if chunk is not None else tensor.new_empty(0)
    record = {
        "small": {"step": commits},
        "buffers": copy.deepcopy(bound.buffers()),
        "optimizers": bound.settings(),
        "scalars": bound.scalars(),
        "tensors": [tuple(one) for one in shard],
    }
    return Snapshot(Commit(layout.generation, commits), shard, record)


def part_of(chunk):
    return box(chunk.offsets, chunk.sizes)


def writers(bound, layout):
    """The writers of all ranks."""
    made = []
    for rank in range(len(layout.hosts)):
        made.append(Writer())
        made[-1].enter(TOKEN)
        made[-1].bound(layout, Names(bound), rank)
    return made


def save(folder, model, optimizer, mesh=(1, 4, 1), commits=7, keep=3):
    """Write a checkpoint as the ranks of a mesh do; returns its path."""
    bound = Bound({"model": model}, {"optimizer": optimizer})
    layout = layout_of(bound, mesh)
    savings = [
        writer.save(folder, keep, lambda rank=rank: snapshot(bound, layout, rank, commits))
        for rank, writer in enumerate(writers(bound, layout))
    ]
    paths = [saving.wait(20) for saving in savings]
    return paths[0]


def values(model, optimizer):
    """All values, to compare."""
    return model.state_dict(), optimizer.state_dict()
