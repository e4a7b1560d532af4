"""What the agent says of its host's GPUs: NVML's word, and silence where there is none."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from nbelastic.agent.gpus import Gpus, listed


class NVMLError(Exception):
    pass


class NVMLErrorNotSupported(NVMLError):
    pass


class FakeNvml:
    """A machine with GPUs of 80 GB; the numbers in `lost` have fallen off the bus, `slices` are known by UUID alone."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLErrorNotSupported

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
        return f"GPU-{handle}{handle}{handle}-cafe"

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


FIRST, SECOND = (90, 10_000, 80_000), (91, 20_000, 80_000)


@pytest.fixture
def machine(monkeypatch):
    """`machine(gpus=2, …)` is this machine from now on, and CUDA_VISIBLE_DEVICES is not set."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def become(*args, **kwargs):
        fake = FakeNvml(*args, **kwargs)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return become


def test_each_gpu_tells_how_busy_and_how_full_it_is(machine):
    """Percent, MB in use, MB there are; NVML is begun once and ended once."""
    fake, gpus = machine(), Gpus()
    assert gpus.read() == (FIRST, SECOND)
    assert gpus.read() == (FIRST, SECOND)
    gpus.close()
    gpus.close()
    assert (fake.begun, fake.ended) == (1, 1)
    assert gpus.sample() == ()


def test_a_gpu_that_falls_off_the_bus_takes_no_other_with_it(machine):
    fake, gpus = machine(), Gpus()
    assert gpus.read() == (FIRST, SECOND)
    fake.lost.add(0)
    assert gpus.read() == (SECOND,)
    fake.lost.add(1)
    assert gpus.read() == ()
    fake.lost.clear()
    assert gpus.read() == (FIRST, SECOND)


@pytest.mark.parametrize("nothing", [{"gpus": 0}, {"driver": False}])
def test_without_a_gpu_or_a_driver_there_is_nothing_and_it_is_asked_for_once(machine, nothing):
    fake, gpus = machine(**nothing), Gpus()
    gpus.sample()
    gpus._reader.join()
    reader = gpus._reader
    assert gpus.sample() == gpus.sample() == gpus.read() == ()
    assert gpus._reader is reader, "no thread is started for nothing"
    assert fake.begun == 1
    gpus.close()


def test_without_the_library_there_is_nothing(machine, monkeypatch):
    """And it is looked for once: what comes later is not found."""
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
        ("MIG-a,0", ((0, 5_000, 80_000), FIRST)),
    ],
)
def test_only_visible_gpus_are_told_of(machine, monkeypatch, visible, found):
    """By index or by UUID, or its beginning, in the order of CUDA_VISIBLE_DEVICES."""
    machine(slices=("MIG-a",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Gpus().read() == found


@pytest.mark.parametrize("visible", ["", " ", "-1", "NoDevFiles"])
def test_where_no_gpu_is_visible_nvml_is_left_alone(machine, monkeypatch, visible):
    fake = machine()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Gpus().read() == ()
    assert fake.begun == 0


def test_a_lost_gpu_does_not_hide_one_that_is_named_by_its_uuid(machine, monkeypatch):
    machine(lost=[0])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-111-cafe")
    assert Gpus().read() == (SECOND,)


def test_all_gpus_are_visible_unless_something_is_said():
    assert listed(None) is None
    assert listed("") == []
    assert listed("2,GPU-5,2") == ["2", "GPU-5"]


def test_who_samples_never_waits_for_nvml(machine):
    """NVML may take seconds to begin, and for ever when a GPU is in trouble; the caller has workers to watch."""
    fake, gpus = machine(), Gpus()
    answers = threading.Event()
    fake.nvmlInit = answers.wait
    assert gpus.sample() == gpus.sample() == ()
    gpus.close()
    assert fake.ended == 0, "one that does not answer is left alone"
    answers.set()
    gpus._reader.join()


def test_a_sample_is_what_was_read_since_the_one_before(machine):
    fake, gpus = machine(), Gpus()
    assert gpus.sample() == ()
    gpus._reader.join()
    fake.lost.add(1)
    assert gpus.sample() == (FIRST, SECOND)
    gpus._reader.join()
    assert gpus.sample() == (FIRST,)
    gpus._reader.join()
    gpus.close()
    assert fake.ended == 1


def test_an_agent_imports_no_nvml_before_its_first_sample():
    """What has it cannot be forked; and a host without a GPU shall not pay for it."""
    code = "import sys, nbelastic.agent.agent; sys.exit('pynvml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
