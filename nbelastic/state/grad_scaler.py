"""What a commit records of a GradScaler, without waiting for the GPU: its `state_dict()` reads numbers from there."""

from __future__ import annotations

from typing import Any

import torch

SETTINGS = ("_init_scale", "_init_growth_tracker", "_growth_factor", "_backoff_factor", "_growth_interval")
TENSORS = ("_scale", "_growth_tracker")  # None until the first use


def is_grad_scaler(value: Any) -> bool:
    """Whether it is torch's GradScaler, enabled, with the attributes that torch 2.11 to 2.15 give it."""
    return isinstance(value, torch.amp.GradScaler) and all(
        hasattr(value, name) for name in ("_enabled", *SETTINGS, *TENSORS)
    )


def forget_step(optimizer: torch.optim.Optimizer) -> None:
    """An abort in the hook of a fused optimizer leaves what the scaler gives it for one step: the next one would scale twice."""
    for name in ("grad_scale", "found_inf"):
        optimizer.__dict__.pop(name, None)


class RecordedScaler:
    """The state of `scaler` as it is now."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._settings = {name: getattr(scaler, name) for name in SETTINGS}
        present = {name: getattr(scaler, name) for name in TENSORS}
        self._tensors = {name: None if one is None else one.clone() for name, one in present.items()}

    def restore(self) -> None:
        """Set it again. A step that an abort has ended must not look as if its gradients were unscaled already."""
        for name, value in self._settings.items():
            setattr(self._scaler, name, value)
        for name, value in self._tensors.items():
            present = getattr(self._scaler, name)
            if value is not None and present is not None:
                present.copy_(value)
            else:
                setattr(self._scaler, name, None if value is None else value.clone())
        self._scaler._per_optimizer_states.clear()
