"""The first values of a model that was made on the meta device: those that the whole model would have on one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from nbelastic.errors import StateError
from nbelastic.sharded.bound import Bound
from nbelastic.sharded.parameters import chunk_of, local_tensor
from nbelastic.sharded.transfer import broadcast_bytes


def allocate(model: torch.nn.Module, device: torch.device) -> set[torch.Tensor]:
    """Give parameters and buffers on the meta device memory; returns those parameters. They stay the same objects."""
    on_meta = {parameter for parameter in model.parameters() if parameter.is_meta}
    if on_meta or any(buffer.is_meta for buffer in model.buffers()):
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)  # an optimizer may have the parameters already
        try:
            model.to_empty(device=device)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
    return on_meta


def set_first_values(
    bound: Bound,
    allocated: Mapping[str, set[torch.Tensor]],
    init: Callable[[Any], object] | None,
    run: Callable[[Callable[[], bytes]], bytes],
    group: Any,
) -> None:
    """Collective: give all models their first values. All ranks draw the same random numbers, those of rank 0.

    Afterwards each rank goes on with its own random generators.
    """
    with torch.random.fork_rng(enabled=True), torch.no_grad():
        shared = run(lambda: broadcast_bytes(torch.get_rng_state().numpy().tobytes(), 0, group))
        torch.set_rng_state(torch.frombuffer(bytearray(shared), dtype=torch.uint8))
        if bound.device.type == "cuda":
            torch.cuda.manual_seed(torch.initial_seed())
        for name, model in bound.modules.items():
            _initialize(name, model, allocated[name], init)


def _initialize(
    name: str, model: torch.nn.Module, allocated: set[torch.Tensor], init: Callable[[Any], object] | None
) -> None:
    """Call `init(model)`, or `reset_parameters()` of each layer with parameters in `allocated`, whole, one after the other.

    So a layer gets the same values for every world size.
    """
    if init is not None:
        init(model)
        return
    missing = set(allocated)
    for key, layer in model.named_modules():
        own = {entry: one for entry, one in layer._parameters.items() if one is not None and one in allocated}
        if missing.isdisjoint(own.values()):  # a shared parameter keeps the values of the first layer that has it
            continue
        reset = getattr(layer, "reset_parameters", None)
        if not callable(reset):
            raise StateError(
                f"{name}.{key} ({type(layer).__name__}) was made on the meta device and has no reset_parameters(): "
                "give bind() an init function, which sets its first values."
            )
        whole = {
            entry: torch.nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device=local_tensor(one).device))
            for entry, one in own.items()
        }
        layer._parameters.update(whole)
        try:
            reset()
        finally:
            layer._parameters.update(own)
        for entry, one in own.items():
            if one not in missing:
                continue
            missing.remove(one)
            chunk = chunk_of(f"{name}.{key}.{entry}", one)
            if chunk is not None:
                part = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
                local_tensor(one).copy_(whole[entry].detach()[part])
