"""The dashboard in a real JupyterLab: it is live, and handles requests while a cell runs."""

from __future__ import annotations

import os
import signal

import pytest
from axe_playwright_python.sync_playwright import Axe
from lab_notebook import BUSY, LOAD, START, TRAIN, chip, process_shown, prompt
from playwright.sync_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


def complaints_of_axe(page):
    """The violations that axe-core finds in the view: the rule, and the first element that breaks it."""
    found = Axe().run(page, context=".nbe").response["violations"]
    return [(violation["id"], violation["nodes"][0]["html"][:200]) for violation in found]


@pytest.mark.soak(share=0.2)
def test_the_dashboard_works_while_a_cell_runs(lab, page, notebook, output_path):
    """Start and train. While a cell runs: add a host, read logs and stacks, lose a worker, and remove the host."""
    page.set_viewport_size({"width": 1300, "height": 1500})
    run = notebook(lab.write("live", LOAD, START, TRAIN, BUSY, "%elastic_status", "%elastic_stop"))
    view = page.locator(".nbe").first
    run(0)
    run(1)
    expect(view.locator(".nbe-phase")).to_have_text("ready")
    run(2)
    expect(view.locator(".nbe-facts").first).to_contain_text("2 (2–4)")
    expect(view.locator(".nbe-facts").first).to_contain_text("loss")
    run(3, ends=False)
    expect(prompt(page, 3)).to_have_text("[*]:")
    view.get_by_label("Host to add").fill("127.0.0.2:2")
    view.get_by_role("button", name="Add host").click()
    expect(view.get_by_role("status", name="Requests")).to_contain_text("up with 2 slots")
    expect(view.locator(".nbe-facts").first).to_contain_text("4 (2–4)")
    view.get_by_role("tab", name="Logs").click()
    expect(view.locator(".nbe-lines")).to_contain_text("step 100")
    view.screenshot(path=f"{output_path}/logs.png")
    view.get_by_role("tab", name="Stacks").click()
    slow = lab.place / "slow"
    slow.touch()
    expect(chip(view, "rank 1, slot 1, running, 1 commit behind")).to_be_visible()
    view.get_by_role("button", name="Stacks now").click()
    expect(view.locator(".nbe-stacks")).to_contain_text("in load")
    expect(view.locator(".nbe-stacks")).to_contain_text("all_reduce")
    view.screenshot(path=f"{output_path}/stacks.png")
    slow.unlink()
    assert complaints_of_axe(page) == []
    view.get_by_role("tab", name="Timeline").click()
    chip(view, "rank 1").click()
    detail = view.locator(".nbe-detail")
    pid = process_shown(detail)
    os.kill(pid, signal.SIGKILL)
    expect(view.locator(".nbe-log")).to_contain_text("SIGKILL")
    expect(view.locator(".nbe-facts").first).to_contain_text("4 (2–4)")
    expect(view.locator(".nbe-log")).to_contain_text("world of 4 at generation")
    view.screenshot(path=f"{output_path}/busy.png")
    expect(prompt(page, 3)).to_have_text("[*]:")
    view.get_by_role("button", name="Remove host 127.0.0.2").click()
    expect(view.locator(".nbe-table")).not_to_contain_text("127.0.0.2")
    (lab.place / "awake").touch()
    expect(prompt(page, 3)).to_have_text("[4]:")
    run(4)
    expect(page.locator(".jp-OutputArea-executeResult").last).to_contain_text("world 2 / 2–4")
    run(5)
    expect(view.locator(".nbe-phase")).to_have_text("finished")


@pytest.mark.soak(seconds=25)
def test_the_view_returns_after_a_reload_and_can_be_shown_twice(lab, page, notebook):
    """Reloading the page brings the same live view; %elastic shows another one; one request changes both."""
    run = notebook(lab.write("again", LOAD, START, "%elastic", "%elastic_stop"))
    run(0)
    run(1)
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    page.reload()
    expect(page.locator(".nbe-phase")).to_have_text("ready", timeout=60_000)
    run(2, ends=False)
    views = page.locator(".nbe")
    expect(views).to_have_count(2)
    views.nth(1).get_by_role("button", name="Stop cluster").click()
    page.wait_for_timeout(500)  # an earlier second click is a double click, and confirms nothing
    views.nth(1).get_by_role("button", name="Really stop it?").click()
    for view in views.all():
        view.scroll_into_view_if_needed()  # a view out of sight is not drawn
        expect(view.locator(".nbe-phase")).to_have_text("finished")
    run(3)


@pytest.mark.soak(seconds=25)
@pytest.mark.parametrize("server", ["dark"], indirect=True)
def test_the_view_works_by_keyboard_alone_in_a_dark_theme(lab, page, notebook, output_path):
    """Tab, arrows and Enter reach each control. A slot is opened and its worker restarted; the second Enter stops the cluster."""
    page.set_viewport_size({"width": 1000, "height": 1300})
    run = notebook(lab.write("keys", LOAD, START, TRAIN, "%elastic_stop"))
    view = page.locator(".nbe").first
    run(0)
    run(1)
    run(2)
    facts = view.locator(".nbe-facts").first
    expect(facts).to_contain_text("2 (2–4)")
    chip(view, "rank 0").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(view.locator(".nbe-detail")).to_contain_text("localhost/1#1")
    view.locator(".nbe-detail").get_by_role("button", name="Restart").focus()
    page.keyboard.press("Enter")
    page.wait_for_timeout(500)  # an earlier second click is a double click, and confirms nothing
    page.keyboard.press("Enter")
    expect(view.get_by_role("status", name="Requests")).to_contain_text("localhost/1#2 has replaced it")
    view.get_by_label("max", exact=True).focus()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("2")
    page.keyboard.press("Enter")
    expect(facts).to_contain_text("2 (always 2)")
    view.get_by_label("Host to add").focus()
    page.keyboard.type("no:where:at:all")
    page.keyboard.press("Enter")
    expect(view.get_by_role("status", name="Requests")).to_contain_text("is not a valid host")
    view.screenshot(path=f"{output_path}/dark.png")
    assert complaints_of_axe(page) == []
    view.get_by_role("button", name="Stop cluster").focus()
    page.keyboard.press("Enter")
    page.wait_for_timeout(500)  # as above
    page.keyboard.press("Enter")
    expect(view.locator(".nbe-phase")).to_have_text("finished")


@pytest.mark.soak(seconds=25)
@pytest.mark.parametrize("server", ["notebook"], indirect=True)
def test_the_dashboard_works_in_jupyter_notebook_7(lab, page, notebook):
    """The same view; clicks are handled while a cell runs."""
    run = notebook(lab.write("classic", LOAD, START, BUSY, "%elastic_stop"))
    run(0)
    run(1)
    view = page.locator(".nbe").first
    expect(view.locator(".nbe-phase")).to_have_text("ready")
    run(2, ends=False)
    expect(prompt(page, 2)).to_have_text("[*]:")
    view.get_by_label("Host to add").fill("127.0.0.2:1")
    view.get_by_role("button", name="Add host").click()
    expect(view.get_by_role("status", name="Requests")).to_contain_text("up with 1 slot")
    expect(prompt(page, 2)).to_have_text("[*]:")
    view.get_by_role("button", name="Remove host 127.0.0.2").click()
    expect(view.locator(".nbe-table")).not_to_contain_text("127.0.0.2")
    (lab.place / "awake").touch()
    expect(prompt(page, 2)).to_have_text("[3]:")
    run(3)
