"""Hosts of one world that do not reach one another, though the driver hears them all: who is left out, and why."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.state import HostPhase, Stage
from nbelastic.core.step import deadline
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import Interface
from tests.core.story import Story


def wide(count: int, slots: int = 1, **limits) -> Story:
    """gpu1, gpu2, … with a network between them train, and have made three commits."""
    story = Story(**{"min": 1, **limits})
    for number in range(1, count + 1):
        story.add(f"gpu{number}:{slots}", f"10.0.0.{number}")
        story.answer()
    return story.run().commit(3).answer()


def sever(story: Story, one: str, other: str) -> Story:
    """No packet passes between these hosts (given by their numbers), either way."""
    story.cut |= {(f"gpu{one}", f"10.0.0.{other}"), (f"gpu{other}", f"10.0.0.{one}")}
    return story


def test_hosts_of_a_world_that_stands_still_probe_one_another():
    """Each pair, both ways, at the present address; one round at a time."""
    story = wide(3)
    mark = story.mark()
    story.send(ev.StallDetected(story.cluster.generation, 3.0), ev.StallDetected(story.cluster.generation, 4.0))
    probes = story.commands(cmd.Probe, mark)
    assert {(p.host, p.target) for p in probes} == {
        (f"gpu{a}", f"gpu{b}") for a in (1, 2, 3) for b in (1, 2, 3) if a != b
    }
    assert len(probes) == 6
    assert {p.addresses for p in probes if p.target == "gpu2"} == {("10.0.0.2",)}
    story.answer()
    story.stand_still(5.0)
    assert len(story.commands(cmd.Probe, mark)) == 12


@pytest.mark.parametrize(("addresses", "port"), [([], 4711), (["10.0.0.1", "10.0.0.2"], 0)])
def test_hosts_that_cannot_be_tried_are_not_probed(addresses, port):
    """Their agents have found no interface, or have no prober: nobody could say where to try."""
    story = Story(min=1)
    for number, name in enumerate(("gpu1", "gpu2")):
        found = tuple(Interface("eth0", address) for address in addresses[number : number + 1])
        story.homes |= {name: interface.address for interface in found}
        story.add(f"{name}:1").send(ev.AgentReady(name, 1, found, port))
        story.answer(lambda e: not isinstance(e, ev.AgentReady))
    story.run().commit(3)
    mark = story.mark()
    story.stand_still(5.0)
    assert story.commands(cmd.Probe, mark) == []


def test_up_to_eight_hosts_are_all_probed_with_one_another():
    """28 pairs, both ways; from nine on only neighbours are, and the host of rank 0 with all."""
    for count, probes in ((8, 56), (9, 30)):
        story = wide(count)
        mark = story.mark()
        story.send(ev.StallDetected(story.cluster.generation, 3.0))
        assert len(story.commands(cmd.Probe, mark)) == probes


def test_many_hosts_are_not_all_probed_with_one_another():
    """Of ten hosts, neighbours in a ring and rank 0's with all: 17 pairs, not 45."""
    story = wide(10)
    mark = story.mark()
    story.send(ev.StallDetected(story.cluster.generation, 3.0))
    pairs = {frozenset((p.host, p.target)) for p in story.commands(cmd.Probe, mark)}
    assert len(pairs) == 17


def test_all_that_reach_one_another_stay():
    """The network is well: nobody is left out, however long they stand still."""
    story = wide(3).stand_still(times=10)
    assert story.cluster.stage is Stage.RUNNING
    assert story.records("host-unreachable") == []


def test_the_younger_of_two_hosts_that_are_cut_off_is_left_out():
    """Twice in a row they did not reach one another: the younger is treated as a lost host, and the reason names both."""
    story = sever(wide(2), "1", "2").stand_still(5.0)
    text = "gpu2 and gpu1 do not reach one another; gpu2 is left out, as it is younger"
    host = story.cluster.hosts["gpu2"]
    assert (host.phase, host.reason, host.retry_at) == (HostPhase.LOST, text, story.now + 5.0)
    assert story.last(cmd.StopAgent) == cmd.StopAgent("gpu2")
    assert story.records("host-unreachable") == [f"gpu2: {text}; tried again in 5 s"]
    assert story.records("world-broken") == [f"host gpu2 was lost ({text})"]
    story.answer()
    assert (story.names, story.cluster.stage) == (["gpu1/0#1"], Stage.RUNNING)


def test_one_direction_is_enough():
    """A packet filter that lets one way through: they cannot train together."""
    story = wide(2)
    story.cut.add(("gpu1", "10.0.0.2"))
    story.stand_still(5.0)
    assert story.cluster.hosts["gpu2"].phase is HostPhase.LOST


