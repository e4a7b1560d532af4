"""Import this module in a template (`preload`): NCCL is the double in its workers."""

from __future__ import annotations

from nbelastic.worker import accelerator
from tests.support.nccl_double.accelerator import Double, register

register()
accelerator.NCCL = Double()
