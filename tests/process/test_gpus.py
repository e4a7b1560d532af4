"""Workers on the GPUs of a fake NVML: which GPU each sees, and what a sick one leads to."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import nbelastic as nbe
from tests.support.waiting import until

HEAT = [("GPU-a", 71), ("GPU-b", 40), ("GPU-c", 40)]
FAKE = Path(__file__).parents[1] / "support" / "fake_nvml"


@pytest.fixture
def write_gpus(monkeypatch, tmp_path):
    """`write_gpus(GPU_a={}, GPU_b={"xids": [79]})` gives this machine these GPUs, or changes them."""
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "gpus.json"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def write(**gpus):
        rows = [{"uuid": name.replace("_", "-"), **gpu} for name, gpu in gpus.items()]
        (tmp_path / "new.json").write_text(json.dumps({"gpus": rows}))
        (tmp_path / "new.json").rename(tmp_path / "gpus.json")

    return write


def seen(cluster: nbe.Cluster) -> dict[str, str]:
    """The GPUs that the workers see, by worker."""
    rows = cluster.execute("import os; print(os.environ['CUDA_VISIBLE_DEVICES'], end='')", timeout=20)
    return {row[0]: row[1] for row in rows}


@pytest.mark.soak(share=0.2)
def test_workers_and_sick_gpus(make, write_gpus):
    """Each worker sees one GPU, on two hosts of one machine too, and the status has each GPU's figures.

    A lost worker is not replaced while its GPU is sick, or while memory of the dead process is not free.
    """
    write_gpus(GPU_a={"heat": 71}, GPU_b={}, GPU_c={})
    cluster = make("localhost:2,127.0.0.2:1", min=1, backend="gloo")
    cluster.wait(3, timeout=30)
    until(lambda: len([w for w in cluster.workers if w.state == "ready"]) == 3, 30)
    gpus = seen(cluster)
    assert sorted(gpus.values()) == ["GPU-a", "GPU-b", "GPU-c"]
    assert {w.id: w.gpu for w in cluster.workers} == gpus
    until(lambda: [[(gpu.id, gpu.temperature) for gpu in host.gpus] for host in cluster.hosts] == [HEAT, HEAT], 20)
    victim = next(w for w in cluster.workers if gpus[w.id] == "GPU-b")
    write_gpus(GPU_a={}, GPU_b={"lost": True}, GPU_c={})
    text = "GPU GPU-b is left out: NVML reports: GPU is lost"
    until(lambda: [host.reason for host in cluster.hosts] == [text, text], 20)
    os.kill(victim.pid, signal.SIGKILL)
    until(lambda: victim.id not in [w.id for w in cluster.workers], 20)
    assert len(cluster.workers) == 2
    write_gpus(GPU_a={}, GPU_b={}, GPU_c={})
    until(lambda: len([w for w in cluster.workers if w.state == "ready"]) == 3, 30)
    assert sorted(seen(cluster).values()) == ["GPU-a", "GPU-b", "GPU-c"]
    first, second = [w for w in cluster.workers if w.host == "localhost"]
    own = seen(cluster)[first.id]
    write_gpus(**{gpu: {"pids": [first.pid if gpu == own else second.pid]} for gpu in ("GPU-a", "GPU-b", "GPU-c")})
    os.kill(first.pid, signal.SIGKILL)
    (late,) = until(lambda: [w for w in cluster.workers if w.host == "localhost" and w.id not in (first.id, second.id)])
    assert late.pid == 0, "it is started on a GPU of which the dead worker still holds memory"
    write_gpus(GPU_a={}, GPU_b={}, GPU_c={})
    until(lambda: all(w.pid for w in cluster.workers), 20)

    def count(kind):
        return [event.kind for event in cluster.events].count(kind)

    until(lambda: (count("gpu-left-out"), count("gpu-back")) == (2, 2), 20)  # both hosts see all GPUs
