"""What a machine without a GPU can show of the NCCL path: the choice, the environment, and who calls what."""

from __future__ import annotations

import pytest
import torch

from nbelastic.protocol.settings import NCCL_ENVIRONMENT
from nbelastic.worker import process_group as rendezvous
from nbelastic.worker.device import backend_for
from nbelastic.worker.process_group import Group
from nbelastic.worker.sockets import Connections


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
        ("auto", 2, 2, "cpu:gloo,cuda:nccl"),
        ("auto", 1, 2, "gloo"),
        ("gloo", 2, 2, "gloo"),
        ("nccl", 2, 2, "cpu:gloo,cuda:nccl"),
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


def test_an_nccl_abort_sets_the_device_first_and_runs_once(monkeypatch):
    """In a thread of its own (it may wait for the group's time-out), on the worker's GPU, however often it is asked."""
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(str(device)))
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_abort_process_group", lambda: calls.append("abort"))
    threads = []
    start = rendezvous.threading.Thread.start
    monkeypatch.setattr(rendezvous.threading.Thread, "start", lambda thread: (threads.append(thread), start(thread)))
    group = Group(1, torch.device("cuda", 3), "cpu:gloo,cuda:nccl")
    group._connections, group._default = Connections(), {}
    group.abort()
    group.abort()
    for thread in threads:
        thread.join()
    assert calls == ["cuda:3", "abort"]
