"""The dashboard in a real JupyterLab: it is live, and handles requests while a cell runs."""

from __future__ import annotations

import os
import re
import signal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.support.processes import alive
from tests.support.waiting import until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

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
EXPECTED_ERRORS = (
    "undefined (reading 'schema')",  # an error of Notebook 7.6 in its own settings
    "net::ERR_NETWORK_CHANGED",  # another worker of pytest-xdist has started or ended a network of tests/hosts
)
KERNEL_READY = """() => {
    const kernel = window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel;
    return kernel?.connectionStatus === "connected" && kernel.status === "idle";
}"""


@pytest.fixture
def notebook(page, lab):
    """Open a notebook and return a function that runs its cells. The test fails if the browser has logged an error."""
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)

    def open_(address):
        page.goto(address)
        page.wait_for_function(KERNEL_READY, timeout=60_000)

        def run(number, *, ends=True):
            if lab.app == "lab":
                prompt(page, number).click()
                page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-cell') }")
            else:
                page.locator(".jp-Cell .jp-InputArea-editor").nth(number).click()
                page.keyboard.press("Control+Enter")
            if ends:
                expect(prompt(page, number)).to_have_text(re.compile(r"\[\d+\]:"), timeout=60_000)

        return run

    yield open_
    assert [text for text in complaints if not any(known in text for known in EXPECTED_ERRORS)] == []


def prompt(page, number):
    return page.locator(".jp-InputArea-prompt").nth(number)


def complaints_of_axe(page):
    """The violations that axe-core finds in the view: the rule, and the first element that breaks it."""
    found = Axe().run(page, context=".nbe").response["violations"]
    return [(violation["id"], violation["nodes"][0]["html"][:200]) for violation in found]


def chip(view, name):
    """The button of a slot, by the beginning of its label: `rank 1` or, without a rank, `slot 0`."""
    return view.get_by_role("button", name=re.compile(rf"^{name}\b"))


def process_shown(detail):
    """The pid that the details of a worker name."""
    expect(detail).to_contain_text(re.compile(r"Process\s*\d"))
    return int(re.search(r"Process\s*(\d+)", detail.inner_text()).group(1))


def test_the_dashboard_works_while_a_cell_runs(lab, page, notebook, output_path):
    """Start and train. While a cell runs: add a host, read logs and stacks, lose a worker, and remove the host."""
    page.set_viewport_size({"width": 1300, "height": 1500})
    run = notebook(lab.write("live", LOAD, START, TRAIN, BUSY, "%elastic_status", "%elastic_stop"))
    view = page.locator(".nbe").first
    run(0)
    run(1)
    expect(view.locator(".nbe-phase")).to_have_text("ready")
    run(2)
    expect(view.locator(".nbe-facts").first).to_contain_text("2 / 2–4")
    expect(view.locator(".nbe-facts").first).to_contain_text("loss")
    run(3, ends=False)
    expect(prompt(page, 3)).to_have_text("[*]:")
    view.get_by_label("Host to add").fill("127.0.0.2:2")
    view.get_by_role("button", name="Add host").click()
    expect(view.get_by_role("status", name="Requests")).to_contain_text("up with 2 slots")
    expect(view.locator(".nbe-facts").first).to_contain_text("4 / 2–4")
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
    expect(view.locator(".nbe-facts").first).to_contain_text("4 / 2–4")
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
    expect(facts.first).to_contain_text("2 / 2–4")
    expect(facts.first).to_contain_text("loss")
    page.evaluate("() => { window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart() }")
    expect(view.first.get_by_role("alert")).to_contain_text("the kernel")
    page.wait_for_function(KERNEL_READY, timeout=60_000)
    run(0)
    run(3)
    expect(facts.last).to_contain_text("2 / 2–4")
    expect(facts.last).to_contain_text("loss")
    expect(view.last.locator(".nbe-log")).to_contain_text("world of 2 at generation 1")
    view.last.get_by_role("tab", name="Logs").click()
    expect(view.last.locator(".nbe-lines")).to_contain_text("step 50")
    view.last.screenshot(path=f"{output_path}/attached.png")
    view.last.get_by_label("Host to add").fill("127.0.0.2:1")
    view.last.get_by_role("button", name="Add host").click()
    expect(facts.last).to_contain_text("3 / 2–4")
    run(4)
    expect(view.last.locator(".nbe-phase")).to_have_text("finished")


@pytest.mark.soak
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
    expect(facts).to_contain_text("2 / 2–4")
    chip(view, "rank 0").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(view.locator(".nbe-detail")).to_contain_text("localhost/1#1")
    view.locator(".nbe-detail").get_by_role("button", name="Restart").focus()
    page.keyboard.press("Enter")
    page.wait_for_timeout(500)  # an earlier second click is a double click, and confirms nothing
    page.keyboard.press("Enter")
    expect(view.get_by_role("status", name="Requests")).to_contain_text("localhost/1#2 has replaced it")
    view.get_by_label("max").focus()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("2")
    page.keyboard.press("Enter")
    expect(facts).to_contain_text("2 / 2")
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


@pytest.mark.soak
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
