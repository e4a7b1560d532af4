"""Sharded parameters as torch keeps them (DTensor), and as this package sees them: a local tensor and its chunk."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from nbelastic.errors import StateError
from nbelastic.sharded.chunks import Chunk

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and activation checkpointing


def plain_name(name: str) -> str:
    """The parameter's name without the wrappers of torch.compile and activation checkpointing."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this rank has, without gradients and without a reference to the mesh."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


def chunk_of(name: str, tensor: torch.Tensor) -> Chunk | None:
    """The chunk that this rank has; the whole tensor if it is not sharded; None if this rank has no element of it.

    StateError if it is split in a way that torch's distributed checkpoints do not describe by one chunk per rank.
    """
    if not isinstance(tensor, DTensor):
        return Chunk((0,) * tensor.dim(), tuple(tensor.shape)) if tensor.numel() else None
    if any(placement.is_partial() for placement in tensor.placements):
        raise StateError(f"{name} is a DTensor with unreduced (Partial) values, which a commit cannot keep.")
    local = tensor._local_tensor
    if not local.numel():
        return None
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1 or chunks[0].sizes != local.shape:
        found = " and ".join(str(Chunk(tuple(one.offsets), tuple(one.sizes))) for one in chunks)
        raise StateError(
            f"{name} has {tuple(local.shape)} on this rank, as the chunks {found}: ShardedState recovers one chunk per rank."
        )
    return Chunk(tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor that is split as `parameter` is, of this local part."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def has_local_gradients(model: torch.nn.Module) -> bool:
    """Whether FSDP2 keeps gradients that are not summed over the ranks yet: see `set_requires_gradient_sync(False)`."""
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # of torch 2.13; before, one or none
            for group in [state._fsdp_param_group] if groups is None else groups:
                for one in group.fsdp_params if group is not None else ():
                    whole = getattr(one, "_unsharded_param", None)
                    if one.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
                        return True
    return False
