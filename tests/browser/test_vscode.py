"""The view by the rules of VS Code's notebook renderer, as far as a page can have them.

VS Code shows outputs in a sandboxed frame whose policy allows no other origin. Its style sheets change all tables, have the
colours of a light JupyterLab, and put widgets on white. Clicks on links go to VS Code. anywidget's front end loads the module
from a blob.
"""

from __future__ import annotations

import json

import pytest
from fake_view import FILES
from playwright.sync_api import expect
from view_samples import ANSWERS, logs, reports, request_status, state

pytestmark = pytest.mark.browser

POLICY = (  # VS Code's also allows inline scripts and eval, and fonts and pictures of other origins
    "default-src 'none'; script-src 'self' blob:; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'none'"
)
SANDBOX = "allow-same-origin allow-scripts allow-forms allow-pointer-lock allow-downloads"
EXPECTED = (
    "can escape its sandboxing."  # VS Code's own frame, which it serves from another origin, causes this warning too
)
EDITOR = f'<!doctype html><title>Editor</title><iframe sandbox="{SANDBOX}" src="webview.html" style="width: 800px; height: 700px">'
WEBVIEW = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Outputs</title>
<style>
  html { --vscode-editor-foreground: #cccccc; --vscode-editor-background: #1e1e1e; }
  :root { --jp-ui-font-color1: rgba(0, 0, 0, 0.87); --jp-layout-color1: white; --jp-border-color2: #bdbdbd; }
  body { margin: 0; background: var(--vscode-editor-background); color: var(--vscode-editor-foreground); }
  table, thead, tbody, tr, th, td { border: none !important; border-collapse: collapse; }
  table, tr, th { text-align: left !important; }
  table { width: 100%; }
  th, td { padding: 4px 8px; }
  tr:nth-child(even), thead { background-color: rgb(130 130 130 / 10%); }
  .cell-output-ipywidget-background { background: white !important; padding: 8px; }
</style>
<body class="vscode-dark" data-vscode-theme-kind="vscode-dark"><main class="cell-output-ipywidget-background"></main>
<script type="module" src="front_end.mjs"></script>"""
FRONT_END = """
import { FakeModel } from "./fake_model.mjs";
window.model = new FakeModel(STATE);
Object.assign(model.answers, ANSWERS);
window.links = [];
window.addEventListener("click", (event) => {
  const link = event.composedPath().find((node) => node instanceof HTMLAnchorElement);
  if (!link) return;
  event.preventDefault();
  links.push([link.download, link.href.slice(0, 5)]);
});
const [module, styles] = await Promise.all(["dashboard.js", "dashboard.css"].map((name) => import(`./${name}.text.mjs`)));
const style = document.createElement("style");
style.textContent = styles.default;
document.head.append(style);
const url = URL.createObjectURL(new Blob([module.default], { type: "text/javascript" }));
const { default: widget } = await import(url);
URL.revokeObjectURL(url);
await widget.initialize?.({ model });
await widget.render({ model, el: document.querySelector("main") });
"""


@pytest.fixture
def webview(page):
    """The frame with the view in it. The test fails if anything is logged, or requested from another origin."""
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
    page.on("console", lambda line: complaints.remove(line.text) if line.text.endswith(EXPECTED) else None)
    answers = {**ANSWERS, "reports": reports(), "logs": logs((0, "out", "a line"), (1, "err", "another one"))}
    first = state(step=400, report={"loss": 0.29, "accuracy": 0.8})
    front_end = FRONT_END.replace("STATE", json.dumps(first)).replace("ANSWERS", json.dumps(answers))
    files = {
        "": (EDITOR, "text/html"),
        "webview.html": (WEBVIEW, "text/html"),
        "front_end.mjs": (front_end, "text/javascript"),
        "fake_model.mjs": (FILES["fake_model.mjs"], "text/javascript"),
        **{
            f"{name}.text.mjs": (f"export default {json.dumps(FILES[name])};", "text/javascript")
            for name in ("dashboard.js", "dashboard.css")
        },
    }

    def serve(route):
        url = route.request.url
        name = url.removeprefix("http://widget.test/")
        if name == "favicon.ico":
            route.fulfill(status=204)
        elif name in files:
            body, kind = files[name]
            policy = {"Content-Security-Policy": POLICY} if name == "webview.html" else {}
            route.fulfill(body=body, content_type=kind, headers=policy)
        else:
            complaints.append(f"requested {url}")
            route.abort()

    page.route("**/*", serve)
    page.goto("http://widget.test/")
    frame = page.frame_locator("iframe")
    expect(frame.locator(".nbe-phase")).to_have_text("running")
    yield frame
    assert complaints == []


def evaluate(page, script):
    return page.frames[1].evaluate(script)


def colours(page, selector):
    style = page.frames[1].locator(selector).evaluate_handle("node => getComputedStyle(node)")
    return style.evaluate("style => [style.color, style.backgroundColor, style.colorScheme]")


def test_the_view_works_in_a_notebook_of_vs_code(page, webview, output_path):
    """It is drawn in VS Code's colours, with charts and every panel, and its clicks send messages."""
    expect(webview.get_by_role("img", name="loss from")).to_be_visible()
    assert colours(page, ".nbe") == ["rgb(204, 204, 204)", "rgb(30, 30, 30)", "dark"]
    assert colours(page, "main")[1] == "rgba(0, 0, 0, 0)"
    for name, text in (("Logs", "another one"), ("Step times", "rank 2"), ("Stacks", ""), ("Timeline", "world of 4")):
        webview.get_by_role("tab", name=name).click()
        expect(webview.get_by_role("tabpanel", name=name)).to_contain_text(text)
    page.screenshot(path=f"{output_path}/vscode.png")
    webview.get_by_label("max", exact=True).fill("6")
    webview.get_by_role("button", name="Apply").click()
    (sent,) = evaluate(page, "model.sent.filter((content) => content.order)")
    assert (sent["order"], sent["max"]) == ("scale", 6)
    done = request_status(sent["id"], "done", text="at least 2, at most 6 workers")
    evaluate(page, f"model.update({{ change: {{ base: 1, patch: {{ orders: [{json.dumps(done)}] }} }} }})")
    expect(webview.get_by_role("status", name="Requests")).to_contain_text("done")


def test_a_click_waits_for_the_cell_that_runs(page, webview):
    """VS Code hands it on after that cell. Until then the view says so, and it shows what is new all the same."""
    webview.get_by_role("button", name="Pause").click()
    requests = webview.get_by_role("status", name="Requests")
    expect(requests).to_contain_text("sent")
    expect(requests).to_contain_text("no answer yet; the kernel may be busy", timeout=10_000)
    evaluate(page, "model.update({ change: { base: 1, patch: { step: 2345 } } })")
    expect(webview.locator(".nbe-facts").first).to_contain_text("2,345")
    (sent,) = evaluate(page, "model.sent.filter((content) => content.order)")
    paused = request_status(sent["id"], "done", text="pause")
    evaluate(page, f"model.update({{ change: {{ base: 1, patch: {{ orders: [{json.dumps(paused)}] }} }} }})")
    expect(requests).to_contain_text("done")


def test_vs_code_saves_files(page, webview):
    """It handles clicks on links to blobs that reach the window: a link outside of the page would save nothing."""
    webview.get_by_role("button", name="Save CSV").click()
    assert evaluate(page, "links") == [["job-1.csv", "blob:"]]
    assert evaluate(page, "document.querySelectorAll('a').length") == 0
