"""The view in a page without a notebook, with a fake model, and the states it is given."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = {
    "dashboard.js": ROOT / "widgets" / "dashboard.js",
    "dashboard.css": ROOT / "widgets" / "dashboard.css",
    "fake_model.mjs": Path(__file__).parent / "fake_model.mjs",
}
THEMES = Path(sys.prefix) / "share/jupyter/lab/themes/@jupyterlab"
PAGE = """
<!doctype html><html lang="en" data-jp-theme-light="LIGHT"><meta charset="utf-8"><title>A notebook</title>
THEME<link rel="stylesheet" href="dashboard.css"><style>body { margin: 8px; BACKGROUND }</style>
<h1 hidden>A notebook</h1><main></main>
<script type="module">
  import dashboard from "./dashboard.js";
  import { FakeModel } from "./fake_model.mjs";
  window.complaints = [];
  window.model = new FakeModel(STATE);
  Object.assign(window.model.answers, ANSWERS);
  window.show = () => { window.close_view = dashboard.render({ model, el: document.querySelector("main") }); };
  window.show();
</script></html>
"""
NOW = 1_753_000_000.0  # the kernel's clock in every story


def worker(rank=None, state="running", behind=0, restarts=0, pid=4711, cpu=97, memory=320, reason=""):
    return [rank, state, behind, restarts, pid, cpu, memory, reason]


def host(workers, slots=None, **more):
    """`workers`: a list of them, one a slot, or the whole dict."""
    named = workers if isinstance(workers, dict) else {f"{slot}#1": row for slot, row in enumerate(workers)}
    plain = {"address": "10.0.0.1", "slots": slots or len(named), "phase": "up", "reason": "", "until": 0}
    used = {"cpu": 63, "memory": 41_200, "of": 128_000, "gpus": [], "workers": named, "slots_until": {}}
    return {**plain, **used, **more}


def event(n, kind="host-up", text="gpu1 is up", *, ago=0.0, size=4, **more):
    known = {"host": "", "worker": "", "generation": 3, "took": {}}
    return {"n": n, "time": NOW - ago, "kind": kind, "text": text, "size": size, **known, **more}


def state(**more):
    """A cluster of two hosts that train with four workers."""
    hosts = {"gpu1": host([worker(0), worker(1)]), "gpu2": host([worker(2), worker(3)], address="10.0.0.2")}
    world = {
        "n": 1,
        "time": NOW,
        "name": "fake",
        "phase": "running",
        "generation": 3,
        "world_size": 4,
        "min": 2,
        "max": 8,
    }
    job = {"job": "job-1", "outcome": "", "step": 1234, "total": None, "steps_per_second": 55.123, "report": {}}
    rest = {"curves": {}, "failed_at": None, "hosts": hosts, "events": [event(1)], "orders": []}
    return {**world, "reason": "4 workers train in generation 3", **job, **rest, **more}


class View:
    """A page with the view in it; `tell` is the kernel's word, `sent` what came up."""

    def __init__(self, page):
        self.page = page
        self.root = page.locator(".nbe")

    def open(self, first, answers=None, theme=None):
        """`theme`: JupyterLab's own light or dark colours, or None for a page without any."""

        def serve(route):
            name = route.request.url.rsplit("/", 1)[-1]
            if name in FILES:
                route.fulfill(path=FILES[name])
            elif name == "theme.css" and theme:
                route.fulfill(path=THEMES / f"theme-{theme}-extension" / "index.css")
            elif name == "":
                route.fulfill(body=self._page(first, answers, theme), content_type="text/html")
            else:
                route.fulfill(status=404)

        self.page.route("**/*", serve)
        self.page.goto("http://widget.test/")
        self.root.wait_for()
        return self

    def _page(self, first, answers, theme):
        link = '<link rel="stylesheet" href="theme.css">' if theme else ""
        back = "background: var(--jp-layout-color0)" if theme else "color-scheme: light dark"
        words = {"LIGHT": {"light": "true", "dark": "false"}.get(theme, ""), "THEME": link, "BACKGROUND": back}
        words |= {"STATE": json.dumps(first), "ANSWERS": json.dumps(answers or {})}
        text = PAGE
        for name, word in words.items():
            text = text.replace(name, word, 1)
        return text

    def tell(self, **values):
        """New values of `state` or `change`."""
        self.page.evaluate("values => model.tell(values)", values)

    def patch(self, base=1, **patch):
        self.tell(change={"base": base, "patch": patch})

    def sent(self, word="order"):
        """What came up, without its ids."""
        sent = self.page.evaluate("word => model.sent.filter((content) => word in content)", word)
        return [{name: value for name, value in content.items() if name != "id"} for content in sent]

    def last(self, word="order"):
        """The id of the last order or question."""
        return self.page.evaluate("word => model.sent.filter((content) => word in content).at(-1)?.id", word)
