"""A new driver takes over the nodes of a script of the last one."""

from __future__ import annotations

from types import SimpleNamespace

from msgspec.structs import replace

from nbelastic.core.commands import EndJob
from nbelastic.driver.driver_snapshot import SavedJob
from nbelastic.driver.job_run import JobRun
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.agent_messages import AgentHello, NodeExited, Script, StartNode, StopNode
from nbelastic.protocol.node_messages import LeaveRound
from tests.driver.fakes import DriverWithFakes, FakeAgent, run_story

SCRIPT = Script("job-1", "/train.py"), sev.Terms()


class NodeAgent(FakeAgent):
    """An agent whose nodes wait for each round, and run it."""

    def receive(self, message):
        if isinstance(message, StartNode):
            host = self.spec.name
            self._fakes.deliver(
                f"node/{host}~{message.number}", sev.NodeReady(host, 0, f"127.0.0.1:{message.number}", "default")
            )
        super().receive(message)


class NodesFakes(DriverWithFakes):
    """Its nodes only send that they are ready."""

    agent = NodeAgent

    def arrive(self, peer, message):
        if isinstance(message, LeaveRound):
            host, _, number = peer.removeprefix("node/").partition("~")
            self.deliver(peer, sev.NodeReady(host, message.round, f"127.0.0.1:{number}", "default"))
        elif not peer.startswith("node/"):
            super().arrive(peer, message)


def sent(fakes: DriverWithFakes, kind: type) -> list[tuple[str, int]]:
    return [(peer, message.number) for peer, message in fakes.sent if isinstance(message, kind)]


def resume(fakes: DriverWithFakes, saved: SavedJob, **hello) -> None:
    """The reports of the takeover have come: all hosts say the same of their nodes."""
    agents = {host: AgentHello(host, 1, {}, **hello) for host in fakes.driver.cluster.hosts}
    fakes.driver.jobs.load(saved)
    fakes.driver.jobs.resume(saved, SimpleNamespace(agents=agents, workers={}))


def test_a_node_that_saves_what_it_has_is_not_killed(tmp_path):
    """All nodes are killed as the script begins again, but for one that has to end anyway. Its host waits for it no longer than it lives."""

    async def story() -> None:
        async with DriverWithFakes(tmp_path, "a:1,b:1", min=1) as fakes:
            await fakes.advance_time(2.0)
            decisions = fakes.driver._decisions
            decisions.cluster = replace(decisions.cluster, ending_nodes={"b": 1e9})
            resume(fakes, SavedJob("job-1", script=SCRIPT, round=1, nodes={"a": 3, "b": 4}), nodes=(3,))
            assert [peer.partition("~")[0] for peer, _ in sent(fakes, StopNode)] == ["agent/a"]
            fakes.driver._components.scripts.on_node_exited(NodeExited("b", 3, 0))
            await fakes.settle()
            assert fakes.driver.cluster.ending_nodes == {}

    run_story(story)


def test_no_number_of_a_node_is_used_twice(tmp_path):
    """The saved script is over. The nodes of the next one have new numbers: yet another driver would take the old ends for theirs."""

    async def story() -> None:
        async with DriverWithFakes(tmp_path, "a:1", min=1) as fakes:
            await fakes.advance_time(2.0)
            over = EndJob("job-1", "succeeded", "every worker ended well", ())
            resume(fakes, SavedJob("job-1", script=SCRIPT, nodes={"a": 1}, over=over), nodes=(2,), ended={1: 0})
            fakes.driver.jobs.submit(JobRun("job-2", None), SavedJob("job-2", script=SCRIPT))
            await fakes.settle()
            assert [number for _, number in sent(fakes, StartNode)] == [3]

    run_story(story)


def test_a_host_that_was_lost_has_no_node(tmp_path):
    """The others went on without it. If all of them end well while there is no driver, the next one does not run the script again."""

    async def story() -> None:
        async with NodesFakes(tmp_path, "a:1,b:1,c:1", min=1) as fakes:
            await fakes.advance_time(2.0)
            fakes.driver.jobs.submit(JobRun("job-1", None), SavedJob("job-1", script=SCRIPT))
            await fakes.advance_time(2.0)
            saved = fakes.driver._snapshot_writer
            assert saved.job.nodes == {"a": 1, "b": 2, "c": 3}
            fakes.silent.add("c")
            await fakes.advance_time(30.0)
            assert saved.job.round == 2
            assert saved.job.nodes == {"a": 1, "b": 2}
            assert "node/c~3" not in fakes.server.heard_at

    run_story(story)
