"""A script's group played by faithful fakes of its nodes: they start, become ready and leave rounds as commanded.

`Play` does for `core.script_rounds` what `story.Story` does for the world. After every step `faults` checks the
invariants of the group and the commands. Each event is sent to the group a second time, which must change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from nbelastic.core import commands as cmd
from nbelastic.core import script_commands as scmd
from nbelastic.core.reasons import in_words
from nbelastic.core.script_group import Group, GroupState, Stage
from nbelastic.core.script_rounds import advance, deadline
from nbelastic.protocol import events as ev
from nbelastic.protocol import script_events as sev
from nbelastic.protocol.cluster_limits import NEVER, Limits
from nbelastic.protocol.timeouts import Timeouts
from tests.support import decisions


class Play:
    """`Play("b:2", "a:1", min=2, settle=0.5)`: hosts with their slots, in the order in which the cluster got them.

    Nodes answer at once. With `slow` their answers wait in `answers` until the story hands them in.
    """

    def __init__(self, *hosts: str, **terms) -> None:
        times = {name: terms.pop(name) for name in ("settle", "grace") if name in terms}
        allowed = {name: terms.pop(name) for name in ("min", "max", "elastic_timeout", "cooldown") if name in terms}
        self.limits = Limits(**allowed, timeouts=Timeouts(**times))
        self.slow = False
        self.group = Group("job-1", sev.Terms(**terms), self.limits)
        self.now = 100.0
        self.hosts = dict(self.parsed(host) for host in hosts)
        self.mute: set[str] = set()  # hosts whose nodes do not start
        self.silent: set[str] = set()  # hosts whose nodes are silent
        self.lost: tuple[str, ...] = ()
        self.said: list[cmd.Command] = []
        self.heard: list[ev.Event] = []
        self.answers: list[ev.Event] = []
        self.rounds: dict[str, int] = {}  # of each node that lives: the last round that it was in
        self.inside: set[str] = set()  # nodes whose workers run
        self.look()

    def allow(self, low: int, high: int | None) -> None:
        """The limits of the cluster change; the driver applies them with the next list of hosts."""
        self.limits = replace(self.limits, min=low, max=high)

    @staticmethod
    def parsed(host: str) -> tuple[str, int]:
        name, _, slots = host.partition(":")
        return name, int(slots or 1)

    def look(self, *hosts: str) -> Play:
        """The driver passes on the cluster's present hosts."""
        if hosts:
            self.hosts = dict(self.parsed(host) for host in hosts)
        return self.send(sev.HostsChanged(tuple(self.hosts.items()), self.limits, self.lost))

    def send(self, event: ev.Event) -> Play:
        before = self.group
        self.heard.append(event)
        self.group, commands = advance(before, event, self.now)
        self.said += commands
        decisions.note(event, commands, in_words(self.group.reason, self.now))
        for command in commands:
            self._obey(command)
        for fault in faults(before, event, self.group, commands):
            raise AssertionError(f"{fault}\nevent: {event}\ngroup: {self.group}\ncommands: {commands}")
        if not isinstance(event, sev.NodeLeft):  # the driver passes it on once for each process
            again, repeated = advance(self.group, event, self.now)
            assert (again, repeated) == (self.group, ()), f"{event} changes something when it arrives twice"
        while self.answers and not self.slow:
            self.send(self.answers.pop(0))
        return self

    def _obey(self, command: cmd.Command) -> None:
        match command:
            case scmd.StartNode(host=host):
                self.forget(host)
                if host not in self.mute:
                    self.rounds[host] = 0
                    self.answers.append(self._hello(host))
            case scmd.LeaveRound(round=number, hosts=hosts):
                for host in hosts:
                    if host in self.rounds:
                        self.inside.discard(host)
                        self.rounds[host] = number
                        self.answers.append(self._hello(host))
            case scmd.FormRound(round=number, assignments=assignments):
                for seat in assignments:
                    if seat.host in self.rounds:
                        self.rounds[seat.host] = number
                        self.inside.add(seat.host)
                        self.answers.append(sev.NodeStarted(seat.host, number, tuple(range(1, seat.workers + 1))))

    def _hello(self, host: str, role: str = "default", **more) -> sev.NodeReady:
        number = self.rounds.get(host, 0)
        return sev.NodeReady(host, number, f"{host}:{number + 4000}", role, **more)

    def ready(self, host: str, **more) -> Play:
        self.inside.discard(host)
        return self.send(self._hello(host, **more))

    def external(self, host: str, workers: int = 1, **more) -> Play:
        self.rounds.setdefault(host, 0)
        return self.ready(host, workers=workers, external=True, **more)

    def forget(self, host: str) -> None:
        """The node of a host has ended, and its unsent messages are dropped."""
        self.rounds.pop(host, None)
        self.inside.discard(host)
        self.answers = [answer for answer in self.answers if answer.host != host]
        self.heard = [event for event in self.heard if getattr(event, "host", "") != host]

    @property
    def why(self) -> str:
        """The reason as a sentence."""
        return in_words(self.group.reason, self.now)

    def wait(self, seconds: float) -> Play:
        end = self.now + seconds
        for _ in range(100):
            at = max(self.now, deadline(self.group))
            if at > end:
                self.now = end
                return self
            self.now = at
            if self.group.failures:
                self.send(sev.NodesHeard(tuple(host for host in self.rounds if host not in self.silent)))
            self.send(sev.Ticked())
        raise AssertionError(f"a hot loop: {self.why}")

    def fail(self, host: str, code: int = 1, rank: int = 0, ago: float = 1.0, error: str = "boom") -> Play:
        """A node's worker fails; the node ends its other workers and asks for another round."""
        number = self.group.round
        self.send(sev.NodeFailed(host, number, (sev.Failure(rank, 0, code, error, f"trace of {error}", ago),)))
        return self.ready(host) if (self.group.stage, self.group.round) == (Stage.RUNNING, number) else self

    def succeed(self, *hosts: str) -> Play:
        for host in hosts:
            self.send(sev.NodeSucceeded(host, self.group.round))
        return self

    def records(self, kind: str) -> list[str]:
        return [command.text for command in self.said if isinstance(command, cmd.Record) and command.kind == kind]

    def commands(self, kind: type) -> list:
        return [command for command in self.said if isinstance(command, kind)]

    @property
    def assignments(self) -> list[tuple[str, int]]:
        return [(seat.host, seat.workers) for seat in self.group.assignments]

    @property
    def end(self) -> scmd.EndScript:
        return next(command for command in self.said if isinstance(command, scmd.EndScript))


