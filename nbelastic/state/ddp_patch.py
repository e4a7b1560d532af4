"""Changes DistributedDataParallel inside an elastic function: what an abort on a GPU leaves in its collectives is not used."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed.utils as distributed_utils
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from nbelastic.state.contents import Contents
from nbelastic.state.tensor_snapshot import TensorSnapshot, clone_all, copy_all

_signature = functools.lru_cache(maxsize=2)(inspect.signature)  # it takes longer than the rest of a patch
MOST_CHECKS = 100  # of one DDP: a program that reduces its gradients itself never has buckets made


@contextlib.contextmanager
def unchanged_by_ddp(
    contents: Contents,
    tensors: TensorSnapshot,
    check: Callable[[], object],
    on_any_rank: Callable[[bool, Any], bool],
) -> Iterator[None]:
    """Inside this context, DDP's constructor changes a tensor only where rank 0 has another value, and only in a whole world.

    It sends nothing if the state has the whole module, unchanged since the last commit, on all ranks of its group: then they have
    the same. Otherwise `_beside` receives what it sends. On an accelerator an abort leaves garbage in what was received, and no
    error: then `check()` raises.

    Before an early forward pass, mostly its second, DDP sends rank 0's sizes of buckets, and allocates what it has received:
    gigabytes, of garbage. `check()` comes before that, and after an error of it.
    """
    original, forward = DistributedDataParallel.__init__, DistributedDataParallel._pre_forward
    send = distributed_utils._sync_params_and_buffers
    signature = _signature(original)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        if options["init_sync"]:
            may_differ = tensors.changed() or not _is_in(contents, options["module"])
            options["init_sync"] = on_any_rank(may_differ, _group(options["process_group"], options["device_mesh"]))
        try:
            original(*given.args, **given.kwargs)
        finally:
            check()  # also after an error, of garbage that it took for another rank's shapes

    passes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def checked(ddp: Any, *args: Any, **kwargs: Any) -> Any:
        passes[ddp] = passes.get(ddp, 0) + 1
        if passes[ddp] <= MOST_CHECKS:
            check()
        try:
            return forward(ddp, *args, **kwargs)
        except Exception:
            check()
            raise

    @functools.wraps(forward)
    def before_forward(ddp: Any, *args: Any, **kwargs: Any) -> Any:
        return (checked if _may_rebuild(ddp) else forward)(ddp, *args, **kwargs)

    DistributedDataParallel.__init__, DistributedDataParallel._pre_forward = patched, before_forward
    distributed_utils._sync_params_and_buffers = _beside(send, check)
    try:
        yield
    finally:
        DistributedDataParallel.__init__, DistributedDataParallel._pre_forward = original, forward
        distributed_utils._sync_params_and_buffers = send


def _beside(send: Callable[..., object], check: Callable[[], object]) -> Callable[..., None]:
    """`send`, but it receives into new memory, and then changes the tensors whose values differ.

    So a rank whose world breaks meanwhile keeps its commit. It takes memory for one bucket and what differs.
    """

    def sync(process_group: Any, module_states: list[torch.Tensor], broadcast_bucket_size: int, src: int) -> None:
        different: list[tuple[torch.Tensor, torch.Tensor]] = []
        for bucket in _buckets(module_states, broadcast_bucket_size):
            received = clone_all(bucket)
            send(process_group, received, broadcast_bucket_size, src)
            different += [pair for pair in zip(received, bucket, strict=True) if not _have_same_bytes(*pair)]
        check()
        copy_all([new for new, _ in different], to=[live for _, live in different])

    return sync


def _have_same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """NaN equals itself here, and 0.0 differs from -0.0."""
    mine, others = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (first, second))
    return bool(torch.equal(mine, others))


def _buckets(tensors: list[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    """The tensors in their order, in lists of about `size` bytes."""
    bucket: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        bucket.append(tensor)
        filled += tensor.nbytes
        if filled >= size:
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket


def _group(process_group: Any, device_mesh: Any) -> Any:
    """The group of a DDP with these arguments, of which it takes one; None: the default one."""
    return process_group if device_mesh is None else device_mesh.get_group(mesh_dim=0)


def _may_rebuild(ddp: Any) -> bool:
    """Whether DDP may make its buckets anew before this pass: it does that once."""
    is_done = ddp._has_rebuilt_buckets or ddp._use_python_reducer or ddp._delay_all_reduce_all_params
    return torch.is_grad_enabled() and not is_done and (ddp.static_graph or not ddp.find_unused_parameters)


def _is_in(contents: Contents, module: Any) -> bool:
    """Whether the state has all parameters and buffers of this module."""
    if not isinstance(module, Module):
        return False
    buffers = {*map(id, contents.buffers())}
    return all(p in contents.names for p in module.parameters()) and all(id(b) in buffers for b in module.buffers())
