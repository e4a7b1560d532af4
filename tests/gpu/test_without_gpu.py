"""What a machine without a GPU can show of the NCCL path: the choice, the environment, and who calls what."""

from __future__ import annotations

import pytest
import torch

from nbelastic.protocol.settings import NCCL_ENVIRONMENT
from nbelastic.worker.device import backend_for


@pytest.fixture
def gpus(monkeypatch):
    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


@pytest.mark.parametrize(
    ("choice", "count", "slots", "backend"),
    [
        ("auto", 0, 4, "gloo"),
        ("auto", 2, 2, "nccl"),
        ("auto", 1, 2, "gloo"),
        ("gloo", 2, 2, "gloo"),
        ("nccl", 2, 2, "nccl"),
    ],
)
def test_the_back_end_follows_the_gpus(gpus, choice, count, slots, backend):
    """NCCL where every slot has a GPU of its own; gloo everywhere else, and where it was asked for."""
    gpus(count)
    assert backend_for(choice, slots) == backend


def test_nccl_without_enough_gpus_is_refused_with_both_numbers(gpus):
    """Two workers cannot share a GPU over NCCL: the error says what there is and what to do."""
    gpus(1)
    with pytest.raises(ValueError, match="1 for 2 slots; use gloo or auto"):
        backend_for("nccl", 2)


def test_agents_start_with_nccls_watchdog_out_of_the_way():
    """These are read when torch is imported, so every agent has them before its template starts."""
    assert NCCL_ENVIRONMENT["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert NCCL_ENVIRONMENT["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert NCCL_ENVIRONMENT["TORCH_NCCL_ENABLE_MONITORING"] == "0"
