"""The layout at several widths and in several themes, and accessibility."""

from __future__ import annotations

import base64

import pytest
from fake_view import button, faults, panel
from playwright.sync_api import expect
from view_samples import ANSWERS, crowd, event, host, logs, reports, state, worker

pytestmark = pytest.mark.browser

COLORS = """async (picture) => {
  const image = new Image();
  image.src = `data:image/png;base64,${picture}`;
  await image.decode();
  const pen = new OffscreenCanvas(image.width, image.height).getContext("2d");
  pen.drawImage(image, 0, 0);
  const { data } = pen.getImageData(0, 0, image.width, image.height);
  return new Set(new Uint32Array(data.buffer)).size;
}"""


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


@pytest.mark.soak(share=0.2)
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
    view.page.locator(".nbe-about summary").click()
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
        assert faults(view.page) == []


@pytest.mark.soak(seconds=25)
def test_a_large_board_is_accessible(view):
    """64 hosts with 8 slots each, and the lanes of all."""
    hosts = {f"node{h:02}": host([worker(h * 8 + s) for s in range(8)]) for h in range(64)}
    events = [event(n, ago=100 - n, host=name) for n, name in enumerate(hosts, 1)]
    view.open(
        state(hosts=hosts, world_size=512, max=512, events=events[-2:]),
        {**ANSWERS, "history": {"events": events, "oldest": 1}},
    )
    button(view, "Show all hosts").click()
    expect(view.page.locator(".nbe-lane")).to_have_count(64)
    assert faults(view.page) == []


def test_forced_colours_hide_nothing(view, output_path):
    """The bars of use and progress, the lanes of hosts, the phase's sign and the selected tab are seen in the reader's own colours too."""
    view.page.emulate_media(forced_colors="active")
    events = [
        event(1, ago=300),
        event(2, ago=200, host="gpu1"),
        event(3, ago=100, host="gpu2"),
        event(4, "worker-lost", host="gpu2"),
    ]
    view.open(state(total=2000, events=events), {**ANSWERS, "history": {"events": events, "oldest": 1}})
    expect(view.page.locator(".nbe-lane")).to_have_count(2)
    view.page.screenshot(path=f"{output_path}/forced.png", full_page=True)
    for name in (".nbe-meter", ".nbe-progress", ".nbe-track"):
        picture = view.page.locator(name).first.screenshot()
        assert view.page.evaluate(COLORS, base64.b64encode(picture).decode()) > 1, name
    color = "(node, [part, name]) => getComputedStyle(node, part)[name]"
    assert view.page.locator(".nbe-phase").evaluate(color, ["::before", "backgroundColor"]) == "rgb(0, 0, 0)"
    tabs = [tab.evaluate(color, [None, "borderBottomColor"]) for tab in view.page.get_by_role("tab").all()]
    assert tabs[0] not in tabs[1:]
