"""Hosts on other machines are admitted: which hosts probe which addresses, and which host is left out."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.state import HostPhase
from nbelastic.core.step import deadline
from nbelastic.protocol import events as ev
from tests.core.story import Story, wid

LO = "127.0.0.1"


def wide(count: int = 2, **limits) -> Story:
    """gpu1, gpu2, … of two networks each, 10.0 and 10.1; all are up."""
    story = Story(**{"min": 1, **limits})
    for number in range(1, count + 1):
        story.add(f"gpu{number}:1", f"10.0.0.{number}", f"10.1.0.{number}")
    return story.answer()


def phases(story: Story) -> dict[str, str]:
    return {name: str(host.phase) for name, host in story.cluster.hosts.items()}


def homes(story: Story) -> dict[str, str]:
    return {name: host.address for name, host in story.cluster.hosts.items()}


def test_on_one_machine_nothing_is_probed():
    """Hosts on loopback addresses are not probed or moved; each is admitted at its first address."""
    story = Story(min=1)
    story.add("localhost:1", LO, "10.0.0.9").add("127.0.0.2:1", "127.0.0.2", "10.0.0.9").run()
    assert story.commands(cmd.Probe) == story.commands(cmd.Rehome) == []
    assert homes(story) == {"localhost": LO, "127.0.0.2": "127.0.0.2"}


def test_external_nodes_of_other_machines_move_local_hosts():
    """An external node of another machine moves local hosts to the address it reaches, later ones too."""
    story = Story(min=1)
    story.add("localhost:1", LO, "10.0.0.9", "192.168.0.9").run()
    story.send(ev.ExternalAccessOpened("192.168.0.9"))
    assert homes(story) == {"localhost": "192.168.0.9"}
    story.add("127.0.0.2:1", "127.0.0.2", "10.0.0.9", "192.168.0.9").answer()
    assert homes(story) == {"localhost": "192.168.0.9", "127.0.0.2": "192.168.0.9"}
    for host in ("localhost", "127.0.0.2"):
        story.send(ev.AgentLost(host, "killed"))
    story.add("127.0.0.3:1", "127.0.0.3", "10.0.0.9").answer()
    assert homes(story)["127.0.0.3"] == "10.0.0.9"


def test_a_host_without_addresses_is_admitted_at_once():
    """A host whose agent reports no address is up at once, beside hosts that were probed."""
    story = wide(2)
    mark = story.mark()
    story.add("old:1").answer()
    assert story.commands(cmd.Probe, mark) == []
    assert phases(story) == {"gpu1": "up", "gpu2": "up", "old": "up"}


def test_the_first_host_is_taken_at_its_first_address():
    """The first host has no partner to probe: it is up at once at its first address."""
    story = wide(1)
    assert story.commands(cmd.Probe) == []
    assert homes(story) == {"gpu1": "10.0.0.1"}
    assert story.alive() == ["gpu1/0#1"]


def test_a_new_host_starts_nothing_before_it_is_probed():
    """A new host and its partner probe each other, both ways, before its workers start."""
    story = wide(1).add("gpu2:2", "10.0.0.2", "10.1.0.2")
    mark = story.mark()
    story.hear(ev.AgentReady)
    one, other = story.commands(cmd.Probe, mark)
    assert one == cmd.Probe("gpu2", "gpu1", ("10.0.0.1", "10.1.0.1"), 4711, one.number)
    assert other == cmd.Probe("gpu1", "gpu2", ("10.0.0.2", "10.1.0.2"), 4711, one.number)
    assert story.alive("gpu2") == []
    story.answer()
    assert story.alive("gpu2") == ["gpu2/0#1", "gpu2/1#1"]


def test_a_host_that_is_probed_is_a_wait_with_its_reason():
    """The reason of a waiting job names the host that is probed and its partner."""
    story = wide(1, min=2).submit().answer().add("gpu3:1", "10.0.0.3").hear(ev.AgentReady)
    assert story.reason == "1 of min 2 workers ready; waiting for gpu3: its network is probed with gpu1"
    assert story.cluster.hosts["gpu3"].reason == "its network is probed with gpu1"
    story.add("gpu3:2")
    assert story.reason.endswith("gpu3: its network is probed with gpu1")
    story.answer()
    assert story.cluster.hosts["gpu3"].reason == ""


def test_partners_are_the_first_and_the_last():
    """A new host is probed with the host admitted first and the host admitted last: a ring."""
    story = wide(3).add("gpu4:1", "10.0.0.4").hear(ev.AgentReady)
    assert story.cluster.probing["gpu4"].partners == ("gpu3", "gpu1")


def test_a_newcomer_to_a_training_is_probed_with_every_member():
    """A new host that does not reach one member's host is left out before its workers start."""
    story = wide(4).run().commit(3).answer()
    mark = story.mark()
    story.cut |= {("gpu5", "10.0.0.3"), ("gpu5", "10.1.0.3")}
    story.add("gpu5:1", "10.0.0.5").quiet(1.0)
    assert story.cluster.hosts["gpu5"].reason == "reaches the driver but not its peers (gpu3 at 10.0.0.3)"
    assert story.commands(cmd.StartWorker, mark) + story.commands(cmd.PrepareWorld, mark) == []
    story.cut.clear()
    story.quiet(6.0)
    assert len(story.names) == 5


