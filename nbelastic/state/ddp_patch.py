"""Changes DistributedDataParallel inside an elastic function: what an abort on a GPU leaves in its collectives is not used."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from nbelastic.state.contents import Contents
from nbelastic.state.tensor_snapshot import TensorSnapshot

_signature = functools.lru_cache(maxsize=2)(inspect.signature)  # it takes longer than the rest of a patch
MOST_CHECKS = 100  # of one DDP: a program that reduces its gradients itself never has buckets made


@contextlib.contextmanager
def unchanged_by_ddp(contents: Contents, tensors: TensorSnapshot, check: Callable[[], object]) -> Iterator[None]:
    """Inside this context, DDP's constructor sends nothing of a module that is in the state: all ranks have the same.

    It sends rank 0's values of any other module, into the live tensors. On an accelerator an abort leaves garbage there,
    and no error: then `check()` raises, and the tensors count as changed.

    Before an early forward pass, mostly its second, DDP sends rank 0's sizes of buckets, and allocates what it has received:
    gigabytes, of garbage. `check()` comes before that, and after an error of it.
    """
    original, forward = DistributedDataParallel.__init__, DistributedDataParallel._pre_forward
    signature = _signature(original)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        with tensors.unchanged():
            if _is_in(contents, given.arguments.get("module")):
                given.arguments["init_sync"] = False
            original(*given.args, **given.kwargs)
            check()

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
    try:
        yield
    finally:
        DistributedDataParallel.__init__, DistributedDataParallel._pre_forward = original, forward


def _may_rebuild(ddp: Any) -> bool:
    """Whether DDP may make its buckets anew before this pass: it does that once."""
    is_done = ddp._has_rebuilt_buckets or ddp._use_python_reducer or ddp._delay_all_reduce_all_params
    return torch.is_grad_enabled() and not is_done and (ddp.static_graph or not ddp.find_unused_parameters)


def _is_in(contents: Contents, module: Any) -> bool:
    """Whether the state has all parameters and buffers of this module."""
    if not isinstance(module, Module):
        return False
    buffers = {id(buffer) for _, _, buffer in contents.buffers()}
    return all(p in contents.names for p in module.parameters()) and all(id(b) in buffers for b in module.buffers())
