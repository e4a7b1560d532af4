"""How busy the host's GPUs are, and how full: NVML's word, in the agent's own process.

NVML is NVIDIA's, and what it says of a GPU it says of all who use it, ours or not. Nothing of it may be in the template
that the workers are forked from, so it is imported and begun with the first sample and nowhere else.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from typing import Any

MB = 1_000_000
Sample = tuple[int, int, int]  # utilisation in percent, MB in use, MB there are


def listed(visible: str | None) -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES, each once, up to the first that is none, as CUDA reads it. None: all GPUs."""
    if visible is None:
        return None
    entries: list[str] = []
    for part in visible.split(","):
        entry = part.strip()
        if not entry.isdecimal() and not entry.startswith(("GPU-", "MIG-")):
            break
        if entry not in entries:
            entries.append(entry)
    return entries


class Gpus:
    """Nothing but a look at a flag where there is no NVML, no driver or no GPU. An index counts as NVML does, by PCI bus."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] | None = None  # None: not begun
        self._reader: threading.Thread | None = None
        self._latest: tuple[Sample, ...] = ()

    def sample(self) -> tuple[Sample, ...]:
        """What was read since the last call, and let it be read again; `()` at first, and while the driver does not answer.

        NVML can take seconds to begin, and for ever when a GPU is in trouble: just then the caller has workers to watch.
        """
        if self._handles == []:
            return ()
        if self._reader is not None and self._reader.is_alive():
            return ()
        latest = self._latest
        self._reader = threading.Thread(target=self._keep, name="nbelastic-gpus", daemon=True)
        self._reader.start()
        return latest

    def read(self) -> tuple[Sample, ...]:
        """For each visible GPU what NVML says now; one that is in trouble is left out. Raises nothing, but may block."""
        if self._handles is None:
            self._nvml, self._handles = _begin()
        nvml, found = self._nvml, []
        for handle in self._handles:
            with contextlib.suppress(nvml.NVMLError):
                found.append(_read(nvml, handle))
        return tuple(found)

    def close(self) -> None:
        """Be done with NVML. One that does not answer is left alone: it ends with the process."""
        nvml, self._handles = self._nvml, []
        if nvml is not None and not (self._reader is not None and self._reader.is_alive()):
            self._nvml = None
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _keep(self) -> None:
        self._latest = self.read()


def _begin() -> tuple[Any, list[Any]]:
    """NVML and the visible GPUs' handles; without any, for whatever reason, there is nothing to sample, and that is all."""
    entries = listed(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if entries == []:
        return None, []
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001  (no library, no driver, or broken ones, which raise what they like)
        return None, []
    handles = []
    for entry in _indices(nvml) if entries is None else entries:
        with contextlib.suppress(nvml.NVMLError):
            handles.append(_handle(nvml, entry))
    return nvml, handles


def _indices(nvml: Any) -> list[str]:
    try:
        return [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []


def _handle(nvml: Any, entry: str) -> Any:
    """Of an index or a UUID, of which CUDA takes the beginning too. NVMLError if there is no such GPU, or it is lost."""
    if entry.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(entry))
    for index in _indices(nvml):
        with contextlib.suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(int(index))
            if nvml.nvmlDeviceGetUUID(handle).startswith(entry):
                return handle
    return nvml.nvmlDeviceGetHandleByUUID(entry)  # of a slice


def _read(nvml: Any, handle: Any) -> Sample:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        busy = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except nvml.NVMLError_NotSupported:  # a slice of a GPU (MIG) does not tell
        busy = 0
    return busy, int(memory.used) // MB, int(memory.total) // MB
