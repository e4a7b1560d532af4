"""The timeline: events, the trace, and answers of the kernel."""

from __future__ import annotations

import json
import re

import pytest
from fake_view import button
from playwright.sync_api import expect
from view_samples import ANSWERS, HISTORY, event, state

pytestmark = pytest.mark.browser


def test_the_timeline_joins_older_and_new_events(view):
    """The kernel is asked once; a change opens to its phases and reasons."""
    view.open(state(events=HISTORY[-2:]), ANSWERS)
    log = view.page.get_by_role("list", name="Events, newest first")
    expect(log.locator("> li")).to_have_count(5)
    assert view.sent("ask") == [{"ask": "history", "before": None}]
    view.patch(events=[*HISTORY[-2:], event(6, "host-added", "gpu3 with 2 slots", size=5)])
    expect(log.locator("> li").first).to_contain_text("gpu3 with 2 slots")
    expect(
        view.page.get_by_role("img", name=re.compile("Size of the world .* 5 now, 5 at most, 6 events"))
    ).to_be_visible()
    log.get_by_text("first step of generation 2 · 71 ms in all").click()
    expect(log.get_by_role("row", name="abort")).to_contain_text("12 ms")
    expect(log.locator("ul.nbe-why > li")).to_have_text(["gpu2/1#1 was killed", "gpu2/1#1 died"])
    assert len(view.sent("ask")) == 1


def test_the_timeline_asks_again_when_the_kernel_was_busy(view, clock):
    """A first question without an answer leaves no complaint: the next event asks again, and older events are there."""
    view.open(state(events=HISTORY[-2:]), {})
    clock.run_for(10_500)
    expect(view.root.get_by_text("no answer from the kernel for 10 s")).to_be_visible()
    view.page.evaluate("answer => { model.answers.history = answer }", ANSWERS["history"])
    view.patch(events=[*HISTORY[-2:], event(6, "host-added", "gpu3 with 2 slots", size=5)])
    expect(view.page.get_by_role("list", name="Events, newest first").locator("> li")).to_have_count(6)
    expect(view.root.get_by_text("no answer from the kernel")).to_have_count(0)
    assert [sent["ask"] for sent in view.sent("ask")].count("history") == 2


def test_the_marks_are_reached_by_the_keyboard(view):
    """One tab stop; the arrow keys move, the text is shown, and Enter shows the event in the list."""
    view.open(state(events=HISTORY), ANSWERS)
    rug = view.page.get_by_role("group", name="Events on the timeline")
    marks = rug.get_by_role("button")
    expect(marks).to_have_count(5)
    assert marks.evaluate_all("nodes => nodes.filter((node) => node.tabIndex === 0).length") == 1
    marks.last.focus()
    view.page.keyboard.press("Home")
    for _ in range(2):
        view.page.keyboard.press("ArrowRight")
    expect(marks.nth(2)).to_be_focused()
    expect(view.page.locator(".nbe-told")).to_contain_text("gpu2/1#1 died")
    view.page.get_by_label("Show").select_option("changes")
    marks.nth(1).focus()
    view.page.keyboard.press("Enter")
    expect(view.page.get_by_label("Show")).to_have_value("all")
    expect(view.page.locator(".nbe-log > li.nbe-highlight")).to_contain_text("gpu2/1#1 was killed")


def test_the_lanes_say_when_each_host_was_up(view):
    """In words too. Of many hosts eight are shown, and how many there are; a button shows the others."""
    events = [event(n, "host-up", ago=200, host=f"gpu{n:02}") for n in range(1, 65)]
    events += [event(65, "host-lost", "gpu17 is lost", ago=100, host="gpu17")]
    view.open(state(events=events[-2:]), {**ANSWERS, "history": {"events": events, "oldest": 1}})
    lanes = view.page.get_by_role("group", name="Hosts on the timeline").get_by_role("img")
    expect(view.root).to_contain_text("8 of 64 hosts shown")
    expect(lanes).to_have_count(8)
    expect(lanes.first).to_have_accessible_name("gpu17: up for 50 % of the time shown, not up now, 1 failure")
    button(view, "Show all hosts").click()
    expect(lanes).to_have_count(64)
    expect(lanes.last).to_have_accessible_name(re.compile(": up for 100 % of the time shown, up now, 0 failures"))
    expect(view.root).to_contain_text("64 of 64 hosts shown")
    button(view, "Show fewer hosts").click()
    expect(lanes).to_have_count(8)


def test_screen_readers_hear_the_kind_of_an_event(view):
    """The word that `cluster.events` has for it: a tooltip alone is for the pointer only."""
    view.open(state(events=HISTORY), ANSWERS)
    expect(view.page.get_by_role("listitem").filter(has_text="gpu2/1#1 was killed")).to_contain_text("worker-lost")