def test_many_members_are_probed_in_rounds():
    """A new host probes forty members 32 at a time, and joins when it has reached all, later ones too."""
    story = wide(40).run().commit(3).answer()
    story.add("zeta:1", "10.0.1.1").hear(ev.AgentReady)
    assert len(story.cluster.probing["zeta"].partners) == 32
    assert story.cluster.hosts["zeta"].reason == "its network is probed with gpu40 and gpu1 and gpu2 and 29 more"
    mark = story.mark()
    story.answer()
    assert len({p.target for p in story.commands(cmd.Probe, mark) if p.host == "zeta"}) == 8
    assert phases(story)["zeta"] == "up"
    story.cut.add(("alpha", "10.0.0.40"))
    story.cut.add(("alpha", "10.1.0.40"))
    story.cut.add(("gpu39", "10.0.1.2"))
    story.add("alpha:1", "10.0.1.2").answer()
    assert phases(story)["alpha"] == "lost"


def test_eight_hosts_at_once_are_probed_side_by_side():
    """Seven new hosts are probed with the first host at the same time."""
    story = Story(min=8)
    for number in range(1, 9):
        story.add(f"gpu{number}:1", f"10.0.0.{number}")
    story.hear(ev.AgentReady)
    assert {name: a.partners for name, a in story.cluster.probing.items()} == {
        f"gpu{n}": ("gpu1",) for n in range(2, 9)
    }
    story.run()
    assert len(story.names) == 8


def test_its_address_is_the_first_that_all_partners_reached():
    """A host gets the first address that all partners reached, and its agent is sent that address."""
    story = wide(3)
    story.cut.add(("gpu1", "10.0.0.4"))
    story.add("gpu4:1", "10.0.0.4", "10.1.0.4").answer()
    assert homes(story)["gpu4"] == "10.1.0.4"
    assert story.commands(cmd.Rehome) == [cmd.Rehome("gpu4", "10.1.0.4", "eth1")]
    kinds = [type(c) for c in story.said if isinstance(c, cmd.Rehome) or c == cmd.StartWorker(wid("gpu4/0#1"))]
    assert kinds == [cmd.Rehome, cmd.StartWorker], "before it starts a worker"
    assert story.records("host-moved") == [], "no other host was up before"
    assert story.records("host-up")[-1] == "gpu4 is up at 10.1.0.4"


def test_hosts_of_this_machine_move_when_another_machine_comes():
    """With the first host of another machine, local hosts move from loopback to addresses that it reaches."""
    story = Story(min=1).add("localhost:1", LO, "10.0.0.9").run().commit(2).answer()
    story.add("gpu1:1", "10.0.0.1").hear(ev.AgentReady)
    assert story.last(cmd.Rehome) == cmd.Rehome("localhost", "10.0.0.9", "eth1")
    assert story.commands(cmd.Probe)[0].addresses == ("10.0.0.9",)
    story.quiet(2.0)
    assert story.cluster.formation.store.startswith("10.0.0.9:")
    assert story.records("host-moved") == ["localhost is reached at 10.0.0.9 (eth1) now, no longer at 127.0.0.1"]
    assert story.cluster.resets == 0


