"""A real JupyterLab and a real browser. Whatever these fixtures start, they end, by its own id."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

import pytest
from playwright.sync_api import expect

expect.set_options(timeout=30_000)  # milliseconds; for whichever file a process runs
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "notebook"))  # for the fake cluster
CHROMIUM = "/usr/bin/chromium"
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # all cells stay in the page
}


def pytest_collection_modifyitems(items):
    """Without a browser there is nothing to test here."""
    missing = not Path(CHROMIUM).exists() or shutil.which("jupyter-lab", path=str(Path(sys.executable).parent)) is None
    for item in items:
        if missing and item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.skip(reason=f"needs {CHROMIUM} and JupyterLab"))


@pytest.fixture(scope="session")
def browser_type_launch_args():
    """Debian's browser, without what it would fetch by itself."""
    quiet = ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
    return {"executable_path": CHROMIUM, "args": ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *quiet]}


@pytest.fixture(scope="session")
def base_url():
    """pytest-base-url's own is a method of its plugin, which pytest 9 warns about."""


class Lab:
    """A server of its own folder, settings and port, with a token. `app`: lab, or notebook for Jupyter Notebook 7."""

    def __init__(self, folder: Path, theme: str, app: str) -> None:
        self.folder = folder
        self.theme = theme
        self.app = app
        self.token = secrets.token_hex(16)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._write_settings()
        places = {f"JUPYTER_{name}_DIR": str(self.folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "notebook")])
        settings = {"JUPYTERLAB_SETTINGS_DIR": str(self.folder / "settings"), "PYTHONPATH": path}
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
        """A notebook of these cells in the folder `self.place`, where its kernel runs; its address, in a workspace of its own."""
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
        """Each has a moment to end its cluster."""
        for session in json.load(self._ask("GET", "sessions")):
            self._ask("DELETE", f"sessions/{session['id']}").close()

    def _ask(self, method: str, what: str) -> Any:
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.address}/api/{what}", headers=headers, method=method)
        return urllib.request.urlopen(request, timeout=20)

    def _write_settings(self) -> None:
        (self.folder / "work").mkdir()
        if self.app != "lab":  # it knows few of JupyterLab's settings
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
