"""The dashboard in a real JupyterLab: live, and obedient while a cell is busy."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

LOAD = """
from fake_cluster import FakeCluster
from nbelastic.notebook.magics import ElasticMagics
magics = ElasticMagics(get_ipython(), make=FakeCluster)
magics.register()
"""
START = "%elastic_start --min 2 --max 4 --hosts localhost:2"
TRAIN = "magics.cluster.run_for_show()"
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
    """Start, train, and add a host by the button in the middle of a busy cell; then remove it and stop."""
    page.set_viewport_size({"width": 1400, "height": 1200})
    run = notebook(lab.write("live.ipynb", LOAD, START, TRAIN, BUSY, "%elastic_status", "%elastic_stop"))
    run(0)
    run(1)
    dashboard = page.locator(".nbe").first
    expect(dashboard.locator(".nbe-table")).to_contain_text("localhost/1#1", timeout=60_000)
    run(2)
    expect(dashboard).to_contain_text("job-1", timeout=30_000)
    run(3)
    expect(prompt(page, 3)).to_have_text("[*]:")
    dashboard.get_by_placeholder("name:slots").fill("127.0.0.2:2")
    dashboard.get_by_role("button", name="Add host").click()
    expect(dashboard.locator(".nbe-table")).to_contain_text("127.0.0.2/1#1", timeout=10_000)
    expect(prompt(page, 3)).to_have_text("[*]:")
    dashboard.screenshot(path=f"{output_path}/{lab.theme}.png")
    dashboard.get_by_role("button", name="Remove host 127.0.0.2").click()
    expect(dashboard.locator(".nbe-table")).not_to_contain_text("127.0.0.2", timeout=10_000)
    expect(prompt(page, 3)).to_have_text("[*]:")
    expect(prompt(page, 3)).to_have_text("[4]:", timeout=20_000)
    run(4)
    run(5)
    expect(dashboard.locator(".nbe-phase")).to_have_text("finished", timeout=20_000)
    page.screenshot(path=f"{output_path}/{lab.theme}-page.png")
