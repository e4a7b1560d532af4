"""Values that go to hosts that share no files with the notebook, and come back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.hosts.cluster_checks import LONG


@pytest.mark.soak(share=0.2)
def test_values_and_states_cross_the_network(make, tmp_path):
    """Pushed values reach the hosts in pieces, also a later host; the state of rank 0 comes back in pieces.

    Several pulls at once all get it.
    """
    cluster = make("h1:1", min=1)
    data = torch.arange(3_000_000)
    cluster.push(data=data)
    cluster.add_host("h2:1")
    cluster.wait(2, timeout=LONG)
    outputs = cluster.execute("print(data.sum().item())", timeout=LONG)
    assert [(worker, out) for worker, out, _, _ in outputs] == [
        (w, f"{data.sum().item()}\n") for w in ("h1/0#1", "h2/0#1")
    ]
    job = cluster.run_cell(
        "import torch, time, nbelastic as nbe\n"
        "state = nbe.TorchState(data=data, model=torch.nn.Linear(1000, 500), step=0)\n"
        "@nbe.elastic\n"
        "def train(state):\n"
        "    while state.step < 1_000_000:\n"
        "        state.step += 1; state.commit(); time.sleep(0.01)\n"
        "train(state)"
    )
    state = job.state_dict(timeout=LONG)
    assert torch.equal(state["data"], data)
    assert state["model"]["weight"].shape == (500, 1000)
    assert job.state_dict("step", timeout=LONG) > state["step"]
    with ThreadPoolExecutor(3) as threads:  # several notebooks pull at once
        found = [threads.submit(job.state_dict, timeout=LONG) for _ in range(3)]
    assert all(torch.equal(one.result()["data"], data) for one in found)
    job.stop()
    job.wait(LONG)
    assert torch.equal(job.state_dict("data", timeout=LONG), data)
