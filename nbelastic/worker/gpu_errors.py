"""Whether an exception means that this process cannot use its GPU any more.

The idea of the check is that of NVIDIA's resiliency extension: an error that stays is seen by the next synchronisations.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait

from nbelastic.worker.error_text import chain, text_of
from nbelastic.worker.threads import run_in_thread

TIMEOUT = 10.0  # seconds for the synchronisations; a GPU with a fault may not answer
# Without spaces and underscores: CUDA's own names of errors are cudaErrorIllegalAddress and CUDA_ERROR_ILLEGAL_ADDRESS.
TEXTS = (
    *("cudaerror", "cudadrivererror", "tritonerror[cuda]", "illegalmemoryaccess"),
    *("cudnnerror", "cudnnstatus", "cublaserror", "cuffterror", "cusolvererror"),
)
ASSERT = "device-side assert triggered"  # what the program itself has asserted in a kernel, for example an index out of range


def is_gpu_error(error: BaseException) -> bool:
    """Whether torch, or another library, raised this or its cause because of the GPU. Not meant is too little memory."""
    for cause in chain(error):
        text = text_of(cause).lower().replace(" ", "").replace("_", "")
        if isinstance(cause, RuntimeError) and any(one in text for one in TEXTS) and "outofmemory" not in text:
            return True
    return False


def failure_of_gpu(synchronize: Callable[[], object]) -> str:
    """How the GPU fails when this process waits for it twice; empty if it works."""

    def check() -> None:
        synchronize()
        synchronize()

    checking = run_in_thread(check)
    if not wait((checking,), TIMEOUT).done:
        return f"it did not answer within {TIMEOUT:g} s"
    failure = checking.exception()
    return "" if failure is None else f"{type(failure).__name__}: {text_of(failure)}"
