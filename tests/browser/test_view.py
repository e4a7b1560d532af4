"""The live view by itself, in a page without a notebook: what it shows, asks and sends, for whom and how fast."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import axe_playwright_python
import pytest
from fake_view import NOW, View, event, host, state, worker
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

AXE = Path(axe_playwright_python.__file__).parent / "axe.min.js"
CHANGE = {"detect": 3.2, "abort": 12.4, "form": 29.0, "sync": 4.5, "first step": 18.1, "all": 71.2}
DOUBLE = 500  # ms: a second click that comes earlier is a double click, and confirms nothing
HISTORY = [
    event(1, "world-formed", "a world of 4", ago=300, size=4),
    event(2, "worker-lost", "gpu2/1#1 was killed", ago=200, size=3),
    event(3, "world-broken", "gpu2/1#1 died", ago=199.9, size=3),
    event(4, "training", "first step of generation 2", ago=199.8, size=3, took=CHANGE),
    event(5, "worker-ready", "gpu2/1#2 is ready", ago=190, size=3),
]
WRITERS = [["gpu1/0#1", 0], ["gpu1/1#1", 1], ["gpu2/0#1", 2], ["gpu2/1#1", 3]]
STACKS = [
    {"workers": WRITERS[:2], "place": "train.py:88 in train", "text": "line 88, in train", "note": ""},
    {"workers": WRITERS[2:3], "place": "data.py:12 in load", "text": "line 12, in load", "note": "3 commits behind"},
]
ANSWERS = {
    "hello": {},
    "history": {"events": HISTORY, "oldest": 1},
    "stacks": {"stacks": STACKS, "silent": WRITERS[3:]},
    "trace": {"trace": {"traceEvents": [{"name": "form", "ph": "X"}]}},
}


def logs(*lines, first=1, job="job-1", unfinished=(), speakers=WRITERS):
    """An answer of these lines, each of a rank, a stream and a text."""
    numbered = [[n, stream, text, [[rank, rank]]] for n, (rank, stream, text) in enumerate(lines, first)]
    pending = [[0, stream, text, runs] for runs, stream, text in unfinished]
    rest = {"next": first + len(lines) - 1, "writers": WRITERS, "speakers": speakers}
    return {"job": job, "lines": numbered, "unfinished": pending, **rest}


def crowd():
    """Long names and reasons, every state, GPUs, reports and curves."""
    long = "gpu-node-with-a-rather-long-name.cluster.example.org"
    slots = {"0#1": worker(3), "1#2": worker(None, "ready", restarts=1), "2#1": worker(None, "lost", reason="signal 9")}
    hosts = {
        "localhost": host(
            [worker(0), worker(1, behind=3), worker(2), worker(None, "starting")], gpus=[[93, 61e3, 80e3]]
        ),
        long: host(
            slots, slots=5, slots_until={"3": NOW + 3030}, phase="draining", reason="to leave at the next commit"
        ),
        "gpu3": host([], slots=2, phase="backoff", reason="ssh said: connection refused", until=NOW + 3030, cpu=None),
    }
    report = {"loss": 0.2134, "a-report-with-a-rather-long-name": 123456, "lr": "nan"}
    events = [event(6, "order-refused", "a-word-of-one-hundred-letters-" * 4), event(7, "training", took=CHANGE)]
    orders = [{"id": "another-1", "by": "%elastic_add", "text": f"add {long}:8", "word": "under way", "why": ""}]
    curves = {"loss": [2.3, 1.1, 0.5, 0.2134], "accuracy": [0.1, 0.5, 0.97]}
    figures = {"report": report, "curves": curves, "total": 20_000, "failed_at": NOW - 190}
    return state(hosts=hosts, events=events, orders=orders, **figures)


@pytest.fixture
def view(page):
    """Fails if the browser complained about anything."""
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
    yield View(page)
    assert complaints == []


@pytest.fixture
def clock(page):
    """Time that a story may push on; it begins when the kernel's does."""
    page.clock.install(time=datetime.fromtimestamp(NOW, UTC))
    return page.clock


@pytest.fixture
def orders(view):
    return view.page.get_by_role("status", name="Orders")


def button(view, name):
    return view.page.get_by_role("button", name=name, exact=True)


def panel(view, name):
    view.page.get_by_role("tab", name=name).click()
    return view.page.get_by_role("tabpanel", name=name)


def told(id_, word, why="", by="dashboard", text="what was ordered"):
    return {"id": id_, "by": by, "text": text, "word": word, "why": why}


# At a glance.


def test_everything_that_matters_is_told_at_a_glance(view, clock):
    """Phase and reason, world, step of all, speed, what is left, reports with their curves, and the last failure."""
    curves = {"loss": [2.3, 1.0, 0.21]}
    view.open(state(total=10_000, report={"loss": 0.21}, curves=curves, failed_at=NOW - 185, steps_per_second=50.0))
    expect(view.page.locator(".nbe-phase")).to_have_text("running")
    expect(view.page.locator(".nbe-reason")).to_have_text("4 workers train in generation 3")
    facts = view.page.locator(".nbe-facts").first
    for text in ("4 / 2–8", "1,234 of 10,000", "50", "about 2 min", "0.21"):
        expect(facts).to_contain_text(text)
    expect(view.page.get_by_role("img", name="loss from 2.3 to 0.21")).to_be_visible()
    expect(view.page.get_by_role("progressbar")).to_have_attribute("aria-valuetext", "1,234 of 10,000 steps")
    expect(view.root).to_contain_text("3 min since the last failure")
    clock.fast_forward(60_000)
    expect(view.root).to_contain_text("4 min since the last failure")


