"""The first values of a model that was made on the meta device: those that the whole model would have on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nbelastic.errors import StateError
from nbelastic.sharded.bound import Bound
from nbelastic.sharded.parameters import chunk_of, local_tensor, plain_name
from nbelastic.sharded.transfer import broadcast_bytes
from nbelastic.sharded.whole_draws import WholeDraws

RESETS = ("reset_parameters", "_reset_parameters")  # the second one is MultiheadAttention's


def allocate(model: torch.nn.Module, device: torch.device) -> set[torch.Tensor]:
    """Give parameters and buffers on the meta device memory, and return them.

    Parameters stay the same objects, as an optimizer may have them already. Tensors that have memory keep their values.
    """
    on_meta: set[torch.Tensor] = {parameter for parameter in model.parameters() if parameter.is_meta}
    places = [key for key, buffer in model.named_buffers(remove_duplicate=False) if buffer.is_meta]
    if on_meta or places:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model._apply(lambda one: torch.empty_like(one, device=device) if one.is_meta else one)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
    return on_meta | {model.get_buffer(key) for key in places}


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
        with WholeDraws():
            for name, model in bound.modules.items():
                if init is not None:
                    init(model)
                else:
                    _reset_layers(name, model, allocated[name])


def _reset_layers(name: str, model: torch.nn.Module, allocated: set[torch.Tensor]) -> None:
    """Call `reset_parameters()` of each layer that has some of `allocated`, with whole parameters, one after the other.

    So a layer gets the same values for every world size. Inner layers come first, as when the model is made.
    """
    missing = set(allocated)
    for key, layer in _inner_first(model):
        own = {entry: one for entry, one in layer._parameters.items() if one is not None and one in allocated}
        if missing.isdisjoint(own.values()) and missing.isdisjoint(layer.buffers(recurse=False)):
            continue  # a shared parameter keeps the values of the first layer that has it
        reset = next((found for one in RESETS if callable(found := getattr(layer, one, None))), None)
        if reset is None:
            raise StateError(
                f"{plain_name(f'{name}.{key}' if key else name)} ({type(layer).__name__}) was made on the meta device "
                "and has no reset_parameters(): give bind() an init function, which sets its first values."
            )
        missing.difference_update(layer.buffers(recurse=False))
        whole = {
            entry: torch.nn.Parameter(
                torch.empty(one.shape, dtype=one.dtype, device=local_tensor(one).device), one.requires_grad
            )
            for entry, one in own.items()
        }
        layer._parameters.update(whole)
        try:
            reset()
        finally:
            layer._parameters.update(own)
        for entry, one in own.items():
            chunk = chunk_of(f"{name}.{key}.{entry}", one)
            if one in missing and chunk is not None:
                local_tensor(one).copy_(whole[entry].detach()[chunk.part])
        missing.difference_update(own.values())


def _inner_first(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """All layers by name, each once, after the layers within it: the order of `Module.apply`."""
    seen: set[torch.nn.Module] = set()

    def below(key: str, layer: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
        seen.add(layer)
        for name, child in layer.named_children():
            if child not in seen:
                yield from below(f"{key}.{name}" if key else name, child)
        yield key, layer

    return below("", model)
