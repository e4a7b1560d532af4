"""The dashboard in a real JupyterLab, after its kernel was restarted. In a file of its own, so that it runs beside `test_lab`."""

from __future__ import annotations

import os

import pytest
from lab_notebook import KERNEL_READY, LOAD, START, TRAIN, chip, process_shown
from playwright.sync_api import expect

from tests.support.processes import alive
from tests.support.waiting import until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


@pytest.mark.soak(seconds=25)
def test_a_view_whose_kernel_was_restarted_shows_that(lab, page, notebook):
    """It warns and accepts no requests; all processes of the cluster have ended."""
    run = notebook(lab.write("restart", LOAD, START, "1 + 1"))
    run(0)
    run(1)
    view = page.locator(".nbe").first
    expect(view.locator(".nbe-phase")).to_have_text("ready")
    chip(view, "slot 0").click()
    pid = process_shown(view.locator(".nbe-detail"))
    page.evaluate("() => { window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart() }")
    expect(view.get_by_role("alert")).to_contain_text("the kernel")
    expect(view.get_by_role("button", name="Add host")).to_be_disabled()
    page.wait_for_function(KERNEL_READY, timeout=60_000)
    run(2)
    until(lambda: not alive(pid))


@pytest.mark.soak(seconds=40)
def test_a_kept_cluster_goes_on_after_a_restart(lab, page, notebook, output_path):
    """Another kernel attaches: the dashboard has the same events, logs and requests, and the training goes on undisturbed."""
    page.set_viewport_size({"width": 1300, "height": 1500})
    name = f"lab-{os.getpid()}"
    stop = "%elastic_stop"
    run = notebook(lab.write("kept", LOAD, f"{START} --keep --name {name}", TRAIN, f"%elastic_attach {name}", stop))
    view, facts = page.locator(".nbe"), page.locator(".nbe-facts")
    run(0)
    run(1)
    run(2)
    expect(facts.first).to_contain_text("2 (2–4)")
    expect(facts.first).to_contain_text("loss")
    page.evaluate("() => { window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart() }")
    expect(view.first.get_by_role("alert")).to_contain_text("the kernel")
    page.wait_for_function(KERNEL_READY, timeout=60_000)
    run(0)
    run(3)
    expect(facts.last).to_contain_text("2 (2–4)")
    expect(facts.last).to_contain_text("loss")
    expect(view.last.locator(".nbe-log")).to_contain_text("world of 2 at generation 1")
    view.last.get_by_role("tab", name="Logs").click()
    expect(view.last.locator(".nbe-lines")).to_contain_text("step 50")
    view.last.screenshot(path=f"{output_path}/attached.png")
    view.last.get_by_label("Host to add").fill("127.0.0.2:1")
    view.last.get_by_role("button", name="Add host").click()
    expect(facts.last).to_contain_text("3 (2–4)")
    run(4)
    expect(view.last.locator(".nbe-phase")).to_have_text("finished")