def test_between_jobs_it_says_how_many_are_ready(view):
    """A cluster that waits for a job is ready when enough workers are; before, it waits."""
    ready = {"gpu1": host([worker(None, "ready"), worker(None, "ready")])}
    view.open(state(phase="waiting", reason="2 workers ready", job=None, world_size=0, hosts=ready))
    expect(view.page.locator(".nbe-phase")).to_have_text("ready")
    expect(view.page.locator(".nbe-facts").first).to_contain_text("2 / 2–8")
    expect(view.page.get_by_role("progressbar")).to_have_count(0)
    view.patch(hosts={"gpu1": {"workers": {"1#1": None}}})
    expect(view.page.locator(".nbe-phase")).to_have_text("waiting")


def test_a_change_is_shown_only_with_its_own_key_frame(view):
    """A patch for another key frame is none for this one; the next key frame replaces all."""
    view.open(state())
    facts = view.page.locator(".nbe-facts").first
    view.patch(base=7, step=9999)
    view.patch(base=1, step=2345)
    expect(facts).to_contain_text("2,345")
    view.tell(state=state(n=7, step=7000), change={"base": 7, "patch": {"step": 7001}})
    expect(facts).to_contain_text("7,001")


def test_what_stays_is_not_touched(view):
    """Updates make no new nodes for what is there, and take the focus from nobody."""
    view.open(state())
    chip = view.page.locator(".nbe-chip").nth(2)
    chip.evaluate("node => { node.kept = true; node.focus(); }")
    view.patch(step=2000, hosts={"gpu2": {"workers": {"0#1": worker(2, behind=4)}}, "gpu3": host([worker(4)])})
    expect(chip).to_contain_text("4 behind")
    view.patch(step=2001, hosts={"gpu1": None, "gpu2": {"workers": {"0#1": worker(0, behind=5)}}})
    expect(view.page.get_by_role("rowheader", name="gpu1")).to_have_count(0)
    first = view.page.locator(".nbe-chip").first
    expect(first).to_contain_text("5 behind")
    assert first.evaluate("node => node.kept && node === document.activeElement")


def test_losses_are_spoken_and_numbers_are_not(view):
    """A screen reader hears a summary of what changed, and nothing of every step."""
    view.open(state())
    news = view.page.get_by_role("status", name="News")
    view.patch(step=1300)
    expect(view.page.locator(".nbe-facts").first).to_contain_text("1,300")
    expect(news).to_have_text("")
    view.patch(world_size=3, events=[event(1), event(2, "worker-lost", "gpu2/1#1 was killed")])
    expect(news).to_have_text("3 workers in the world. gpu2/1#1 was killed")


def test_text_from_outside_stays_text(view):
    """Markup in names, reasons, reports and lines is shown as it is written."""
    markup = "<img src=x onerror=complain()>"
    row = worker(0, reason=markup)
    hosts = {markup: host([row], reason=markup, address=markup)}
    everything = {"reason": markup, "hosts": hosts, "report": {markup: markup}, "events": [event(9, text=markup)]}
    view.open(state(**everything), {**ANSWERS, "logs": logs((0, "out", markup))})
    expect(view.page.get_by_role("rowheader")).to_contain_text(markup)
    expect(panel(view, "Logs")).to_contain_text(markup)
    expect(view.page.locator(".nbe img")).to_have_count(0)


# The board.


def test_every_slot_shows_who_is_in_it(view, clock):
    """Members, newcomers, the lost, empty and cooling slots: each is a button with a sign and a word."""
    view.open(crowd())
    legend = view.page.locator(".nbe-legend")
    for text in ("4 running", "1 ready", "1 starting", "1 lost", "1 backoff", "3 empty"):
        expect(legend).to_contain_text(text)
    expect(button(view, "rank 1, slot 1, running, 3 commits behind")).to_contain_text("step 1,231")
    expect(button(view, "slot 1, ready, 1 restart")).to_be_visible()
    expect(button(view, "slot 2, lost, signal 9")).to_be_visible()
    expect(view.page.get_by_role("button", name=re.compile("slot 3, backoff, for 50 min"))).to_be_visible()
    expect(view.page.get_by_role("row", name="gpu3")).to_contain_text("again in 50 min")
    clock.fast_forward(600_000)
    expect(view.page.get_by_role("row", name="gpu3")).to_contain_text("again in 40 min")


def test_gpus_have_a_column_only_where_there_are_any(view):
    """Utilisation and memory of all of a host's GPUs."""
    view.open(state())
    expect(view.page.get_by_role("columnheader", name="GPU")).to_have_count(0)
    view.patch(hosts={"gpu1": {"gpus": [[90, 60_000, 80_000], [80, 60_000, 80_000]]}})
    expect(view.page.get_by_role("columnheader", name="GPU")).to_be_visible()
    expect(view.page.get_by_role("cell", name="85 % 120 / 160 GB")).to_be_visible()


