"""The health of GPUs, read from a fake NVML: see tests/support/fake_nvml."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from nbelastic.agent import gpu_health
from nbelastic.agent.gpu_samples import Gpus
from nbelastic.protocol.ids import Gpu

FAKE = Path(__file__).parents[1] / "support" / "fake_nvml" / "pynvml.py"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """`machine(uuid="GPU-a", …)` gives this machine one GPU, or changes it."""
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "gpus.json"))
    spec = importlib.util.spec_from_file_location("pynvml", FAKE)
    fake = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fake)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def become(**gpu):
        (tmp_path / "gpus.json").write_text(json.dumps({"gpus": [{"uuid": "GPU-a", **gpu}]}))

    return become


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ({"ecc": 3}, {"ecc": 3}, ""),  # errors of an earlier time
        ({"ecc": 3}, {"ecc": 5}, "2 uncorrected memory errors (ECC)"),
        ({}, {"pending": True}, "rows of its memory have to be remapped: it needs a reset"),
        ({}, {"xids": [13, 79, 31]}, "NVML has reported Xid 79"),
        ({}, {"xids": [13, 43]}, ""),  # a program has caused these
        ({}, {"lost": True}, "NVML reports: GPU is lost"),
    ],
)
def test_a_fault_is_a_problem(machine, before, after, problem):
    """A GPU with a fault has a problem in words; what a program has caused is none."""
    machine(**before)
    gpus = Gpus()
    assert gpus.find(10) == (Gpu("GPU-a"),)
    machine(**after)
    assert gpus.find(10) == (Gpu("GPU-a", problem),)
    gpus.close()


def test_a_gpu_without_memory_of_its_own_has_no_fault(machine, monkeypatch):
    """NVML reports no memory of a GPU that has the host's, such as a GB10."""
    machine()
    nvml = sys.modules["pynvml"]

    def refuse(_):
        raise nvml.NVMLError_NotSupported("Not Supported")

    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", refuse)
    gpus = Gpus()
    assert gpus.find(10) == (Gpu("GPU-a"),)
    gpus.close()


def test_throttling_is_shown_and_is_no_problem(machine):
    machine(throttle=0x40 | 0x20 | 0x04)
    gpus = Gpus()
    assert gpus.find(10) == (Gpu("GPU-a"),)
    assert gpus.throttled == ("GPU GPU-a: heat, power limit",)


def test_a_visible_slice_is_the_only_gpu(machine, monkeypatch):
    """The user names one slice of a divided GPU: the others are not his."""
    machine(mig=["MIG-1", "MIG-2"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2")
    assert Gpus().find(10) == (Gpu("MIG-2"),)


def test_slices_of_a_divided_gpu_are_its_gpus(machine):
    """CUDA uses only the slices (MIG); a fault of the whole GPU is one of each slice."""
    machine(mig=["MIG-1", "MIG-2"])
    gpus = Gpus()
    assert gpus.find(10) == (Gpu("MIG-1"), Gpu("MIG-2"))
    machine(mig=["MIG-1", "MIG-2"], xids=[79])
    assert {gpu.problem for gpu in gpus.find(10)} == {"NVML has reported Xid 79"}
    gpus.close()


def test_memory_of_an_ended_worker(machine, monkeypatch):
    """A GPU is held until NVML no longer lists the ended worker's pid. If that lasts, it is a problem."""
    machine(pids=[4711, 5])
    gpus = Gpus()
    gpus.find(10)
    gpus.note_ended(4711, "GPU-a")
    gpus.note_ended(4712, "GPU-a")
    assert (gpus.find(10), gpus.held) == ((Gpu("GPU-a"),), {"GPU-a"})
    monkeypatch.setattr(gpu_health, "HELD", -1.0)
    assert gpus.find(10) == (Gpu("GPU-a", "process 4711, which has ended, still holds its memory"),)
    machine(pids=[5])
    assert (gpus.find(10), gpus.held) == ((Gpu("GPU-a"),), frozenset())
    gpus.close()
