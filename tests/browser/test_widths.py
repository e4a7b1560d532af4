"""The widget by itself, in a page without a notebook: readable at any width, usable by keyboard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_cluster import FakeCluster
from playwright.sync_api import expect

from nbelastic.notebook.dashboard import Tail, as_json

pytestmark = pytest.mark.browser

WIDGETS = Path(__file__).parents[2] / "widgets"
PAGE = """
<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="dashboard.css">
<style>:root { color-scheme: light dark } body { margin: 8px }</style><main></main>
<script type="module">
  import dashboard from "./dashboard.js";
  window.sent = [];
  const model = { get: () => (STATE), on() {}, off() {}, send: (order) => window.sent.push(order) };
  window.close_view = dashboard.render({ model, el: document.querySelector("main") });
</script>
"""


def busy_state():
    """Hosts with long names and reasons, and a long event."""
    cluster = FakeCluster("localhost:2,gpu-node-with-a-rather-long-name.cluster.example.org:3", min=2, max=8).start()
    cluster.run_for_show()
    cluster.record("host-lost", "gpu2: ssh said: connection refused; it is tried again in 5 s", host="gpu2")
    cluster.record("order-refused", "a-word-of-one-hundred-letters-" * 4)
    return {**as_json(cluster.status()), "events": Tail().look(cluster.events)}


@pytest.fixture
def view(page):
    """Serves the widget's own files, and nothing else, to the page."""

    def serve(route):
        name = route.request.url.rsplit("/", 1)[-1]
        if name in ("dashboard.js", "dashboard.css"):
            route.fulfill(path=WIDGETS / name)
        elif name == "":
            route.fulfill(body=PAGE.replace("STATE", json.dumps(busy_state())), content_type="text/html")
        else:
            route.fulfill(status=404)

    page.route("**/*", serve)
    return page


def overlap(a, b):
    apart = a["x"] + a["width"] <= b["x"] or b["x"] + b["width"] <= a["x"]
    return not (apart or a["y"] + a["height"] <= b["y"] or b["y"] + b["height"] <= a["y"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 800, 1600])
def test_nothing_is_cut_off(view, width, scheme, output_path):
    """No sideways scrolling from a phone's width on."""
    view.emulate_media(color_scheme=scheme)
    view.set_viewport_size({"width": width, "height": 900})
    view.goto("http://widget.test/")
    expect(view.locator(".nbe-table")).to_contain_text("localhost/1#1")
    view.screenshot(path=f"{output_path}/{scheme}-{width}.png")
    for part in (".nbe", ".nbe-scroll", ".nbe-log", ".nbe-controls"):
        assert view.locator(part).evaluate("node => node.scrollWidth - node.clientWidth") == 0, part
    buttons = [button.bounding_box() for button in view.locator(".nbe-controls button").all()]
    assert not [(a, b) for a in buttons for b in buttons if a is not b and overlap(a, b)]
    assert view.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0


def test_it_can_be_used_by_keyboard_alone(view):
    """Tab and Enter reach every order; the cluster is stopped only by the second Enter."""
    view.goto("http://widget.test/")
    view.get_by_label("Host to add").focus()
    view.keyboard.type("127.0.0.2:2")
    view.keyboard.press("Enter")
    view.get_by_role("button", name="Stop cluster").focus()
    view.keyboard.press("Enter")
    assert view.evaluate("window.sent") == [{"order": "add_host", "host": "127.0.0.2:2"}]
    view.keyboard.press("Enter")
    assert view.evaluate("window.sent")[1:] == [{"order": "stop"}]
    expect(view.get_by_role("status", name="Orders")).to_contain_text("stop the cluster: sent")


def test_a_closed_view_leaves_the_page_empty(view):
    """What render made, its cleanup takes away."""
    view.goto("http://widget.test/")
    expect(view.locator(".nbe")).to_have_count(1)
    view.evaluate("window.close_view()")
    expect(view.locator("main > *")).to_have_count(0)