def test_a_change_lights_up_for_a_moment(view):
    """A slot that changes its state is lit; those that only compute are not, nor is anything at the first sight."""
    view.open(state())
    lit = view.page.locator(".nbe-news")
    expect(lit).to_have_count(0)
    longer = view.page.add_style_tag(content=".nbe-news { animation-duration: 60s !important; }")
    view.patch(step=1500, hosts={"gpu2": {"workers": {"1#1": worker(None, "lost")}}})
    expect(lit).to_have_attribute("data-state", "lost")
    longer.evaluate("node => node.remove()")
    expect(lit).to_have_count(0)


def test_motion_is_for_those_who_like_it(view):
    """With reduced motion nothing is animated."""
    view.page.emulate_media(reduced_motion="reduce")
    view.open(state())
    view.patch(hosts={"gpu2": {"workers": {"1#1": worker(None, "lost")}}})
    expect(view.page.locator("[data-state=lost]")).to_be_visible()
    assert view.page.evaluate("document.getAnimations().length") == 0


def test_a_slot_tells_more_when_it_is_opened(view, clock):
    """Id, process, rank, step, restarts and why; its log is one click away, a restart two."""
    row = worker(3, pid=815, restarts=2, behind=1, reason="slow disk")
    hosts = {"gpu1": host([worker(0), worker(1)]), "gpu2": host([worker(2), row])}
    view.open(state(hosts=hosts), {**ANSWERS, "logs": logs((3, "out", "hello from rank 3"))})
    chip = view.page.locator(".nbe-chip").nth(3)
    chip.click()
    detail = view.page.locator(".nbe-detail")
    for text in ("gpu2/1#1", "815", "1,233", "1 commit", "slow disk"):
        expect(detail).to_contain_text(text)
    expect(chip).to_have_attribute("aria-expanded", "true")
    button(view, "Restart").click()
    assert view.sent() == []
    clock.fast_forward(DOUBLE)
    button(view, "Kill and restart it?").click()
    assert view.sent() == [{"order": "restart", "worker": "gpu2/1#1"}]
    button(view, "Log").click()
    expect(view.page.get_by_role("tabpanel", name="Logs")).to_contain_text("hello from rank 3")
    assert view.sent("ask")[-1] == {"ask": "logs", "worker": "gpu2/1#1", "since": 0}
    view.patch(hosts={"gpu2": {"workers": {"1#1": None, "1#2": worker(None, "starting", pid=816)}}})
    expect(detail).to_contain_text("gpu2/1#2")
    view.patch(hosts={"gpu2": None})
    expect(detail).to_have_count(0)


# Orders.


def test_an_order_is_shown_at_once_then_under_way_then_done_then_gone(view, clock, orders):
    """The kernel's word about an order comes by its id."""
    view.open(state())
    view.page.get_by_label("Host to add").fill(" gpu3:2 ")
    button(view, "Add host").click()
    assert view.sent() == [{"order": "add_host", "host": "gpu3:2"}]
    expect(orders).to_have_text("add gpu3:2: sent")
    mine = view.last()
    view.patch(orders=[told(mine, "under way", text="add gpu3:2")])
    expect(orders).to_have_text("add gpu3:2: under way")
    view.patch(orders=[told(mine, "done", text="add gpu3:2")])
    expect(orders).to_have_text("add gpu3:2: done")
    clock.fast_forward(6_000)
    expect(orders).to_have_text("")


def test_a_refusal_says_why_and_stays_a_while(view, clock, orders):
    """Long enough to be read."""
    view.open(state())
    button(view, "Remove host gpu2").click()
    view.patch(orders=[told(view.last(), "refused", "there is no host", text="remove gpu2")])
    expect(orders).to_have_text("remove gpu2: refused, there is no host")
    clock.fast_forward(10_000)
    expect(orders).to_have_text("remove gpu2: refused, there is no host")
    clock.fast_forward(6_000)
    expect(orders).to_have_text("")


def test_an_order_without_an_answer_says_so(view, clock, orders):
    """After three seconds; a kernel that is gone altogether refuses at once."""
    view.open(state())
    button(view, "Remove host gpu2").click()
    clock.fast_forward(3_500)
    expect(orders).to_have_text("remove gpu2: sent, no answer yet; is the kernel busy or gone?")
    view.page.evaluate("model.broken = 'comm is closed'")
    button(view, "Remove host gpu2").click()
    expect(orders).to_contain_text("refused, the kernel does not listen: Error: comm is closed")


def test_orders_of_others_are_shown_with_their_names(view, orders):
    """Those that were answered before this view was there are old news."""
    first = [told("x-1", "done"), told("x-2", "under way", by="%elastic_add", text="add gpu3:2")]
    view.open(state(orders=first))
    expect(orders).to_have_text("add gpu3:2 (by %elastic_add): under way")
    view.patch(orders=[told("x-2", "refused", "no such host", by="%elastic_add", text="add gpu3:2")])
    expect(orders).to_have_text("add gpu3:2 (by %elastic_add): refused, no such host")


