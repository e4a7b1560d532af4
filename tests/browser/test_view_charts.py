"""The charts of what rank 0 reported."""

from __future__ import annotations

import re

import pytest
from fake_view import button
from playwright.sync_api import expect
from view_samples import ANSWERS, NOW, reports, state

pytestmark = pytest.mark.browser


def chart(view, name):
    return view.page.get_by_role("img", name=name)


def open_view(view, clock, answer, **more):
    view.open(
        state(step=400, report={"loss": 0.29, "accuracy": 0.8, "lr": 0.01}, **more), {**ANSWERS, "reports": answer}
    )
    view.run_for(100)
    return view


LABELS = """
  window.labels = [];
  const { fillText } = CanvasRenderingContext2D.prototype;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const { e, f } = this.getTransform();
    window.labels.push([text, x + e, y + f]);
    fillText.call(this, text, x, y);
  };
"""


def painted(view):
    """The number of pixels that the first chart has drawn in the colour of a change of the world for the worse."""
    script = """canvas => {
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      let count = 0;
      for (let i = 0; i < data.length; i += 4) if (data[i] > 150 && data[i + 1] < 90 && data[i + 3] > 200) count += 1;
      return count;
    }"""
    return view.page.locator("canvas").first.evaluate(script)


def test_each_reported_value_has_a_chart(view, clock):
    """With its range in words, and marks where the world changed. Three are shown at first; speed is one of them."""
    open_view(view, clock, reports())
    for name in ("loss from 2.52 to 0.288", "accuracy from", "steps per second from 1.43 to 1.43"):
        expect(chart(view, name)).to_be_visible()
    expect(view.root).to_contain_text("3 changes of the world")
    assert painted(view) > 8
    expect(view.page.locator(".nbe-chartbox")).to_have_count(3)
    button(view, "Show all 5").click()
    expect(chart(view, "lr from 0.1 to 0.01")).to_be_visible()


def test_without_reports_there_are_no_charts(view, clock):
    """A job that reports nothing has no empty box."""
    open_view(view, clock, ANSWERS["reports"])
    expect(view.page.locator(".nbe-charts")).to_be_hidden()


def test_a_view_asks_only_for_new_rows(view, clock):
    """While the job makes steps, once a second at most; it adds the new rows to those that it has."""
    open_view(view, clock, reports())
    view.page.evaluate(
        "answer => { model.answers.reports = answer }",
        {**reports(404), "start": 400, "rows": reports(404)["rows"][400:]},
    )
    for step in range(401, 405):
        view.patch(step=step)
        view.run_for(250)
    view.run_for(1000)
    asked = view.sent("ask")
    counts = [query["count"] for query in asked if query["ask"] == "reports"]
    assert counts[:2] == [0, 400]
    assert set(counts[2:]) <= {404}
    assert len(counts) <= 4
    expect(chart(view, re.compile("^loss from 2.52 to .*, step 1 to step 404"))).to_be_visible()
    view.run_for(2000)  # an answer to the last step but one may have come only now
    asked = len(view.sent("ask"))
    view.run_for(5000)
    assert len(view.sent("ask")) == asked


def test_a_clock_that_is_set_back_does_not_stop_the_charts(view, clock):
    """The browser's clock may be an hour ahead until it is set: the view asks on for rows."""
    open_view(view, clock, reports())
    asked = len(view.sent("ask"))
    clock.set_system_time(NOW - 3600)
    view.patch(step=401)
    view.run_for(2000)
    assert view.sent("ask")[asked:] == [{"ask": "reports", "version": "v1", "count": 400}]


def test_the_newest_report_is_shown_before_its_row(view, clock):
    """In a long job, a row stands for many reports and comes only every few seconds."""
    open_view(view, clock, reports())
    view.patch(step=450, report={"loss": 0.125})
    view.run_for(1500)
    expect(chart(view, "loss from 2.52 to 0.125, step 1 to step 450")).to_be_visible()


def test_a_chart_can_be_read_zoomed_and_logarithmic(view, clock):
    """The pointer reads all charts at one step; a drag zooms all; each has its own logarithmic scale."""
    open_view(view, clock, reports())
    box = view.page.locator(".u-over").first.bounding_box()
    view.page.mouse.move(box["x"] + box["width"] * 149 / 399, box["y"] + 40)
    view.run_for(100)
    note = view.page.locator(".nbe-charts .nbe-note")
    expect(note).to_contain_text(re.compile(r"step 1(49|50|51) · world of 3, was 4"))
    step = int(note.text_content().split()[1])
    values = view.page.locator(".nbe-charthead b").all_text_contents()
    assert [float(value) for value in values[:2]] == [float(f"{v:.5g}") for v in reports()["rows"][step - 1][4:6]]
    expect(button(view, "Reset zoom")).to_be_hidden()
    view.page.mouse.down()
    view.page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 40)
    view.page.mouse.up()
    view.run_for(100)
    expect(button(view, "Reset zoom")).to_be_visible()
    button(view, "Logarithmic scale of loss").click()
    expect(button(view, "Logarithmic scale of loss")).to_have_attribute("aria-pressed", "true")
    button(view, "Reset zoom").click()
    expect(button(view, "Reset zoom")).to_be_hidden()
    view.page.get_by_label("Horizontal axis").select_option("time")
    expect(chart(view, "loss from 2.52 to 0.288, 20")).to_be_visible()


