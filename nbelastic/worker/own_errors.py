"""Whose fault an exception of the user's function is, as far as this worker can say."""

from __future__ import annotations

import os

from nbelastic.protocol.exit_codes import GPU_LOST
from nbelastic.worker import gpu_errors
from nbelastic.worker.groups import Groups
from nbelastic.worker.hang_detector import may_be_collective

# What torch adds to each error of CUDA.
ADVICE = ("Search for `cuda", "CUDA kernel errors might be asynchronously", "For debugging consider passing CUDA_")


def text_of(error: BaseException) -> str:
    """What the error says, in one line."""
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001  (a class of the user's)
        text = f"its text cannot be read: {type(failure).__name__}"
    lines = [line.strip() for line in text.splitlines()]
    end = next((number for number, line in enumerate(lines) if line.startswith(ADVICE)), len(lines))
    return " ".join(filter(None, lines[:end]))


def is_of_program(error: BaseException, groups: Groups) -> bool:
    """Whether the user's function has raised `error` by itself, and no lost worker has caused it."""
    group = groups.present
    return _gpu_is_lost(error, groups) or group is None or group.is_intact() or not may_be_collective(error)


def _gpu_is_lost(error: BaseException, groups: Groups) -> bool:
    """Whether this process has lost its GPU by a failed assertion of the program's own. End it if the GPU failed."""
    if not gpu_errors.is_gpu_error(error):
        return False
    if not gpu_errors.is_gpu_lost(lambda: groups.synchronize(all_streams=True)):
        return False
    if gpu_errors.ASSERT in str(error):
        return True
    os.write(2, f"nbelastic: this worker ends, as its GPU failed: {error}\n".encode())
    os._exit(GPU_LOST)
