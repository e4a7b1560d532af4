"""The board with its hosts and slots."""

from __future__ import annotations

import re

import pytest
from fake_view import button
from playwright.sync_api import expect
from view_samples import ANSWERS, NOW, crowd, host, logs, sharded, state, worker

pytestmark = pytest.mark.browser

DOUBLE = 500  # ms: an earlier second click is a double click, and confirms nothing
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
    model.update({ change: { base: 1, patch: { step: 1000 + n, hosts } } });
    const updated = performance.now() - before;
    const at = await new Promise((resolve) => requestAnimationFrame((start) => {
      const drawn = performance.now();
      document.body.offsetHeight;
      draws.push([updated + drawn - start, performance.now() - drawn]);
      resolve(start);
    }));
    frames.push(at);
  }
  return { frames: frames.slice(1).map((at, i) => at - frames[i]), draws };
}"""


def test_each_slot_shows_its_worker_and_state(view, clock):
    """Members, newcomers, and lost, empty and back-off slots: each is a button with a sign and a word."""
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


def test_a_host_that_will_end_counts_down(view, clock):
    """Its row says in how much time it ends, and counts on."""
    view.open(state(hosts={"gpu1": host([worker(0)], ends_at=NOW + 630), "gpu2": host([worker(1)])}))
    row = view.page.get_by_role("row", name="gpu1")
    expect(row).to_contain_text("ends in 10 min")
    expect(view.page.get_by_role("row", name="gpu2")).not_to_contain_text("ends in")
    clock.fast_forward(300_000)
    expect(row).to_contain_text("ends in 5 min")
    view.patch(hosts={"gpu1": {"ends_at": None}})
    expect(row).not_to_contain_text("ends in")


def test_many_hosts_can_be_searched_and_those_with_problems_come_first(view):
    """By name, address or rank. Few hosts have no filter."""
    hosts = {f"gpu{n:02}": host([worker(2 * n), worker(2 * n + 1)], address=f"10.0.0.{n}") for n in range(20)}
    hosts["gpu07"]["phase"] = "draining"
    hosts["gpu11"]["workers"]["1#1"] = worker(23, behind=4)
    view.open(state(hosts=hosts))
    shown = view.page.get_by_role("rowheader")
    expect(view.root).to_contain_text("2 hosts with problems")
    view.page.get_by_label("Order of hosts").select_option("problems first")
    expect(shown.nth(0)).to_contain_text("gpu07")
    expect(shown.nth(1)).to_contain_text("gpu11")
    expect(shown).to_have_count(20)
    view.page.get_by_label("Order of hosts").select_option("only problems")
    expect(shown).to_have_count(2)
    view.page.get_by_label("Order of hosts").select_option("in order")
    view.page.get_by_label("Find hosts").fill("rank 23")
    expect(shown).to_have_count(1)
    expect(view.root).to_contain_text("1 of 20 shown")
    view.page.get_by_label("Find hosts").fill("10.0.0.19")
    expect(shown).to_contain_text("gpu19")
    view.update(state=state(n=2))
    expect(view.page.get_by_label("Find hosts")).to_be_hidden()


def test_a_host_that_is_moved_keeps_the_focus(view):
    """With problems first, a host whose worker fails moves to the top; the keyboard goes on at its slot."""
    view.open(state(hosts={f"gpu{n:02}": host([worker(n)]) for n in range(20)}))
    view.page.get_by_label("Order of hosts").select_option("problems first")
    slot = view.page.get_by_role("button", name="rank 15, slot 0")
    slot.focus()
    view.patch(hosts={"gpu15": {"workers": {"0#1": worker(15, "failed")}}})
    expect(view.page.locator(".nbe-hostrow").first).to_contain_text("gpu15")
    expect(slot).to_be_focused()


@pytest.mark.parametrize("gpus", [[], [[50, 1.0, 2.0, 60]]])
def test_the_reason_of_a_host_without_figures_has_their_room(view, gpus):
    """ssh's message about a host that cannot be reached is not one word per line, and the columns stay aligned."""
    lost = host([], slots=2, phase="lost", reason="ssh: Could not resolve hostname gpu9", cpu=None, memory=None)
    view.open(state(hosts={"gpu1": host([worker(0), worker(1)], gpus=gpus), "gpu9": lost}))
    reason, slots = (view.page.locator(f".nbe-hostrow {part}") for part in (".nbe-hoststate > small", ".nbe-chips"))
    assert reason.nth(1).bounding_box()["height"] < 60
    assert slots.nth(0).bounding_box()["x"] == slots.nth(1).bounding_box()["x"]
    view.patch(hosts={"gpu9": {"phase": "up", "reason": "", "cpu": 3}})
    expect(view.page.locator(".nbe-hostrow").nth(1)).to_contain_text("3\u00a0%")


def test_gpus_have_a_column_only_if_a_host_has_one(view):
    """It shows the use and memory of all GPUs of a host."""
    view.open(state())
    expect(view.page.get_by_role("columnheader", name="GPU")).to_have_count(0)
    view.patch(hosts={"gpu1": {"gpus": [[90, 60.0, 80.0, 71], [80, 60.0, 80.0, None]]}})
    expect(view.page.get_by_role("columnheader", name="GPU")).to_be_visible()
    expect(view.page.get_by_role("cell", name="85 % 120 / 160 GB")).to_be_visible()