def test_times_of_another_day_have_their_day(view, clock):
    """In the list, on the axis and at the marks. The chart can show the last hour only."""
    events = [event(1, "world-formed", "a world of 4", ago=90_000), event(2, "scaled", "to 2", ago=60)]
    view.open(state(events=events), {"history": {"events": events, "oldest": 1}})
    day = re.compile(r"^[A-Z][a-z]{2} \d+, \d\d:\d\d:\d\d$")
    times = view.page.locator(".nbe-log time")
    expect(times.last).to_have_text(day)
    expect(times.first).to_have_text(re.compile(r"^\d\d:\d\d:\d\d$"))
    axis = view.page.locator(".nbe-times time")
    expect(axis.first).to_have_text(day)
    expect(axis.last).to_have_text(day)
    view.page.get_by_label("Chart").select_option("the last hour")
    expect(axis.first).to_have_text(re.compile(r"^\d\d:\d\d:\d\d$"))
    expect(view.page.locator(".nbe-rug button")).to_have_count(1)


def test_events_are_filtered_by_kind(view):
    """All, changes of the world, or failures."""
    view.open(state(events=HISTORY[-2:]), ANSWERS)
    items = view.page.get_by_role("list", name="Events, newest first").locator("> li")
    expect(items).to_have_count(5)
    view.page.get_by_label("Show").select_option("changes")
    expect(items).to_have_count(3)
    view.page.get_by_label("Show").select_option("failures")
    expect(items).to_have_count(2)
    expect(items.last).to_contain_text("gpu2/1#1 was killed")


def test_an_error_in_the_driver_is_a_failure(view):
    """An unexpected error in the driver's code is among the failures, with its sign."""
    fault = event(1, "driver-error", "the host discovery: KeyError: 'a'")
    view.open(state(events=[fault, event(2)]))
    view.page.get_by_label("Show").select_option("failures")
    items = view.page.get_by_role("list", name="Events, newest first").locator("> li")
    expect(items).to_have_count(1)
    expect(items).to_contain_text("the host discovery: KeyError: 'a'")


def test_missing_events_are_asked_for(view):
    """If more events happen than the state lists, the view asks for the missing ones; a button shows older ones."""
    view.open(state(events=[]), {"history": {"events": HISTORY[3:], "oldest": 1}})
    items = view.page.get_by_role("list", name="Events, newest first").locator("> li")
    expect(items).to_have_count(2)
    view.page.evaluate("answer => { model.answers.history = answer }", {"events": HISTORY[:3], "oldest": 1})
    button(view, "Earlier").click()
    expect(items).to_have_count(5)
    expect(button(view, "Earlier")).to_be_disabled()
    missed = {"events": [event(n) for n in range(6, 20)], "oldest": 1}
    view.page.evaluate("answer => { model.answers.history = answer }", missed)
    view.patch(events=[event(n) for n in range(20, 25)])
    expect(items).to_have_count(24)
    assert [query["before"] for query in view.sent("ask")] == [None, 4, 20]


def test_a_cluster_that_is_started_again_has_a_new_timeline(view, clock):
    """Its events are numbered from 1 again; they are not taken for those of the last start."""
    view.open(state(), ANSWERS)
    log = view.page.locator(".nbe-log > li")
    expect(log).to_have_count(6)
    clock.run_for(200)
    new = [event(1, "host-added", "gpu7 is new"), event(2, "worker-lost", "gpu7/0#1 died", size=1)]
    view.page.evaluate("answer => { model.answers.history = answer }", {"events": new, "oldest": 1})
    view.update(state=state(n=2, events=new[1:], driver={**state()["driver"], "pid": 999}), change={})
    clock.run_for(200)
    expect(log).to_have_text([re.compile("gpu7/0#1 died"), re.compile("gpu7 is new")])
    expect(view.page.locator(".nbe-rug button")).to_have_count(2)
    expect(view.page.locator(".nbe-rug button").last).to_have_accessible_name(re.compile("gpu7/0#1 died"))


def test_the_trace_is_saved_as_a_file(view):
    """For Perfetto."""
    view.open(state(), ANSWERS)
    with view.page.expect_download() as download:
        button(view, "Save trace").click()
    assert download.value.suggested_filename == "nbelastic-trace.json"
    assert json.loads(download.value.path().read_text()) == ANSWERS["trace"]["trace"]


def test_answers_to_other_views_are_ignored(view):
    """The kernel sends answers to all views; each view takes its own. An error is shown."""
    view.open(state(events=[]))
    items = view.page.get_by_role("list", name="Events, newest first").locator("> li")
    view.page.evaluate("events => model.deliver({reply: 'another-1', events, oldest: 1})", HISTORY)
    view.page.evaluate("([id, error]) => model.deliver({reply: id, error})", [view.last_id("ask"), "it is forgotten"])
    expect(view.page.get_by_role("tabpanel", name="Timeline")).to_contain_text("it is forgotten")
    expect(items).to_have_count(0)
