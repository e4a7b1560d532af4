"""Hosts with different networks: dead interfaces, several interfaces, IPv6 only, and unreachable peers."""

import re

import pytest

from tests.hosts.cluster_checks import LONG, event_texts, host_phases, host_reasons, wait_for_more_steps
from tests.hosts.network import DRIVER
from tests.process import programs
from tests.support.waiting import until


def addresses(cluster):
    return {host.name: host.address for host in cluster.hosts}


@pytest.mark.soak(share=0.2)
def test_dead_interfaces_are_not_used(network, trains):
    """Hosts train together though each has a dead interface, before or after its working one."""
    network.add("h4", "h5", dead="docker")  # both have the same address on it
    lines = (
        "link add name later type veth peer name nowhere",
        "link set nowhere up",
        "addr add 172.28.0.1/24 dev later",
        "link set later up",
    )
    network.run("h1", "ip", "-batch", "-", input="".join(f"{line}\n" for line in lines))
    training = trains("h4:1,h5:1,h1:1", min=3)
    training.wait_for_world(3, timeout=LONG)
    assert addresses(training.cluster) == {name: network[name].address for name in ("h4", "h5", "h1")}
    assert len(training.finish(timeout=LONG)) == 3


@pytest.mark.soak(share=0.2)
def test_hosts_train_on_the_interface_where_they_reach_each_other(network, trains):
    """Hosts that do not reach each other on the driver's network train on their second interface."""
    network.add("h4", "h5", second=True)
    for host, peer in (("h4", "h5"), ("h5", "h4")):
        network.run(host, "ip", "neigh", "replace", network[peer].address, "lladdr", "02:6e:62:65:ff:fe", "dev", "eth0")
    training = trains("h4:1,h5:1", min=2)
    training.wait_for_world(2, timeout=LONG)
    assert addresses(training.cluster) == {name: network[name].second_address for name in ("h4", "h5")}
    assert len(training.finish(timeout=LONG)) == 2


@pytest.mark.soak(share=0.2)
def test_the_user_names_the_interfaces(network, trains):
    """With `nics="eth1"` hosts with that interface train on it, and a host without it is lost with that reason."""
    network.add("h4", "h5", second=True)
    training = trains("h1:1,h4:1,h5:1", min=2, nics="eth1", cooldown=(60, 60))
    training.wait_for_world(2, timeout=LONG)
    cluster = training.cluster
    until(lambda: host_phases(cluster)["h1"] == "lost", LONG, "h1 to be refused")
    assert host_reasons(cluster)["h1"].endswith("there is no network interface eth1 here: it has lo, eth0")
    assert {name: addresses(cluster)[name] for name in ("h4", "h5")} == {
        name: network[name].second_address for name in ("h4", "h5")
    }
    assert len(training.finish(timeout=LONG)) == 2


@pytest.mark.soak(share=0.2)
def test_hosts_that_have_ipv6_only(network, trains):
    """Hosts with only IPv6, given by an address in brackets or by name, train together."""
    for name in ("h1", "h2"):
        network.run(name, "ip", "-4", "address", "flush", "dev", "eth0")
    one = network["h1"].address6
    training = trains(f"[{one}]:1,h2v6:1", min=2)
    training.wait_for_world(2, timeout=LONG)
    assert addresses(training.cluster) == {one: one, "h2v6": network["h2"].address6}
    assert len(training.finish(timeout=LONG)) == 2


@pytest.mark.soak(share=0.2)
def test_this_machine_and_others_train_together(network, make, trains):
    """This machine leaves its loopback address when another host joins, at the start or later; the other host drains."""
    training = trains("localhost:1", min=1)
    here = training.wait_for_world(1, timeout=LONG)
    cluster = training.cluster
    assert addresses(cluster) == {"localhost": "127.0.0.1"}
    cluster.add_host("h1:1")
    assert [w.host for w in training.wait_for_world(2, timeout=LONG)] == ["localhost", "h1"]
    assert addresses(cluster) == {"localhost": network[DRIVER].address, "h1": network["h1"].address}
    cluster.remove_host("h1")
    assert [w.id for w in training.wait_for_world(1, timeout=LONG)] == [w.id for w in here]
    until(lambda: [host.name for host in cluster.hosts] == ["localhost"], LONG, "h1 to leave")
    assert len(training.finish(timeout=LONG)) == 1
    assert not {event.kind for event in cluster.events} & {"world-broken", "host-lost", "worker-lost"}
    cluster.stop()

    rows = make("localhost:1,h1:1", min=2).run(programs.describe_ranks).result(timeout=LONG)
    assert [(row["rank"], row["cross"]) for row in rows] == [(0, (0, 2)), (1, (1, 2))]


@pytest.mark.soak(seconds=15)
def test_a_newcomer_that_does_not_reach_its_peers(network, trains):
    """A newcomer that does not reach a member is left out with that reason; after the network is healed, it joins."""
    training = trains("h1:1,h2:1", min=1, cooldown=(1, 2))
    training.wait_for_world(2, timeout=LONG)
    cluster = training.cluster
    network.cut_between("h2", "h3")
    cluster.add_host("h3:1")
    (reason, *_) = until(lambda: event_texts(cluster, "host-unreachable", "h3"), LONG, "h3 to be left out")
    peer = re.escape(f"h2 at {network['h2'].address}")
    assert re.fullmatch(rf"h3: reaches the driver but not its peers \({peer}\); tried again in [0-9.]+ s", reason)
    wait_for_more_steps(training)
    assert training.cluster.status().world_size == 2
    assert not event_texts(cluster, "world-broken")
    network.heal()
    training.wait_for_world(3, timeout=LONG)
    assert len(training.finish(timeout=LONG)) == 3
    assert not event_texts(cluster, "world-broken")
