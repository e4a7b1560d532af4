"""Hosts of one world do not reach one another although the driver reaches all: which host is left out, and why."""

from __future__ import annotations

import pytest

from nbelastic.core import commands as cmd
from nbelastic.core.state import HostPhase, Stage
from nbelastic.core.step import deadline
from nbelastic.protocol import events as ev
from nbelastic.protocol.ids import Interface
from tests.core.story import Story


def wide(count: int, slots: int = 1, **limits) -> Story:
    """gpu1, gpu2, … on one network train and have made three commits."""
    story = Story(**{"min": 1, **limits})
    for number in range(1, count + 1):
        story.add(f"gpu{number}:{slots}", f"10.0.0.{number}")
        story.answer()
    return story.run().commit(3).answer()


def sever(story: Story, one: str, other: str) -> Story:
    """No packet passes between these hosts (given by their numbers), either way."""
    story.cut |= {(f"gpu{one}", f"10.0.0.{other}"), (f"gpu{other}", f"10.0.0.{one}")}
    return story


def test_hosts_of_a_stalled_world_probe_one_another():
    """In a stall each pair of hosts probes the present addresses, both ways, one round at a time."""
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
    """Hosts whose agents have no interface or no prober are not probed."""
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
    """Up to eight hosts probe all 28 pairs; from nine on only neighbours do, and rank 0's host with all."""
    for count, probes in ((8, 56), (9, 30)):
        story = wide(count)
        mark = story.mark()
        story.send(ev.StallDetected(story.cluster.generation, 3.0))
        assert len(story.commands(cmd.Probe, mark)) == probes


def test_many_hosts_are_not_all_probed_with_one_another():
    """Of ten hosts, neighbours in a ring probe, and rank 0's host probes all: 17 pairs, not 45."""
    story = wide(10)
    mark = story.mark()
    story.send(ev.StallDetected(story.cluster.generation, 3.0))
    pairs = {frozenset((p.host, p.target)) for p in story.commands(cmd.Probe, mark)}
    assert len(pairs) == 17


def test_all_that_reach_one_another_stay():
    """While all hosts reach one another none is left out, however long the stall lasts."""
    story = wide(3).stand_still(times=10)
    assert story.cluster.stage is Stage.RUNNING
    assert story.records("host-unreachable") == []


def test_the_younger_of_two_hosts_that_are_cut_off_is_left_out():
    """Two hosts fail two rounds: the younger is treated as lost, and the reason names both."""
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
    """Two hosts that reach each other in one direction only cannot train together."""
    story = wide(2)
    story.cut.add(("gpu1", "10.0.0.2"))
    story.stand_still(5.0)
    assert story.cluster.hosts["gpu2"].phase is HostPhase.LOST


def test_once_is_not_enough():
    """One failed round followed by a good one has no effect."""
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


def test_an_answer_of_an_earlier_round_does_not_count():
    """A late or repeated answer of an earlier round does not count in the next round."""
    story = sever(wide(2), "1", "2")
    story.send(ev.StallDetected(story.cluster.generation, 5.0))
    first = [e for e in story.answers if isinstance(e, ev.Probed)]
    story.send(*first)
    before = story.cluster
    story.send(*first)
    assert story.cluster == before
    assert story.cluster.hosts["gpu2"].phase is HostPhase.UP


def test_the_host_with_fewer_workers_is_left_out():
    """Of two hosts that are cut off, the one with fewer workers is left out."""
    story = Story(min=1)
    story.add("gpu1:1", "10.0.0.1").answer().add("gpu2:2", "10.0.0.2").answer().run().commit(3).answer()
    sever(story, "1", "2").stand_still(5.0)
    assert story.cluster.hosts["gpu1"].reason.endswith("gpu1 is left out, as it has fewer workers")
    assert story.cluster.hosts["gpu2"].phase is HostPhase.UP


def test_the_younger_of_those_with_fewest_workers_is_left_out():
    """Among hosts with equally few workers the younger is left out; the reason does not claim more."""
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
    """A host that reaches no other host leaves, although it is the oldest."""
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
    """Only as many hosts leave as have to, in one break."""
    story = wide(4)
    for one, other in (("1", "3"), ("1", "4"), ("2", "3"), ("2", "4")):
        sever(story, one, other)
    story.stand_still(5.0)
    assert [name for name, host in story.cluster.hosts.items() if host.phase is HostPhase.UP] == ["gpu1", "gpu2"]
    assert story.cluster.resets == 1


def test_a_host_that_does_not_answer_is_not_cut_off():
    """A host that does not answer the driver's probe is not taken for one that is cut off."""
    story = sever(wide(2), "1", "2")
    story.mute.add("gpu2")
    for _ in range(4):
        story.stand_still(5.0).wait(5.0)
    assert story.cluster.hosts["gpu2"].phase is HostPhase.UP
    assert deadline(story.cluster, story.now) > story.now


def test_a_host_that_was_left_out_is_probed_with_the_hosts_it_did_not_reach():
    """After its cooldown a left-out host is probed with the hosts that it did not reach."""
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


def test_commits_during_a_round_break_nothing():
    """Commits continue while hosts are probed: an answer that all is well breaks nothing."""
    story = wide(2)
    story.send(ev.StallDetected(story.cluster.generation, 3.0), ev.StallResolved(story.cluster.generation))
    story.answer()
    assert (story.cluster.stage, story.cluster.partition_check.pairs) == (Stage.RUNNING, frozenset())


def test_a_host_lost_in_the_middle_of_a_round_is_only_lost():
    """A host is lost during a round: the round ends without its answers, and its loss stays the reason."""
    story = sever(wide(3), "1", "3")
    story.send(ev.StallDetected(story.cluster.generation, 3.0))
    story.lose_host("gpu3", "its machine is gone").answer().wait(5.0)
    assert story.cluster.hosts["gpu3"].reason == "its machine is gone"
    assert story.records("host-unreachable") == []
    assert [host.phase for name, host in story.cluster.hosts.items() if name != "gpu3"] == [HostPhase.UP] * 2


def test_a_host_lost_after_its_last_answer_is_only_lost():
    """A host that failed two rounds is lost before the second ends: its loss stays the reason."""
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
    """Two hosts are cut off before their world has formed: one of them is left out, and the program is not blamed."""
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
    """A world breaks faster than hosts can be probed: the job waits for the probes."""
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
    """A member's connections break without a lost worker, and the world forms again."""
    return story.raised("gpu2/0#1", "RuntimeError: connection closed", intact=False).quiet(8.0)


def test_a_host_that_was_left_out_explains_the_breaks_before():
    """After a host was left out, earlier breaks at the same commit do not count against the program."""
    story = broken(wide(4, cooldown=(1000.0, 1000.0)))
    broken(sever(story, "1", "4"))
    assert "gpu4/0#1" not in story.names
    broken(broken(story))
    assert story.cluster.active, story.job.reason


def test_a_program_that_breaks_its_connections_is_to_blame_in_a_wide_cluster_too():
    """The network is well: after three breaks at one commit the job ends with the program's error."""
    story = wide(2)
    for _ in range(4):  # the first of them at another commit
        story.raised("gpu1/0#1", "RuntimeError: I closed it", intact=False)
        story.wait(1.0)
        story.answer()
    assert story.job.outcome == "failed"
    assert "I closed it (3 times in a row, and no lost worker explains it)" in story.job.reason


def test_a_newcomer_that_was_cut_off_after_it_was_admitted_is_named_with_its_pair():
    """A newcomer cannot connect to one member: its host is left out, and the training is not touched."""
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
