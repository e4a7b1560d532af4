"""A stand-in for NVML's Python module, for machines without a GPU.

Put this folder first on `sys.path` before a cluster of this machine starts: its agents then import this module. In a process
without the variable FAKE_NVML it is the module that it hides, if there is one. The variable names a JSON file, which is read
again at each call, so a test can change it while a cluster runs:

    {"gpus": [{"uuid": "GPU-a", "memory": [1000000000, 80000000000], "busy": 50, "pids": [4711], "ecc": 0, "pending": false,
               "throttle": 0, "heat": 71, "lost": false, "xids": [79], "mig": ["MIG-1", "MIG-2"]}]}

Every key but `uuid` may be left out. Without the file there is no driver. An Xid is reported once.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

nvmlEventTypeXidCriticalError = 8
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NVML_TEMPERATURE_GPU = 0

_reported: dict[str, int] = {}  # how many Xids of each GPU were read


def _be_the_hidden_one() -> None:
    """Replace this module by the one of its name that other folders of `sys.path` have."""
    here = os.path.dirname(__file__)
    spec = PathFinder.find_spec(__name__, [folder for folder in sys.path if folder != here])
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
    sys.modules[__name__] = module_from_spec(spec)  # what `import` returns
    spec.loader.exec_module(sys.modules[__name__])


if "FAKE_NVML" not in os.environ:
    _be_the_hidden_one()


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_Timeout(NVMLError):
    pass


def _gpus() -> list[dict[str, Any]]:
    try:
        return list(json.loads(Path(os.environ["FAKE_NVML"]).read_text())["gpus"])
    except (KeyError, OSError):
        raise NVMLError("Driver Not Loaded") from None


def _gpu(handle: Any) -> dict[str, Any]:
    """Of a handle: a GPU's uuid, or a slice's."""
    for gpu in _gpus():
        if handle == gpu["uuid"] or handle in gpu.get("mig", ()):
            if gpu.get("lost"):
                raise NVMLError("GPU is lost")
            return gpu
    raise NVMLError("Not Found")


def nvmlInit() -> None:
    _gpus()


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index: int) -> str:
    gpus = _gpus()
    if index >= len(gpus):
        raise NVMLError("Invalid Argument")
    return str(gpus[index]["uuid"])


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
    _gpu(uuid)
    return uuid


def nvmlDeviceGetUUID(handle: str) -> str:
    return handle


def nvmlDeviceGetMigMode(handle: str) -> list[int]:
    has_slices = int("mig" in _gpu(handle))
    return [has_slices, has_slices]


def nvmlDeviceGetMaxMigDeviceCount(handle: str) -> int:
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(handle: str, index: int) -> str:
    slices = _gpu(handle).get("mig", [])
    if index >= len(slices):
        raise NVMLError("Not Found")
    return str(slices[index])


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle: str) -> str:
    return str(_gpu(handle)["uuid"])


def nvmlDeviceGetMemoryInfo(handle: str) -> SimpleNamespace:
    used, total = _gpu(handle).get("memory", [1_000_000_000, 80_000_000_000])
    return SimpleNamespace(used=used, total=total)


def nvmlDeviceGetUtilizationRates(handle: str) -> SimpleNamespace:
    if handle.startswith("MIG-"):
        raise NVMLError_NotSupported("Not Supported")
    return SimpleNamespace(gpu=_gpu(handle).get("busy", 0))


def nvmlDeviceGetTemperature(handle: str, sensor: int) -> int:
    if handle.startswith("MIG-"):
        raise NVMLError_NotSupported("Not Supported")
    return int(_gpu(handle).get("heat", 40))


def nvmlDeviceGetTotalEccErrors(handle: str, kind: int, counter: int) -> int:
    return int(_gpu(handle).get("ecc", 0))


def nvmlDeviceGetRemappedRows(handle: str) -> tuple[int, int, int, int]:
    return 0, 0, int(_gpu(handle).get("pending", False)), 0


def nvmlDeviceGetRetiredPagesPendingStatus(handle: str) -> int:
    raise NVMLError_NotSupported("Not Supported")


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: str) -> int:
    return int(_gpu(handle).get("throttle", 0))


def nvmlDeviceGetComputeRunningProcesses(handle: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid) for pid in _gpu(handle).get("pids", [])]


def nvmlEventSetCreate() -> list[str]:
    return []


def nvmlDeviceRegisterEvents(handle: str, kinds: int, events: list[str]) -> None:
    events.append(handle)


def nvmlEventSetFree(events: list[str]) -> None:
    pass


def nvmlEventSetWait_v2(events: list[str], timeout: int) -> SimpleNamespace:
    for gpu in _gpus():
        xids, read = gpu.get("xids", []), _reported.get(gpu["uuid"], 0)
        if gpu["uuid"] in events and len(xids) > read:
            _reported[gpu["uuid"]] = read + 1
            return SimpleNamespace(device=gpu["uuid"], eventData=xids[read])
    raise NVMLError_Timeout("Timeout")
