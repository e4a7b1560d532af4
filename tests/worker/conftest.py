from __future__ import annotations

import pytest

from tests.worker.worker_protocol import training_worker


@pytest.fixture
def worker():
    return training_worker()
