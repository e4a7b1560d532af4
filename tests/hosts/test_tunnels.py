"""Hosts that are reached through ssh only: no connection of theirs to the driver's machine is needed, and ssh may break."""

import os
import signal
import socket
from collections import Counter

import psutil
import pytest

from nbelastic.notebook.status_text import print_unanswered
from nbelastic.system import tunnel_folder
from tests.hosts.cluster_checks import LONG, event_texts, host_reasons, strays, wait_for_more_steps, worker_on
from tests.hosts.network import DRIVER
from tests.process.training import in_one_generation
from tests.support.processes import alive, driver_pid
from tests.support.waiting import until

SILENCE = 2.0


def tunnels(cluster):
    """The processes of the tunnels, by the host to which their ssh client leads."""
    children = psutil.Process(driver_pid(cluster)).children()
    found = [child for child in children if "nbelastic.tunnel.driver_end" in " ".join(child.cmdline())]
    return {ssh.cmdline()[ssh.cmdline().index("--") + 1]: tunnel for tunnel in found for ssh in tunnel.children()}


def end_ssh(cluster, host):
    """Kill the ssh client that leads to a host."""
    (client,) = tunnels(cluster)[host].children()
    os.kill(client.pid, signal.SIGKILL)


def test_hosts_behind_a_firewall_train(network, trains):
    """Hosts that can open no connection to the driver's machine start, run cells, train, and replace a killed worker."""
    network.wall("h1", "h2")
    with network.socket("h1") as refused:
        refused.settimeout(0.5)
        with pytest.raises(OSError, match=r"timed out|unreachable|Invalid"):
            refused.connect((network[DRIVER].address, 9))
    training = trains("h1:1,h2:1", min=2)
    training.wait_for_world(2, timeout=LONG)
    victim = worker_on(training, "h2")
    os.kill(victim.pid, signal.SIGKILL)
    until(lambda: not alive(victim.pid) and event_texts(training.cluster, "worker-lost"), LONG, "the loss")
    training.wait_for_world(2, timeout=LONG)
    assert len(training.finish(timeout=LONG)) == 2
    assert [row[1].strip() for row in training.cluster.execute("print(6 * 7)", timeout=LONG)] == ["42", "42"]


@pytest.mark.soak(share=0.2)
def test_a_broken_ssh_connection_costs_no_step(network, trains):
    """The ssh client of a host is killed, five times: its worker trains on in the same generation, and obeys orders afterwards."""
    training = trains("h1:1,h2:1", min=1)
    training.wait_for_world(2, timeout=LONG)
    cluster = training.cluster
    with in_one_generation(training):
        for n in range(1, 6):
            end_ssh(cluster, "h2")
            until(lambda n=n: len(event_texts(cluster, "host-reconnected", "h2")) == n, LONG, "the host to be reached")
        wait_for_more_steps(training)
    assert "the ssh connection to h2 has ended" in event_texts(cluster, "host-disconnected", "h2")[0]
    assert host_reasons(cluster)["h2"] == ""
    cluster.remove_host("h2")
    training.wait_for_world(1, timeout=LONG)
    until(lambda: not network.strays("h2"), LONG, f"nothing to be left on h2: {strays(network)}")
    training.finish(timeout=LONG)
    assert not event_texts(cluster, "host-lost")


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cut", [("h2",), ("h1", "h2", "h3")], ids=["one host", "all hosts"])
def test_ssh_is_cut_for_twenty_seconds(network, trains, cut):
    """Packets between the driver's machine and hosts vanish for 20 s: no step is lost and nothing restarts."""
    training = trains("h1:1,h2:1,h3:1", min=1)
    training.wait_for_world(3, timeout=LONG)
    with in_one_generation(training):
        for host in cut:
            network.cut_between(DRIVER, host)
        made = training.lines()[-1]["t"]
        until(lambda: training.lines()[-1]["t"] > made + 20, LONG, "20 s of training")
        network.heal()
        until(lambda: not any(host_reasons(training.cluster).values()), LONG, "all hosts to be reached again")
        wait_for_more_steps(training)
    assert not event_texts(training.cluster, "host-lost")
    assert len(training.finish(timeout=LONG)) == 3


