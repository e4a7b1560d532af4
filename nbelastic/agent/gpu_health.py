"""Whether GPUs can be used: what NVML reports of their faults, and of memory that an ended worker still holds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from nbelastic.protocol.ids import Gpu

HELD = 5.0  # seconds in which the driver should free the memory of an ended process
# Xids that a program causes, or that the driver has dealt with (63, 94). NVIDIA's device plugin for Kubernetes ignores
# most of these too. Any other one means that the GPU needs a reset.
HARMLESS_XIDS = frozenset({13, 31, 43, 45, 63, 68, 94, 109})
THROTTLED = {0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake", 0x04: "power limit"}


class GpuHealth:
    """Reads the health of these handles, by id. All methods but `note_ended` may block: call them in one thread."""

    def __init__(self, nvml: Any, handles: Mapping[str, Any]) -> None:
        self._nvml, self._handles = nvml, handles
        self._ignored = (nvml.NVMLError, AttributeError)  # not supported by this GPU, or not known to this library
        self._xids: dict[str, int] = {}  # the first one of each GPU that means a fault
        self._memory_errors: dict[str, int] = {}  # how many there were at first
        self._ended: dict[int, tuple[str, float]] = {}  # the GPU of each ended worker that may hold it, and since when
        self.throttled: tuple[str, ...] = ()  # GPUs that run slower than they could, and why
        self._events: Any = None
        with contextlib.suppress(*self._ignored):
            self._events = nvml.nvmlEventSetCreate()
        for handle in handles.values():
            with contextlib.suppress(*self._ignored):
                nvml.nvmlDeviceRegisterEvents(self._whole(handle), nvml.nvmlEventTypeXidCriticalError, self._events)

    def note_ended(self, pid: int, gpu: str) -> None:
        """A worker of this pid has ended that used this GPU."""
        self._ended[pid] = gpu, time.monotonic()

    @property
    def held(self) -> frozenset[str]:
        """The GPUs of which ended workers may still hold memory."""
        return frozenset(gpu for gpu, _ in list(self._ended.values()))

    def read(self) -> tuple[Gpu, ...]:
        """The present health of each GPU."""
        self._read_xids()
        slow = {gpu: self._throttled(handle) for gpu, handle in self._handles.items()}
        self.throttled = tuple(f"GPU {gpu}: {why}" for gpu, why in slow.items() if why)
        return tuple(Gpu(gpu, self._problem(gpu, handle)) for gpu, handle in self._handles.items())

    def _problem(self, gpu: str, handle: Any) -> str:
        nvml, whole = self._nvml, self._whole(handle)
        try:
            nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError_NotSupported:  # a GPU that has the host's memory, such as a GB10
            pass
        except nvml.NVMLError as error:
            return f"NVML reports: {error}"
        held = self._held_by(gpu, handle)
        if gpu in self._xids:
            return f"NVML has reported Xid {self._xids[gpu]}"
        with contextlib.suppress(*self._ignored):
            errors = int(
                nvml.nvmlDeviceGetTotalEccErrors(whole, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
            )
            new = errors - self._memory_errors.setdefault(gpu, errors)
            if new > 0:
                return f"{new} uncorrected memory errors (ECC)"
        with contextlib.suppress(*self._ignored):
            if any(nvml.nvmlDeviceGetRemappedRows(whole)[2:]):
                return "rows of its memory have to be remapped: it needs a reset"
        with contextlib.suppress(*self._ignored):
            if nvml.nvmlDeviceGetRetiredPagesPendingStatus(whole):
                return "pages of its memory have to be retired: it needs a reset"
        return f"process {held}, which has ended, still holds its memory" if held else ""

    def _held_by(self, gpu: str, handle: Any) -> int:
        """The pid of an ended worker that holds the GPU for longer than HELD; 0 if there is none. Forget those that do not."""
        ours = {pid: since for pid, (name, since) in list(self._ended.items()) if name == gpu}
        if not ours:
            return 0
        listed: set[int] = set()
        with contextlib.suppress(*self._ignored):
            listed = {int(process.pid) for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        for pid in ours.keys() - listed:
            del self._ended[pid]
        return next((pid for pid in ours.keys() & listed if time.monotonic() - ours[pid] > HELD), 0)

    def _throttled(self, handle: Any) -> str:
        with contextlib.suppress(*self._ignored):
            reasons = int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._whole(handle)))
            return ", ".join(dict.fromkeys(text for bit, text in THROTTLED.items() if reasons & bit))
        return ""

    def _read_xids(self) -> None:
        with contextlib.suppress(*self._ignored):  # a time-out: there is no further event
            while self._events is not None:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                if int(event.eventData) in HARMLESS_XIDS:
                    continue
                uuid = self._nvml.nvmlDeviceGetUUID(event.device)
                for gpu, handle in self._handles.items():
                    if self._nvml.nvmlDeviceGetUUID(self._whole(handle)) == uuid:
                        self._xids.setdefault(gpu, int(event.eventData))

    def _whole(self, handle: Any) -> Any:
        """The whole GPU of a slice (MIG); faults are of the whole."""
        with contextlib.suppress(*self._ignored):
            return self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        return handle
