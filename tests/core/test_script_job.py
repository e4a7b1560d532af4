"""A script on the cluster: its nodes follow the hosts, and external nodes get answers while they wait."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import script_commands as scmd
from nbelastic.core.connections import BLIP
from nbelastic.core.reasons import Reason
from nbelastic.core.state import is_same
from nbelastic.core.step import deadline
from nbelastic.protocol import events as ev
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.connection_events import HostDisconnected
from tests.core.away import Away
from tests.core.story import Story


class Scripted(Story):
    """A story whose hosts run the nodes of `script-1`; each node is ready when `nodes_answer` is called."""

    def run_script(self, job="script-1", **terms):
        self.send(sev.ScriptSubmitted(job, "train.py", sev.Terms(**terms)))
        return self.nodes_answer()

    def nodes_answer(self, port=4000):
        """Every node that was started, or asked to leave its round, is ready at once, at its host's address."""
        while self.answered < len(self.said):
            command = self.said[self.answered]
            self.answered += 1
            match command:
                case scmd.StartNode(host=host):
                    self.node(host, 0, port)
                case scmd.LeaveRound(round=number, hosts=hosts):
                    for host in hosts:
                        self.node(host, number, port)
        return self

    answered = 0

    def node(self, host, number=0, port=4000):
        home = self.cluster.hosts[host].address or "127.0.0.1"
        self.send(sev.NodeReady(host, number, f"{home}:{port}", "default"))
        return self

    def external(self, host="t", workers=1, *, store="127.0.0.1:5000", number=0, here=True, job=""):
        """An external node connects and waits."""
        self.send(sev.ExternalNodeJoined(host, 4711, here))
        return self.waits(host, workers, store=store, number=number, job=job)

    def waits(self, host="t", workers=1, *, store="127.0.0.1:5000", number=0, job=""):
        self.send(sev.NodeReady(host, number, store, "default", workers, True, job))
        return self

    @property
    def assignments(self):
        return {seat.host: seat.workers for seat in self.cluster.script.assignments}


def test_a_script_runs_on_the_hosts_that_are_up():
    """Each host that is up, or comes later, gets a node; a removed host leaves, and the others begin another round."""
    story = Scripted("a:2", "b:1").answer()
    story.run_script()
    assert story.assignments == {"a": 2, "b": 1}
    story.add("c:1").answer().nodes_answer()
    assert story.assignments == {"a": 2, "b": 1, "c": 1}
    story.remove("b").answer().nodes_answer()
    assert story.assignments == {"a": 2, "c": 1}
    assert scmd.EndNode("b", "b has left the cluster", error=False) in story.said
    assert story.cluster.present_job == "script-1"
    assert not story.commands(scmd.RepeatRound), "each order is given once"


def removed(**how) -> Scripted:
    """A script runs on two hosts, and one of them is removed. Its idle worker ends at once."""
    story = Scripted("a:1", "b:1").answer().run_script(leave=35.0)
    story.remove("b", **how).answer().nodes_answer()
    return story


def stopped(story: Scripted) -> list[str]:
    return [command.host for command in story.commands(cmd.StopAgent)]


def test_a_removed_host_leaves_when_the_workers_of_its_script_have_ended():
    """They get SIGTERM, and may save what they have: the agent, with which they would be killed, ends after their node."""
    story = removed()
    assert story.assignments == {"a": 1}
    story.wait(34.0)
    story.send(sev.NodeSucceeded("b", 1), sev.NodesHeard(("b",)))
    assert stopped(story) == []
    story.send(sev.NodeLeft("b", "its host has left"))
    assert (stopped(story), [*story.cluster.hosts]) == (["b"], ["a"])


def test_a_removed_host_does_not_wait_for_ever_for_its_node():
    """A node that does not end within its time is killed with the agent; so is that of a host that is lost, ends or is removed at once."""
    story = removed().wait(35.0)
    assert (stopped(story), story.cluster.ending_nodes) == (["b"], {})
    story.wait(100.0)
    assert stopped(story) == ["b"]
    story = removed(within=10.0).wait(9.0)
    assert stopped(story) == []
    assert stopped(story.wait(1.0)) == ["b"]
    assert stopped(removed(now=True).wait(0.1)) == ["b"]
    story = removed().lose_host("b")
    assert ([*story.cluster.hosts], story.cluster.ending_nodes) == (["a"], {})


