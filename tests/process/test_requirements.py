"""A cluster with requirements: its workers have packages that the notebook does not have. No test needs the network."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys

import pytest

import nbelastic as nbe
from nbelastic.agent.environment import environments_folder
from tests.support.waiting import until
from tests.support.wheels import make_wheel

pytest.importorskip("uv")


@pytest.fixture
def requirements(tmp_path, monkeypatch):
    """A file that names a package which no index has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_wheel(tmp_path / "wheels", "only-there", "1.0", "WORD = 'there'\n", requires=("torch>=2",))
    file = tmp_path / "requirements.txt"
    file.write_text(f"--no-index\n--find-links {tmp_path}/wheels\nonly-there  # for training\n")
    return file


def there():
    import subprocess

    import only_there
    import torch

    code = "import only_there; print(only_there.WORD)"
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return only_there.WORD, only_there.__file__, torch.__file__, child.stdout.strip()


@pytest.fixture
def go(tmp_path, monkeypatch):
    """uv does nothing before this file is there."""
    folder, file = tmp_path / "bin", tmp_path / "go"
    folder.mkdir()
    (folder / "uv").write_text(
        f'#!/bin/sh\nwhile [ ! -e "{file}" ]; do sleep 0.05; done\nexec "{sys.executable}" -m uv "$@"\n'
    )
    (folder / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return file


@pytest.mark.cold
@pytest.mark.soak(share=0.2)
def test_workers_have_the_required_packages_and_the_notebook_has_not(make, requirements, go):
    """torch is the host's own. A host that is added later, and a worker that is restarted, have the packages too.

    While uv runs, the status says so, and a new driver that takes over waits for it.
    """
    import torch

    cluster = make("localhost:1", min=1, requirements=requirements, preload=("only_there",), wait=False)
    until(lambda: "localhost: makes an environment for the requirements" in cluster.status().reason)
    os.kill(cluster._link.process.pid, signal.SIGKILL)
    until(lambda: any(event.kind == "driver-came" for event in cluster.events))
    go.touch()
    cluster.wait(1, timeout=60)
    [row] = cluster.run(there).result(timeout=20)
    assert (row[0], row[2], row[3]) == ("there", torch.__file__, "there")
    assert os.path.commonpath([row[1], environments_folder()]) == str(environments_folder())
    assert importlib.util.find_spec("only_there") is None
    os.kill(cluster.workers[0].pid, signal.SIGKILL)
    cluster.add_host("127.0.0.2:1")
    cluster.wait(2, timeout=60)
    assert [row[0] for row in cluster.run(there).result(timeout=20)] == ["there"] * 2
    events = [
        (event.kind, event.host) for event in cluster.events if event.kind.startswith(("environment-", "host-lost"))
    ]
    begun, ready = "environment-begun", "environment-ready"
    assert events == [(begun, "localhost"), (begun, "localhost"), (ready, "localhost"), (ready, "127.0.0.2")]
    texts = {event.text for event in cluster.events if event.kind == ready}
    assert all(text.endswith("; packages beside those of the host: only_there 1.0") for text in texts)


@pytest.mark.cold
def test_a_start_whose_environments_cannot_be_made_says_why(make, requirements):
    """The error names the host and the package, in uv's words."""
    requirements.write_text(requirements.read_text() + "not-anywhere\n")
    with pytest.raises(
        nbe.HostError, match=r"no host could be started: localhost: .*: uv: .*not-anywhere was not found"
    ):
        make("localhost:1", requirements=requirements)
