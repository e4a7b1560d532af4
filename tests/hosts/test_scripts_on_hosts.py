"""Scripts on hosts that are reached by ssh, and torchruns in terminals of other machines."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import nbelastic as nbe
from nbelastic.transport.keys import Keys
from tests.hosts.cluster_checks import LONG, event_texts
from tests.hosts.conftest import ROOT
from tests.hosts.network import Network
from tests.process.script_training import (
    MANY_STEPS,
    REPORT,
    TRAIN,
    ScriptTraining,
    join_options,
    reports_by_rank,
    torchrun,
)
from tests.support.processes import alive
from tests.support.waiting import until

SILENCE = 2.0


class Terminal:
    """A command in a terminal of a host, through ssh."""

    def __init__(self, process: subprocess.Popen[str], output: Path) -> None:
        self._process, self._output = process, output

    def press_ctrl_c(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\x03")
        self._process.stdin.flush()

    def wait(self) -> int:
        return self._process.wait(LONG)

    @property
    def output(self) -> str:
        lines = self._output.read_text().replace("\r", "").splitlines()
        return "\n".join(line for line in lines if not line.startswith("Connection to "))  # ssh prints this line


@pytest.fixture
def terminal(network: Network, temporary: Path, tmp_path: Path) -> Callable[..., Any]:
    """`with terminal("h3", file, script, ...) as run:` runs torchrun on a host, with the connection file `file`."""

    @contextmanager
    def start(host: str, file: str, *arguments: Any) -> Iterator[Terminal]:
        words = [sys.executable, "-m", "torch.distributed.run", *join_options(file, "--max-restarts=3"), *arguments]
        command = f"cd {ROOT} && TMPDIR={temporary} exec {shlex.join(map(str, words))}"
        output = tmp_path / f"terminal-{len(list(tmp_path.glob('terminal-*')))}"
        with open(output, "wb") as out:
            process = subprocess.Popen(
                [f"{network.path}/ssh", "-tt", host, command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        with process:
            try:
                yield Terminal(process, output)
            finally:
                process.terminate()  # the terminal closes: its processes get SIGHUP

    return start


@pytest.fixture
def carry(network: Network) -> Callable[..., str]:
    """Copy a file to a host by scp, and return its path there."""

    def copy(file: Path, host: str) -> str:
        there = network.folder / f"copy-on-{host}.json"
        command = ["scp", "-O", "-p", "-q", "-F", str(network.ssh_config), str(file), f"{host}:{there}"]
        subprocess.run(command, check=True, timeout=LONG)
        assert there.stat().st_mode & 0o777 == 0o600
        return str(there)

    return copy


def external_nodes(cluster: nbe.Cluster) -> list[str]:
    return [host.name for host in cluster.hosts if host.name.startswith("torchrun-")]


@pytest.mark.soak(seconds=20)
@pytest.mark.timeout(300)
def test_a_script_on_hosts_that_die_are_cut_off_and_join(network, make, tmp_path):
    """When a host is lost, the script restarts on the others at once; it grows when the host returns or another joins."""
    cluster = make("h1:1,h2:1", min=1, silence=SILENCE)
    training = ScriptTraining(cluster, tmp_path / "training")
    training.wait_for_world(2, timeout=LONG)  # the node that joins first has rank 0
    network.kill("h2")
    training.wait_for_world(1, timeout=LONG)
    network.reboot("h2")
    before = training.wait_for_world(2, timeout=LONG)
    network.cut("h1")  # with rank 0, and the round's store
    assert [row.host for row in training.wait_for_world(1, timeout=LONG)] == ["h2"]
    network.heal("h1")
    until(lambda: not alive(before[0].pid), LONG, "the workers that were cut off to end")
    assert [row.host for row in training.wait_for_world(2, timeout=LONG)] == ["h2", "h1"]
    cluster.add_host("h3:1")
    training.wait_for_world(3, timeout=LONG)
    lines = training.finish(timeout=LONG)
    assert {line["restarts"] for line in lines} == {0}
    assert training.job.result() == [None] * 3
    assert "done at" in training.job.logs(rank=0)
    assert event_texts(cluster, "world-broken") == ["host h2 was lost", "host h1 was lost"]


@pytest.mark.timeout(300)
@pytest.mark.soak(seconds=23)
def test_a_terminal_on_another_machine(network, make, terminal, carry, tmp_path):
    """A torchrun on another machine joins this host and one by ssh; Ctrl-C ends it, and the others go on."""
    cluster = make("localhost:1,h1:1", min=2, silence=SILENCE)
    file = carry(cluster.connection_file(network["h3"].address), "h3")
    cluster.scale(min=3)
    with terminal("h3", file, REPORT, tmp_path) as run:
        job = cluster.run_script(REPORT, tmp_path)
        job.result(timeout=LONG)
        assert run.wait() == 0, run.output
    rows = [one["environment"] for one in reports_by_rank(tmp_path)]
    assert [one["sum"] for one in reports_by_rank(tmp_path)] == [[3.0, 3.0]] * 3
    assert {row["WORLD_SIZE"] for row in rows} == {"3"}
    assert len({(row["MASTER_ADDR"], row["MASTER_PORT"]) for row in rows}) == 1
    assert rows[0]["MASTER_ADDR"] in {network["driver"].address, network["h1"].address}
    cluster.scale(min=1)
    training = ScriptTraining(cluster, tmp_path / "training")
    training.wait_for_world(2, timeout=LONG)
    with terminal("h3", file, TRAIN, training.folder, MANY_STEPS) as run:
        hosts = [row.host for row in training.wait_for_world(3, timeout=LONG)]
        assert set(hosts[:2]) == {"localhost", "h1"}
        assert external_nodes(cluster) == hosts[2:]
        assert cluster.hosts[2].reason == "torchrun: worker group HEALTHY"
        run.press_ctrl_c()
        assert run.wait() != 0
        training.wait_for_world(2, timeout=LONG)
    assert not external_nodes(cluster)
    assert {line["restarts"] for line in training.finish(timeout=LONG)} == {0}


def torchrun_of(external: str) -> int:
    """The process of an external node, whose pid is in its name."""
    return int(external.rpartition("-")[2])


@pytest.mark.soak(seconds=30)
@pytest.mark.timeout(300)
def test_terminals_on_two_machines_and_none_of_the_hosts(network, make, terminal, carry, tmp_path):
    """Torchruns on two machines join this host, and all reach one another."""
    cluster = make("localhost:1", silence=SILENCE)
    files = {host: carry(cluster.connection_file(network[host].address), host) for host in ("h2", "h3")}
    cluster.scale(min=3)
    cluster.run_script(REPORT, tmp_path)
    with terminal("h2", files["h2"], REPORT, tmp_path) as one, terminal("h3", files["h3"], REPORT, tmp_path) as other:
        assert (one.wait(), other.wait()) == (0, 0), (one.output, other.output)
    cluster.job.result(timeout=LONG)
    rows = [one["environment"] for one in reports_by_rank(tmp_path)]
    assert [one["sum"] for one in reports_by_rank(tmp_path)] == [[3.0, 3.0]] * 3
    assert {row["MASTER_ADDR"] for row in rows} == {network["driver"].address}
    assert [row["GLOO_SOCKET_IFNAME"] for row in rows] == [network.name, "eth0", "eth0"]


@pytest.mark.soak(seconds=30)
@pytest.mark.timeout(300)
def test_a_terminal_on_another_machine_is_killed(network, make, terminal, carry, tmp_path):
    """A torchrun on another machine is killed: it is lost, and its worker ends."""
    cluster = make("localhost:1", min=1, silence=SILENCE)
    file = carry(cluster.connection_file(network["h2"].address), "h2")
    training = ScriptTraining(cluster, tmp_path / "training")
    training.wait_for_world(1, timeout=LONG)
    with terminal("h2", file, TRAIN, training.folder, MANY_STEPS):
        killed = training.wait_for_world(2, timeout=LONG)[1]
        os.kill(torchrun_of(killed.host), signal.SIGKILL)
        training.wait_for_world(1, timeout=LONG)
        until(lambda: not alive(killed.pid), LONG, "the orphan to end")
        (why,) = event_texts(cluster, "host-gone", killed.host)
        assert why.startswith(f"{killed.host}: no message from it for ")


@pytest.mark.soak(seconds=20)
@pytest.mark.timeout(300)
def test_a_terminal_on_another_machine_is_cut_off(network, make, terminal, carry, tmp_path):
    """A torchrun on another machine is cut off: it is lost, and its processes end. Another one joins after that."""
    cluster = make("localhost:1", min=1, silence=SILENCE, keep=True, lease=10.0)
    file = carry(cluster.connection_file(network["h3"].address), "h3")
    training = ScriptTraining(cluster, tmp_path / "training")
    training.wait_for_world(1, timeout=LONG)
    with terminal("h3", file, TRAIN, training.folder, MANY_STEPS):
        cut = training.wait_for_world(2, timeout=LONG)[1]
        network.cut("h3")
        training.wait_for_world(1, timeout=LONG)
        until(
            lambda: not alive(cut.pid) and not alive(torchrun_of(cut.host)),
            LONG,
            "the processes that are cut off to end",
        )
        network.heal("h3")
    with terminal("h3", file, TRAIN, training.folder, MANY_STEPS) as again:
        training.wait_for_world(2, timeout=LONG)
        assert {line["restarts"] for line in training.finish(timeout=LONG)} == {0}
        assert again.wait() == 0, again.output


@pytest.mark.timeout(300)
@pytest.mark.soak(seconds=17)
def test_a_cluster_on_loopback_moves_to_a_network(network, make, tmp_path):
    """When another host joins a script and a torchrun on loopback addresses, all move to a network that it reaches."""
    cluster = make("localhost:1", min=1)
    training = ScriptTraining(cluster, tmp_path / "training")
    training.wait_for_world(1, timeout=LONG)
    with torchrun(*join_options(cluster.connection_file()), TRAIN, training.folder, MANY_STEPS) as run:
        training.wait_for_world(2, timeout=LONG)
        cluster.add_host("h1:1")
        hosts = [row.host for row in training.wait_for_world(3, timeout=LONG)]
        assert hosts == ["localhost", *external_nodes(cluster), "h1"]
        cluster.remove_host("localhost")
        training.wait_for_world(2, timeout=LONG)
        assert {line["restarts"] for line in training.finish(timeout=LONG)} == {0}
        assert run.wait(LONG) == 0, run.stdout.read()
    assert not event_texts(cluster, "world-broken")
    assert cluster.status().failed_at is None


@pytest.mark.soak(share=0.2)
def test_a_torchrun_that_cannot_join_from_another_machine(network, make, terminal, carry, tmp_path):
    """A wrong key and a stopped cluster each print one line; for an unknown machine there is no connection file."""
    cluster = make("localhost:1")
    with pytest.raises(nbe.HostError, match=r"nowhere\.invalid is an unknown name"):
        cluster.connection_file("nowhere.invalid")
    file = cluster.connection_file("h3")  # by the name that ssh knows
    content = json.loads(file.read_text())
    assert content["address"].startswith(f"tcp://{network['driver'].address}:")
    old = tmp_path / "old.json"
    keys = msgspec.to_builtins(Keys.make().for_clients())
    old.write_text(json.dumps({**content, "keys": keys}))
    old.chmod(0o600)

    def last_line(there: str) -> str:
        with terminal("h3", there, REPORT, tmp_path) as run:
            assert run.wait() != 0
            return run.output.splitlines()[-1]

    refused = last_line(carry(old, "h3"))
    assert refused.endswith(
        f"does not accept this key: is this the connection file of {cluster.name!r}'s present start?"
    )
    assert not external_nodes(cluster)
    there = carry(file, "h3")
    cluster.stop()
    assert last_line(there).endswith(
        f"nothing listens at {content['address']}: the cluster {cluster.name!r} is closed."
    )