def test_a_chart_is_read_and_zoomed_by_the_keyboard(view, clock):
    """Tab reaches it. The arrow keys move the cursor of all charts, plus and minus zoom, Escape shows all; each value is spoken."""
    open_view(view, clock, reports())
    rows, keys = reports()["rows"], view.page.keyboard
    spoken = view.page.get_by_role("status", name="Value under the cursor")
    button(view, "Logarithmic scale of loss").focus()
    keys.press("Tab")
    expect(view.page.get_by_role("application", name="Chart of loss")).to_be_focused()
    keys.press("End")
    expect(spoken).to_have_text(f"loss {rows[-1][4]:.5g}, step 400")
    for key in ("Home", *["ArrowRight"] * 150, "ArrowLeft"):
        keys.press(key)
    expect(spoken).to_have_text(f"loss {rows[149][4]:.5g}, step 150 · world of 3, was 4")
    expect(view.page.locator(".nbe-charthead b").nth(1)).to_have_text(f"{rows[149][5]:.5g}")
    keys.press("+")
    expect(spoken).to_have_text(f"step 76 to step 275: loss {rows[149][4]:.5g}, step 150 · world of 3, was 4")
    keys.press("Home")
    expect(spoken).to_contain_text(f"loss {rows[75][4]:.5g}, step 76")
    keys.press("Escape")
    expect(button(view, "Reset zoom")).to_be_hidden()
    keys.press("Tab")
    expect(view.page.locator(".nbe-charts .nbe-note")).to_have_text("3 changes of the world")


def test_the_charts_and_the_overview_show_the_same_newest_values(view, clock):
    """A row of the charts may be older, or the mean of many reports: beside a name is what was reported last."""
    open_view(view, clock, reports(), steps_per_second=44.0)
    for loss, speed in ((0.29, "44"), (0.0019214, "41.9")):
        view.patch(step=401, report={"loss": loss}, steps_per_second=float(speed))
        view.run_for(100)
        values = view.page.locator(".nbe-charthead b")
        expect(values.nth(0)).to_have_text(str(loss))
        expect(values.nth(2)).to_have_text(speed)
        facts = view.page.locator(".nbe-facts").first
        expect(facts).to_contain_text(f"loss{loss}")
        expect(facts).to_contain_text(f"Steps per second{speed}")


@pytest.mark.parametrize("width", [400, 872, 1600])
def test_the_axes_have_at_least_two_labels(view, clock, width):
    """Of steps and of times, at each width, and however long the job is."""
    view.page.set_viewport_size({"width": width, "height": 900})
    view.page.add_init_script(LABELS)
    open_view(view, clock, reports(20))
    for axis in ("step", "time"):
        view.page.get_by_label("Horizontal axis").select_option(axis)
        for n, last in enumerate((40, 190, 950, 1914, 9_700, 49_000)):
            answer = reports(2, version=f"{axis}{n}")
            answer["rows"][1][:2] = [last, answer["rows"][0][1] + 7 * last]
            view.page.evaluate("answer => { model.answers.reports = answer; window.labels = [] }", answer)
            view.patch(step=last)
            view.run_for(2500)
            labels = view.page.evaluate(
                "window.labels.filter(([text, x, y]) => y === Math.max(...window.labels.map((l) => l[2])))"
            )
            assert len({x for _, x, _ in labels}) >= 2, (axis, last, labels)


def test_the_reports_can_be_saved(view, clock):
    """As a table for spreadsheets, named after the job."""
    open_view(view, clock, reports(2))
    with view.page.expect_download() as download:
        button(view, "Save CSV").click()
    assert download.value.suggested_filename == "job-1.csv"
    text = download.value.path().read_text()
    assert text.splitlines()[0] == "step,time,generation,size,loss,accuracy,lr,a-report-with-a-rather-long-name"
    assert len(text.splitlines()) == 3


def test_a_job_that_reports_nothing_has_not_the_charts_of_the_one_before(view, clock):
    """They go as soon as the new job has begun, also while the kernel is busy and does not answer."""
    open_view(view, clock, reports())
    expect(chart(view, "loss from")).to_be_visible()
    view.page.evaluate("() => { model.answers.reports = null }")
    view.patch(step=401)
    view.run_for(1500)
    late = view.last_id("ask")
    view.patch(job="job-2", outcome="failed", step=0, report={"loss": None, "accuracy": None, "lr": None})
    view.run_for(100)
    expect(view.page.locator(".nbe-charts")).to_be_hidden()
    view.page.evaluate("answer => model.deliver(answer)", {**reports(), "reply": late})
    view.run_for(100)
    expect(view.page.locator(".nbe-charts")).to_be_hidden()


def test_another_job_begins_with_empty_charts(view, clock):
    """Its reports have another version, and replace those of the job before."""
    open_view(view, clock, reports())
    view.page.evaluate(
        "answer => { model.answers.reports = answer }",
        {**reports(40, version="v2"), "names": ["reward", "b", "c", "d"]},
    )
    view.patch(job="job-2", step=40, report={"reward": 1.0}, time=NOW + 9)
    view.run_for(2500)
    expect(chart(view, "reward from")).to_be_visible()
    expect(chart(view, "loss from")).to_have_count(0)


def test_another_job_is_not_zoomed(view, clock):
    """A range of the old job's steps may have none of the new job's: its charts would be empty."""
    open_view(view, clock, reports())
    view.page.locator(".nbe-chartreader").first.focus()
    view.page.keyboard.press("+")
    expect(button(view, "Reset zoom")).to_be_visible()
    view.page.evaluate("answer => { model.answers.reports = answer }", reports(20, version="v2"))
    view.patch(job="job-2", step=20)
    view.run_for(2000)
    expect(chart(view, re.compile("step 1 to step 20,"))).not_to_have_count(0)
    expect(button(view, "Reset zoom")).to_be_hidden()