def test_a_host_of_this_machine_joins_others_at_an_external_address():
    """In a wide cluster a local host is not admitted at its loopback address."""
    story = wide(2).add("localhost:1", LO, "10.0.0.9").answer()
    assert homes(story)["localhost"] == "10.0.0.9"
    assert story.last(cmd.Rehome) == cmd.Rehome("localhost", "10.0.0.9", "eth1")


def test_a_host_with_nothing_but_loopback_is_left_out():
    """A host with only a loopback address is left out of a wide cluster."""
    story = wide(2).add("localhost:1", LO).answer()
    reason = "has no address but 127.0.0.1, and the other hosts are on other machines"
    assert story.cluster.hosts["localhost"].reason == reason
    assert phases(story)["localhost"] == "lost"


def test_a_newcomer_is_left_out_if_the_partner_has_nothing_but_loopback():
    """A new host is left out, with that reason, if its partner has only a loopback address."""
    story = Story(min=1).add("localhost:1", LO).answer().add("gpu1:1", "10.0.0.1").answer()
    assert story.cluster.hosts["gpu1"].reason == "reaches the driver but not its peers (localhost at 127.0.0.1)"


def test_a_partner_moves_to_an_address_that_all_reach():
    """The partner moves to an address that the new host and all other hosts have reached."""
    story = wide(2).run().commit(2).answer()
    story.cut.add(("gpu3", "10.0.0.1"))
    story.add("gpu3:1", "10.0.0.3").quiet(2.0)
    assert homes(story) == {"gpu1": "10.1.0.1", "gpu2": "10.0.0.2", "gpu3": "10.0.0.3"}
    assert story.last(cmd.Rehome) == cmd.Rehome("gpu1", "10.1.0.1", "eth1")
    assert story.names == ["gpu1/0#1", "gpu2/0#1", "gpu3/0#1"]
    assert story.cluster.formation.store.startswith("10.1.0.1:")


def test_a_partner_does_not_move_to_an_address_that_others_did_not_reach():
    """A new host that reaches no address which all earlier hosts reached is left out."""
    story = wide(1)
    story.cut |= {("gpu2", "10.1.0.1"), ("gpu3", "10.0.0.1")}
    story.add("gpu2:1", "10.0.0.2").answer().add("gpu3:1", "10.0.0.3").answer()
    assert phases(story) == {"gpu1": "up", "gpu2": "up", "gpu3": "lost"}
    assert story.cluster.hosts["gpu3"].reason == "reaches the driver but not its peers (gpu1 at 10.0.0.1)"
    assert story.commands(cmd.Rehome) == []


def test_two_newcomers_at_once_agree_on_the_partners_address():
    """Of two new hosts that reach different addresses of a partner, the first to answer is admitted."""
    story = wide(1)
    story.cut |= {("gpu2", "10.1.0.1"), ("gpu3", "10.0.0.1")}
    story.add("gpu2:1", "10.0.0.2").add("gpu3:1", "10.0.0.3").hear(ev.AgentReady).answer()
    assert phases(story) == {"gpu1": "up", "gpu2": "up", "gpu3": "lost"}


def test_hosts_of_one_machine_move_together():
    """A partner that moves takes all hosts of its machine along."""
    story = Story(min=1)
    for name in ("localhost", "127.0.0.2", "127.0.0.3"):
        story.add(f"{name}:1", LO, "10.0.0.9", "10.1.0.9")
    story.answer()
    story.cut.add(("gpu1", "10.0.0.9"))
    story.add("gpu1:1", "10.0.0.1").answer()
    assert {address for name, address in homes(story).items() if name != "gpu1"} == {"10.1.0.9"}


