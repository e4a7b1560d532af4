"""The first lines of every run: on what it ran."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nbelastic.agent.gpu_samples import parse_visible
from tests.gpu.bench import Bench

ROOT = Path(__file__).parents[2]
VARIABLES = ("CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "GLOO_", "OMP_", "NVIDIA_", "LD_PRELOAD", "LD_LIBRARY_PATH")
NVLINKS = 18  # of one GPU, at most


def report(bench: Bench) -> None:
    """Write one line each for versions, GPUs, links and variables."""
    import torch

    results = bench.results
    versions = {
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl_version())),
        "system": platform.platform(),
        "cores": os.cpu_count(),
    }
    for name, value in versions.items():
        results.line(name, value=value)
    results.line(
        "variables", value={name: os.environ[name] for name in sorted(os.environ) if name.startswith(VARIABLES)}
    )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    results.line("gpus", value=count)
    if not count:
        return
    for name, value in _nvml():
        results.line(name, value=value)
    for number in range(count):
        found = torch.cuda.get_device_properties(number)
        text = f"{found.name}, {found.total_memory >> 20} MiB, {found.major}.{found.minor}"
        results.line(f"gpu {number}", value=text, uuid=str(getattr(found, "uuid", "")))
    if count > 1:
        peers = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
        results.line("peer access", value=peers)


def nccl_version() -> tuple[int, ...]:
    """Of the library that is loaded, also if LD_PRELOAD has replaced torch's; () without one."""
    import torch

    if not torch.distributed.is_nccl_available():
        return ()
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return tuple(torch.cuda.nccl.version())
    code = number.value
    return (code // 10_000, code // 100 % 100, code % 100)


def _commit() -> str:
    """What the variable COMMIT says, for a copy whose git does not know; else that of the checkout."""
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _nvml() -> Iterator[tuple[str, Any]]:
    """What the driver says of each GPU. A question that a driver or a slice of a GPU does not know has no answer."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:
        yield "nvml", f"{type(error).__name__}: {error}"
        return

    def ask(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            answer = question(*arguments)
        except nvml.NVMLError as error:
            return str(error)
        return answer.decode() if isinstance(answer, bytes) else answer

    yield "driver", ask(nvml.nvmlSystemGetDriverVersion)
    yield "visible", parse_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    for number in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(number)
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, gpu)
        links = [ask(nvml.nvmlDeviceGetNvLinkState, gpu, link) for link in range(NVLINKS)]
        yield (
            f"nvml gpu {number}",
            {
                "name": ask(nvml.nvmlDeviceGetName, gpu),
                "uuid": ask(nvml.nvmlDeviceGetUUID, gpu),
                "mig": ask(nvml.nvmlDeviceGetMigMode, gpu),
                "ecc": ask(nvml.nvmlDeviceGetEccMode, gpu),
                "uncorrected errors": ask(nvml.nvmlDeviceGetTotalEccErrors, gpu, 1, 0),
                "throttled": ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu),
                "compute mode": ask(nvml.nvmlDeviceGetComputeMode, gpu),
                "MiB in use": memory if isinstance(memory, str) else memory.used >> 20,
                "nvlinks": sum(state == 1 for state in links),
            },
        )
