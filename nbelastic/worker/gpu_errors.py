"""Whether an exception means that this process cannot use its GPU any more.

The idea of the check is that of NVIDIA's resiliency extension: an error that stays is seen by the next synchronisations.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait

from nbelastic.worker.threads import run_in_thread

TIMEOUT = 10.0  # seconds for the synchronisations; a GPU with a fault may not answer
TEXTS = ("cuda error", "cuda driver error", "triton error [cuda]", "cudnn error", "cudnn_status_")
ASSERT = "device-side assert triggered"  # what the program itself has asserted in a kernel, for example an index out of range


def is_gpu_error(error: BaseException) -> bool:
    """Whether torch, or Triton, raised this because of the GPU. Too little memory is not meant: the GPU works on."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(one in text for one in TEXTS) and "out of memory" not in text


def is_gpu_lost(synchronize: Callable[[], object]) -> bool:
    """Whether the GPU fails, or does not answer, when this process waits for it twice."""

    def check() -> None:
        synchronize()
        synchronize()

    checking = run_in_thread(check)
    return not wait((checking,), TIMEOUT).done or checking.exception() is not None