def test_a_host_is_removed_gently_at_once_and_hard_only_when_asked_twice(view, clock):
    """The second question is open for a moment only."""
    view.open(state())
    button(view, "Remove host gpu2").click()
    assert view.sent() == [{"order": "remove_host", "host": "gpu2", "now": False}]
    view.patch(hosts={"gpu2": {"phase": "draining"}})
    expect(button(view, "Remove host gpu2")).to_be_disabled()
    button(view, "Remove gpu2 now").click()
    clock.fast_forward(5_000)
    button(view, "Remove gpu2 now").click()
    assert len(view.sent()) == 1
    clock.fast_forward(DOUBLE)
    button(view, "Remove gpu2 now: really?").click()
    assert view.sent()[1:] == [{"order": "remove_host", "host": "gpu2", "now": True}]


@pytest.mark.parametrize(
    ("name", "sure", "order"),
    [("Stop job", "Really stop it?", "stop_job"), ("Stop cluster", "Really stop it?", "stop")],
)
def test_nothing_is_ended_by_a_double_click_or_a_held_key(view, clock, name, sure, order):
    """What ends work is asked twice: a second click on purpose confirms, a double click or a key that repeats does not."""
    view.open(state())
    button(view, name).dblclick()
    expect(button(view, sure)).to_be_visible()
    clock.fast_forward(10_000)
    button(view, name).evaluate("node => { node.click(); node.click(); }")  # as two quick presses of a key
    clock.fast_forward(DOUBLE)
    button(view, sure).focus()
    view.page.keyboard.down("Enter")  # the first of these would be a click on purpose, if it came alone
    assert view.sent() == [{"order": order}]
    for _ in range(5):
        view.page.keyboard.down("Enter")  # it repeats
    clock.fast_forward(DOUBLE)
    view.page.keyboard.down("Enter")
    expect(button(view, name)).to_be_visible()
    assert view.sent() == [{"order": order}]


def test_an_order_that_takes_long_stays(view, clock, orders):
    """One that is under way for minutes, as for a host of a batch system, is not dropped, and its end is still heard."""
    view.open(state(), ANSWERS)
    view.page.get_by_label("min").fill("3")
    button(view, "Apply").click()
    mine = view.last()
    view.patch(orders=[told(mine, "under way", text="scale to 3–8")])
    expect(orders).to_have_text("scale to 3–8: under way")
    clock.run_for(70_000)
    expect(orders).to_have_text("scale to 3–8: under way")
    expect(button(view, "Apply")).to_be_enabled()
    view.patch(min=3, orders=[told(mine, "done", text="scale to 3–8")])
    expect(button(view, "Apply")).to_be_disabled()


def test_a_refused_scale_keeps_what_was_typed(view, orders):
    """It can be corrected; Escape brings the kernel's values back."""
    view.open(state())
    least = view.page.get_by_label("min")
    least.fill("9")
    button(view, "Apply").click()
    view.patch(orders=[told(view.last(), "refused", "min=9 is more than max=8", text="scale to 9–8")])
    expect(orders).to_contain_text("min=9 is more than max=8")
    view.patch(step=2000)
    expect(view.page.locator(".nbe-facts").first).to_contain_text("2,000")
    expect(least).to_have_value("9")
    expect(button(view, "Apply")).to_be_enabled()
    least.press("Escape")
    view.patch(step=3000)
    expect(least).to_have_value("2")
    expect(button(view, "Apply")).to_be_disabled()


def test_the_limits_are_scaled_together(view, orders):
    """No number is no limit; what is being typed stays until the order is answered."""
    view.open(state())
    least, most = view.page.get_by_label("min"), view.page.get_by_label("max")
    expect(button(view, "Apply")).to_be_disabled()
    least.fill("3")
    most.fill("")
    view.patch(step=2000)
    expect(view.page.locator(".nbe-facts").first).to_contain_text("2,000")
    button(view, "Apply").click()
    assert view.sent() == [{"order": "scale", "min": 3, "max": None}]
    view.patch(min=3, max=None, orders=[told(view.last(), "done", text="scale to 3 or more")])
    expect(orders).to_have_text("scale to 3 or more: done")
    expect(button(view, "Apply")).to_be_disabled()
    view.patch(min=4, max=6)
    expect(least).to_have_value("4")
    expect(most).to_have_value("6")


def test_a_finished_cluster_takes_no_orders_and_a_finished_job_cannot_be_stopped(view):
    """What makes no sense cannot be pressed; what is over needs no room."""
    view.open(state(outcome="succeeded"))
    expect(button(view, "Stop job")).to_be_disabled()
    view.patch(phase="stopping")
    for name in ("Stop cluster", "Add host", "Remove host gpu1", "Remove gpu1 now"):
        expect(button(view, name)).to_be_disabled()
    view.patch(phase="finished", hosts={"gpu1": None, "gpu2": None})
    expect(view.page.locator(".nbe-controls")).to_be_hidden()
    expect(view.page.locator(".nbe-board")).to_be_hidden()


