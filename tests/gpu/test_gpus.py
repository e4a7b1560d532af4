"""What NVML says of a real GPU: run with `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

import pytest

from nbelastic.agent.gpu_samples import Gpus

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_a_gpu_tells_how_busy_and_how_full_it_is():
    """One row a visible GPU; memory that torch takes is seen."""
    gpus = Gpus()
    try:
        before = gpus.read()
        assert len(before) == torch.cuda.device_count()
        held = torch.zeros(500_000_000, dtype=torch.uint8, device="cuda")
        after = gpus.read()
        assert after[0].memory >= before[0].memory + 450
        assert all(0 <= gpu.busy <= 100 and 0 < gpu.memory <= gpu.memory_total for gpu in after)
        assert all(gpu.temperature is None or 0 < gpu.temperature < 150 for gpu in after)
        del held
    finally:
        gpus.close()
