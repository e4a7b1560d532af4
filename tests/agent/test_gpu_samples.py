"""Samples of GPUs: what NVML reports, and nothing without NVML or GPUs."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from nbelastic.agent.gpu_samples import Gpus
from nbelastic.protocol.status import GpuStatus
from nbelastic.system.gpu_count import parse_visible


class NVMLError(Exception):
    pass


class NVMLErrorNotSupported(NVMLError):
    pass


class FakeNvml:
    """A machine with GPUs of 80 GB. GPUs in `lost` have fallen off the bus; `slices` have only a UUID."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLErrorNotSupported
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, gpus=2, *, driver=True, lost=(), slices=()):
        self.gpus, self.driver, self.lost, self.slices = gpus, driver, set(lost), slices
        self.begun = self.ended = 0

    def nvmlInit(self):
        self.begun += 1
        if not self.driver:
            raise NVMLError("Driver Not Loaded")

    def nvmlShutdown(self):
        self.ended += 1

    def nvmlDeviceGetCount(self):
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index):
        if index >= self.gpus:
            raise NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetUUID(self, handle):
        if handle in self.lost:
            raise NVMLError("GPU is lost")
        return handle if handle in self.slices else f"GPU-{handle}{handle}{handle}-cafe"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.slices:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle):
        if handle in self.lost:
            raise NVMLError("GPU is lost")
        used = 5_000_000_000 if handle in self.slices else (handle + 1) * 10_000_000_000
        return SimpleNamespace(used=used, total=80_000_000_000)

    def nvmlDeviceGetUtilizationRates(self, handle):
        if handle in self.slices:
            raise NVMLErrorNotSupported("Not Supported")
        return SimpleNamespace(gpu=90 + handle)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        if handle in self.slices:
            raise NVMLErrorNotSupported("Not Supported")
        return 70 + handle


FIRST = GpuStatus("GPU-000-cafe", 90, 10_000, 80_000, 70)
SECOND = GpuStatus("GPU-111-cafe", 91, 20_000, 80_000, 71)


@pytest.fixture
def machine(monkeypatch):
    """`machine(gpus=2, …)` makes this machine have that NVML; CUDA_VISIBLE_DEVICES is not set."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def become(*args, **kwargs):
        fake = FakeNvml(*args, **kwargs)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return become


def test_a_sample_has_use_memory_and_temperature_of_each_gpu(machine):
    """Percent, MB in use, MB in total, °C. NVML is loaded once and shut down once."""
    fake, gpus = machine(), Gpus()
    assert gpus.read() == (FIRST, SECOND)
    assert gpus.read() == (FIRST, SECOND)
    gpus.close()
    gpus.close()
    assert (fake.begun, fake.ended) == (1, 1)
    assert gpus.sample() == ()


def test_a_lost_gpu_does_not_affect_the_others(machine):
    """It keeps its place, so that the others keep their numbers."""
    fake, gpus = machine(), Gpus()
    assert gpus.read() == (FIRST, SECOND)
    fake.lost.add(0)
    assert gpus.read() == (GpuStatus("GPU-000-cafe"), SECOND)
    fake.lost.add(1)
    assert gpus.read() == (GpuStatus("GPU-000-cafe"), GpuStatus("GPU-111-cafe"))
    fake.lost.clear()
    assert gpus.read() == (FIRST, SECOND)


@pytest.mark.parametrize("nothing", [{"gpus": 0}, {"driver": False}])
def test_without_a_gpu_or_a_driver_samples_are_empty_and_nvml_is_tried_once(machine, nothing):
    fake, gpus = machine(**nothing), Gpus()
    gpus.sample()
    gpus._reader.join()
    reader = gpus._reader
    assert gpus.sample() == gpus.sample() == gpus.read() == ()
    assert gpus._reader is reader, "no further thread is started"
    assert fake.begun == 1
    gpus.close()


def test_without_the_library_samples_are_empty(machine, monkeypatch):
    """Without the library samples are empty; its import is tried once."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpus = Gpus()
    assert gpus.read() == ()
    fake = machine()
    assert gpus.read() == gpus.sample() == ()
    assert fake.begun == 0
    gpus.close()


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("0", (FIRST,)),
        ("1,0", (SECOND, FIRST)),
        (" 1 , 1", (SECOND,)),
        ("0,7", (FIRST,)),
        ("1,-1,0", (SECOND,)),
        ("GPU-111-cafe", (SECOND,)),
        ("GPU-1,GPU-0", (SECOND, FIRST)),
        ("GPU-feed,0", (FIRST,)),
        ("MIG-a,0", (GpuStatus("MIG-a", None, 5_000, 80_000), FIRST)),
    ],
)
def test_only_visible_gpus_are_sampled(machine, monkeypatch, visible, found):
    """Visible GPUs are sampled in the order of CUDA_VISIBLE_DEVICES, by index, UUID or the UUID's beginning."""
    machine(slices=("MIG-a",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Gpus().read() == found


@pytest.mark.parametrize("visible", ["", " ", "-1", "NoDevFiles"])
def test_without_a_visible_gpu_nvml_is_not_loaded(machine, monkeypatch, visible):
    fake = machine()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Gpus().read() == ()
    assert fake.begun == 0


def test_a_lost_gpu_does_not_hide_one_with_a_visible_uuid(machine, monkeypatch):
    machine(lost=[0])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-111-cafe")
    assert Gpus().read() == (SECOND,)


def test_without_the_variable_all_gpus_are_visible():
    assert parse_visible(None) is None
    assert parse_visible("") == []
    assert parse_visible("2,GPU-5,2") == ["2", "GPU-5"]


def test_sample_never_waits_for_nvml(machine):
    """A sample never waits for NVML, which may take seconds or hang: the agent has workers to watch."""
    fake, gpus = machine(), Gpus()
    answers = threading.Event()
    fake.nvmlInit = answers.wait
    assert gpus.sample() == gpus.sample() == ()
    gpus.close()
    assert fake.ended == 0, "an NVML that does not answer is not shut down"
    answers.set()
    gpus._reader.join()


def test_a_sample_was_read_since_the_last_call(machine):
    fake, gpus = machine(), Gpus()
    assert gpus.sample() == ()
    gpus._reader.join()
    fake.lost.add(1)
    assert gpus.sample() == (FIRST, SECOND)
    gpus._reader.join()
    assert gpus.sample() == (FIRST, GpuStatus("GPU-111-cafe"))
    gpus._reader.join()
    gpus.close()
    assert fake.ended == 1


def test_an_agent_imports_no_nvml_before_its_first_sample():
    """An agent imports NVML only for a sample: a process that has loaded it must not be forked."""
    code = "import sys, nbelastic.agent.agent; sys.exit('pynvml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