def test_it_can_be_used_by_keyboard_alone(view, clock):
    """Tab, Enter and the arrows reach everything; the cluster is stopped only by the second Enter."""
    view.open(state(), ANSWERS)
    keys = view.page.keyboard
    view.page.get_by_label("Host to add").focus()
    keys.type("gpu3:2")
    keys.press("Enter")
    button(view, "Stop cluster").focus()
    keys.press("Enter")
    assert view.sent() == [{"order": "add_host", "host": "gpu3:2"}]
    clock.fast_forward(DOUBLE)
    keys.press("Enter")
    assert view.sent()[1:] == [{"order": "stop"}]
    view.page.locator(".nbe-chip").first.focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "Enter"):
        keys.press(key)
    expect(view.page.locator(".nbe-detail")).to_contain_text("gpu2/0#1")
    button(view, "Close").focus()
    keys.press("Escape")
    expect(view.page.locator(".nbe-chip").nth(2)).to_be_focused()
    view.page.get_by_role("tab", name="Timeline").focus()
    keys.press("ArrowRight")
    expect(view.page.get_by_role("tab", name="Logs")).to_be_focused()
    expect(view.page.get_by_role("tabpanel", name="Logs")).to_be_visible()


def test_the_notebooks_shortcuts_are_not_meant(view):
    """A letter pressed on a button of the view does not reach the notebook; a chord does."""
    view.open(state())
    view.page.evaluate("document.addEventListener('keydown', (event) => (window.heard ??= []).push(event.key))")
    button(view, "Stop job").focus()
    view.page.keyboard.press("x")
    view.page.keyboard.press("Control+s")
    assert view.page.evaluate("window.heard") == ["Control", "s"]


# The timeline.


def test_the_timeline_joins_history_and_news(view):
    """The kernel is asked once; a change can be opened and tells its phases and why."""
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


def test_a_fault_of_the_driver_is_a_failure(view):
    """An unexpected error in the driver's code is among the failures, with its sign."""
    fault = event(1, "driver-error", "the host discovery: KeyError: 'a'")
    view.open(state(events=[fault, event(2)]))
    view.page.get_by_label("Show").select_option("failures")
    items = view.page.get_by_role("list", name="Events, newest first").locator("> li")
    expect(items).to_have_count(1)
    expect(items).to_contain_text("the host discovery: KeyError: 'a'")


def test_what_was_missed_is_asked_for(view):
    """More events than the last few, while nobody looked: the hole is filled; older ones come by a button."""
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
    assert [question["before"] for question in view.sent("ask")] == [None, 4, 20]


def test_the_trace_is_saved_as_a_file(view):
    """For Perfetto."""
    view.open(state(), ANSWERS)
    with view.page.expect_download() as download:
        button(view, "Save trace").click()
    assert download.value.suggested_filename == "nbelastic-trace.json"
    assert json.loads(download.value.path().read_text()) == ANSWERS["trace"]["trace"]


def test_an_answer_to_somebody_else_is_none(view):
    """Answers go to every view; each takes its own. An error is told."""
    view.open(state(events=[]))
    items = view.page.get_by_role("list", name="Events, newest first").locator("> li")
    view.page.evaluate("events => model.say({reply: 'another-1', events, oldest: 1})", HISTORY)
    view.page.evaluate("([id, error]) => model.say({reply: id, error})", [view.last("ask"), "it is forgotten"])
    expect(view.page.get_by_role("tabpanel", name="Timeline")).to_contain_text("it is forgotten")
    expect(items).to_have_count(0)


# Logs and stacks.


def test_logs_of_all_ranks_are_merged_and_equal_lines_folded(view):
    """Each line says whose it is, and which stream; a rank alone can be picked; a closed panel asks nothing."""
    lines = [(rank, "out", "generation 1") for rank in range(4)] + [(1, "err", "a warning"), (2, "out", "only mine")]
    view.open(state(), {**ANSWERS, "logs": logs(*lines)})
    box = panel(view, "Logs").locator(".nbe-line")
    expect(box).to_have_count(3)
    expect(box.nth(0)).to_have_text(re.compile("ranks 0–3.*generation 1"))
    expect(box.nth(1)).to_have_text(re.compile("rank 1.*err.*a warning"))
    view.page.evaluate("answer => { model.answers.logs = answer }", logs((2, "out", "one more"), first=7))
    expect(box).to_have_count(4)
    assert view.sent("ask")[-1]["since"] >= 6
    view.page.get_by_label("Lines of").select_option("rank 2 · gpu2/0#1")
    expect(box).to_have_count(1)
    assert {"ask": "logs", "worker": "gpu2/0#1", "since": 0} in view.sent("ask")
    panel(view, "Stacks")
    asked = len(view.sent("ask"))
    view.patch(step=2000)
    expect(view.page.locator(".nbe-facts").first).to_contain_text("2,000")
    assert len(view.sent("ask")) == asked