def test_once_is_not_enough():
    """One round failed, the next did not: that was a hiccup."""
    story = sever(wide(2), "1", "2")
    story.send(ev.StallDetected(story.cluster.generation, 5.0))
    first = [e for e in story.answers if isinstance(e, ev.Probed)]
    story.answers.clear()
    story.cut.clear()
    story.send(*first)
    assert len([e for e in story.answers if isinstance(e, ev.Probed)]) == 2, "asked again at once"
    story.answer()
    assert story.cluster.hosts["gpu2"].phase is HostPhase.UP
    sever(story, "1", "2")
    story.send(ev.StallDetected(story.cluster.generation, 6.0))
    story.send(*[e for e in story.answers if isinstance(e, ev.Probed)])
    assert story.cluster.hosts["gpu2"].phase is HostPhase.UP, "it is counted anew"


def test_an_answer_of_an_earlier_round_is_no_news():
    """It comes late, doubled, in the middle of the next round: it is not counted there."""
    story = sever(wide(2), "1", "2")
    story.send(ev.StallDetected(story.cluster.generation, 5.0))
    first = [e for e in story.answers if isinstance(e, ev.Probed)]
    story.send(*first)
    before = story.cluster
    story.send(*first)
    assert story.cluster == before
    assert story.cluster.hosts["gpu2"].phase is HostPhase.UP


def test_the_host_with_fewer_workers_is_left_out():
    """Less is lost with it."""
    story = Story(min=1)
    story.add("gpu1:1", "10.0.0.1").answer().add("gpu2:2", "10.0.0.2").answer().run().commit(3).answer()
    sever(story, "1", "2").stand_still(5.0)
    assert story.cluster.hosts["gpu1"].reason.endswith("gpu1 is left out, as it has fewer workers")
    assert story.cluster.hosts["gpu2"].phase is HostPhase.UP


def test_the_younger_of_those_with_fewest_workers_is_left_out():
    """Nobody reaches anybody: that the host is younger decides among equals, and the reason does not claim more."""
    story = Story(min=1)
    for number, slots in ((3, 1), (1, 1), (2, 2)):
        story.add(f"gpu{number}:{slots}", f"10.0.0.{number}").answer()
    story.run().commit(3).answer()
    for pair in ("12", "13", "23"):
        sever(story, *pair)
    story.stand_still(5.0)
    reasons = {name: host.reason.rpartition("as it ")[2] for name, host in story.cluster.hosts.items()}
    assert reasons == {"gpu1": "is younger", "gpu3": "has fewer workers", "gpu2": ""}


def test_the_host_that_reaches_fewest_is_left_out():
    """One that reaches nobody leaves, though it is the oldest."""
    story = wide(4)
    for other in "234":
        sever(story, "1", other)
    story.stand_still(5.0)
    text = "gpu1 and gpu2, gpu3, gpu4 do not reach one another; gpu1 is left out, as it reaches 0 of 3 hosts"
    assert story.cluster.hosts["gpu1"].reason == text
    assert [name for name, host in story.cluster.hosts.items() if host.phase is HostPhase.UP] == [
        "gpu2",
        "gpu3",
        "gpu4",
    ]


def test_a_network_in_two_halves_keeps_the_older_half():
    """As many leave as must, in one break."""
    story = wide(4)
    for one, other in (("1", "3"), ("1", "4"), ("2", "3"), ("2", "4")):
        sever(story, one, other)
    story.stand_still(5.0)
    assert [name for name, host in story.cluster.hosts.items() if host.phase is HostPhase.UP] == ["gpu1", "gpu2"]
    assert story.cluster.resets == 1


def test_a_host_that_does_not_answer_is_not_cut_off():
    """The driver does not hear it either: its silence is told in another way, and this round says nothing of it."""
    story = sever(wide(2), "1", "2")
    story.mute.add("gpu2")
    for _ in range(4):
        story.stand_still(5.0).wait(5.0)
    assert story.cluster.hosts["gpu2"].phase is HostPhase.UP
    assert deadline(story.cluster, story.now) > story.now


def test_a_host_that_was_left_out_is_probed_with_whom_it_did_not_reach():
    """It comes back after its cooldown, and is not admitted by other partners than those it was cut off from."""
    story = sever(wide(5), "2", "4").stand_still(5.0)
    assert story.cluster.hosts["gpu4"].phase is HostPhase.LOST
    story.answer().wait(5.0).hear(ev.AgentReady)
    assert story.cluster.probing["gpu4"].partners == ("gpu5", "gpu1", "gpu2", "gpu3")
    story.answer()
    assert story.cluster.hosts["gpu4"].reason == "reaches the driver but not its peers (gpu2 at 10.0.0.2)"
    story.cut.clear()
    story.quiet(10.0)
    assert story.cluster.hosts["gpu4"].phase is HostPhase.UP
    assert len(story.names) == 5


def test_going_on_does_not_hinder_a_round_that_has_begun():
    """Commits go on while hosts are probed: nothing is broken by an answer that says all is well."""
    story = wide(2)
    story.send(ev.StallDetected(story.cluster.generation, 3.0), ev.StallResolved(story.cluster.generation))
    story.answer()
    assert (story.cluster.stage, story.cluster.partition_check.pairs) == (Stage.RUNNING, frozenset())