@pytest.mark.parametrize("nodes", [(1,), ()], ids=["the node runs", "it has ended meanwhile"])
@pytest.mark.parametrize("stopping", [False, True])
def test_a_new_driver_waits_for_the_workers_of_a_script_that_save_what_they_have(nodes, stopping):
    """The driver dies while they end, on a host that leaves or as the cluster stops: the next one gives them the rest of their time."""

    class AwayWithNodes(Away):
        def hello(self, name):
            return replace(super().hello(name), nodes=nodes if name == "b" else ())

    story = removed()
    if stopping:
        story.send(ev.StopRequested())
    story.wait(5.0)
    mark = story.mark()
    AwayWithNodes(story).new_driver().wait(29.0)
    assert ("b" in [command.host for command in story.commands(cmd.StopAgent, mark)]) == (not nodes)
    if nodes:
        story.send(sev.NodeLeft("b", "it has ended"))
    assert "b" in [command.host for command in story.commands(cmd.StopAgent, mark)]


def test_a_stopped_cluster_waits_for_the_workers_of_its_script():
    """Each agent ends when its node has ended. If the kernel has ended, there is no time for that."""
    story = Scripted("a:1", "b:1").answer().run_script()
    story.send(ev.StopRequested())
    assert stopped(story) == []
    story.send(sev.NodeLeft("a", "its node ended (exit code 1)", broken=True))
    assert stopped(story) == ["a"]
    assert stopped(story.wait(35.0)) == ["a", "b"]
    story = Scripted("a:1", "b:1").answer().run_script()
    story.send(ev.StopRequested("its kernel has ended", within=0.5))
    assert stopped(story.wait(0.5)) == ["a", "b"]
    story = Scripted("a:1", "b:1").answer().run_script()
    story.send(HostDisconnected("b", "ssh has ended"))
    story.send(ev.StopRequested())
    assert stopped(story) == ["b"]


def test_a_host_that_is_added_again_while_its_node_ends_gets_another_one():
    """The host stays, and no node that ends takes it away later."""
    story = removed().add("b:1").answer().nodes_answer()
    assert story.assignments == {"a": 1, "b": 1}
    story.quiet(100.0)
    assert (stopped(story), [*story.cluster.hosts]) == ([], ["a", "b"])


def test_nothing_is_started_for_a_script_that_has_ended():
    """Hosts that come after a script's end start no node for it."""
    story = Scripted("a:1").answer().run_script().stop_job("script-1").add("b:1").answer()
    assert [node.host for node in story.commands(scmd.StartNode)] == ["a"]


def test_a_lost_host_breaks_the_round():
    """The other nodes begin another round at once; the lost host gets a node when it is back."""
    story = Scripted("a:1", "b:1").answer().run_script()
    story.lose_host("b")
    assert story.records("world-broken") == ["host b was lost"]
    story.nodes_answer()
    assert story.assignments == {"a": 1}
    story.quiet(20.0).nodes_answer()
    assert story.assignments == {"a": 1, "b": 1}


def test_time_and_bounds_are_the_cluster_s():
    """`elastic_timeout` and `%elastic_scale` apply to scripts."""
    story = Scripted("a:1", "b:1", max=1, elastic_timeout=60.0).answer().run_script()
    assert story.assignments == {"a": 1}
    story.scale(1, 2).nodes_answer()
    assert story.assignments == {"a": 1, "b": 1}
    story.scale(3, 3)
    assert story.cluster.script.stage == "running", "who trains goes on"
    story.lose_host("b").nodes_answer()
    assert deadline(story.cluster, story.now) <= story.now + 60.0
    story.wait(61.0)
    assert story.last(scmd.EndScript).outcome == "failed"
    assert "(elastic_timeout)" in story.last(scmd.EndScript).reason


def test_one_job_at_a_time():
    """A second job or script is refused with the name of the running one."""
    story = Scripted("a:1").answer().run_script()
    story.submit()
    assert story.last(cmd.EndJob).reason == "script-1 is still running: wait for it or stop it first"
    story.send(sev.ScriptSubmitted("script-2", "train.py", sev.Terms()))
    assert story.last(cmd.EndJob).job == "script-2"
    story.stop_job("script-1")
    assert (story.last(scmd.EndScript).outcome, story.cluster.script.outcome) == ("stopped", "stopped")
    story.run()
    assert (story.cluster.present_job, story.cluster.script) == ("job", None)
    story.send(sev.ScriptSubmitted("script-3", "train.py", sev.Terms()))
    assert story.last(cmd.EndJob).reason == "job is still running: wait for it or stop it first"


def test_a_job_is_not_stopped_by_the_name_of_another():
    """A stop of another job's name has no effect."""
    story = Scripted("a:1").answer().run_script()
    story.stop_job("script-0")
    assert story.cluster.present_job == "script-1"


