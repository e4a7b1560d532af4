"""Requests: what is sent, and how its outcome is shown."""

from __future__ import annotations

import re

import pytest
from fake_view import button
from playwright.sync_api import expect
from view_samples import ANSWERS, request_status, state

pytestmark = pytest.mark.browser

DOUBLE = 500  # ms: an earlier second click is a double click, and confirms nothing


def test_a_request_is_shown_as_sent_then_under_way_then_done_and_then_disappears(view, clock, requests):
    """The kernel reports a request's state under the request's id."""
    view.open(state())
    view.page.get_by_label("Host to add").fill(" gpu3:2 ")
    button(view, "Add host").click()
    assert view.sent() == [{"order": "add_host", "host": "gpu3:2"}]
    expect(requests).to_have_text("add gpu3:2: sent")
    mine = view.last_id()
    view.patch(orders=[request_status(mine, "under way", text="add gpu3:2")])
    expect(requests).to_have_text("add gpu3:2: under way")
    view.patch(orders=[request_status(mine, "done", text="add gpu3:2")])
    expect(requests).to_have_text("add gpu3:2: done")
    clock.fast_forward(6_000)
    expect(requests).to_have_text("")


def test_a_refusal_shows_its_reason_for_a_while(view, clock, requests):
    """Long enough to be read."""
    view.open(state())
    button(view, "Remove host gpu2").click()
    view.patch(orders=[request_status(view.last_id(), "refused", "there is no host", text="remove gpu2")])
    expect(requests).to_have_text("remove gpu2: refused, there is no host")
    clock.fast_forward(10_000)
    expect(requests).to_have_text("remove gpu2: refused, there is no host")
    clock.fast_forward(6_000)
    expect(requests).to_have_text("")


def test_a_request_without_an_answer_shows_that(view, clock, requests):
    """After three seconds. If the connection is closed, the request is refused at once."""
    view.open(state())
    button(view, "Remove host gpu2").click()
    clock.fast_forward(3_500)
    expect(requests).to_have_text("remove gpu2: sent, no answer yet; the kernel may be busy or have ended")
    view.page.evaluate("model.sendError = 'comm is closed'")
    button(view, "Remove host gpu2").click()
    expect(requests).to_contain_text("refused, it cannot be sent to the kernel: Error: comm is closed")


def test_requests_of_others_are_shown_with_their_origin(view, requests):
    """Requests that were answered before this view opened are not shown."""
    first = [request_status("x-1", "done"), request_status("x-2", "under way", by="%elastic_add", text="add gpu3:2")]
    view.open(state(orders=first))
    expect(requests).to_have_text("add gpu3:2 (by %elastic_add): under way")
    view.patch(orders=[request_status("x-2", "refused", "no such host", by="%elastic_add", text="add gpu3:2")])
    expect(requests).to_have_text("add gpu3:2 (by %elastic_add): refused, no such host")


def test_a_host_leaves_at_a_commit_or_after_a_second_click_at_once(view, clock):
    """The second click counts for a short time only."""
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


def test_a_training_is_paused_and_resumed_by_one_button(view):
    """Its name says what it does. Without a training it is disabled."""
    view.open(state())
    button(view, "Pause").click()
    view.patch(phase="paused")
    button(view, "Resume").click()
    assert view.sent() == [{"order": "pause"}, {"order": "resume"}]
    view.patch(phase="waiting", outcome="stopped")
    expect(button(view, "Pause")).to_be_disabled()


@pytest.mark.parametrize(
    ("name", "sure", "order"),
    [("Stop job", "Really stop it?", "stop_job"), ("Stop cluster", "Really stop it?", "stop")],
)
def test_nothing_is_ended_by_a_double_click_or_a_held_key(view, clock, name, sure, order):
    """Stopping needs a second, separate click; a double click or a repeating key does not confirm."""
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


def test_a_second_click_confirms_only_what_the_first_one_was_about(view, clock):
    """If another slot was opened meanwhile, or another job has begun, it is a first click."""
    view.open(state())
    restart = view.page.locator(".nbe-detail").get_by_role("button").nth(1)
    stop = view.page.get_by_role("button", name=re.compile("^(Stop job|Really)"))
    view.page.locator(".nbe-chip").nth(0).click()
    restart.click()
    view.page.locator(".nbe-chip").nth(1).click()
    stop.click()
    view.patch(job="job-2")
    clock.run_for(DOUBLE)
    for each in (restart, stop):
        each.click()
    assert view.sent() == []


def test_a_request_that_takes_long_stays(view, clock, requests):
    """A request under way for minutes, as for a host of a batch system, stays, and its end is still shown."""
    view.open(state(), ANSWERS)
    view.page.get_by_label("min", exact=True).fill("3")
    button(view, "Apply").click()
    mine = view.last_id()
    view.patch(orders=[request_status(mine, "under way", text="scale to 3–8")])
    expect(requests).to_have_text("scale to 3–8: under way")
    clock.run_for(70_000)
    expect(requests).to_have_text("scale to 3–8: under way")
    expect(button(view, "Apply")).to_be_enabled()
    view.patch(min=3, orders=[request_status(mine, "done", text="scale to 3–8")])
    expect(button(view, "Apply")).to_be_disabled()


def test_a_refused_scale_request_keeps_the_typed_bounds(view, requests):
    """They can be corrected; Escape restores the kernel's values."""
    view.open(state())
    min_field = view.page.get_by_label("min", exact=True)
    min_field.fill("9")
    button(view, "Apply").click()
    view.patch(orders=[request_status(view.last_id(), "refused", "min=9 is more than max=8", text="scale to 9–8")])
    expect(requests).to_contain_text("min=9 is more than max=8")
    view.patch(step=2000)
    expect(view.page.locator(".nbe-facts").first).to_contain_text("2,000")
    expect(min_field).to_have_value("9")
    expect(button(view, "Apply")).to_be_enabled()
    min_field.press("Escape")
    view.patch(step=3000)
    expect(min_field).to_have_value("2")
    expect(button(view, "Apply")).to_be_disabled()


def test_both_bounds_are_sent_together(view, requests):
    """An empty field means no limit; typed values stay until the request is answered."""
    view.open(state())
    min_field, max_field = view.page.get_by_label("min", exact=True), view.page.get_by_label("max", exact=True)
    expect(button(view, "Apply")).to_be_disabled()
    min_field.fill("3")
    max_field.fill("")
    view.patch(step=2000)
    expect(view.page.locator(".nbe-facts").first).to_contain_text("2,000")
    button(view, "Apply").click()
    assert view.sent() == [{"order": "scale", "min": 3, "max": None}]
    view.patch(min=3, max=None, orders=[request_status(view.last_id(), "done", text="scale to 3 or more")])
    expect(requests).to_have_text("scale to 3 or more: done")
    expect(button(view, "Apply")).to_be_disabled()
    view.patch(min=4, max=6)
    expect(min_field).to_have_value("4")
    expect(max_field).to_have_value("6")


def test_a_finished_cluster_accepts_no_requests_and_a_finished_job_cannot_be_stopped(view):
    """Buttons without a use are disabled, and the panels of a finished cluster are hidden."""
    view.open(state(outcome="succeeded"))
    expect(button(view, "Stop job")).to_be_disabled()
    view.patch(phase="stopping")
    for name in ("Stop cluster", "Add host", "Remove host gpu1", "Remove gpu1 now"):
        expect(button(view, name)).to_be_disabled()
    view.patch(phase="finished", hosts={"gpu1": None, "gpu2": None})
    expect(view.page.locator(".nbe-controls")).to_be_hidden()
    expect(view.page.locator(".nbe-board")).to_be_hidden()
