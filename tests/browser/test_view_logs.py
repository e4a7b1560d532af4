"""Logs and stacks."""

from __future__ import annotations

import re
import time

import pytest
from fake_view import button, panel
from playwright.sync_api import expect
from view_samples import ANSWERS, NOW, logs, state

pytestmark = pytest.mark.browser


def test_logs_of_all_ranks_are_merged_and_equal_lines_folded(view):
    """Each line shows its ranks and its stream; one rank can be picked; a closed panel sends no queries."""
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
    """A progress bar is one line at the end whose text is replaced; after its newline it is an ordinary line."""
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
    """Even if that worker has another rank by now."""
    answer = logs((0, "out", "as rank 2 was"), speakers=[["gpu1/1#1", 2]])
    view.open(state(), {**ANSWERS, "logs": answer})
    expect(panel(view, "Logs").locator(".nbe-line")).to_have_text(re.compile("rank 2.*as rank 2 was"))


def test_an_error_of_the_logs_disappears_with_the_next_answer(view):
    """Even if there is no new line."""
    view.open(state(), {**ANSWERS, "logs": {"error": "it is forgotten"}})
    tab = panel(view, "Logs")
    expect(tab).to_contain_text("it is forgotten")
    view.page.evaluate("answer => { model.answers.logs = answer }", logs())
    expect(tab).not_to_contain_text("it is forgotten")
    expect(tab).to_contain_text("0 lines of job-1")


def test_the_number_of_lines_is_spoken_after_a_search_only(view):
    """New lines come all the time: a screen reader would read the number aloud without an end."""
    view.open(state(), {**ANSWERS, "logs": logs((0, "out", "one"), (1, "out", "two"))})
    tab = panel(view, "Logs")
    expect(tab).to_contain_text("2 lines of job-1")
    spoken = view.page.evaluate_handle(
        """() => {
            const texts = [];
            for (const node of document.querySelectorAll("[role=status]"))
                new MutationObserver(() => texts.push(node.textContent)).observe(node, { childList: true, subtree: true, characterData: true });
            return texts;
        }"""
    )
    view.page.evaluate(
        "answer => { model.answers.logs = answer }", logs((0, "out", "one"), (1, "out", "two"), (0, "out", "three"))
    )
    expect(tab).to_contain_text("3 lines of job-1")
    assert not any(spoken.json_value())
    tab.get_by_role("searchbox").fill("two")
    expect(tab).to_contain_text("1 of 3 lines of job-1")
    assert [text for text in spoken.json_value() if text] == ["1 of 3 lines of job-1"]


def test_lines_have_times(view):
    """A button shows when each line has arrived; the day is in its tooltip. A line without an end has none."""
    view.open(
        state(), {**ANSWERS, "logs": logs((0, "out", "one"), (1, "out", "two"), unfinished=[([[0, 0]], "err", "50%")])}
    )
    times = panel(view, "Logs").locator(".nbe-time")
    expect(times).to_have_count(3)
    expect(times.first).to_be_hidden()
    button(view, "Times").click()
    expect(button(view, "Times")).to_have_attribute("aria-pressed", "true")
    shown = times.all_text_contents()
    assert shown == [time.strftime("%H:%M:%S", time.localtime(NOW + n)) for n in (1, 2)] + [""]
    expect(times.first).to_be_visible()
    expect(times.first).to_have_attribute("title", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(NOW + 1)))
    button(view, "Times").click()
    expect(times.first).to_be_hidden()


def test_lines_are_searched_in_any_case(view):
    """Upper and lower case are equal."""
    view.open(state(), {**ANSWERS, "logs": logs((0, "out", "Loss 2.3"), (0, "out", "accuracy 0.1"))})
    tab = panel(view, "Logs")
    expect(tab.locator(".nbe-line")).to_have_count(2)
    view.page.get_by_label("Search the lines").fill("LOSS")
    expect(tab.get_by_text("accuracy")).to_be_hidden()
    expect(tab.get_by_text("Loss 2.3")).to_be_visible()
    expect(tab).to_contain_text("1 of 2 lines")


def test_following_ends_when_the_reader_scrolls_up(view):
    """A button starts it again."""
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
    """Its lines are counted from the beginning; the newest thousand are in the page."""
    view.open(state(), {**ANSWERS, "logs": logs((0, "out", "old"), first=500)})
    lines = panel(view, "Logs").locator(".nbe-line")
    expect(lines).to_have_count(1)
    many = logs(*[(0, "out", f"new {i}") for i in range(1200)], job="job-2")
    view.page.evaluate("answer => { model.answers.logs = answer }", many)
    expect(lines).to_have_count(1000)
    expect(lines.first).to_contain_text("new 200")
    assert {"ask": "logs", "worker": None, "since": 0} in view.sent("ask")[2:]


def test_earlier_lines_are_shown_searched_and_saved(view):
    """The view asks on while there are more lines, and has 10,000. A file has all of them, with their times and ranks."""
    pages = [[(0, "out", f"line {i}") for i in range(n, n + 6000)] for n in (0, 6000)]
    answers = [logs(*pages[0], more=True), logs(*pages[1], (1, "err", "the end"), first=6001)]
    view.open(state(), {**ANSWERS, "logs": answers})
    tab = panel(view, "Logs")
    expect(tab).to_contain_text("10000 lines of job-1")
    lines = tab.locator(".nbe-line")
    expect(lines).to_have_count(1000)
    expect(lines.last).to_be_in_viewport()
    button(view, "Earlier lines").focus()
    view.page.keyboard.press("Enter")
    expect(lines).to_have_count(2000)
    expect(button(view, "Follow")).to_have_attribute("aria-pressed", "false")
    expect(lines.first).to_contain_text("line 10001")
    view.page.get_by_label("Search the lines").fill("line 2001")
    expect(lines).to_have_count(1)
    view.page.get_by_label("Search the lines").fill("line 200")
    expect(lines).to_have_count(9)
    with view.page.expect_download() as download:
        button(view, "Save").click()
    assert download.value.suggested_filename == "job-1.log"
    text = download.value.path().read_text().splitlines()
    assert [line[20:] for line in (text[0], text[-1])] == ["rank 0 | line 2001", "rank 1 err | the end"]
    assert len(text) == 10_000
    assert text == sorted(text, key=lambda line: line[:19])
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d rank 0 ", text[0])
    button(view, "Follow").click()
    view.page.get_by_label("Search the lines").fill("")
    expect(lines).to_have_count(1000)


def test_stacks_show_where_each_rank_is(view):
    """Equal stacks are one group; ranks that are behind or did not answer are named."""
    view.open(state(), ANSWERS)
    tab = panel(view, "Stacks")
    assert "stacks" not in [query["ask"] for query in view.sent("ask")]
    button(view, "Stacks now").click()
    expect(tab).to_contain_text("No answer from rank 3")
    groups = tab.locator("details")
    expect(groups).to_have_count(2)
    expect(groups.first).to_contain_text("ranks 0, 1 train.py:88 in train")
    expect(groups.first.locator("pre")).to_have_text("line 88, in train")
    expect(groups.last).to_contain_text("3 commits behind")
