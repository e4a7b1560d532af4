"""Long plays of a script that a seed writes, the same in each run: its hosts, nodes and external nodes come, go and fail."""

from __future__ import annotations

import random

from nbelastic.core.script_group import Stage
from nbelastic.protocol import script_events as sev
from tests.core.play import Play

HOSTS = ("gpu7", "gpu1", "gpu4")  # not in alphabetical order: seniority is not the name
GUESTS = ("tty2", "tty1")


class LongPlay:
    """`LongPlay(7).act(40)`: what happens is drawn with the seed 7. `play` has the group."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        low = chance.randint(1, 3)
        self.play = Play(
            *(f"{host}:{chance.randint(1, 3)}" for host in HOSTS[: chance.randint(1, 3)]),
            min=low,
            max=chance.choice([None, low, low + 3]),
            max_restarts=chance.choice([1, 20, 100]),
            nproc=chance.choice([None, None, 2]),
            settle=chance.choice([0.0, 0.5]),
            elastic_timeout=chance.choice([60.0, 600.0]),
        )

    def act(self, count: int) -> LongPlay:
        things = [getattr(self, name) for name in sorted(vars(LongPlay)) if name.startswith("may_")]
        for _ in range(count):
            self.chance.choice(things)()
            while self.play.answers and self.chance.random() < 0.9:
                self.play.send(self.play.answers.pop(0))
            self.play.slow = self.chance.random() < 0.3
            self.play.wait(self.chance.choice([0.0, 0.1, 1.0, 5.0]))
        self.play.slow = False
        self.play.mute.clear()
        self.play.silent.clear()
        self.play.look().wait(60.0)
        return self

    def may_change_hosts(self) -> None:
        there = self.chance.sample(HOSTS, self.chance.randint(1, len(HOSTS)))
        gone = [host for host in self.play.hosts if host not in there]
        self.play.lost = tuple(gone[: self.chance.randint(0, 1)])
        self.play.look(*(f"{host}:{self.chance.randint(1, 3)}" for host in there))
        for host in gone:
            self.play.forget(host)

    def may_scale(self) -> None:
        low = self.chance.randint(1, 3)
        self.play.allow(low, self.chance.choice([None, low, low + 2]))
        self.play.look()

    def may_stop(self) -> None:
        if self.chance.random() < 0.05:
            self.play.send(sev.ScriptStopped("stopped by a test"))

    def may_bring_external_node(self) -> None:
        host = self.chance.choice(GUESTS)
        node = self.play.group.nodes.get(host)
        self.play.external(host, node.slots if node else self.chance.randint(1, 2))

    def may_fail(self) -> None:
        for _ in range(self.chance.randint(1, 2)):
            if inside := self._inside():
                host, code = self.chance.choice(inside), self.chance.choice([-9, -15, 1, 3])
                guest = {"external": True, "workers": self.play.group.nodes[host].slots} if host in GUESTS else {}
                number = self.play.rounds[host]
                failures = (sev.Failure(self.chance.randint(0, 3), 0, code, "boom", ago=self.chance.random()),)
                self.play.send(sev.NodeFailed(host, number, failures[: self.chance.randint(0, 1)]))
                if host in self.play.inside and self.play.group.stage is not Stage.ENDED:
                    self.play.ready(host, **guest)

    def may_succeed(self) -> None:
        inside = self._inside()
        if inside and self.chance.random() < 0.15:
            self.play.succeed(*self.chance.sample(inside, self.chance.randint(1, len(inside))))

    def may_leave(self) -> None:
        if self.play.rounds:
            host = self.chance.choice(sorted(self.play.rounds))
            self.play.forget(host)
            self.play.send(sev.NodeLeft(host, "it has ended", broken=host in HOSTS or self.chance.random() < 0.5))

    def may_move(self) -> None:
        outside = sorted(self.play.rounds.keys() - self.play.inside - set(GUESTS))
        if outside:
            host = self.chance.choice(outside)
            self.play.send(sev.NodeMoved(host))
            if host in self.play.rounds:
                self.play.ready(host)

    def may_start_no_nodes(self) -> None:
        self.play.mute ^= {self.chance.choice(HOSTS)}

    def may_be_silent(self) -> None:
        self.play.silent ^= {self.chance.choice(HOSTS)}

    def may_wait(self) -> None:
        self.play.wait(40.0)

    def _inside(self) -> list[str]:
        return sorted(host for host in self.play.inside if self.play.group.nodes.get(host))
