"""Import this module in a template (`preload`): NCCL is the double in its workers, and each of them has a GPU of its own."""

from __future__ import annotations

import os

from nbelastic.worker import accelerator, session
from tests.support.nccl_double.accelerator import Double, register


def _allot_gpu() -> None:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", f"GPU-{os.getpid()}")


register()
accelerator.NCCL = Double()
session.backend_for = lambda choice, _slots: choice
os.register_at_fork(after_in_child=_allot_gpu)
