"""The overview of the view by itself, in a page without a notebook, and how updates are shown."""

from __future__ import annotations

import pytest
from fake_view import panel
from playwright.sync_api import expect
from view_samples import ANSWERS, NOW, event, host, logs, reports, sharded, state, worker

pytestmark = pytest.mark.browser


def test_the_overview_shows_what_matters(view, clock):
    """Phase and reason, world, steps and their total, speed, time left, reports, and the last failure."""
    view.open(state(total=10_000, report={"loss": 0.21}, failed_at=NOW - 185, steps_per_second=50.0))
    expect(view.page.locator(".nbe-phase")).to_have_text("running")
    expect(view.page.locator(".nbe-reason")).to_have_text("4 workers train in generation 3")
    facts = view.page.locator(".nbe-facts").first
    for text in ("4 (2–8)", "1,234 of 10,000", "50", "about 2 min", "0.21"):
        expect(facts).to_contain_text(text)
    expect(view.page.get_by_role("progressbar")).to_have_attribute("aria-valuetext", "1,234 of 10,000 steps")
    expect(view.root).to_contain_text("3 min since the last failure")
    clock.fast_forward(60_000)
    expect(view.root).to_contain_text("4 min since the last failure")


def test_a_program_with_a_step_of_its_own_has_commits(view, clock):
    """Lightning reports its own step, and commits more often: figures, workers and charts name the count of commits."""
    answer = reports()
    answer["names"][0] = "step"
    newest = {"commit": 1200, "made_at": NOW - 180, "size": 35.2, "every": 100}
    report = {"loss": 0.21, "step": 1200.0}
    first = state(total=10_000, report=report, steps_per_second=50.0, checkpoints=newest)
    view.open(first, {**ANSWERS, "reports": answer})
    clock.run_for(100)
    names = view.page.locator(".nbe-facts").first.locator("dt").all_text_contents()
    assert {"Commit", "Commits per second", "step"} <= {*names}
    assert not {"Step", "Steps per second"} & {*names}
    expect(view.page.get_by_role("progressbar")).to_have_attribute("aria-valuetext", "1,234 of 10,000 commits")
    expect(view.page.get_by_label("Horizontal axis")).to_contain_text("commit")
    expect(view.page.get_by_role("img", name="commits per second from")).to_be_visible()


def test_the_overview_shows_what_failures_have_cost(view):
    """Lost steps and the time without training, as far as they are known."""
    view.open(state(summary={"failures": 3, "lost": 0, "trained": 98.7}, failed_at=NOW - 185))
    past = view.page.locator(".nbe-since")
    expect(past).to_contain_text("0 steps lost in 3 failures · trained 98.7\u00a0% of the time")
    view.patch(summary={"lost": None})
    expect(past).not_to_contain_text("lost")
    expect(past).to_contain_text("trained 98.7\u00a0% of the time")


def test_a_cluster_that_was_not_started_is_not_called_finished(view):
    """The view appears before the driver's process: it shows `not started` once, and the phase with the first event."""
    view.open(state(phase="finished", reason="not started", events=[], hosts={}, job=""))
    sentence = view.page.locator(".nbe-state")
    expect(sentence).to_have_text("not started ")
    view.patch(phase="waiting", reason="0 of min 2 workers ready", events=[event(6)])
    expect(sentence).to_have_text("waiting 0 of min 2 workers ready")
    view.patch(phase="finished", reason="stopped by you", events=[event(6)])
    expect(sentence).to_have_text("finished stopped by you")


def test_nothing_separates_the_losses_from_an_empty_text(view):
    """After the end there is no text about the last failure, and no separator in front of it."""
    view.open(state(summary={"failures": 0, "lost": None, "trained": 98.7}, failed_at=None))
    separator = "node => getComputedStyle(node, '::before').content"
    since = view.page.locator(".nbe-since > span").last
    assert "·" in since.evaluate(separator)
    view.patch(phase="finished")
    expect(since).to_be_empty()
    assert "·" not in since.evaluate(separator)


def test_the_overview_shows_the_newest_checkpoint(view, clock):
    """Its step, age and size, and when the next one is due. Jobs without checkpoints have no such figures."""
    newest = {"commit": 1200, "made_at": NOW - 180, "size": 35.2, "every": 100}
    view.open(state(checkpoints=newest, steps_per_second=2.0))
    facts = view.page.locator(".nbe-facts").first
    expect(facts).to_contain_text("1,200 · 3 min old · 35\u00a0MB")
    expect(facts).to_contain_text("in 33 s")
    clock.fast_forward(120_000)
    expect(facts).to_contain_text("1,200 · 5 min old")
    view.patch(checkpoints={"commit": None})
    expect(facts).to_contain_text("none yet")
    view.patch(checkpoints=None)
    expect(facts).not_to_contain_text("heckpoint")


