"""A real JupyterLab, a real browser, and the view by itself. Each fixture ends the processes that it starts."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import pytest
from fake_view import View
from lab_notebook import KERNEL_READY, prompt
from playwright.sync_api import expect
from view_samples import NOW

from nbelastic.system import ports

expect.set_options(timeout=30_000)  # milliseconds
ROOT = Path(__file__).parents[2]
CHROMIUM = "/usr/bin/chromium"
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # all cells stay in the page
}
EXPECTED_ERRORS = (
    "undefined (reading 'schema')",  # an error of Notebook 7.6 in its own settings
    "net::ERR_NETWORK_CHANGED",  # another worker of pytest-xdist has started or ended a network of tests/hosts
)


def pytest_collection_modifyitems(items):
    """Skip tests that need a browser if there is none."""
    missing = not Path(CHROMIUM).exists() or shutil.which("jupyter-lab", path=str(Path(sys.executable).parent)) is None
    for item in items:
        if missing and item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.skip(reason=f"needs {CHROMIUM} and JupyterLab"))


@pytest.fixture(scope="session")
def browser_type_launch_args():
    """Debian's browser, which must not fetch updates."""
    quiet = ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
    return {"executable_path": CHROMIUM, "args": ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *quiet]}


@pytest.fixture(scope="session")
def base_url():
    """Replaces the fixture of pytest-base-url, a method of a plugin, about which pytest 9 warns."""


class Lab:
    """A server with its own folder, settings, port and token. `app`: lab, or notebook for Jupyter Notebook 7."""

    def __init__(self, folder: Path, theme: str, app: str) -> None:
        self.folder = folder
        self.theme = theme
        self.app = app
        self.token = secrets.token_hex(16)
        # Not an ephemeral one: until the server listens, any connection of this machine may be given that.
        self.port = next(port for port in ports.random_ports(100, 10_000) if ports.is_free("127.0.0.1", port))
        self.address = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._write_settings()
        places = {f"JUPYTER_{name}_DIR": str(self.folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
        settings = {"JUPYTERLAB_SETTINGS_DIR": str(self.folder / "settings"), "PYTHONPATH": str(ROOT)}
        self.log = (self.folder / "lab.log").open("wb")
        module, name = {"lab": ("jupyterlab", "LabApp"), "notebook": ("notebook", "JupyterNotebookApp")}[self.app]
        command = [sys.executable, "-m", module, "--no-browser", "--allow-root", "--ip=127.0.0.1"]
        command += [f"--port={self.port}", "--ServerApp.port_retries=0", f"--{name}.expose_app_in_browser=True"]
        command += [f"--ServerApp.root_dir={self.folder / 'work'}", f"--IdentityProvider.token={self.token}"]
        self.process = subprocess.Popen(
            command, env={**os.environ, **places, **settings}, stdout=self.log, stderr=subprocess.STDOUT
        )
        self._wait_until_it_answers()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()  # the server ends its kernels
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def write(self, name: str, *cells: str) -> str:
        """Write a notebook to the folder `self.place`, in which its kernel runs. Return its address, in its own workspace."""
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        made = [
            {
                "cell_type": "code",
                "id": f"c{i}",
                "source": source,
                "metadata": {},
                "outputs": [],
                "execution_count": None,
            }
            for i, source in enumerate(cells)
        ]
        notebook = {"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
        self.place = self.folder / "work" / name
        self.place.mkdir()
        (self.place / f"{name}.ipynb").write_text(json.dumps(notebook))
        view = f"lab/workspaces/{name}/tree" if self.app == "lab" else "notebooks"
        return f"{self.address}/{view}/{name}/{name}.ipynb?token={self.token}"

    def end_kernels(self) -> None:
        """End all kernels. Each has some time to end its cluster."""
        for session in json.load(self._request("GET", "sessions")):
            self._request("DELETE", f"sessions/{session['id']}").close()

    def _request(self, method: str, path: str) -> Any:
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.address}/api/{path}", headers=headers, method=method)
        return urllib.request.urlopen(request, timeout=20)

    def _write_settings(self) -> None:
        (self.folder / "work").mkdir()
        if self.app != "lab":  # Notebook has few of JupyterLab's settings
            return
        themes = {"apputils-extension/themes": {"theme": THEMES[self.theme]}}
        for name, content in {**SETTINGS, **themes}.items():
            path = self.folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content))

    def _wait_until_it_answers(self) -> None:
        end = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"{self.address}/api", timeout=5):
                    return
            except OSError:
                assert self.process.poll() is None, f"JupyterLab ended; see {self.folder / 'lab.log'}"
                assert time.monotonic() < end, f"JupyterLab does not answer; see {self.folder / 'lab.log'}"
                time.sleep(0.2)


@pytest.fixture(scope="module")
def server(request, tmp_path_factory):
    """Parametrize indirectly with a theme, `light` or `dark`, or with `notebook` for Jupyter Notebook 7."""
    wanted = getattr(request, "param", "light")
    theme, app = ("light", "notebook") if wanted == "notebook" else (wanted, "lab")
    with Lab(tmp_path_factory.mktemp("lab"), theme, app) as lab:
        yield lab


@pytest.fixture
def lab(server):
    """A running server; each test's kernels end with the test."""
    yield server
    server.end_kernels()


@pytest.fixture
def notebook(page, lab):
    """Open a notebook and return a function that runs its cells. The test fails if the browser has logged an error."""
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)

    def open_(address):
        page.goto(address)
        page.wait_for_function(KERNEL_READY, timeout=60_000)

        def run(number, *, ends=True):
            if lab.app == "lab":
                prompt(page, number).click()
                page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-cell') }")
            else:
                page.locator(".jp-Cell .jp-InputArea-editor").nth(number).click()
                page.keyboard.press("Control+Enter")
            if ends:
                expect(prompt(page, number)).to_have_text(re.compile(r"\[\d+\]:"), timeout=60_000)

        return run

    yield open_
    assert [text for text in complaints if not any(known in text for known in EXPECTED_ERRORS)] == []


@pytest.fixture
def view(page):
    """The view in an empty page. The test fails if the browser has logged an error or warning."""
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
    yield View(page)
    assert complaints == []


@pytest.fixture
def clock(page):
    """The browser's clock, which begins with the kernel's time and stands until the test advances it. Frames go on."""
    frames = "[window.requestAnimationFrame, window.cancelAnimationFrame]"
    page.context.add_init_script(f"window.frames_of_the_browser = {frames}")
    page.clock.install(time=datetime.fromtimestamp(NOW - 600, UTC))
    page.clock.pause_at(datetime.fromtimestamp(NOW, UTC))
    page.context.add_init_script(f"{frames} = window.frames_of_the_browser")
    return page.clock


@pytest.fixture
def requests(view):
    return view.page.get_by_role("status", name="Requests")