def test_a_host_lost_in_the_middle_of_a_round_is_only_lost():
    """Its answers do not come any more, the others' say nothing of it, and the round ends."""
    story = sever(wide(3), "1", "3")
    story.send(ev.StallDetected(story.cluster.generation, 3.0))
    story.lose_host("gpu3", "its machine is gone").answer().wait(5.0)
    assert story.cluster.hosts["gpu3"].reason == "its machine is gone"
    assert story.records("host-unreachable") == []
    assert [host.phase for name, host in story.cluster.hosts.items() if name != "gpu3"] == [HostPhase.UP] * 2


def test_a_host_lost_after_its_last_answer_is_only_lost():
    """Twice it did not reach another, but it is lost before the round is over: its loss stays the reason."""
    story = sever(wide(3), "1", "3")
    story.send(ev.StallDetected(story.cluster.generation, 3.0))
    story.send(*[e for e in story.answers if isinstance(e, ev.Probed)])
    story.send(*[e for e in story.answers if isinstance(e, ev.Probed) and "gpu3" in (e.host, e.target)])
    assert story.cluster.partition_check.awaited == {("gpu1", "gpu2"), ("gpu2", "gpu1")}
    story.lose_host("gpu3").answer()
    assert (story.cluster.hosts["gpu3"].reason, story.cluster.partition_check.pairs) == (
        "its machine is gone",
        frozenset(),
    )
    assert story.commands(cmd.StopAgent) == []


def test_connections_that_break_though_all_live_are_the_networks():
    """Two hosts are cut off before they have formed a world: not the program is to blame, and one of the two leaves."""
    story = wide(3)
    sever(story, "2", "3")
    for _ in range(5):
        if story.cluster.hosts["gpu3"].phase is not HostPhase.UP:
            break
        for w in ("gpu2/0#1", "gpu3/0#1"):
            story.raised(w, "RuntimeError: connection reset", intact=False)
        story.wait(1.0)
        story.answer(lambda e: not isinstance(e, ev.WorkerFormed) or e.worker.host == "gpu1")
    assert story.cluster.active, story.job.reason
    assert story.cluster.hosts["gpu3"].reason.startswith("gpu3 and gpu2 do not reach one another")
    story.answer().wait(2.0)
    story.answer()
    assert story.names == ["gpu1/0#1", "gpu2/0#1"]


def test_the_program_is_not_blamed_before_the_network_is_known():
    """The world breaks at one commit faster than hosts can be probed: the job waits for what the probes say."""
    story = sever(wide(2), "1", "2")
    for _ in range(4):
        story.raised("gpu1/0#1", "RuntimeError: connection refused", intact=False)
        story.wait(0.5).wait(0.5)
        story.answer(lambda e: not isinstance(e, ev.Probed))
    assert story.cluster.active, story.job.reason
    story.answer()
    assert story.cluster.hosts["gpu2"].phase is HostPhase.LOST
    assert story.cluster.active


def broken(story: Story) -> Story:
    """Connections of a member break, nobody has died, and the world forms again."""
    return story.raised("gpu2/0#1", "RuntimeError: connection closed", intact=False).quiet(8.0)


def test_a_host_that_was_left_out_explains_the_breaks_before():
    """Two more breaks at the same commit are not the third and fourth: the program is not to blame yet."""
    story = broken(wide(4, cooldown=(1000.0, 1000.0)))
    broken(sever(story, "1", "4"))
    assert "gpu4/0#1" not in story.names
    broken(broken(story))
    assert story.cluster.active, story.job.reason


def test_a_program_that_breaks_its_connections_is_to_blame_in_a_wide_cluster_too():
    """The network was asked and is well: after three breaks at one commit the job ends with the program's error."""
    story = wide(2)
    for _ in range(4):  # the first of them at another commit
        story.raised("gpu1/0#1", "RuntimeError: I closed it", intact=False)
        story.wait(1.0)
        story.answer()
    assert story.job.outcome == "failed"
    assert "I closed it (3 times in a row, and no lost worker explains it)" in story.job.reason


def test_a_newcomer_that_was_cut_off_after_it_was_admitted_is_named_with_its_pair():
    """It cannot be joined with one member, and their hosts are asked: its host is left out, and the training not touched."""
    story = wide(3)
    story.add("gpu4:1", "10.0.0.4").hear(ev.AgentReady).hear(ev.Probed).hear(ev.WorkerRegistered)
    sever(story, "2", "4")
    mark = story.mark()
    story.answer(lambda e: not isinstance(e, ev.Probed)).wait(15.3)
    asked = {frozenset((p.host, p.target)) for p in story.commands(cmd.Probe, mark)}
    assert frozenset(("gpu2", "gpu4")) in asked
    story.quiet(4.0)
    reason = "gpu4 and gpu2 do not reach one another; gpu4 is left out, as it has fewer workers"
    assert story.cluster.hosts["gpu4"].reason == reason
    assert story.commands(cmd.AskLeave, mark) + story.commands(cmd.AbortWorld, mark) == []
    story.cut.clear()
    story.quiet(20.0)
    assert (len(story.names), story.cluster.resets) == (4, 0)