def test_unfinished_lines_are_shown_while_they_change(view):
    """A progress bar is one line at the end, whose text is replaced; with its newline it is a line as any other."""
    bar = [([[0, 3]], "err", " 50%|##  |")]
    view.open(state(), {**ANSWERS, "logs": logs((0, "out", "begin"), unfinished=bar)})
    box = panel(view, "Logs").locator(".nbe-line")
    expect(box).to_have_count(2)
    expect(box.nth(1)).to_have_text(re.compile(r"ranks 0–3.*err.*50%\|##"))
    node = box.nth(1).element_handle()
    more = [([[0, 2]], "err", "\x1b[31m 75%|### |\x1b[0m"), ([[3, 3]], "err", " 50%|##  |")]
    view.page.evaluate("answer => { model.answers.logs = answer }", logs((1, "out", "news"), first=2, unfinished=more))
    expect(box).to_have_count(4)
    expect(box.nth(1)).to_have_text(re.compile("rank 1.*news"))
    expect(box.nth(2)).to_have_text(re.compile(r"ranks 0–2.*err 75%\|### \|$"))
    assert "75%" in node.text_content()
    view.page.evaluate("answer => { model.answers.logs = answer }", logs((0, "err", "100%|####|"), first=3))
    expect(box).to_have_count(3)
    expect(box.nth(2)).to_have_text(re.compile(r"rank 0.*100%"))


def test_a_line_keeps_the_rank_that_printed_it(view):
    """Though that worker has another rank by now."""
    answer = logs((0, "out", "as rank 2 was"), speakers=[["gpu1/1#1", 2]])
    view.open(state(), {**ANSWERS, "logs": answer})
    expect(panel(view, "Logs").locator(".nbe-line")).to_have_text(re.compile("rank 2.*as rank 2 was"))


def test_an_error_of_the_logs_goes_with_the_next_answer(view):
    """Even if there is no new line."""
    view.open(state(), {**ANSWERS, "logs": {"error": "it is forgotten"}})
    tab = panel(view, "Logs")
    expect(tab).to_contain_text("it is forgotten")
    view.page.evaluate("answer => { model.answers.logs = answer }", logs())
    expect(tab).not_to_contain_text("it is forgotten")
    expect(tab).to_contain_text("0 lines of job-1")


def test_lines_are_searched(view):
    """Whatever the case of the letters."""
    view.open(state(), {**ANSWERS, "logs": logs((0, "out", "Loss 2.3"), (0, "out", "accuracy 0.1"))})
    tab = panel(view, "Logs")
    expect(tab.locator(".nbe-line")).to_have_count(2)
    view.page.get_by_label("Search the lines").fill("LOSS")
    expect(tab.get_by_text("accuracy")).to_be_hidden()
    expect(tab.get_by_text("Loss 2.3")).to_be_visible()
    expect(tab).to_contain_text("1 of 2 lines")


def test_following_ends_when_somebody_scrolls_up(view):
    """And begins again by its button."""
    view.open(state(), {**ANSWERS, "logs": logs(*[(0, "out", f"line {i}") for i in range(200)])})
    tab = panel(view, "Logs")
    expect(tab.get_by_text("line 199")).to_be_in_viewport()
    tab.get_by_text("line 199").hover()
    view.page.mouse.wheel(0, -2000)
    expect(button(view, "Follow")).to_have_attribute("aria-pressed", "false")
    view.page.evaluate("answer => { model.answers.logs = answer }", logs((0, "out", "the newest"), first=201))
    expect(tab.get_by_text("the newest")).to_be_attached()
    expect(tab.get_by_text("the newest")).not_to_be_in_viewport()
    button(view, "Follow").click()
    expect(tab.get_by_text("the newest")).to_be_in_viewport()


def test_a_new_job_begins_with_an_empty_log(view):
    """Its lines are counted from the beginning; only the last thousand of them are kept."""
    view.open(state(), {**ANSWERS, "logs": logs((0, "out", "old"), first=500)})
    lines = panel(view, "Logs").locator(".nbe-line")
    expect(lines).to_have_count(1)
    many = logs(*[(0, "out", f"new {i}") for i in range(1200)], job="job-2")
    view.page.evaluate("answer => { model.answers.logs = answer }", many)
    expect(lines).to_have_count(1000)
    expect(lines.first).to_contain_text("new 200")
    assert {"ask": "logs", "worker": None, "since": 0} in view.sent("ask")[2:]


def test_stacks_tell_where_every_rank_is(view):
    """Equal ones together; who is behind and who did not answer is named."""
    view.open(state(), ANSWERS)
    tab = panel(view, "Stacks")
    assert "stacks" not in [question["ask"] for question in view.sent("ask")]
    button(view, "Stacks now").click()
    expect(tab).to_contain_text("No answer from rank 3")
    groups = tab.locator("details")
    expect(groups).to_have_count(2)
    expect(groups.first).to_contain_text("ranks 0, 1 train.py:88 in train")
    expect(groups.first.locator("pre")).to_have_text("line 88, in train")
    expect(groups.last).to_contain_text("3 commits behind")


# Dead or not.


