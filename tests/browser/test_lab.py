"""The dashboard in a real JupyterLab: live, and obedient while a cell is busy."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

LOAD = "%load_ext nbelastic"
START = "%elastic_start --min 2 --max 4 --hosts localhost:2"
TRAIN = """%%elastic_run --job job
import time
import nbelastic as nbe

state = nbe.ObjectState(step=0)

@nbe.elastic
def train(state):
    while True:
        time.sleep(0.02)
        state.step += 1
        state.report(loss=1 / state.step)
        state.commit()

train(state)
"""
BUSY = "import time; time.sleep(15); print('slept')"


@pytest.fixture
def notebook(page):
    """Opens one and returns a way to run its cells; fails if the browser complained about anything."""
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)

    def open_(address):
        page.goto(address)
        expect(page.get_by_role("button", name="Python 3 (ipykernel) | Idle")).to_be_visible(timeout=60_000)

        def run(number):
            prompt(page, number).click()
            page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-cell') }")

        return run

    yield open_
    assert complaints == []


def prompt(page, number):
    return page.locator(".jp-InputArea-prompt").nth(number)


@pytest.mark.parametrize("lab", ["light", "dark"], indirect=True)
def test_a_click_is_handled_while_a_cell_sleeps(lab, page, notebook, output_path):
    """Start, train, and in the middle of a busy cell add and remove a host by the buttons; then stop."""
    page.set_viewport_size({"width": 1400, "height": 1300})
    run = notebook(lab.write("live.ipynb", LOAD, START, TRAIN, BUSY, "%elastic_status", "%elastic_stop"))
    dashboard = page.locator(".nbe").first
    table = dashboard.locator(".nbe-table")
    run(0)
    expect(prompt(page, 0)).to_have_text("[1]:", timeout=30_000)
    run(1)
    expect(prompt(page, 1)).to_have_text("[2]:", timeout=60_000)
    expect(dashboard.locator(".nbe-phase")).to_have_text("ready")
    run(2)
    expect(dashboard.locator(".nbe-facts")).to_contain_text("2 / 2–4", timeout=30_000)
    expect(dashboard.locator(".nbe-facts")).to_contain_text("loss")
    run(3)
    expect(prompt(page, 3)).to_have_text("[*]:")
    dashboard.get_by_label("Host to add").fill("127.0.0.2:2")
    dashboard.get_by_role("button", name="Add host").click()
    expect(dashboard.locator(".nbe-orders")).to_contain_text("add 127.0.0.2:2: done", timeout=5_000)
    expect(dashboard.locator(".nbe-facts")).to_contain_text("4 / 2–4", timeout=12_000)
    expect(prompt(page, 3)).to_have_text("[*]:")
    dashboard.screenshot(path=f"{output_path}/{lab.theme}.png")
    dashboard.get_by_role("button", name="Remove host 127.0.0.2").click()
    expect(prompt(page, 3)).to_have_text("[4]:", timeout=20_000)
    expect(table).not_to_contain_text("127.0.0.2", timeout=10_000)
    run(4)
    expect(page.locator(".jp-OutputArea-executeResult").last).to_contain_text("world 2 / 2–4")
    run(5)
    expect(dashboard.locator(".nbe-phase")).to_have_text("finished", timeout=20_000)
    page.screenshot(path=f"{output_path}/{lab.theme}-page.png")


def test_the_view_comes_back_after_a_reload_and_in_a_second_place(lab, page, notebook):
    """Reloading the page brings the same live view; %elastic shows another; one order changes both."""
    run = notebook(lab.write("again.ipynb", LOAD, START, "%elastic", "%elastic_stop"))
    run(0)
    run(1)
    expect(prompt(page, 1)).to_have_text("[2]:", timeout=60_000)
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    page.reload()
    expect(page.locator(".nbe-phase")).to_have_text("ready", timeout=60_000)
    run(2)
    views = page.locator(".nbe")
    expect(views).to_have_count(2, timeout=20_000)
    views.nth(1).get_by_role("button", name="Stop cluster").click()
    views.nth(1).get_by_role("button", name="Really stop it?").click()
    for view in views.all():
        expect(view.locator(".nbe-phase")).to_have_text("finished", timeout=20_000)
    run(3)
    expect(prompt(page, 3)).to_have_text("[4]:", timeout=20_000)
