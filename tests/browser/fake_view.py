"""The view in a page without a notebook, with a fake model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import axe_playwright_python
import msgspec

from nbelastic.notebook.dashboard_frames import KeyFrame
from nbelastic.notebook.widget_files import widget_text

FILES = {
    "dashboard.js": widget_text("dashboard.js"),
    "dashboard.css": widget_text("dashboard.css"),
    "fake_model.mjs": (Path(__file__).parent / "fake_model.mjs").read_text(),
}
AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
TYPES = {"js": "text/javascript", "mjs": "text/javascript", "css": "text/css"}
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


class View:
    """A page with the view in it. `update` and `patch` act as the kernel; `sent` lists what the view has sent."""

    def __init__(self, page):
        self.page = page
        self.root = page.locator(".nbe")

    def open(self, first, answers=None, theme=None):
        """`theme`: JupyterLab's light or dark colours, or None for a page without a theme."""
        msgspec.convert(first, KeyFrame)

        def serve(route):
            name = route.request.url.rsplit("/", 1)[-1]
            if name in FILES:
                route.fulfill(body=FILES[name], content_type=TYPES[name.rpartition(".")[2]])
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
        parts = {"LIGHT": {"light": "true", "dark": "false"}.get(theme, ""), "THEME": link, "BACKGROUND": back}
        parts |= {"STATE": json.dumps(first), "ANSWERS": json.dumps(answers or {})}
        text = PAGE
        for name, part in parts.items():
            text = text.replace(name, part, 1)
        return text

    def update(self, **values):
        """Set new values of `state` or `change`."""
        self.page.evaluate("values => model.update(values)", values)

    def patch(self, base=1, **patch):
        self.update(change={"base": base, "patch": patch})

    def run_for(self, ms):
        """Advance a clock that stands, between two frames: what is to be drawn is drawn before and after."""
        frame = "new Promise((drawn) => requestAnimationFrame(drawn))"
        self.page.evaluate(frame)
        self.page.clock.run_for(ms)
        self.page.evaluate(frame)

    def sent(self, key="order"):
        """The messages of the view that have this key, without their ids."""
        sent = self.page.evaluate("key => model.sent.filter((content) => key in content)", key)
        return [{name: value for name, value in content.items() if name != "id"} for content in sent]

    def last_id(self, key="order"):
        """The id of the last request or query."""
        return self.page.evaluate("key => model.sent.filter((content) => key in content).at(-1)?.id", key)


def button(view, name):
    return view.page.get_by_role("button", name=name, exact=True)


def faults(page):
    """What axe finds in the page: rules, and parts that break them."""
    page.evaluate(AXE)
    found = page.evaluate("axe.run('main')")["violations"]
    return [(rule["id"], [node["html"] for node in rule["nodes"]][:3]) for rule in found]


def panel(view, name):
    """Open a panel and return it."""
    view.page.get_by_role("tab", name=name).click()
    return view.page.get_by_role("tabpanel", name=name)