def test_a_host_that_does_not_reach_its_partners_is_left_out():
    """A host that reaches no partner is lost with reason and addresses, and tried again after a cooldown."""
    story = wide(2)
    story.cut |= {("gpu3", f"10.{net}.0.{peer}") for net in (0, 1) for peer in (1, 2)}
    story.add("gpu3:1", "10.0.0.3").answer()
    reason = "reaches the driver but not its peers (gpu2 at 10.0.0.2, gpu1 at 10.0.0.1)"
    host = story.cluster.hosts["gpu3"]
    assert (host.phase, host.reason, host.retry_at) == (HostPhase.LOST, reason, story.now + 5.0)
    assert story.last(cmd.StopAgent) == cmd.StopAgent("gpu3")
    assert story.records("host-unreachable") == [f"gpu3: {reason}; tried again in 5 s"]
    assert story.records("host-lost") == []
    assert story.alive("gpu3") == []
    story.quiet(5.0)
    assert story.cluster.hosts["gpu3"].retry_at == story.now + 10.0
    story.cut.clear()
    story.quiet(10.0)
    assert phases(story)["gpu3"] == "up"


def test_a_host_that_is_not_reached_is_left_out():
    """A firewall blocks connections to a host: it is left out, and the reason names the prober and the addresses."""
    story = wide(1)
    story.cut |= {("gpu1", "10.0.0.3"), ("gpu1", "10.1.0.3")}
    story.add("gpu3:1", "10.0.0.3", "10.1.0.3").answer()
    assert story.cluster.hosts["gpu3"].reason == "is not reached by gpu1 at any of 10.0.0.3, 10.1.0.3"


def test_a_host_without_a_common_address_is_left_out():
    """Two partners reach a host at different addresses only: it is left out."""
    story = wide(2)
    story.cut |= {("gpu1", "10.0.0.3"), ("gpu2", "10.1.0.3")}
    story.add("gpu3:1", "10.0.0.3", "10.1.0.3").answer()
    assert story.cluster.hosts["gpu3"].reason == "is reached by gpu2 only at 10.0.0.3 and by gpu1 only at 10.1.0.3"


@pytest.mark.parametrize(
    ("mute", "reason"),
    [
        ("gpu1", "gpu1 did not report within 5 s whether gpu2 is reached"),
        ("gpu2", "did not report within 5 s whether it reaches gpu1"),
    ],
)
def test_a_probe_without_an_answer_has_a_deadline(mute, reason):
    """A probe without an answer ends after 5 s, and the reason names the host that did not answer."""
    story = wide(1)
    story.mute.add(mute)
    story.add("gpu2:1", "10.0.0.2").answer()
    assert deadline(story.cluster, story.now) == story.now + 5.0
    story.wait(5.0)
    assert story.cluster.hosts["gpu2"].reason == reason
    story.mute.clear()
    story.quiet(10.0)
    assert phases(story)["gpu2"] == "up"


def test_a_partner_that_is_lost_is_replaced():
    """A lost partner is replaced, and answers about it are dropped."""
    story = wide(2).add("gpu3:1", "10.0.0.3").hear(ev.AgentReady)
    old = list(story.answers)
    story.lose_host("gpu1")
    assert story.cluster.probing["gpu3"].partners == ("gpu2",)
    before = story.cluster
    story.send(*(e for e in old if isinstance(e, ev.Probed)))
    assert story.cluster == before
    story.answer()
    assert phases(story) == {"gpu1": "lost", "gpu2": "up", "gpu3": "up"}


def test_without_partners_left_a_newcomer_is_the_first():
    """The only partner is lost or removed during the probe: the new host is admitted as the first."""
    story = wide(1).add("gpu2:1", "10.0.0.2").hear(ev.AgentReady)
    story.lose_host("gpu1")
    assert phases(story) == {"gpu1": "lost", "gpu2": "up"}
    story = wide(1).add("gpu2:1", "10.0.0.2").hear(ev.AgentReady)
    story.remove("gpu1", now=True).answer()
    assert phases(story) == {"gpu2": "up"}


def test_a_newcomer_that_is_lost_while_it_is_probed_is_lost():
    """A host that is lost during its probe is tried again with a new probe; late answers are dropped."""
    story = wide(1).add("gpu2:1", "10.0.0.2").hear(ev.AgentReady)
    old = [e for e in story.answers if isinstance(e, ev.Probed)]
    story.lose_host("gpu2", "its machine is gone")
    assert story.cluster.probing == {}
    assert story.cluster.hosts["gpu2"].reason == "its machine is gone"
    story.quiet(5.0 - 1e-3).wait(2e-3).hear(ev.AgentReady)
    story.send(*old)
    assert story.alive("gpu2") == []
    story.answer()
    assert story.alive("gpu2") == ["gpu2/0#1"]


