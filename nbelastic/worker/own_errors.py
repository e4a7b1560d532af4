"""Whose fault an exception of the user's function is, as far as this worker can say."""

from __future__ import annotations

import os

from nbelastic.protocol.exit_codes import GPU_LOST
from nbelastic.worker import gpu_errors
from nbelastic.worker.error_text import text_of
from nbelastic.worker.groups import Groups
from nbelastic.worker.hang_detector import may_be_collective


def is_of_program(error: BaseException, groups: Groups) -> bool:
    """Whether the user's function has raised `error` by itself, and no lost worker has caused it."""
    group = groups.present
    return _gpu_is_lost(error, groups) or group is None or group.is_intact() or not may_be_collective(error)


def _gpu_is_lost(error: BaseException, groups: Groups) -> bool:
    """Whether this process has lost its GPU by a failed assertion of the program's own. End it if the GPU failed."""
    if not gpu_errors.is_gpu_error(error):
        return False
    failure = gpu_errors.failure_of_gpu(lambda: groups.synchronize(all_streams=True))
    if not failure:
        return False
    if gpu_errors.ASSERT in f"{text_of(error)} {failure}":  # what was raised may be a later call's error
        return True
    os.write(2, f"nbelastic: this worker ends, as its GPU failed: {text_of(error)}\n".encode())
    os._exit(GPU_LOST)
