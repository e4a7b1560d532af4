"""Cells of notebooks in a JupyterLab, and what their pages show."""

from __future__ import annotations

import re

from playwright.sync_api import expect

LOAD = "%load_ext nbelastic"
START = "%elastic_start --min 2 --max 4 --hosts localhost:2 --cooldown 0 0 --silence 2"
PROGRAM = """import os, time
import torch, torch.distributed as dist
import nbelastic as nbe

state = nbe.ObjectState(step=0)

def load():
    while nbe.rank() == 1 and os.path.exists("slow"):
        time.sleep(0.05)

@nbe.elastic
def train(state):
    while True:
        time.sleep(0.02)
        load()
        dist.all_reduce(torch.ones(1))
        state.step += 1
        state.report(loss=2 / (1 + state.step / 100), total=100_000)
        if state.step % 50 == 0:
            print("step", state.step)
        state.commit()

train(state)
"""
TRAIN = f"%%elastic_run --job job\n{PROGRAM}"
BUSY = """import os, time
while not os.path.exists("awake"):
    time.sleep(0.1)
"""
KERNEL_READY = """() => {
    const kernel = window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel;
    return kernel?.connectionStatus === "connected" && kernel.status === "idle";
}"""


def prompt(page, number):
    return page.locator(".jp-InputArea-prompt").nth(number)


def chip(view, name):
    """The button of a slot, by the beginning of its label: `rank 1` or, without a rank, `slot 0`."""
    return view.get_by_role("button", name=re.compile(rf"^{name}\b"))


def process_shown(detail):
    """The pid that the details of a worker name."""
    expect(detail).to_contain_text(re.compile(r"Process\s*\d"))
    return int(re.search(r"Process\s*(\d+)", detail.inner_text()).group(1))
