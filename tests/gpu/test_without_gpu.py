"""What a machine without a GPU can show of the NCCL path: the choice, the environment, and who calls what."""

from __future__ import annotations

import os

import pytest
import torch

import nbelastic as nbe
from nbelastic.agent.start import _set_up_process
from nbelastic.protocol.settings import NCCL_DEFAULTS, NCCL_ENVIRONMENT
from nbelastic.worker.device import device


def test_a_worker_uses_the_one_gpu_that_it_sees(monkeypatch):
    """It is `cuda:0` in every worker, so the current device and the default generator are right; without a GPU the CPU."""
    assert str(device()) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert str(device()) == "cuda:0"


def test_agents_start_with_nccls_watchdog_out_of_the_way():
    """These are read when torch is imported, so every agent has them before its template starts."""
    assert NCCL_ENVIRONMENT["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert NCCL_ENVIRONMENT["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert NCCL_ENVIRONMENT["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert int(NCCL_ENVIRONMENT["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"]) <= 50  # it holds its lock for four times that


def test_the_users_own_value_wins_only_where_it_is_harmless(monkeypatch, tmp_path):
    """What an abort needs is refused in one line; a default gives way to `env` and to the environment of the host."""
    with pytest.raises(nbe.UsageError, match="TORCH_NCCL_ENABLE_MONITORING=1: nbelastic needs 0"):
        nbe.Cluster("localhost:1", env={"TORCH_NCCL_ENABLE_MONITORING": "1"})
    with pytest.raises(nbe.UsageError, match="NCCL_COMM_BLOCKING=1: nbelastic needs -1"):
        nbe.Cluster("localhost:1", env={"NCCL_COMM_BLOCKING": "1"})
    with pytest.raises(nbe.UsageError, match="TORCH_NCCL_NONBLOCKING_TIMEOUT=60: whole seconds below 30"):
        nbe.Cluster("localhost:1", env={"TORCH_NCCL_NONBLOCKING_TIMEOUT": "60"})
    for name in (*NCCL_ENVIRONMENT, *NCCL_DEFAULTS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_RAS_ENABLE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    environment = {**NCCL_ENVIRONMENT, "NCCL_NVLS_ENABLE": "2"}
    _set_up_process(
        {"defaults": NCCL_DEFAULTS, "environment": environment, "preload": [], "threads": "1", "cwd": "", "path": []}
        | {"run_folder": str(tmp_path / "runs" / "one")}
    )
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == os.environ["TORCH_DIST_USE_NCCL2"] == "0"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    assert (os.environ["NCCL_RAS_ENABLE"], os.environ["NCCL_NVLS_ENABLE"]) == ("1", "2")
