"""Which device and which back end of torch.distributed a worker uses."""

from __future__ import annotations

import torch


def device(slot: int) -> torch.device:
    """The device of a slot: its GPU for the life of the process, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", slot % torch.cuda.device_count())
    return torch.device("cpu")


def backend_for(choice: str, slots: int) -> str:
    """`nccl` if each of the host's `slots` has a GPU, else `gloo`. ValueError if NCCL was chosen and cannot be."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "nccl" and gpus < slots:
        raise ValueError(
            f"backend nccl needs one GPU per slot: this host has {gpus} for {slots} slots; use gloo or auto."
        )
    if choice == "gloo" or gpus < slots or gpus == 0:
        return "gloo"
    return "nccl"