def test_a_slot_shows_its_own_gpu(view):
    """In it how busy the GPU is; in its details also the memory and temperature. Another GPU of the host is not there."""
    gpus = [[11, 1.0, 80.0, 40], [93, 61.0, 80.0, 71]]
    view.open(state(hosts={"gpu1": host([worker(0, gpu=1), worker(1)], gpus=gpus)}))
    chip = view.page.locator(".nbe-chip").first
    expect(chip).to_contain_text("GPU 93 %")
    chip.click()
    detail = view.page.locator(".nbe-detail")
    expect(detail).to_contain_text("GPU 1 of the host93 %, 61.0 / 80.0 GB, 71 °C")
    expect(detail).not_to_contain_text("GPU 0")
    view.patch(hosts={"gpu1": {"gpus": [gpus[0], [None, None, None, None]]}})
    expect(detail).to_contain_text("GPU 1 of the hostnot known")
    expect(chip).not_to_contain_text("GPU")
    view.patch(hosts={"gpu1": {"gpus": [gpus[0]], "workers": {"0#1": worker(0)}}})
    expect(detail).not_to_contain_text("GPU")
    view.page.locator(".nbe-chip").nth(1).click()
    expect(view.page.locator(".nbe-detail")).to_contain_text("Process")
    expect(view.page.locator(".nbe-detail")).not_to_contain_text("GPU")


def test_a_change_is_highlighted_for_a_moment(view):
    """A slot that changes its state is highlighted. New numbers are not, nor is anything when the view opens."""
    view.open(state())
    highlighted = view.page.locator(".nbe-highlight")
    expect(highlighted).to_have_count(0)
    slower = view.page.add_style_tag(content=".nbe-highlight { animation-duration: 60s !important; }")
    view.patch(step=1500, hosts={"gpu2": {"workers": {"1#1": worker(None, "lost")}}})
    expect(highlighted).to_have_attribute("data-state", "lost")
    slower.evaluate("node => node.remove()")
    expect(highlighted).to_have_count(0)


def test_reduced_motion_ends_all_animations(view):
    """With the reader's preference for reduced motion, no element is animated."""
    view.page.emulate_media(reduced_motion="reduce")
    view.open(state())
    view.patch(hosts={"gpu2": {"workers": {"1#1": worker(None, "lost")}}})
    expect(view.page.locator("[data-state=lost]")).to_be_visible()
    assert view.page.evaluate("document.getAnimations().length") == 0


def test_an_open_slot_shows_its_details(view, clock):
    """Id, process, rank, step, restarts and reason. Its log is one click away, a restart two."""
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


def test_an_open_slot_shows_who_has_its_copy(view):
    """With a sharded model: the memory of its copies, the slot that has its copy, and the slot whose copy it keeps."""
    view.open(sharded())
    view.page.locator(".nbe-chip").nth(1).click()
    detail = view.page.locator(".nbe-detail")
    for text in (
        "Memory of copies1.2\u00a0GB",
        "Its copy is ongpu2/1, gpu1 (shared memory)",
        "It keeps the copy ofgpu2/1",
    ):
        expect(detail).to_contain_text(text)
    view.patch(hosts={"gpu1": {"copies": {"1#1": None}}})
    expect(detail).not_to_contain_text("copy")


def test_the_view_can_be_used_by_keyboard_alone(view, clock):
    """Tab, Enter and the arrow keys reach everything; only the second Enter stops the cluster."""
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


def test_the_view_takes_the_focus_of_a_part_that_is_removed(view):
    """Its frame shows that to those who use the keyboard."""
    view.open(state())
    view.page.locator(".nbe-chip").first.focus()
    view.page.keyboard.press("ArrowDown")
    view.patch(hosts={"gpu2": None})
    expect(view.root).to_be_focused()
    assert view.root.evaluate("node => getComputedStyle(node).outlineStyle") == "solid"


def test_keys_in_the_view_are_not_the_notebooks_shortcuts(view):
    """A letter pressed on a button of the view does not reach the notebook; a chord does."""
    view.open(state())
    view.page.evaluate("document.addEventListener('keydown', (event) => (window.keys ??= []).push(event.key))")
    button(view, "Stop job").focus()
    view.page.keyboard.press("x")
    view.page.keyboard.press("Control+s")
    assert view.page.evaluate("window.keys") == ["Control", "s"]


def test_a_large_cluster_is_drawn_correctly(view, record_property):
    """64 hosts with 8 slots each and 40 updates in a row: each is shown. The cost is recorded, not asserted."""
    rows = {
        f"node{i:02}": host([worker(i * 8 + j, gpu=j) for j in range(8)], gpus=[[90, 70.0, 80.0, 71]] * 8)
        for i in range(64)
    }
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


def test_with_many_slots_tab_stops_once_in_the_table(view):
    """At the slot that had the focus last. The arrow keys reach all slots, and the buttons of each host."""
    view.open(state(hosts={f"gpu{h}": host([worker(4 * h + s) for s in range(4)]) for h in range(8)}))
    stops = "nodes => nodes.filter((node) => node.tabIndex === 0).length"
    reachable = view.page.locator(".nbe-table .nbe-chip, .nbe-table .nbe-actions button")
    expect(reachable).to_have_count(8 * 6)
    assert reachable.evaluate_all(stops) == 1
    view.page.locator(".nbe-chip").first.focus()
    for _ in range(4):
        view.page.keyboard.press("ArrowRight")
    expect(button(view, "Remove host gpu0")).to_be_focused()
    view.page.keyboard.press("ArrowDown")
    expect(button(view, "Remove host gpu1")).to_be_focused()
    view.page.keyboard.press("ArrowLeft")
    expect(view.page.locator(".nbe-chip").nth(7)).to_be_focused()
    view.patch(step=2000)
    expect(view.page.locator(".nbe-facts").first).to_contain_text("2,000")
    assert reachable.evaluate_all(stops) == 1
    view.page.keyboard.press("Tab")
    assert view.page.evaluate("document.activeElement.closest('.nbe-table')") is None
