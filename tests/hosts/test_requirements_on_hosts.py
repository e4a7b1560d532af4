"""Environments for requirements on hosts that ssh reaches. No test needs a package index."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from tests.hosts.cluster_checks import LONG, event_texts, host_reasons
from tests.support.processes import processes_of
from tests.support.waiting import until
from tests.support.wheels import make_wheel

pytest.importorskip("uv")
PASSWORD = "open-sesame"


@pytest.mark.cold
@pytest.mark.soak(seconds=21)
def test_hosts_make_one_environment_for_a_folder_that_they_share(network, make, tmp_path):
    """One host makes it and the other waits. The workers have the package, and the notebook has not.

    A password in the requirements is in no command line, environment, event or log.
    """
    go, folder = tmp_path / "go", tmp_path / "bin"
    make_wheel(tmp_path / "wheels", "only-there", "1.0", "WORD = 'there'\n")
    folder.mkdir()
    (folder / "uv").write_text(
        f'#!/bin/sh\nwhile [ ! -e "{go}" ]; do sleep 0.05; done\nexec "{sys.executable}" -m uv "$@"\n'
    )
    (folder / "uv").chmod(0o755)
    lines = [f"--find-links {tmp_path}/wheels", "--no-index", "only-there", f"-i https://me:{PASSWORD}@127.0.0.1:1/x"]
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": f"{folder}:/usr/bin:/bin"}
    cluster = make("h1:1,h2:1", min=2, requirements=lines, env=env, wait=False)
    makes = "makes an environment for the requirements: "
    both = [f"{makes}another agent makes it", f"{makes}begins"]
    until(lambda: sorted(host_reasons(cluster).values()) == both, LONG, lambda: str(host_reasons(cluster)))
    pids = processes_of(cluster) | network.processes("h1") | network.processes("h2")
    shown = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            shown[pid] = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    assert any(b"environment_maker" in text for text in shown.values())
    assert not any(PASSWORD.encode() in text for text in shown.values())
    go.touch()
    cluster.wait(2, timeout=LONG)
    rows = cluster.execute("import only_there, sys; print(only_there.WORD, sys.executable)", timeout=LONG)
    assert len({row[1] for row in rows}) == 1
    assert rows[0][1].startswith(f"there {tmp_path}/cache/")
    assert len(event_texts(cluster, "environment-ready")) == 2
    assert len(list((tmp_path / "cache" / "nbelastic" / "environments").glob("*/"))) == 1
    texts = [file.read_text(errors="replace") for file in cluster.log_dir.rglob("*") if file.is_file()]
    assert not [text for text in [*texts, repr(cluster), repr(cluster.status())] if PASSWORD in text]
