"""The panel *Step times*."""

from __future__ import annotations

import pytest
from fake_view import panel
from playwright.sync_api import expect
from view_samples import ANSWERS, state, step_times

pytestmark = pytest.mark.browser

COLORS = """places => {
  const canvas = document.querySelector(".nbe-heat canvas");
  const ratio = canvas.width / canvas.clientWidth;
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  return places.map(([x, y]) => [...copy.getImageData(x * ratio, y * ratio, 1, 1).data]);
}"""


def test_a_slow_rank_stands_out(view):
    """Its cells have another colour than those of the others, each cell shows its numbers, and its text names it."""
    view.open(state(), ANSWERS)
    assert "step_times" not in [query["ask"] for query in view.sent("ask")]
    tab = panel(view, "Step times")
    expect(tab).to_contain_text("4 ranks over 5 min")
    expect(tab).to_contain_text("the slowest is rank 2 with 40 ms, the median of the others is 7.1 ms")
    expect(tab.get_by_role("listitem")).to_have_text("rank 2 is 5.0 times as slow as the others")
    box = tab.locator("canvas").bounding_box()
    last, middle = box["width"] - 5, 34 + (box["width"] - 34) * 38 / 60  # where rank 2 had no times
    usual, slow, missing = view.page.evaluate(COLORS, [[last, 8], [last, 40], [middle, 40]])
    assert usual[:3] != slow[:3]
    assert slow[3] > usual[3] > 0 == missing[3]
    tab.locator("canvas").hover(position={"x": last, "y": 40})
    expect(tab).to_contain_text("rank 2 (gpu2/0#1) 40 ms per step, the median of the others is 7.1 ms")
    assert tab.get_by_role("img").get_attribute("aria-label").startswith("Time per step")


def test_the_heat_map_is_read_by_the_keyboard(view):
    """Tab reaches it; the arrow keys move from cell to cell, a frame shows which, and its numbers are spoken."""
    view.open(state(), ANSWERS)
    tab = panel(view, "Step times")
    expect(tab).to_contain_text("4 ranks over 5 min")
    keys, spoken = view.page.keyboard, tab.get_by_role("status", name="Time under the cursor")
    keys.press("Tab")
    expect(tab.get_by_role("application", name="Heat map of step times")).to_be_focused()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown"):
        keys.press(key)
    expect(spoken).to_contain_text("rank 2 (gpu2/0#1) 40 ms per step, the median of the others is 7.1 ms")
    expect(tab.locator(".nbe-cell")).to_be_visible()
    for _ in range(21):
        keys.press("ArrowLeft")
    expect(spoken).to_contain_text("rank 2 (gpu2/0#1) no time")
    keys.press("Escape")
    expect(tab.locator(".nbe-cell")).to_be_hidden()
    expect(tab).to_contain_text("4 ranks over 5 min")


def test_step_times_are_asked_for_while_the_panel_is_open(view, clock):
    """Every five seconds. Without times it says when they come; 512 ranks fit, without numbers."""
    view.open(state(), {**ANSWERS, "step_times": {"span": 5, "end": 0, "rows": [], "texts": {}}})
    tab = panel(view, "Step times")
    expect(tab).to_contain_text("No times yet")
    expect(tab.locator("canvas")).to_be_hidden()
    view.page.evaluate("answer => { model.answers.step_times = answer }", step_times(512, 180, slow=300))
    clock.run_for(6000)
    expect(tab).to_contain_text("512 ranks over")
    assert tab.locator("canvas").bounding_box()["height"] == 512 * 3

    def asked():
        return sum(query["ask"] == "step_times" for query in view.sent("ask"))

    assert asked() == 2
    panel(view, "Logs")
    clock.run_for(20_000)
    assert asked() == 2
