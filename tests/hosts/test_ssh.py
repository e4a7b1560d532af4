"""Clusters on hosts that are reached by ssh: their start, their errors, and their end with all processes."""

import getpass
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nbelastic as nbe
from nbelastic.system import versions
from tests.hosts.cluster_checks import (
    LONG,
    check_nothing_left,
    event_texts,
    host_phases,
    host_reasons,
    strays,
    wait_for_more_steps,
    worker_on,
)
from tests.hosts.conftest import ROOT
from tests.process import programs
from tests.support.processes import agent_of_worker, alive
from tests.support.waiting import files_in, until


def script(network, text):
    """Write a program that all hosts can run; {python} is this process's Python."""
    path = network.folder / "interpreter"
    path.write_text("#!/bin/sh\n" + text.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def describe():
    """Print the rank, and return its ranks, environment, folder and host name."""
    found = programs.describe_ranks()
    print(f"rank {found['rank']} was here")
    seen = {name: os.environ.get(name) for name in ("WORD", "NUMBER", "INTERPRETER", "NCCL_DEBUG")}
    return {**found, "cwd": os.getcwd(), "node": platform.node(), **seen}


def test_hosts_start_together_and_give_exact_ranks(network, make, temporary, tmp_path):
    """Hosts start at the same time with `python`, `env` and `cwd`; ranks are packed by host; all output arrives."""
    started = network.folder / "started"
    started.mkdir()
    together = f"touch {started}/$(hostname)\nuntil [ -e {started}/h1 ] && [ -e {started}/h2 ]; do sleep 0.1; done\n"
    python = script(network, together + 'INTERPRETER=$0 exec {python} "$@"\n')
    environment = {"WORD": "two words; $HOME 'n \"all", "NUMBER": 7, "PYTHONPATH": str(ROOT)}
    hosts = f"h1:2,{getpass.getuser()}@h2:1"
    cluster = make(hosts, min=3, python=python, env=environment, cwd=tmp_path)
    job = cluster.run(describe)
    rows = job.result(timeout=LONG)
    assert [(row["rank"], row["size"], row["local"], row["cross"]) for row in rows] == [
        (0, 3, (0, 2), (0, 2)),
        (1, 3, (1, 2), (0, 1)),
        (2, 3, (0, 1), (1, 2)),
    ]
    assert [row["sums"] for row in rows] == [(1.0, 2.0), (1.0, 1.0), (2.0, 2.0)]
    assert [row["node"] for row in rows] == ["h1", "h1", "h2"]
    for row in rows:
        assert (row["WORD"], row["NUMBER"]) == (environment["WORD"], "7")
        assert (row["cwd"], row["INTERPRETER"]) == (str(tmp_path), python)
    output = until(lambda: (text := job.logs()).count("was here") == 3 and text, LONG, "the output of all ranks")
    assert sorted(output.splitlines()) == [
        "h1/0#1 | rank 0 was here",
        "h1/1#1 | rank 1 was here",
        "h2/0#1 | rank 2 was here",
    ]
    assert job.logs(rank=2) == "rank 2 was here"
    assert host_phases(cluster) == {"h1": "up", "h2": "up"}
    cluster.stop()
    assert not list(temporary.glob("pymp-*"))


FAKE = """
import importlib.metadata, platform
from types import SimpleNamespace
real, older = importlib.metadata.distributions, {"nbelastic": "0.0.9", "torch": "1.2.3+cpu"}
def distributions(**given):
    name = given.get("name")
    return [SimpleNamespace(version=older[name])] if name in older else real(**given)
importlib.metadata.distributions = distributions
platform.python_version = lambda: "3.8.1"
"""


@pytest.mark.cold  # its hosts differ in what Python reads as it starts
@pytest.mark.soak(share=0.2)
def test_an_error_of_a_host_concerns_only_that_host(network, trains, tmp_path):
    """Nine unusable hosts are each reported with a different reason, and the tenth host trains."""
    folder = network.folder / "folder"
    (folder / "deep").mkdir(parents=True)
    (network.folder / "sitecustomize").mkdir()
    (network.folder / "sitecustomize" / "sitecustomize.py").write_text(FAKE)
    network.add("closed", sshd=False)
    network.add("silent", sshd=False)
    network.cut("silent")
    network.add("bare", python=False)
    network.add("secretive", password_only=True)
    network.add("stranger", "old", "poor", "nowhere")
    network.add("narrow", hides=(str(folder),))
    known = network.folder / "known_hosts"
    known.write_text("".join(line for line in known.read_text().splitlines(True) if "stranger" not in line))
    config = network.ssh_config
    config.write_text(
        config.read_text().replace(f"HostName {network['nowhere'].address}\n", "HostName nowhere.invalid\n")
    )
    python = script(
        network,
        f'case $(hostname) in old) export PYTHONPATH={network.folder}/sitecustomize;; poor) exec {{python}} -IS "$@";; esac\n'
        'exec {python} "$@"\n',
    )
    names = ("closed", "silent", "bare", "secretive", "stranger", "old", "poor", "nowhere", "narrow")
    hosts = ",".join(f"{name}:1" for name in (*names, "h1"))
    training = trains(
        hosts, min=1, python=python, cwd=folder / "deep", env={"PYTHONPATH": str(ROOT)}, cooldown=(100, 100)
    )
    cluster = training.cluster
    assert [w.host for w in training.wait_for_world(1, timeout=LONG)] == ["h1"]
    until(lambda: list(host_phases(cluster).values()).count("lost") == 9, LONG, f"nine hosts to fail: {cluster.hosts}")
    here = versions.installed()
    expected = {
        "closed": "closed cannot be reached by ssh (",
        "silent": "silent cannot be reached by ssh (",
        "bare": f"there is no {python} on bare: install Python there or name it with --python",
        "secretive": "secretive accepts none of your keys and would ask for a password (",
        "stranger": "the host key of stranger is not known or has changed: run `ssh stranger` once in a terminal",
        "old": f"Python 3.8.1 there, {here['Python']} here; nbelastic 0.0.9 there, {here['nbelastic']} here; "
        f"torch 1.2.3+cpu there, {here['torch']} here",
        "poor": f"nbelastic is not installed for {python} on poor: install it there or name another with --python",
        "nowhere": "nowhere is an unknown name (",
        "narrow": f"its agent ended with exit code 1: the folder {folder / 'deep'} (cwd) cannot be entered here: "
        "No such file or directory",
        "h1": "",
    }
    found = host_reasons(cluster)
    assert {name: text if found[name].startswith(text) else found[name] for name, text in expected.items()} == expected
    assert "refused" in found["closed"]
    assert "timed out" in found["silent"]
    assert "ssh-copy-id secretive" in found["secretive"]
    for name in names:
        kind = "host-refused" if name == "old" else "host-lost"
        assert event_texts(cluster, kind, name) == [f"{name}: {found[name]}; tried again in 100 s"]
    assert len(training.finish(timeout=LONG)) == 1


def test_without_any_host_the_start_fails(network, make):
    """When no host can be started, `start()` raises with the reason of each, and leaves nothing."""
    network.add("closed", sshd=False)
    network.add("secretive", password_only=True)
    with pytest.raises(nbe.HostError) as caught:
        make("closed:1,secretive:1", min=1)
    assert "closed: closed cannot be reached by ssh (" in str(caught.value)
    assert "secretive: secretive accepts none of your keys" in str(caught.value)
    assert not strays(network)


@pytest.mark.soak(share=0.2)
def test_all_processes_of_a_host_end_with_its_agent_and_with_the_cluster(network, temporary, trains):
    """When an agent is killed, its worker and the worker's child end, and the host is started again; `stop()` ends all."""
    training = trains("h1:1,h2:1", program=train_with_child)
    cluster = training.cluster
    training.wait_for_world(2, timeout=LONG)
    children = {w.host: int((training.folder / f"{w.pid}.child").read_text()) for w in cluster.workers}
    assert all(alive(child) for child in children.values())
    victim = worker_on(training, "h2")
    os.kill(agent_of_worker(victim).pid, signal.SIGKILL)
    until(lambda: not alive(victim.pid) and not alive(children["h2"]), LONG, "the worker and its child to end")
    until(lambda: event_texts(cluster, "host-lost", "h2"), LONG, "the host to be lost")
    assert pid_on(training.wait_for_world(2, timeout=LONG), "h2") != victim.pid
    assert alive(children["h1"])
    children["h2"] = int((training.folder / f"{worker_on(training, 'h2').pid}.child").read_text())
    wait_for_more_steps(training)
    cluster.stop()
    until(lambda: not any(map(alive, children.values())), LONG, "the children to end")
    check_nothing_left(network, temporary)
    assert cluster.status().reason == "stopped: stopped by hand"


def pid_on(workers, host):
    (pid,) = [w.pid for w in workers if w.host == host]
    return pid


def train_with_child(folder, **options):
    """Train with a child process that outlives its worker unless nbelastic ends it."""
    child = subprocess.Popen(["sleep", "1000"])
    (Path(folder) / f"{os.getpid()}.child").write_text(str(child.pid))
    return programs.train(folder, **options)


KERNEL = """\
import os, sys, time
import nbelastic as nbe
from tests.process import programs
folder, temporary, root = sys.argv[1:]
cluster = nbe.Cluster("h1:1,h2:1", min=2, env={"TMPDIR": temporary}, cwd=root, log_dir=folder + "/logs")
cluster.start(timeout=60)
os.mkdir(folder + "/steps")
cluster.run(programs.train, folder + "/steps")
cluster.wait(2, timeout=60)
print("trains", flush=True)
time.sleep(1000)
"""


@pytest.mark.soak(share=0.2)
def test_nothing_outlives_the_kernel(network, temporary, tmp_path):
    """When a kernel is killed, all processes on all hosts end within 10 s, and their files are removed."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", KERNEL, str(tmp_path), str(temporary), str(ROOT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=environment) as kernel:
        try:
            assert kernel.stdout.readline() == b"trains\n"
            assert len(strays(network)) >= 6
        finally:
            kernel.kill()
        until(lambda: not strays(network), 10, f"nothing to run on the hosts; {strays(network)}")
    left = lambda: [path for path in files_in(temporary) if path.is_socket() or path.name.startswith("run-")]
    until(lambda: not left(), LONG, "the agents' folders and the driver's socket to go")