def test_an_external_node_waits_for_a_script_and_joins_it():
    """An external node joins the first round of a later script, or is sent that there is no room."""
    story = Scripted("a:1", max=2).answer().external("t")
    assert story.last(scmd.ReportWaiting) == scmd.ReportWaiting("t", None)
    assert story.records("host-up")[-1] == "t was started in a terminal"
    story.run_script()
    story.quiet(2.0).nodes_answer()
    story.waits("t", number=story.cluster.script.round)
    assert story.assignments == {"a": 1, "t": 1}
    story.send(sev.NodeStarted("t", story.cluster.script.round, (7,)))
    assert "t" in story.cluster.external_nodes
    story.external("u")
    assert story.last(scmd.ReportWaiting) == scmd.ReportWaiting("u", Reason("full", 2, 2), full=True)


def test_a_repeated_introduction_of_an_external_node_counts_once():
    """Repeated introductions of an external node cause one event; another process of its name is another node."""
    story = Scripted("a:1").answer().external("t")
    story.send(sev.ExternalNodeJoined("t", 4711, on_driver_machine=True))
    assert len(story.records("host-up")) == 2, "the host a, and the terminal"
    assert story.cluster.external_nodes["t"].ready is not None
    story.send(sev.ExternalNodeJoined("t", 4712, on_driver_machine=True))
    assert len(story.records("host-up")) == 3
    assert story.cluster.external_nodes["t"].ready is None


@pytest.mark.parametrize("full", [False, True])
def test_an_external_node_that_still_waits_changes_nothing(full):
    """A waiting external node repeats its message: it is answered, and nothing else changes."""
    story = Scripted("a:1", max=1).answer()
    if full:
        story.run_script()
    story.external("t")
    before, mark = story.cluster, story.mark()
    story.waits("t")
    assert is_same(before, story.cluster)
    assert [type(command) for command in story.said[mark:]] == [scmd.ReportWaiting]


def test_an_external_node_that_was_asked_to_end_is_not_in_the_next_script():
    """An external node that was asked to end, by a stop or a removal, is not in the next script."""
    story = Scripted("a:1").answer().external("t").run_script()
    story.quiet(2.0).nodes_answer()
    assert story.assignments == {"a": 1, "t": 1}
    story.stop_job("script-1").run_script("script-2")
    assert story.assignments == {"a": 1}
    story.send(sev.NodeFailed("t", 1, (sev.Failure(1, 0, 1, "Connection reset by peer"),)))
    assert story.cluster.script.failures == ()
    story.waits("t", number=1).stop_job("script-2").remove("t").run_script("script-3")
    assert story.assignments == {"a": 1}


def test_another_process_of_an_external_node_s_name_is_another_node():
    """Another process of an external node's name replaces it, and another round begins when that process is ready."""
    story = Scripted("a:1").answer().external("t").run_script().quiet(2.0).nodes_answer()
    story.send(sev.ExternalNodeJoined("t", 4712, on_driver_machine=True))
    assert "t: another process replaced it" in story.records("world-broken")
    story.nodes_answer().waits("t", 2).nodes_answer()
    assert story.assignments == {"a": 1, "t": 2}


def test_names_of_hosts_are_taken():
    """An external node with a host's name is sent away, and one that the cluster does not know gets that answer."""
    story = Scripted("a:1").answer()
    story.send(sev.ExternalNodeJoined("a", 4711))
    assert story.said[-1] == scmd.EndNode("a", "a host of the cluster is named a already")
    story.waits("u")
    assert story.said[-1] == scmd.EndNode("u", "the cluster no longer knows it")
    assert not story.cluster.external_nodes


def test_an_external_node_of_another_job_waits():
    """An external node that names another job does not join the script."""
    story = Scripted("a:1").answer().run_script().external("t", job="script-9")
    assert isinstance(story.said[-1], scmd.ReportWaiting)
    assert "t" not in story.cluster.script.nodes


def test_a_node_that_missed_its_assignment_gets_it_again():
    """A node repeats that it waits: it is sent its assignment again."""
    story = Scripted("a:1", "b:1").answer().run_script()
    mark = story.mark()
    story.node("b", 0)
    assert story.commands(scmd.RepeatRound, mark) == [scmd.RepeatRound("b")]


def test_a_node_without_a_script_ends():
    """A node of an ended script is asked to end again."""
    story = Scripted("a:1").answer().run_script().stop_job("script-1")
    mark = story.mark()
    story.node("a", 1)
    assert story.said[mark:] == [scmd.EndNode("a", "its script has ended")]