def test_a_silent_kernel_is_asked_and_then_doubted(view, clock):
    """After ten seconds without a word it is asked, after five more the view says so; one word takes it back."""
    view.open(state(), {"history": ANSWERS["history"]})
    expect(view.page.get_by_role("alert")).to_be_hidden()
    clock.run_for(12_000)
    assert {"ask": "hello"} in view.sent("ask")
    expect(view.page.get_by_role("alert")).to_be_hidden()
    clock.run_for(6_000)
    alert = view.page.get_by_role("alert")
    expect(alert).to_have_text("No word from the kernel: it is busy, was restarted or is gone.")
    dead, shown = view.page.locator(".nbe-dead"), datetime.fromtimestamp(NOW).astimezone().strftime("%H:%M:%S")
    expect(dead).to_contain_text(re.compile(rf"silent for 1\d s\. What is shown is from {shown}\."))
    view.page.evaluate("""alerts => {
        window.spoken = 0;
        new MutationObserver(() => (window.spoken += 1)).observe(
            document.querySelector("[role=alert]"), { childList: true, characterData: true, subtree: true });
    }""")
    clock.run_for(5_000)
    expect(dead).to_contain_text("silent for 2")
    assert view.page.evaluate("window.spoken") == 0
    view.patch(step=2000)
    expect(view.page.get_by_role("alert")).to_be_hidden()
    clock.run_for(20_000)
    expect(view.page.get_by_role("alert")).to_be_visible()
    view.page.evaluate("model.say({reply: model.sent.findLast((content) => content.ask === 'hello').id})")
    expect(view.page.get_by_role("alert")).to_be_hidden()


def test_a_kernel_that_answers_is_left_alone(view, clock):
    """Quiet is no death; and a finished cluster may be quiet for ever."""
    view.open(state(), ANSWERS)
    clock.run_for(40_000)
    expect(view.page.get_by_role("alert")).to_be_hidden()
    view.page.evaluate("model.answers = {}")
    view.patch(phase="finished")
    asked = len(view.sent("ask"))
    clock.run_for(60_000)
    expect(view.page.get_by_role("alert")).to_be_hidden()
    assert len(view.sent("ask")) == asked


def test_a_closed_connection_is_told_at_once(view):
    """A restarted kernel is known before anybody waits for it."""
    view.open(state(events=HISTORY[-2:]), ANSWERS | {"history": {"events": HISTORY[-1:], "oldest": 1}})
    view.page.locator(".nbe-chip").first.click()
    orders = ("Stop cluster", "Stop job", "Add host", "Remove host gpu1", "Remove gpu1 now", "Restart")
    readers = {"Timeline": ("Earlier", "Save trace"), "Stacks": ("Stacks now",), "Logs": ("Log",)}
    for live in (False, True, False):
        view.page.evaluate("live => { model.comm_live = live; model.fire('comm_live_update') }", live)
        alert = view.page.get_by_role("alert")
        if live:
            expect(alert).to_be_hidden()
        else:
            expect(alert).to_contain_text("The connection to the kernel is closed")
        asked = len(view.sent("ask"))
        for name, buttons in {"Timeline": (*orders, *readers["Timeline"]), **readers}.items():
            panel(view, name)
            for each in buttons:
                expect(button(view, each)).to_be_enabled() if live else expect(button(view, each)).to_be_disabled()
        assert live or len(view.sent("ask")) == asked


def test_a_view_that_has_missed_its_key_frame_asks_for_one(view, clock):
    """A change of another key frame is not shown; after a second the kernel is asked for a whole one."""
    view.open(state(), {**ANSWERS, "frame": {}})
    view.patch(base=2, step=2000)
    clock.run_for(3_000)
    assert {"ask": "frame"} in view.sent("ask")
    expect(view.page.locator(".nbe-facts").first).to_contain_text("1,234")
    view.tell(state=state(n=3, step=2000), change={})
    expect(view.page.locator(".nbe-facts").first).to_contain_text("2,000")
    asked = view.sent("ask").count({"ask": "frame"})
    clock.run_for(5_000)
    assert view.sent("ask").count({"ask": "frame"}) == asked


def test_a_closed_view_leaves_nothing_behind(view):
    """No node, no listener, no timer, no frame."""
    view.page.add_init_script("""
        window.pending = new Set();
        for (const [start, end] of [["setTimeout", "clearTimeout"], ["requestAnimationFrame", "cancelAnimationFrame"]]) {
            const [begin, stop] = [window[start].bind(window), window[end].bind(window)];
            window[start] = (act, ...more) => {
                const id = begin((...given) => { pending.delete(start + id); act(...given); }, ...more);
                pending.add(start + id);
                return id;
            };
            window[end] = (id) => { pending.delete(end.replace("clear", "set").replace("cancel", "request") + id);
                stop(id); };
        }
        window.heard = [];
        const [add, remove] = [document.addEventListener, document.removeEventListener];
        document.addEventListener = function (...given) { heard.push(given[1]); add.apply(this, given); };
        document.removeEventListener = function (...given) {
            heard = heard.filter((other) => other !== given[1]);
            remove.apply(this, given);
        };
    """)
    view.open(crowd(), {**ANSWERS, "logs": logs((0, "out", "x"))})
    view.page.locator(".nbe-chip").first.click()
    button(view, "Stop cluster").click()
    panel(view, "Logs")
    expect(view.page.locator(".nbe-line")).to_have_count(1)
    view.patch(step=2)
    left = view.page.evaluate("close_view(), [[...pending], heard.length, model.listeners.length]")
    assert left == [[], 0, 0]
    expect(view.page.locator("main > *")).to_have_count(0)


# For everybody, at any width.


