"""What a machine without a GPU can show of the NCCL path: the choice, the environment, and who calls what."""

from __future__ import annotations

import os

import pytest
import torch

import nbelastic as nbe
from nbelastic.agent.start import _set_up_process
from nbelastic.protocol.settings import NCCL_DEFAULTS, NCCL_ENVIRONMENT
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
    assert int(NCCL_ENVIRONMENT["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"]) <= 50  # it holds its lock for four times that


def test_the_users_own_value_wins_only_where_it_is_harmless(monkeypatch):
    """What an abort needs is refused in one line; a default gives way to `env` and to the environment of the host."""
    with pytest.raises(nbe.UsageError, match="TORCH_NCCL_ENABLE_MONITORING=1: nbelastic needs 0"):
        nbe.Cluster("localhost:1", env={"TORCH_NCCL_ENABLE_MONITORING": "1"})
    for name in (*NCCL_ENVIRONMENT, *NCCL_DEFAULTS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_RAS_ENABLE", "1")
    environment = {**NCCL_ENVIRONMENT, "NCCL_NVLS_ENABLE": "2"}
    _set_up_process(
        {"defaults": NCCL_DEFAULTS, "environment": environment, "preload": [], "threads": "1", "cwd": "", "path": []}
    )
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == os.environ["TORCH_DIST_USE_NCCL2"] == "0"
    assert (os.environ["NCCL_RAS_ENABLE"], os.environ["NCCL_NVLS_ENABLE"]) == ("1", "2")
