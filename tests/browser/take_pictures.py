"""Takes the pictures of docs/pictures anew, from real trainings: `PYTHONPATH=. python tests/browser/take_pictures.py`. It takes two minutes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO

from PIL import Image
from playwright.sync_api import Page, sync_playwright

import nbelastic as nbe
from tests.support.code_blocks import ROOT, example

PICTURES = ROOT / "docs" / "pictures"
CHROMIUM = "/usr/bin/chromium"
WAITING = """
import time
import torch
import torch.distributed as dist
import nbelastic as nbe

state = nbe.TorchState(model=torch.nn.Linear(8, 8), step=0)

def load(step):
    if step > 200 and nbe.rank() == 1:
        time.sleep(60)  # as if its disk were slow
    time.sleep(0.02)

@nbe.elastic
def train(state):
    while True:
        load(state.step)
        dist.all_reduce(torch.ones(1))
        state.step += 1
        state.commit()

train(state)
"""


def until(done: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not done():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.1)


@contextmanager
def dashboard(cluster: nbe.Cluster) -> Iterator[Page]:
    """The page of `nbelastic dashboard`."""
    command = [sys.executable, "-m", "nbelastic", "dashboard", cluster.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 888, "height": 1360}, color_scheme="light")
        page.goto(process.stdout.readline().strip())
        yield page
        browser.close()
        process.terminate()


def save(name: str, picture: bytes) -> None:
    """With 256 colours, in which rare ones remain."""
    image = Image.open(BytesIO(picture)).convert("RGB")
    few = image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(PICTURES / name, optimize=True)


def loss_of_a_worker() -> None:
    """The quickstart with more epochs: two workers become four, and one of them is killed."""
    cells = {block.code.split()[0]: block.code.partition("\n")[2] for block in example()}
    train = (
        cells["%%elastic_run"]
        .replace("30)", "200)")
        .replace("epoch=state.epoch)\n", "epoch=state.epoch, total=3000)\n")
    )
    with nbe.Cluster("localhost:2", min=2, max=4, name="spiral") as cluster, tempfile.TemporaryDirectory() as folder:
        cluster.execute(cells["%%elastic_setup"], setup=True)
        cluster.wait(2)
        cluster.run_cell(train.replace("lr=0.1", "lr=0.02"), checkpoint=folder, checkpoint_every=100)

        def steps(count: int) -> None:
            first = cluster.status().step or 0
            until(lambda: (cluster.status().step or 0) >= first + count)

        with dashboard(cluster) as page:
            steps(150)
            cluster.add_host("127.0.0.2:2")
            cluster.wait(4)
            steps(400)
            victim = next(worker for worker in cluster.workers if worker.rank == 1)
            os.kill(victim.pid, signal.SIGKILL)
            until(lambda: victim.id not in [worker.id for worker in cluster.workers])
            cluster.wait(4)
            steps(350)
            page.get_by_text("first step of generation 3").first.click()
            page.wait_for_timeout(1000)
            save("dashboard.png", page.locator(".nbe").first.screenshot())
        cluster.job.stop()


def ranks_that_wait() -> None:
    """Two ranks wait in a collective for the third, which loads data."""
    with nbe.Cluster("localhost:3", min=3, name="waiting") as cluster, dashboard(cluster) as page:
        cluster.wait(3)
        cluster.run_cell(WAITING)
        until(lambda: (cluster.status().step or 0) > 150)
        page.wait_for_timeout(5000)
        page.get_by_role("tab", name="Stacks").click()
        page.get_by_role("button", name="Stacks now").click()
        page.wait_for_timeout(2000)
        page.locator("[role=tabpanel] details").evaluate_all("all => all.forEach((entry) => { entry.open = true; })")
        view, tabs = page.locator(".nbe").first.bounding_box(), page.get_by_role("tablist").first.bounding_box()
        top = tabs["y"] - 6
        save("stacks.png", page.screenshot(clip={**view, "y": top, "height": view["y"] + view["height"] - top}))


if __name__ == "__main__":
    loss_of_a_worker()
    ranks_that_wait()