def overlap(a, b):
    apart = a["x"] + a["width"] <= b["x"] or b["x"] + b["width"] <= a["x"]
    return not (apart or a["y"] + a["height"] <= b["y"] or b["y"] + b["height"] <= a["y"])


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (800, "dark"), (1600, "light")])
def test_nothing_is_cut_off(view, width, scheme, output_path):
    """No sideways scrolling from a phone's width on, in JupyterLab's own colours."""
    view.page.set_viewport_size({"width": width, "height": 900})
    view.open(crowd(), {**ANSWERS, "logs": logs((0, "out", "a-word-of-one-hundred-letters-" * 6))}, theme=scheme)
    view.page.locator(".nbe-chip").nth(1).click()
    view.page.locator(".nbe-log details").first.locator("summary").click()
    for name in ("Timeline", "Logs", "Stacks"):
        panel(view, name)
        if name == "Stacks":
            button(view, "Stacks now").click()
            expect(view.page.locator(".nbe-stacks details")).to_have_count(2)
        if name == "Logs":
            expect(view.page.locator(".nbe-line")).to_have_count(1)
        view.page.screenshot(path=f"{output_path}/{scheme}-{width}-{name.lower()}.png", full_page=True)
        parts = ".nbe, .nbe-board, .nbe-chip, .nbe-use > span, .nbe-controls, .nbe-orders, .nbe-panel, .nbe-log, .nbe-lines, .nbe-detail td"
        cut = "nodes => nodes.filter((n) => n.scrollWidth > n.clientWidth + 1).map((n) => n.className)"
        assert view.page.locator(parts).evaluate_all(cut) == []
        boxes = [b.bounding_box() for b in view.page.get_by_role("button").all() if b.is_visible()]
        assert not [(a, b) for a in boxes for b in boxes if a is not b and overlap(a, b)]
        assert view.page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0


@pytest.mark.parametrize(("width", "theme"), [(400, "light"), (1200, "light"), (1200, "dark"), (1200, None)])
def test_nobody_is_shut_out(view, theme, width):
    """axe finds no fault, in any panel, in JupyterLab's colours and in a dark page without any; also when it is dead."""
    view.page.emulate_media(color_scheme=theme or "dark", reduced_motion="reduce")
    view.page.set_viewport_size({"width": width, "height": 900})
    view.open(crowd(), {**ANSWERS, "logs": logs((0, "out", "one"), (1, "err", "two"))}, theme=theme)
    view.page.add_script_tag(path=AXE)
    view.page.locator(".nbe-chip").nth(1).click()
    button(view, "Stop cluster").click()
    view.page.locator(".nbe-log details").first.locator("summary").click()
    for name in ("Timeline", "Logs", "Stacks"):
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


STORM = """async (count) => {
  const frames = [], draws = [];
  for (let n = 1; n <= count; n += 1) {
    const hosts = {};
    for (let h = 0; h < 64; h += 1) {
      const workers = {};
      for (let s = 0; s < 8; s += 1) workers[`${s}#1`] = [h * 8 + s, "running", (h + s + n) % 40 ? 0 : 2, 0, 4711, n % 100, 300 + n, ""];
      hosts[`node${String(h).padStart(2, "0")}`] = { cpu: (h + n) % 100, memory: 40000 + n * 100, workers };
    }
    const before = performance.now();
    model.tell({ change: { base: 1, patch: { step: 1000 + n, hosts } } });
    const told = performance.now() - before;
    const at = await new Promise((resolve) => requestAnimationFrame((start) => {
      const drawn = performance.now();
      document.body.offsetHeight;
      draws.push([told + drawn - start, performance.now() - drawn]);
      resolve(start);
    }));
    frames.push(at);
  }
  return { frames: frames.slice(1).map((at, i) => at - frames[i]), draws };
}"""


def test_a_large_cluster_is_drawn_right(view, record_property):
    """64 hosts with 8 slots each, 40 updates in a row: every one is shown; what it cost is recorded, not judged."""
    rows = {f"node{i:02}": host([worker(i * 8 + j) for j in range(8)], gpus=[[90, 70e3, 80e3]] * 8) for i in range(64)}
    view.page.set_viewport_size({"width": 1600, "height": 1000})
    view.open(state(hosts=rows, world_size=512, max=512), ANSWERS)
    expect(view.page.locator(".nbe-chip")).to_have_count(512)
    cost = view.page.evaluate(STORM, 40)
    expect(view.page.locator(".nbe-facts").first).to_contain_text("1,040")
    behind = [rank for rank in range(512) if (rank // 8 + rank % 8 + 40) % 40 == 0]
    expect(view.page.locator(".nbe-chip[data-behind]")).to_have_count(len(behind))
    expect(view.page.locator(".nbe-chip").nth(511)).to_contain_text("511")
    for name, values in {
        "draw ms": [draw for draw, _ in cost["draws"]],
        "style and layout ms": [layout for _, layout in cost["draws"]],
        "between frames ms": cost["frames"],
    }.items():
        ordered = sorted(values)
        figures = {"median": ordered[len(ordered) // 2], "worst": ordered[-1]}
        record_property(name, {part: round(value, 1) for part, value in figures.items()})
        print(name, {part: round(value, 1) for part, value in figures.items()})
