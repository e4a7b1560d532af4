"""A cluster with requirements: its workers have packages that the notebook does not have. No test needs the network."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

import nbelastic as nbe
from nbelastic.agent.environment import environments_folder
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


@pytest.mark.cold
def test_workers_have_the_required_packages_and_the_notebook_has_not(make, requirements):
    """Two hosts of one machine share an environment, of which the event log has the packages. torch is the host's own.

    A host that is added later, and a worker that is restarted, have it too.
    """
    import torch

    cluster = make("localhost:1,127.0.0.2:1", min=2, requirements=requirements, preload=("only_there",), wait=False)
    cluster.wait(2, timeout=60)
    rows = cluster.run(there).result(timeout=20)
    assert {row[0] for row in rows} == {row[3] for row in rows} == {"there"}
    assert {os.path.commonpath([row[1], environments_folder()]) for row in rows} == {str(environments_folder())}
    assert {row[2] for row in rows} == {torch.__file__}
    assert importlib.util.find_spec("only_there") is None
    found = [event for event in cluster.events if event.kind.startswith("environment-")]
    assert {event.host for event in found} == {"localhost", "127.0.0.2"}
    assert sum(event.text.endswith("beside those of the host: only_there 1.0") for event in found) == 2
    assert len(list(environments_folder().glob("*/"))) == 1
    os.kill(cluster.workers[0].pid, 9)
    cluster.add_host("127.0.0.3:1")
    cluster.wait(3, timeout=60)
    assert [row[0] for row in cluster.run(there).result(timeout=20)] == ["there"] * 3


@pytest.mark.cold
def test_a_start_whose_environments_cannot_be_made_says_why(make, requirements):
    """The error names the host and the package, in uv's words."""
    requirements.write_text(requirements.read_text() + "not-anywhere\n")
    with pytest.raises(
        nbe.HostError, match=r"no host could be started: localhost: .*: uv: .*not-anywhere was not found"
    ):
        make("localhost:1", requirements=requirements)