def test_an_external_node_that_leaves_is_forgotten():
    """An external node that leaves is forgotten, with or without a script."""
    story = Scripted("a:1").answer().external("t").external("u")
    story.send(sev.NodeLeft("t", "it has ended"))
    assert list(story.cluster.external_nodes) == ["u"]
    story.run_script()
    story.send(sev.NodeLeft("u", "it has ended"))
    assert not story.cluster.external_nodes
    story.waits("u")
    assert "u" not in story.cluster.script.nodes, "its message from before it left arrives later"


def test_an_external_node_is_removed_by_hand():
    """A removed external node is asked to end, and the reason names the client."""
    story = Scripted("a:1").answer().external("t").remove("t")
    assert story.last(scmd.EndNode) == scmd.EndNode("t", "removed by a test", error=False)


def test_a_stop_ends_the_script_and_the_external_nodes():
    """A stop ends the script once and each external node; one that asks again is answered again."""
    story = Scripted("a:1").answer().external("t").run_script()
    mark = story.mark()
    story.send(ev.StopRequested("enough"))
    assert story.last(scmd.EndScript).reason == "the cluster was stopped: enough"
    homeward = scmd.EndNode("t", "the cluster was stopped: it is closed")
    assert story.commands(scmd.EndNode, mark).count(homeward) == 1
    story.waits("t")
    assert story.said[-1] == homeward
    story.send(sev.ScriptSubmitted("script-2", "train.py", sev.Terms()))
    assert story.last(cmd.EndJob).reason == "the cluster is stopping: enough"


def test_a_script_of_another_driver_begins_again():
    """A new driver begins another round with a higher number, and the event gives the reason."""
    story = Scripted("a:1").answer()
    story.send(sev.ScriptSubmitted("script-1", "train.py", sev.Terms(), round=7))
    story.nodes_answer()
    assert story.records("job-started") == ["script-1 begins again, as its driver was lost: train.py"]
    assert story.last(scmd.FormRound).round == 8


@pytest.mark.parametrize("running", [False, True])
def test_stores_move_with_their_hosts(running):
    """When the cluster gets wide, loopback stores are dropped, and nodes are sent their hosts' new addresses."""
    story = Scripted(min=1 if running else 3).add("a:1", "127.0.0.1", "10.0.0.1").answer().external("t").run_script()
    story.add("b:1", "10.0.0.2")
    story.answers = [replace_here(event) for event in story.answers]
    story.answer()
    mark = story.mark()
    story.send(sev.NodeReady("a", story.cluster.script.round, "127.0.0.1:4000", "default"))
    story.waits("t", number=story.cluster.script.round)
    moves = story.commands(scmd.MoveNode, mark)
    assert moves == [scmd.MoveNode("a", "10.0.0.1", "eth1"), scmd.MoveNode("t", "10.0.0.9")]
    if not running:
        assert not story.cluster.script.nodes["a"].ready


def test_an_external_node_of_another_machine_keeps_its_store():
    """A wide cluster drops only the stores that external nodes of the driver's machine have offered."""
    story = Scripted().add("a:1", "127.0.0.1", "10.0.0.1").answer().run_script().external("t").external("u", here=False)
    story.add("b:1", "10.0.0.2")
    story.answers = [replace_here(event) for event in story.answers]
    assert not story.commands(scmd.MoveNode)
    story.answer()
    story.waits("u", store="10.0.0.7:5000")
    assert not story.commands(scmd.MoveNode)
    story.waits("t")
    assert story.commands(scmd.MoveNode) == [scmd.MoveNode("t", "10.0.0.9")]


def replace_here(event):
    """A story whose cluster gets wide, as when an agent of another machine reaches the driver."""
    if isinstance(event, ev.AgentReady) and event.host == "b":
        return ev.AgentReady(event.host, event.pid, event.addresses, event.port, "", "10.0.0.9")
    return event


@pytest.mark.parametrize("fails_first", [False, True])
def test_a_host_that_cannot_be_reached_explains_a_failure(fails_first):
    """All its processes are dead, so its ssh connection has ended too. Without a failure elsewhere the script goes on."""
    story = Scripted("a:1", "b:1").answer().run_script()
    failed = sev.NodeFailed("a", 1, (sev.Failure(0, 0, 1, "connection reset", ago=0.1),))
    lost = HostDisconnected("b", "the ssh connection to b has ended")
    for event in (failed, lost) if fails_first else (lost, failed):
        assert story.assignments == {"a": 1, "b": 1}
        story.send(event)
    story.wait(BLIP).answer().nodes_answer()
    assert story.assignments == {"a": 1}
    assert story.cluster.script.restarts == 0
    assert story.records("world-broken") == ["host b was lost"]
