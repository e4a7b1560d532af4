"""Whatever happens to a script's nodes, in any order: the invariants hold, and ready nodes train.

The invariants themselves are `play.faults`, checked after every step of every play; here hypothesis writes the play.
"""

from __future__ import annotations

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from nbelastic.core.script_group import GroupState, Stage
from nbelastic.core.script_rounds import deadline
from nbelastic.protocol import script_events as sev
from tests.core.play import Play
from tests.support.soak import examples

HOSTS = ("a", "b", "c")
GUESTS = ("t", "u")
DOUBLED = (sev.HostsChanged, sev.NodeReady, sev.NodeStarted, sev.NodeFailed, sev.NodeSucceeded)


class AnyScript(RuleBasedStateMachine):
    """Hosts, nodes, external nodes and time act at random; the nodes that live follow the protocol."""

    @initialize(
        low=st.integers(1, 3),
        room=st.none() | st.integers(0, 3),
        restarts=st.integers(0, 3),
        nproc=st.sampled_from([None, None, 2]),
    )
    def begin(self, low, room, restarts, nproc):
        high = None if room is None else low + room
        self.play = Play("b:2", "a:1", min=low, max=high, max_restarts=restarts, nproc=nproc)
        self.play.slow = True

    # ---- hosts and clients ----

    @rule(host=st.sampled_from(HOSTS), slots=st.integers(1, 3))
    def add_host(self, host, slots):
        self.play.hosts[host] = slots
        self.play.look()

    @rule(host=st.sampled_from(HOSTS), lost=st.booleans())
    def take_host(self, host, lost):
        assume(host in self.play.hosts)
        del self.play.hosts[host]
        self.play.lost = (host,) if lost else ()
        self.play.look()
        self.play.forget(host)

    @rule(low=st.integers(1, 3), room=st.none() | st.integers(0, 3))
    def scale(self, low, room):
        self.play.allow(low, None if room is None else low + room)
        self.play.look()

    @rule(really=st.integers(0, 9))
    def stop(self, really):
        if not really:
            self.play.send(sev.ScriptStopped("stopped by a test"))

    # ---- nodes ----

    @rule(host=st.sampled_from(GUESTS), workers=st.integers(1, 2))
    def external_node_waits(self, host, workers):
        """An external node waits, repeats that, or returns without being asked because its workers have failed."""
        node = self.play.group.nodes.get(host)
        self.play.external(host, node.slots if node else workers)

    @rule(data=st.data(), codes=st.lists(st.sampled_from([-9, -15, 1, 3]), max_size=2))
    def fail(self, data, codes):
        """Workers of a node's round fail; the node asks for another round when it is answered."""
        host = self._inside(data)
        number = self.play.rounds[host]
        failures = tuple(sev.Failure(i, i, code, "boom", ago=float(i)) for i, code in enumerate(codes))
        self.play.inside.discard(host)
        self._come_back(host)
        self.play.send(sev.NodeFailed(host, number, failures))

    @rule(data=st.data())
    def succeed(self, data):
        host = self._inside(data)
        self.play.send(sev.NodeSucceeded(host, self.play.rounds[host]))

    @rule(data=st.data(), broken=st.booleans())
    def leave(self, data, broken):
        """A node's process ends; its unsent messages are lost."""
        host = self._living(data)
        self.play.forget(host)
        self.play.send(sev.NodeLeft(host, "it has ended", broken=broken or host in HOSTS))

    @rule(data=st.data())
    def move(self, data):
        """A node's host gets another address: the node offers another store."""
        host = self._living(data)
        if host not in self.play.inside:
            self._come_back(host)
        self.play.send(sev.NodeMoved(host))

    @rule(host=st.sampled_from(HOSTS))
    def block_starts(self, host):
        """Nodes of this host no longer start, or start again."""
        self.play.mute ^= {host}

    # ---- messages and time ----

    @precondition(lambda self: self.play.answers)
    @rule(data=st.data())
    def deliver_one(self, data):
        """One node's next message arrives; the messages of one node stay in order."""
        firsts = {}
        for answer in self.play.answers:
            firsts.setdefault(answer.host, answer)
        answer = data.draw(st.sampled_from(list(firsts.values())))
        self.play.answers.remove(answer)
        self.play.send(answer)

    @rule()
    def hear_all(self):
        while self.play.answers:
            self.play.send(self.play.answers.pop(0))

    @rule(data=st.data())
    def deliver_again(self, data):
        """An earlier message of a living node arrives again, unless it contradicts the node's state."""
        play = self.play
        old = [event for event in play.heard if isinstance(event, DOUBLED) and not self._contradicts_the_node(event)]
        assume(old)
        before, said = play.group, len(play.said)
        event = data.draw(st.sampled_from(old))
        # It says so again. Asked before the event, which may begin a round.
        waits = isinstance(event, sev.NodeReady) and event.host not in play.inside
        play.send(event)
        if getattr(event, "round", before.round) < before.round and not waits:
            assert (play.group, play.said[said:]) == (before, []), "a word of an old round changes something"

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 1.0, 40.0]))
    def wait(self, seconds):
        self.play.wait(seconds)

    # ---- invariants ----

    def teardown(self):
        """Nodes start, all answer and time passes; then every node that can train does."""
        if not hasattr(self, "play"):
            return
        play = self.play
        play.mute.clear()
        for _ in range(4):
            self.hear_all()
            for host in [host for host in play.group.nodes if host not in play.rounds]:
                play.send(sev.NodeLeft(host, "it hung and was ended", broken=True))
            play.wait(20.0)
        self.hear_all()
        group = play.group
        assert deadline(group) > play.now
        states = {node.state for node in group.nodes.values()}
        if group.stage is Stage.ENDED or GroupState.SUCCEEDED in states:
            return
        if group.stage is Stage.GATHERING:
            assert group.reason.kind == "too-few"
            return
        assert play.inside == {seat.host for seat in group.assignments}
        room = group.limits.most - group.size
        outside = [node for host, node in group.nodes.items() if host not in play.inside]
        if group.size + sum(node.slots for node in outside) < group.limits.min:  # a round of all nodes could not form
            return
        assert all((node.slots if node.external else 1) > room for node in outside), f"{group.size} train: {play.why}"

    def _come_back(self, host: str) -> None:
        node = self.play.group.nodes.get(host)
        more = {"workers": node.slots, "external": True} if host in GUESTS and node is not None else {}
        self.play.answers = [a for a in self.play.answers if a.host != host or not isinstance(a, sev.NodeReady)]
        self.play.answers.append(self.play._hello(host, **more))

    def _contradicts_the_node(self, event) -> bool:
        """Whether the message contradicts the state of its node, which is in a round and waits for none."""
        play = self.play
        host = getattr(event, "host", "")
        if isinstance(event, sev.HostsChanged):
            return (dict(event.hosts), event.limits) != (play.hosts, play.limits)
        if host not in play.rounds or event.round > play.rounds[host]:
            return True
        return isinstance(event, sev.NodeReady) and (host in play.inside) == (event.round == play.rounds[host])

    def _inside(self, data) -> str:
        inside = sorted(host for host in self.play.inside if self.play.group.nodes.get(host))
        assume(inside)
        return data.draw(st.sampled_from(inside))

    def _living(self, data) -> str:
        living = sorted(self.play.rounds)
        assume(living)
        return data.draw(st.sampled_from(living))


TestAnyScript = AnyScript.TestCase
TestAnyScript.settings = settings(
    max_examples=examples(50),
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
