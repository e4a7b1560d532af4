"""The device mesh of the present generation: `nbe.device_mesh()`."""

from __future__ import annotations

from math import gcd

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nbelastic.errors import UsageError
from nbelastic.system.argument_types import WHOLE, check_optional
from nbelastic.worker import ranks, session


def device_mesh(shard: int | None = None, tensor: int | None = None) -> DeviceMesh:
    """A `DeviceMesh` of the present world, for `fully_shard`. Collective: all ranks call it with the same arguments.

    Without arguments it has one dimension, `shard`, over all ranks. With `shard=n` it has `replicate` and `shard` (HSDP): at
    least `n` ranks share one copy of the model, next to one another, so those of a host are together. With `tensor=n` the
    last dimension, `tensor`, has at most `n` ranks of one host. The world's size changes, so the sizes fit it: `shard` is
    the smallest divisor that is large enough, else all ranks; `tensor` the largest that divides the ranks of every host.
    NoWorldError outside an elastic function.
    """
    for name, value in {"shard": shard, "tensor": tensor}.items():
        check_optional(name, value, WHOLE)
        if value is not None and value < 1:
            raise UsageError(f"device_mesh({name}={value}): at least 1.")
    world = session.world()
    names, sizes = mesh_shape([count for _, count in world.hosts], shard, tensor)
    return init_device_mesh(ranks.device().type, sizes, mesh_dim_names=names)


def mesh_shape(hosts: list[int], shard: int | None, tensor: int | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The names and sizes of the mesh's dimensions. `hosts`: the number of ranks of each host."""
    size = sum(hosts)
    inner = 1
    if tensor is not None:
        inner = max(divisor for divisor in _divisors(gcd(*hosts)) if divisor <= tensor)
    rest = size // inner
    dimensions = {"shard": rest}
    if shard is not None:
        enough = min((divisor for divisor in _divisors(rest) if divisor >= shard), default=rest)
        dimensions = {"replicate": rest // enough, "shard": enough}
    if tensor is not None:
        dimensions["tensor"] = inner
    return tuple(dimensions), tuple(dimensions.values())


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