def test_the_name_opens_to_the_lease_the_driver_and_versions(view):
    """By the keyboard too."""
    view.open(state())
    about = view.page.locator(".nbe-about")
    expect(about.locator("li")).to_have_count(0)
    about.locator("summary").focus()
    view.page.keyboard.press("Enter")
    lines = about.locator("li")
    expect(lines).to_have_count(3)
    expect(lines.nth(0)).to_have_text("Kept for 1 h after the last notebook or terminal has left")
    expect(lines.nth(1)).to_contain_text("Driver: process 812, since")
    expect(lines.nth(1)).to_contain_text("(2 h 5 min), restarted once")
    expect(lines.nth(2)).to_have_text("Python 3.11.2, nbelastic 0.1.0, torch 2.13.0+cpu")
    view.patch(driver={"lease": None, "restarts": 0})
    expect(lines.nth(0)).to_have_text("Ends with its kernel")
    expect(lines.nth(1)).not_to_contain_text("restarted")


def test_the_overview_shows_the_newest_whole_commit(view, clock):
    """With a sharded model: its age counts on, and the memory of all copies. Other jobs have no such figures."""
    view.open(sharded())
    facts = view.page.locator(".nbe-facts").first
    expect(facts).to_contain_text("1,232 · 3 min old")
    expect(facts).to_contain_text("5.0\u00a0GB · copied in 420 ms")
    clock.fast_forward(120_000)
    expect(facts).to_contain_text("1,232 · 5 min old")
    view.patch(copies={"commit": None, "memory": 0})
    expect(facts).to_contain_text("none yet")
    view.patch(copies=None)
    expect(facts).not_to_contain_text("Whole commit")


def test_a_reported_name_does_not_replace_another_figure(view):
    """`report(Step=…)`: the count of steps stays, and the report is beside it."""
    view.open(state(report={"Step": 7.5, "Generation": 0.25}))
    facts = view.page.locator(".nbe-facts").first
    names, values = facts.locator("dt").all_text_contents(), facts.locator("dd > span:first-child").all_text_contents()
    figures = list(zip(names, values, strict=True))
    assert {("Step", "1,234"), ("Step", "7.5"), ("Generation", "3"), ("Generation", "0.25")} <= {*figures}


def test_what_a_figure_means_is_more_than_a_tooltip(view):
    """Screen readers read it after the value."""
    view.open(sharded())
    values = view.page.get_by_role("definition")
    for meaning in (
        "It grows by one with each change of the world",
        "its copies are complete",
        "Memory of all copies, on 4 workers",
    ):
        expect(values.filter(has_text=meaning)).to_have_count(1)


def test_between_jobs_the_overview_shows_how_many_are_ready(view):
    """A cluster without a job is ready when enough workers are ready; before, it waits."""
    ready = {"gpu1": host([worker(None, "ready"), worker(None, "ready")])}
    view.open(state(phase="waiting", reason="2 workers ready", job=None, world_size=0, hosts=ready))
    expect(view.page.locator(".nbe-phase")).to_have_text("ready")
    expect(view.page.locator(".nbe-facts").first).to_contain_text("2 (2–8)")
    expect(view.page.get_by_role("progressbar")).to_have_count(0)
    view.patch(hosts={"gpu1": {"workers": {"1#1": None}}})
    expect(view.page.locator(".nbe-phase")).to_have_text("waiting")


def test_a_change_is_shown_only_with_its_own_key_frame(view):
    """A patch for another key frame is ignored; the next key frame replaces all."""
    view.open(state())
    facts = view.page.locator(".nbe-facts").first
    view.patch(base=7, step=9999)
    view.patch(base=1, step=2345)
    expect(facts).to_contain_text("2,345")
    view.update(state=state(n=7, step=7000), change={"base": 7, "patch": {"step": 7001}})
    expect(facts).to_contain_text("7,001")


def test_an_update_keeps_the_nodes_that_remain(view):
    """Updates make no new nodes for parts that remain, and the focus stays where it is."""
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
    """Screen readers get a summary of what changed, and not each step."""
    view.open(state())
    news = view.page.get_by_role("status", name="News")
    view.patch(step=1300)
    expect(view.page.locator(".nbe-facts").first).to_contain_text("1,300")
    expect(news).to_have_text("")
    view.patch(world_size=3, events=[event(6), event(7, "worker-lost", "gpu2/1#1 was killed")])
    expect(news).to_have_text("3 workers in the world. gpu2/1#1 was killed")


def test_losses_are_spoken_out_of_sight(view):
    """Also while the view is scrolled away, and draws nothing."""
    view.open(state())
    view.page.evaluate("document.querySelector('main').style.marginTop = '5000px'")
    view.page.evaluate(
        "() => new Promise((resolve) => new IntersectionObserver((e) => e.at(-1).isIntersecting || resolve(), { rootMargin: '200px' }).observe(document.querySelector('.nbe')))"
    )
    view.patch(step=1300, world_size=3, events=[event(6), event(7, "worker-lost", "gpu2/1#1 was killed")])
    expect(view.page.get_by_role("status", name="News")).to_have_text("3 workers in the world. gpu2/1#1 was killed")
    expect(view.page.locator(".nbe-facts").first).to_contain_text("1,234")


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
