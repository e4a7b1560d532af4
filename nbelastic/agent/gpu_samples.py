"""The host's GPUs: their ids, health, use, memory and temperature, read with NVML, in the agent's process.

NVML counts the processes of all users. The template, from which workers are forked, must not have loaded it. So it is
imported with the first sample.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from typing import Any

from nbelastic.agent.gpu_health import GpuHealth
from nbelastic.protocol.ids import Gpu
from nbelastic.protocol.status import GpuStatus
from nbelastic.system.gpu_count import parse_visible

MB = 1_000_000


class Gpus:
    """Samples the visible GPUs. Without NVML, its driver or a GPU, samples are empty and cost nothing.

    Indices are NVML's, in the order of the PCI bus.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: dict[str, Any] | None = None  # by id; None: NVML is not loaded yet
        self._health: GpuHealth | None = None
        self.states: tuple[Gpu, ...] = ()  # when they were read last
        self._reader: threading.Thread | None = None
        self._latest: tuple[GpuStatus, ...] = ()

    def sample(self) -> tuple[GpuStatus, ...]:
        """The sample that was read since the last call; begin to read the next one, in a thread.

        `()` at first, and while NVML does not answer: it takes seconds to load, and may hang if a GPU has a fault. The caller
        must not wait for it.
        """
        if self._handles == {}:
            return ()
        if self._reader is not None and self._reader.is_alive():
            return ()
        latest = self._latest
        self._reader = threading.Thread(target=self._read_latest, name="nbelastic-gpus", daemon=True)
        self._reader.start()
        return latest

    def find(self, timeout: float) -> tuple[Gpu, ...]:
        """The visible GPUs; none if NVML does not answer within `timeout` seconds."""
        self.sample()
        if self._reader is not None:
            self._reader.join(timeout)
        return self.states

    def note_ended(self, pid: int, gpu: str) -> None:
        """A worker of this pid has ended that used this GPU."""
        if self._health is not None:
            self._health.note_ended(pid, gpu)

    @property
    def held(self) -> frozenset[str]:
        """The GPUs of which ended workers may still hold memory, when they were read last."""
        return self._health.held if self._health is not None else frozenset()

    @property
    def throttled(self) -> tuple[str, ...]:
        """GPUs that run slower than they could, and why, when they were read last."""
        return self._health.throttled if self._health is not None else ()

    def read(self) -> tuple[GpuStatus, ...]:
        """Read a sample of each visible GPU. Raises nothing, but may block."""
        if self._handles is None:
            self._nvml, self._handles = _load()
        nvml, found = self._nvml, []
        for gpu, handle in self._handles.items():
            try:
                found.append(_read(nvml, gpu, handle))
            except nvml.NVMLError:
                found.append(GpuStatus(gpu))
        return tuple(found)

    def close(self) -> None:
        """Shut NVML down, unless it does not answer: then it ends with the process."""
        nvml, self._handles = self._nvml, {}
        if nvml is not None and not (self._reader is not None and self._reader.is_alive()):
            self._nvml = None
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _read_latest(self) -> None:
        latest = self.read()
        if self._health is None and self._handles:
            self._health = GpuHealth(self._nvml, self._handles)
        if self._health is not None:
            self.states = self._health.read()
        self._latest = latest


def _load() -> tuple[Any, dict[str, Any]]:
    """Load NVML. Returns it with the handles of the visible GPUs, by id; no handles if it does not work here."""
    entries = parse_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if entries == []:
        return None, {}
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001  (no library, no driver, or broken ones, which may raise anything)
        return None, {}
    handles: dict[str, Any] = {}
    for entry in _indices(nvml) if entries is None else entries:
        with contextlib.suppress(nvml.NVMLError):
            handle = _handle(nvml, entry)
            slices = [] if entry.startswith("MIG-") else _slices(nvml, handle)
            for one in slices or [handle]:
                handles.setdefault(_id(nvml, one, entry), one)
    return nvml, handles


def _slices(nvml: Any, handle: Any) -> list[Any]:
    """The slices of a GPU that is divided (MIG), as CUDA uses only these. Empty if it is whole."""
    slices: list[Any] = []
    with contextlib.suppress(nvml.NVMLError, AttributeError):  # this GPU, or this library, has no slices
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return []
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(nvml.NVMLError):
                slices.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
    return slices


def _id(nvml: Any, handle: Any, entry: str) -> str:
    """Its UUID; if NVML does not tell it, what the user has written."""
    with contextlib.suppress(nvml.NVMLError):
        return str(nvml.nvmlDeviceGetUUID(handle))
    return entry


def _indices(nvml: Any) -> list[str]:
    try:
        return [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []


def _handle(nvml: Any, entry: str) -> Any:
    """The handle of an index, a UUID, or the beginning of one, as CUDA allows. NVMLError if the GPU is unknown or lost."""
    if entry.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(entry))
    for index in _indices(nvml):
        with contextlib.suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(int(index))
            if nvml.nvmlDeviceGetUUID(handle).startswith(entry):
                return handle
    return nvml.nvmlDeviceGetHandleByUUID(entry)  # of a slice of a GPU (MIG)


def _read(nvml: Any, gpu: str, handle: Any) -> GpuStatus:
    memory, busy, temperature = nvml.nvmlDeviceGetMemoryInfo(handle), None, None
    with contextlib.suppress(nvml.NVMLError_NotSupported):  # NVML has no utilisation of a slice
        busy = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    with contextlib.suppress(nvml.NVMLError, AttributeError):  # nor its temperature; a GPU that is lost raises above
        temperature = int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    return GpuStatus(gpu, busy, int(memory.used) // MB, int(memory.total) // MB, temperature)
