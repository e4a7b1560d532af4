"""The connection to the kernel, and the end of a view."""

from __future__ import annotations

import re
from datetime import datetime

import pytest
from fake_view import View, button, panel
from playwright.sync_api import expect
from view_samples import ANSWERS, HISTORY, NOW, crowd, logs, state

pytestmark = pytest.mark.browser


def test_a_kernel_that_does_not_answer_is_reported(view, clock):
    """The view asks after ten seconds without a message and warns five seconds later; one message ends the warning."""
    view.open(state(), {"history": ANSWERS["history"]})
    expect(view.page.get_by_role("alert")).to_be_hidden()
    clock.run_for(12_000)
    assert {"ask": "hello"} in view.sent("ask")
    expect(view.page.get_by_role("alert")).to_be_hidden()
    clock.run_for(6_000)
    alert = view.page.get_by_role("alert")
    expect(alert).to_have_text("No answer from the kernel: it is busy, was restarted or has ended.")
    dead, shown = view.page.locator(".nbe-warning"), datetime.fromtimestamp(NOW).astimezone().strftime("%H:%M:%S")
    expect(dead).to_contain_text(re.compile(rf"The last message came 1\d s ago\. The state shown is from {shown}\."))
    view.page.evaluate("""alerts => {
        window.spoken = 0;
        new MutationObserver(() => (window.spoken += 1)).observe(
            document.querySelector("[role=alert]"), { childList: true, characterData: true, subtree: true });
    }""")
    clock.run_for(5_000)
    expect(dead).to_contain_text("The last message came 2")
    assert view.page.evaluate("window.spoken") == 0
    view.patch(step=2000)
    expect(view.page.get_by_role("alert")).to_be_hidden()
    clock.run_for(20_000)
    expect(view.page.get_by_role("alert")).to_be_visible()
    view.page.evaluate("model.deliver({reply: model.sent.findLast((content) => content.ask === 'hello').id})")
    expect(view.page.get_by_role("alert")).to_be_hidden()


def test_a_kernel_that_answers_causes_no_warning(view, clock):
    """A kernel may send nothing as long as it answers; a finished cluster is not asked."""
    view.open(state(), ANSWERS)
    clock.run_for(40_000)
    expect(view.page.get_by_role("alert")).to_be_hidden()
    view.page.evaluate("model.answers = {}")
    view.patch(phase="finished")
    asked = len(view.sent("ask"))
    clock.run_for(60_000)
    expect(view.page.get_by_role("alert")).to_be_hidden()
    assert len(view.sent("ask")) == asked


def test_a_closed_connection_is_shown_at_once(view):
    """After a restart of the kernel the view does not wait for an answer."""
    view.open(state(events=HISTORY[-2:]), ANSWERS | {"history": {"events": HISTORY[-1:], "oldest": 1}})
    view.page.locator(".nbe-chip").first.click()
    buttons_of_requests = ("Stop cluster", "Stop job", "Add host", "Remove host gpu1", "Remove gpu1 now", "Restart")
    readers = {"Timeline": ("Earlier", "Save trace"), "Stacks": ("Stacks now",), "Logs": ("Log",)}
    for live in (False, True, False):
        view.page.evaluate("live => { model.comm_live = live; model.fire('comm_live_update') }", live)
        alert = view.page.get_by_role("alert")
        if live:
            expect(alert).to_be_hidden()
        else:
            expect(alert).to_contain_text("The connection to the kernel is closed")
        asked = len(view.sent("ask"))
        for name, buttons in {"Timeline": (*buttons_of_requests, *readers["Timeline"]), **readers}.items():
            panel(view, name)
            for each in buttons:
                expect(button(view, each)).to_be_enabled() if live else expect(button(view, each)).to_be_disabled()
        assert live or len(view.sent("ask")) == asked


@pytest.mark.parametrize(
    ("lease", "text"),
    [
        (None, "Its cluster ends with it, unless %elastic_start has --keep."),
        (60, "The cluster goes on: %elastic_attach shows it."),
    ],
)
def test_a_closed_connection_says_what_becomes_of_the_cluster(view, lease, text):
    """After a restart of the kernel the view says whether the cluster has ended, or how to show it again."""
    view.open(state(driver={**state()["driver"], "lease": lease}), ANSWERS)
    view.page.evaluate("() => { model.comm_live = false; model.fire('comm_live_update') }")
    expect(view.page.get_by_role("alert")).to_contain_text(text)


def test_a_view_that_has_missed_its_key_frame_asks_for_one(view, clock):
    """A change of another key frame is not shown; after a second the view asks for a new key frame."""
    view.open(state(), {**ANSWERS, "frame": {}})
    view.patch(base=2, step=2000)
    clock.run_for(3_000)
    assert {"ask": "frame"} in view.sent("ask")
    expect(view.page.locator(".nbe-facts").first).to_contain_text("1,234")
    view.update(state=state(n=3, step=2000), change={})
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
        window.listeners = [];
        const [add, remove] = [document.addEventListener, document.removeEventListener];
        document.addEventListener = function (...given) { listeners.push(given[1]); add.apply(this, given); };
        document.removeEventListener = function (...given) {
            listeners = listeners.filter((other) => other !== given[1]);
            remove.apply(this, given);
        };
    """)
    view.open(crowd(), {**ANSWERS, "logs": logs((0, "out", "x"))})
    view.page.locator(".nbe-chip").first.click()
    button(view, "Stop cluster").click()
    panel(view, "Logs")
    expect(view.page.locator(".nbe-line")).to_have_count(1)
    view.patch(step=2)
    left = view.page.evaluate("close_view(), [[...pending], listeners.length, model.listeners.length]")
    assert left == [[], 0, 0]
    expect(view.page.locator("main > *")).to_have_count(0)


def test_one_part_that_fails_does_not_end_the_others(page):
    """The browser's console has its error once, and the rest is drawn at each update."""
    errors = []
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    view = View(page).open(state())
    for step in (2001, 2002):
        view.patch(step=step, hosts={"gpu1": {"workers": {"0#1": None, "1#1": 7}}}, max=step)
        expect(view.page.locator(".nbe-facts").first).to_contain_text(f"{step:,}")
        expect(view.page.get_by_label("max", exact=True)).to_have_value(str(step))
    assert [text.split("\n")[0][:40] for text in errors] == ["nbelastic: the board cannot be drawn Typ"]