def test_a_newcomer_that_is_removed_while_it_is_probed_leaves_no_trace():
    """A host that is removed during its probe leaves no trace; late answers are dropped."""
    story = wide(1).add("gpu2:1", "10.0.0.2").hear(ev.AgentReady)
    old = [e for e in story.answers if isinstance(e, ev.Probed)]
    story.remove("gpu2")
    assert (story.cluster.probing, phases(story)) == ({}, {"gpu1": "up"})
    story.send(*old)
    assert phases(story) == {"gpu1": "up"}


def test_repeated_messages_change_nothing():
    """A repeated `AgentReady` or answer has no effect."""
    story = wide(1).add("gpu2:1", "10.0.0.2").hear(ev.AgentReady)
    first, second = [e for e in story.answers if isinstance(e, ev.Probed)]
    hello = next(e for e in story.heard if isinstance(e, ev.AgentReady) and e.host == "gpu2")
    story.send(first)
    before = story.cluster
    story.send(first, hello, ev.Probed("gpu2", "gpu1", ("10.0.0.1",), 999), ev.Probed("gpu9", "gpu8", ()))
    assert story.cluster == before
    story.send(second)
    before = story.cluster
    story.send(second, first, hello)
    assert story.cluster == before


def test_stopping_ends_the_probing():
    """A stopping cluster waits for no probe."""
    story = wide(1).add("gpu2:1", "10.0.0.2").hear(ev.AgentReady)
    story.send(ev.StopRequested("enough"))
    assert story.cluster.probing == {}
    story.quiet(1.0)
    assert story.cluster.phase == "finished"


def test_a_refused_host_is_lost_with_the_problem():
    """A refused agent is ended, and its host is lost with the problem as reason and tried again after a cooldown."""
    story = Story(min=1).add("gpu1:1")
    story.send(ev.AgentReady("gpu1", 1, problem="nbelastic 0.2 there, 0.3 here"))
    host = story.cluster.hosts["gpu1"]
    assert (host.phase, host.reason, host.retry_at) == (
        HostPhase.LOST,
        "nbelastic 0.2 there, 0.3 here",
        story.now + 5.0,
    )
    assert story.last(cmd.StopAgent) == cmd.StopAgent("gpu1")
    assert story.records("host-refused") == ["gpu1: nbelastic 0.2 there, 0.3 here; tried again in 5 s"]
    story.submit()
    assert "gpu1 (lost: nbelastic 0.2 there, 0.3 here; tried again in 5 s)" in story.reason


def test_no_number_of_a_probe_is_used_twice():
    """Admission and stalls number their probes together: an old answer fits no later question."""
    story = wide(3).run().commit(3).answer()
    story.stand_still(3.0)
    story.add("gpu9:1", "10.0.0.9", "10.1.0.9").answer()
    story.stand_still(4.0)
    rounds = list(dict.fromkeys(probe.number for probe in story.commands(cmd.Probe)))
    assert rounds == list(range(1, len(rounds) + 1))
    assert len(rounds) >= 5
    numbers = [probe.number for probe in story.commands(cmd.Probe)]
    assert numbers == sorted(numbers)


def test_a_host_whose_partner_leaves_is_probed_with_others_at_once():
    """The successor of a host that ends is up, so that one leaves. A newcomer that was probed with it waits for no answers of it."""
    story = Story(min=1, max=1)
    for number, host in enumerate(("gpu1", "gpu2"), 1):
        story.add(f"{host}:1", f"10.0.0.{number}").answer()
    story.remove("gpu2", within=3600.0, replaced=True)
    story.addresses["gpu2.2"] = ("10.0.0.3",)
    story.wait(6.0).hear(ev.AgentReady)
    story.add("gpu4:1", "10.0.0.4").hear(ev.AgentReady)
    assert story.cluster.probing["gpu4"].partners == ("gpu2", "gpu1")
    story.answer(lambda e: isinstance(e, ev.Probed) and "gpu2.2" in (e.host, e.target))
    assert "gpu2" not in story.cluster.hosts
    story.wait(0.0)
    assert story.cluster.probing["gpu4"].partners == ("gpu2.2", "gpu1")
    assert story.answer().cluster.hosts["gpu4"].is_up
