"""What a view of the dashboard costs in a browser: `python -m tests.benchmarks.dashboard_view`.

512 workers and charts of 100,000 reports, four updates per second that change every worker; then the first paint of four
workers. It needs chromium.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from nbelastic.protocol.report_history import ReportHistory

sys.path.insert(0, str(Path(__file__).parents[1] / "browser"))
import view_samples as samples
from fake_view import View

CHROMIUM = {
    "executable_path": "/usr/bin/chromium",
    "args": ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
}
UPDATES = """async ([hosts, now, count]) => {
  const frames = [], draws = [], later = window.requestAnimationFrame.bind(window);
  let last = performance.now(), isOn = true;
  const tick = (at) => { frames.push(at - last); last = at; if (isOn) later(tick); };
  later(tick);
  window.requestAnimationFrame = (draw) => later((at) => {
    const began = performance.now();
    draw(at);
    draws.push(performance.now() - began);
  });
  for (let i = 1; i <= count; i += 1) {
    const changed = Object.entries(hosts).map(([name, host]) => [name, {
      cpu: 40 + i % 20,
      workers: Object.fromEntries(Object.entries(host.workers).map(([place, row]) => [place, row.with(5, 90 + (i + row[0]) % 9)])),
    }]);
    const patch = { time: now + i / 4, step: 100000 + i, report: { loss: 0.1 + i / 1e4 }, hosts: Object.fromEntries(changed) };
    model.update({ change: { base: 1, patch } });
    await new Promise((resolve) => setTimeout(resolve, 250));
  }
  isOn = false;
  return [frames.slice(2), draws];
}"""
PAINT = """async () => {
  close_view();
  const began = performance.now();
  show();
  await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
  return performance.now() - began;
}"""


def long_history() -> dict[str, object]:
    history = ReportHistory()
    for step in range(100_000):
        loss = 2.3 * math.exp(-step / 30_000) + 0.1 * math.sin(step)
        place = step, samples.NOW - 25_000 + step / 4, 1 + step // 20_000, 512
        history.add(place, {"loss": loss, "accuracy": step / 1e5, "lr": 0.1})
    whole = history.since("", 0)
    return {"version": whole.version, "start": 0, "names": list(whole.names), "rows": whole.rows}


def large(browser, count: int = 40) -> None:
    """Print the times between frames, and of drawing."""
    gpus = [[97, 71.0, 81.6, 71]] * 8
    hosts = {
        f"gpu-{h:03}": samples.host([samples.worker(8 * h + s, gpu=s) for s in range(8)], gpus=gpus) for h in range(64)
    }
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    report = {"loss": 0.1, "accuracy": 1.0, "lr": 0.1}
    first = samples.state(hosts=hosts, step=100_000, world_size=512, report=report)
    View(page).open(first, {**samples.ANSWERS, "reports": long_history()}, "light")
    page.wait_for_timeout(1500)
    page.evaluate(
        "() => { const r = model.answers.reports; model.answers.reports = { ...r, rows: [], start: r.rows.length }; }"
    )
    for name, times in zip(("between frames", "to draw"), page.evaluate(UPDATES, [hosts, samples.NOW, count])):
        print(f"{name}, ms: median {statistics.median(times):.1f}, max {max(times):.1f}, n {len(times)}")


def first_paint(browser, rounds: int = 7) -> None:
    """Print the time from the call of the widget to the second frame after it."""
    found = []
    for _ in range(rounds):
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        View(page).open(
            samples.state(step=400, report={"loss": 0.3}), {**samples.ANSWERS, "reports": samples.reports()}
        )
        page.wait_for_timeout(300)
        found.append(page.evaluate(PAINT))
        page.close()
    print(f"first paint of 4 workers, ms: median {statistics.median(found):.0f}, max {max(found):.0f}, n {rounds}")


if __name__ == "__main__":
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(**CHROMIUM)
        large(chromium)
        first_paint(chromium)
        chromium.close()
