"""The layout at several widths and in several themes, and accessibility."""

from __future__ import annotations

from pathlib import Path

import axe_playwright_python
import pytest
from fake_view import button, panel
from playwright.sync_api import expect
from view_samples import ANSWERS, crowd, logs, reports, state

pytestmark = pytest.mark.browser

AXE = Path(axe_playwright_python.__file__).parent / "axe.min.js"


def overlap(a, b):
    apart = a["x"] + a["width"] <= b["x"] or b["x"] + b["width"] <= a["x"]
    return not (apart or a["y"] + a["height"] <= b["y"] or b["y"] + b["height"] <= a["y"])


def test_nothing_moves_between_press_and_release(view, clock):
    """A click counts although an update arrives in the middle of it; a button held for longer stops no update."""
    view.open(state())
    tab = view.page.get_by_role("tab", name="Logs")
    before = tab.bounding_box()
    mouse = view.page.mouse
    mouse.move(before["x"] + 5, before["y"] + 5)
    mouse.down()
    view.patch(reason="gpu2 cannot start: " + "the reason is long, " * 100)
    clock.run_for(100)
    assert tab.bounding_box() == before
    mouse.up()
    expect(tab).to_have_attribute("aria-selected", "true")
    clock.run_for(100)
    assert tab.bounding_box()["y"] > before["y"] + 20
    mouse.down()
    view.patch(step=2345)
    clock.run_for(2500)
    expect(view.page.locator(".nbe-facts").first).to_contain_text("2,345")


OTHERS = [(400, "light"), (1200, "dark"), (1200, None)]


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (800, "dark"), (1600, "light")])
def test_nothing_is_cut_off(view, width, scheme, output_path):
    """No sideways scrolling from a phone's width on, in JupyterLab's own colours."""
    view.page.set_viewport_size({"width": width, "height": 900})
    view.open(
        crowd(),
        {**ANSWERS, "reports": reports(), "logs": logs((0, "out", "a-word-of-one-hundred-letters-" * 6))},
        theme=scheme,
    )
    view.page.locator(".nbe-chip").nth(1).click()
    view.page.locator(".nbe-log details").first.locator("summary").click()
    for name in ("Timeline", "Logs", "Step times", "Stacks"):
        panel(view, name)
        if name == "Stacks":
            button(view, "Stacks now").click()
            expect(view.page.locator(".nbe-stacks details")).to_have_count(2)
        if name == "Logs":
            expect(view.page.locator(".nbe-line")).to_have_count(1)
        view.page.screenshot(path=f"{output_path}/{scheme}-{width}-{name}.png", full_page=True)
        parts = ".nbe, .nbe-board, .nbe-chip, .nbe-usage > span, .nbe-controls, .nbe-requests, .nbe-panel, .nbe-log, .nbe-lines, .nbe-detail td"
        cut = "nodes => nodes.filter((n) => n.scrollWidth > n.clientWidth + 1).map((n) => n.className)"
        assert view.page.locator(parts).evaluate_all(cut) == []
        boxes = [b.bounding_box() for b in view.page.locator(".nbe button:not(.nbe-rug *)").all() if b.is_visible()]
        assert not [(a, b) for a in boxes for b in boxes if a is not b and overlap(a, b)]
        assert view.page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0


@pytest.mark.parametrize(
    ("width", "theme"), [(1200, "light"), *(pytest.param(*view, marks=pytest.mark.soak(seconds=10)) for view in OTHERS)]
)
def test_the_view_is_accessible(view, theme, width):
    """axe finds no fault in any panel, with JupyterLab's colours, in a dark page without a theme, and after a closed connection."""
    view.page.emulate_media(color_scheme=theme or "dark", reduced_motion="reduce")
    view.page.set_viewport_size({"width": width, "height": 900})
    view.open(
        crowd(), {**ANSWERS, "reports": reports(), "logs": logs((0, "out", "one"), (1, "err", "two"))}, theme=theme
    )
    view.page.add_script_tag(path=AXE)
    view.page.locator(".nbe-chip").nth(1).click()
    button(view, "Stop cluster").click()
    view.page.locator(".nbe-log details").first.locator("summary").click()
    for name in ("Timeline", "Logs", "Step times", "Stacks"):
        panel(view, name)
        if name == "Stacks":
            button(view, "Stacks now").click()
            expect(view.page.locator(".nbe-stacks details")).to_have_count(2)
            view.page.evaluate("model.comm_live = false; model.fire('comm_live_update')")
            expect(view.page.get_by_role("alert")).to_be_visible()
        if name == "Logs":
            expect(view.page.locator(".nbe-line")).to_have_count(2)
        found = view.page.evaluate("axe.run('main')")["violations"]
        assert [(rule["id"], [node["html"] for node in rule["nodes"]][:3]) for rule in found] == []