def faults(before: Group, event: ev.Event, group: Group, commands: tuple[cmd.Command, ...]) -> Iterator[str]:
    """The faults found after a step of a script."""
    if not in_words(group.reason, 0.0):
        yield "there is no reason"
    if before.stage is Stage.ENDED and (group != before or commands):
        yield "a script that has ended goes on"
    if group.stage is Stage.GATHERING and deadline(group) == NEVER:
        yield "there is no round, and no deadline"
    if (group.stage is Stage.ENDED) != bool(group.outcome):
        yield f"{group.stage} with the outcome {group.outcome!r}"
    ends = [command for command in commands if isinstance(command, scmd.EndScript)]
    if len(ends) != (group.stage is Stage.ENDED and before.stage is not Stage.ENDED):
        yield f"{len(ends)} ends are commanded"
    if not before.restarts <= group.restarts <= min(before.restarts + 1, group.terms.max_restarts):
        yield f"the restarts went from {before.restarts} to {group.restarts} of {group.terms.max_restarts}"
    failed = before.failures or isinstance(
        event, sev.NodeFailed | sev.NodeReady
    )  # an external node fails by returning unasked
    if group.restarts > before.restarts and not failed:
        yield "a restart is counted, and nothing has failed"
    if group.stage is Stage.GATHERING and group.failures:
        yield "failures of a round that is over are kept"
    formed = [command for command in commands if isinstance(command, scmd.FormRound)]
    if group.round != before.round + len(formed) or len(formed) > 1:
        yield f"the round went from {before.round} to {group.round}, {len(formed)} were formed"
    for command in formed:
        yield from _faults_of_a_round(before, group, command)
    for command in commands:
        match command:
            case scmd.LeaveRound(round=number, hosts=hosts):
                if number != before.round or not set(hosts) <= {seat.host for seat in before.assignments}:
                    yield "others than those in the round are to leave it"
            case scmd.StartNode(host=host):
                if group.stage is not Stage.ENDED and (host not in group.nodes or group.nodes[host].external):
                    yield f"a node is started on {host}, and the script does not need it"


def _faults_of_a_round(before: Group, group: Group, order: scmd.FormRound) -> Iterator[str]:
    hosts, size = [seat.host for seat in order.assignments], sum(seat.workers for seat in order.assignments)
    if not group.limits.min <= size <= group.limits.most:
        yield f"a round of {size}, outside [{group.limits.min}, {group.limits.max}]"
    if len(set(hosts)) != len(hosts) or (group.stage is Stage.RUNNING and order.assignments != group.assignments):
        yield f"the seats are {hosts}"
    if order.restarts != group.restarts:
        yield f"{order.restarts} restarts are sent, {group.restarts} are counted"
    if not order.store:
        yield "a round without a store"
    if any(
        group.nodes[seat.host].external and seat.workers != group.nodes[seat.host].slots for seat in order.assignments
    ):
        yield "an external node is not taken whole"
    same = [seat.host for seat in before.assignments if seat.host in hosts]  # also a host that left and has come back
    fresh = [host for host in hosts if host not in same]
    if hosts != [*same, *sorted(fresh, key=lambda host: group.nodes[host].joined)]:
        yield f"{hosts} sit where {same} sat, and are not by seniority"
    if any(group.nodes[host].state is not GroupState.HEALTHY for host in hosts if group.stage is Stage.RUNNING):
        yield "a node in the round is not healthy"