@pytest.mark.soak(share=0.2)
def test_a_host_without_its_connection_is_lost_when_the_training_breaks(network, trains):
    """A host that can get no order is lost at once; reached again, its old worker ends and a new one joins."""
    training = trains("h1:1,h2:1,h3:1", min=1)
    training.wait_for_world(3, timeout=LONG)
    cluster = training.cluster
    old, victim = worker_on(training, "h2"), worker_on(training, "h3")
    network.cut_between(DRIVER, "h2")
    end_ssh(cluster, "h2")
    until(lambda: event_texts(cluster, "host-disconnected", "h2"), LONG, "the driver to notice")
    os.kill(victim.pid, signal.SIGKILL)
    until(lambda: event_texts(cluster, "host-lost", "h2"), LONG, "h2 to be lost")
    training.wait_for_world(2, timeout=LONG)
    assert alive(old.pid)  # it can get no order to end yet
    network.heal()
    training.wait_for_world(3, timeout=LONG)
    assert worker_on(training, "h2").id != old.id
    assert not alive(old.pid)
    assert len(training.finish(timeout=LONG)) == 3


@pytest.mark.parametrize("cut", [pytest.param(True, marks=pytest.mark.soak(seconds=17)), False])
def test_a_stop_names_the_hosts_that_it_does_not_reach(network, trains, capsys, cut):
    """A host that is cut off is named after the stop, with the time in which its agent ends. A host that has ended is not."""
    options = {"lease": 12.0, "silence": SILENCE, "timeouts": {"close": 15}}  # h1 may need more than 5 s to answer
    training = trains("h1:1,h2:1", min=1, keep=True, **options)
    training.wait_for_world(2, timeout=LONG)
    if cut:
        network.cut("h2")
    capsys.readouterr()
    training.cluster.stop()
    print_unanswered(training.cluster)
    line = "h2 did not answer the stop: an agent that still runs there ends by itself within 12 s.\n"
    assert capsys.readouterr().out == (line if cut else "")


def test_a_killed_tunnel_ends_its_agent(network, trains):
    """If the tunnel's process is killed and not its ssh client, the host's agent ends, and the host is started again."""
    training = trains("h1:1,h2:1", min=1)
    training.wait_for_world(2, timeout=LONG)
    old = worker_on(training, "h2")
    os.kill(tunnels(training.cluster)["h2"].pid, signal.SIGKILL)
    until(lambda: not alive(old.pid), LONG, "the old worker to end")
    until(lambda: event_texts(training.cluster, "host-lost", "h2"), LONG, "the host to be lost")
    training.wait_for_world(2, timeout=LONG)
    assert len(training.finish(timeout=LONG)) == 2


def test_the_tunnel_leads_only_to_the_driver_and_the_controller(network, make, temporary):
    """A process of a host that asks its tunnel for another port of the driver's machine is not connected."""
    make("h1:1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (folder,) = temporary.glob("nbelastic-*/run-*/tunnel-*")
        tunnel_folder.ask(folder, f"listen {port}").close()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(LONG)
            connection.connect(tunnel_folder.socket_path(tunnel_folder.open_folder(folder), f"port:{port}"))
            assert connection.recv(1) == b""
        other.settimeout(0.2)
        with pytest.raises(TimeoutError):
            other.accept()


@pytest.mark.soak(seconds=25)
def test_all_workers_of_a_host_become_engines(make):
    """The limit of connections through a tunnel grows with the workers that %px needs: each opens one to a port."""
    cluster = make("h1:10", min=10)
    assert len(set(cluster.client[:].apply_sync(os.getpid))) == 10
    (tunnel,) = tunnels(cluster).values()
    to = Counter(each.raddr.port for each in tunnel.net_connections("tcp") if each.status == "ESTABLISHED")
    assert max(to.values()) == 10
