"""Long stories that a seed writes, the same in each run: hosts, workers, clients, networks, programs and drivers act.

The stories of hypothesis (`any_story.py`) differ from run to run; these do not, so that `tests/core/decisions.txt` has their
decisions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from nbelastic.core.cluster_snapshot import Saved
from nbelastic.protocol import events as ev
from nbelastic.protocol.connection_events import EnvironmentReported, HostDisconnected, HostReconnected
from nbelastic.protocol.exit_codes import GPU_LOST, HUNG
from nbelastic.protocol.ids import Gpu, WorkerId
from nbelastic.protocol.program_events import BreakpointReached, ReplicaDiffered, SwapCancelled, SwapSubmitted
from nbelastic.protocol.timeouts import Timeouts
from tests.core.away import Away
from tests.core.invariants import check_saved
from tests.core.settled import settle
from tests.core.story import Story

HOSTS = ("gpu7", "gpu1", "gpu4", "gpu3")  # not in alphabetical order: seniority is not the name
NETWORKS = (  # of these hosts: their addresses
    {},
    {host: (f"127.0.0.{number}", f"10.0.0.{number}") for number, host in enumerate(HOSTS, 1)},
    {host: (f"10.0.0.{number}", f"10.1.0.{number}") for number, host in enumerate(HOSTS, 1)},
)
GPUS = (
    {},
    {host: tuple(Gpu(f"GPU-{host}-{index}") for index in range(2)) for host in HOSTS},
    {host: (Gpu(f"GPU-{host}"), Gpu(f"MIG-{host}")) for host in HOSTS},
)


class LongStory:
    """`LongStory(7).play(40)`: what happens is drawn with the seed 7. `story` has the cluster, and is of this `kind`."""

    def __init__(self, seed: int, kind: type[Story] = Story) -> None:
        self.chance = chance = random.Random(seed)
        low = chance.randint(1, 3)
        self.story = kind(
            min=low,
            max=chance.choice([None, low, low + chance.randint(1, 4)]),
            spares=chance.choice([0, 0, 1]),
            reset_limit=chance.choice([None, None, None, 4]),
            cooldown=chance.choice([(0.0, 0.0), (5.0, 300.0), (1.0, 2.0)]),
            stall=chance.choice([None, 2.0]),
            exclude_differing=chance.random() < 0.5,
            elastic_timeout=chance.choice([None, 60.0, 1000.0]),
            shares_gpus=chance.random() < 0.3,
            timeouts=Timeouts(step=300.0, program=300.0, recover_working=120.0, sync=300.0),
        )
        self.story.addresses = dict(chance.choice(NETWORKS))
        self.story.gpus = dict(chance.choice(GPUS))
        self.jobs = self.cells = self.programs = 0
        self._saved: Saved | None = None
        for host in HOSTS[: chance.randint(1, 3)]:
            self.story.add(f"{host}:{chance.randint(1, 3)}")
        self.go_on()

    def play(self, count: int, *, one_driver: bool = False) -> LongStory:
        """So many things happen. `one_driver`: the driver does not end."""
        names = [name for name in sorted(vars(LongStory)) if name.startswith("may_")]
        things = [getattr(self, name) for name in names if not (one_driver and name == "may_lose_driver")]
        for _ in range(count):
            self.chance.choice(things)()
            if self.chance.random() < 0.5:
                self.story.answer().commit(self.chance.randint(1, 3)).quiet(self.chance.choice([0.0, 0.5, 3.0]))
            if self.chance.random() < 0.3:
                self.go_on()
            self._saved = check_saved(self.story.cluster, self._saved)
        settle(self.story)
        return self

    def go_on(self) -> None:
        """All answer, and a job runs if none did."""
        if self.story.cluster.active is None and not self.story.cluster.stopping:
            self.jobs += 1
            self.story.submit(f"job-{self.jobs}")
        self.story.quiet(3.0)

    # ---- hosts and people ----

    def may_add_host(self) -> None:
        self.story.add(f"{self.chance.choice(HOSTS)}:{self.chance.randint(1, 4)}")

    def may_remove_host(self) -> None:
        now, within = self.chance.random() < 0.3, self.chance.choice([None, 0.0, 3.0, 3600.0])
        self.story.remove(self.chance.choice(HOSTS), now=now, within=within, replaced=self.chance.random() < 0.3)

    def may_discover(self) -> None:
        self.story.discover(*(f"{host}:{self.chance.randint(1, 3)}" for host in self.some(HOSTS)))

    def may_fail_to_discover(self) -> None:
        self.story.send(ev.DiscoveryFailed("no answer"))

    def may_scale(self) -> None:
        low = self.chance.randint(1, 4)
        self.story.scale(low, self.chance.choice([None, low, low + 3]))

    def may_stop_job(self) -> None:
        if self.story.cluster.active is not None and self.chance.random() < 0.3:
            self.story.stop_job(self.story.job.name)

    def may_submit_job(self) -> None:
        self.go_on()

    def may_submit_cell(self) -> None:
        self.cells += 1
        self.story.send(ev.CommitCellSubmitted(self.cells, self.chance.choice([(), (0,), (1, 2)]), 30.0))
        if self.chance.random() < 0.3:
            self.story.answer().send(ev.CommitCellCancelled(self.cells))

    def may_swap(self) -> None:
        self.programs += 1
        self.story.send(SwapSubmitted(self.programs))
        trying = sorted(w for w, fake in self.story.answer().fakes.items() if fake.old)
        if trying and self.chance.random() < 0.3:
            self.story.fail_program(self.chance.choice(trying))
        elif self.chance.random() < 0.3:
            self.story.send(SwapCancelled(self.programs))

    def may_pause(self) -> None:
        self.story.send(self.chance.choice([ev.PauseRequested("a test"), ev.StepsRequested(2, "a test")]))

    def may_resume(self) -> None:
        self.story.send(ev.ResumeRequested("a test"))

    def may_set_up(self) -> None:
        if self.chance.random() < 0.5:
            self.story.push(*self.some("xyz", 1))
        else:
            self.story.set_up(self.chance.choice("kl"), self.chance.choice("123"))
        failing = [e for e in self.story.answers if isinstance(e, ev.SetupEnded)]
        if failing and self.chance.random() < 0.2:
            self.story.answers.remove(failing[0])
            self.story.ran[failing[0].worker].pop()
            self.story.send(ev.SetupEnded(failing[0].worker, failing[0].version, "NameError: x"))

    def may_clear_setup(self) -> None:
        self.story.send(ev.SetupCleared(self.chance.choice(["", "k", "l"])))

    def may_restart(self) -> None:
        self.one(lambda w: self.story.send_about(w, ev.RestartRequested(w, "a test")))

    # ---- processes, hosts and networks ----

    def may_kill(self) -> None:
        for w in self.some(sorted(self.story.fakes), 0)[: self.chance.randint(1, 3)]:
            if w in self.story.fakes:
                self.story.kill(str(w), code=self.chance.choice([-9, -11, 0, 1, HUNG, GPU_LOST]))

    def may_freeze(self) -> None:
        self.one(lambda w: self.story.send_about(w, ev.WorkerFrozen(w, "stopped")))

    def may_be_silent(self) -> None:
        seconds = self.chance.choice([11.0, 100.0, 1000.0])
        self.one(lambda w: self.story.send_about(w, ev.WorkerSilent(w, seconds, self.chance.random() < 0.5)))
        self.one(lambda w: self.story.send(ev.WorkerResponded(w)))

    def may_lose_host(self) -> None:
        self.host(self.story.lose_host)

    def may_disconnect(self) -> None:
        self.host(lambda name: self.story.send(HostDisconnected(name, "ssh has ended")))

    def may_reconnect(self) -> None:
        for name in sorted(self.story.cluster.disconnected):
            self.story.send(HostReconnected(name))

    def may_make_environment(self) -> None:
        self.host(lambda name: self.story.send(EnvironmentReported(name, self.chance.choice(["installs torch", ""]))))

    def may_find_gpus(self) -> None:
        problem = self.chance.choice(["", "it fell off the bus"])
        self.host(lambda name: self.story.send(ev.GpusReported(name, (Gpu(f"GPU-{name}-0", problem=problem),))))

    def may_cut(self) -> None:
        one, other = self.chance.sample(HOSTS, 2)
        self.story.cut |= {(one, address) for address in self.some(self.story.addresses.get(other, ()), 0)}
        if self.chance.random() < 0.5:
            self.story.cut |= {(other, address) for address in self.story.addresses.get(one, ())}
        self.story.stand_still(self.chance.choice([3.0, 30.0]))

    def may_answer_no_probes(self) -> None:
        self.story.mute ^= {self.chance.choice(HOSTS)}

    def may_mend(self) -> None:
        self.story.mend()

    # ---- the training ----

    def may_raise(self) -> None:
        self.inside(
            lambda w: self.story.send(
                ev.WorkerRaised(w, self.story.fakes[w].generation, self.chance.random() < 0.3, "RuntimeError: lost")
            )
        )

    def may_end_by_error(self) -> None:
        if self.chance.random() < 0.3:
            self.inside(lambda w: self.story.ended(str(w), error="ValueError: bad"))

    def may_return(self) -> None:
        for _ in range(self.chance.choice([0, 0, 0, 1, 2, 4])):
            self.inside(lambda w: self.story.returned(str(w)))

    def may_fall_behind(self) -> None:
        slow = self.some(self.story.cluster.members, 0)
        for w in self.story.cluster.members:
            if w in self.story.fakes and w not in slow[:2]:
                self.story.fakes[w].begun += 1
        self.story.stand_still(3.0, times=self.chance.randint(1, 4))

    def may_hang(self) -> None:
        if self.chance.random() < 0.3:
            self.inside(lambda w: self.story.hang(str(w)))

    def may_stick(self) -> None:
        if self.chance.random() < 0.3:
            self.inside(lambda w: self.story.stick(str(w)))

    def may_differ(self) -> None:
        equal = self.chance.random() < 0.5
        self.one(lambda w: self.story.send_about(w, ReplicaDiffered(w, self.story.cluster.generation, 3, equal)))

    def may_come_to_breakpoint(self) -> None:
        self.inside(lambda w: self.story.send(BreakpointReached(w, 1, "train.py:9 in step", "")))

    def may_leave_debugger(self) -> None:
        self.story.leave_debugger(*self.story.fakes)

    def may_change_half_way(self) -> None:
        """A change of the world goes on until a kind of message is missing."""
        missing = self.chance.choice([ev.WorkerPrepared, ev.LeaveAcknowledged, ev.WorkerReady, ev.WorkerFormed])
        self.story.commit(3).add(f"{self.chance.choice(HOSTS)}:{self.chance.randint(1, 3)}")
        self.story.answer(lambda e: not isinstance(e, missing))

    # ---- time and drivers ----

    def may_wait(self) -> None:
        self.story.wait(self.chance.choice([0.1, 1.0, 5.0, 70.0]))

    def may_lose_driver(self) -> None:
        """The driver ends; something happens until the next one takes over."""
        if self.story.cluster.stopping:
            return
        away = Away(self.story, written=self.chance.random() < 0.7)
        match self.chance.randrange(5):
            case 0:
                away.form().commit(3)
            case 1 if self.story.fakes:
                away.kill(str(self.chance.choice(sorted(self.story.fakes))), noticed=self.chance.random() < 0.5)
            case 2 if self.story.agents:
                away.lose_host(self.chance.choice(sorted(self.story.agents)))
            case 3:
                inside = [w for w in self._inside() if self.story.fakes[w].formed]
                away.returned(*map(str, inside[: self.chance.randint(0, 3)]))
        late = self.some(sorted(self.story.agents), 0)[:1] if self.chance.random() < 0.2 else []
        away.new_driver(late=late)

    # ---- to whom ----

    def some(self, things: Iterable[Any], least: int = 1) -> list[Any]:
        every = list(things)
        return self.chance.sample(every, self.chance.randint(min(least, len(every)), len(every)))

    def one(self, act: Callable[[WorkerId], object]) -> None:
        if self.story.fakes:
            act(self.chance.choice(sorted(self.story.fakes)))

    def host(self, act: Callable[[str], object]) -> None:
        if self.story.cluster.hosts:
            act(self.chance.choice(sorted(self.story.cluster.hosts)))

    def inside(self, act: Callable[[WorkerId], object]) -> None:
        """With a worker in the elastic function, in a generation that it has formed."""
        if inside := self._inside():
            act(self.chance.choice(inside))

    def _inside(self) -> list[WorkerId]:
        story = self.story
        waiting = {e.worker for e in story.answers if isinstance(e, ev.WorkerFormed | ev.WorkerReady)}
        there = {w for w, fake in story.fakes.items() if fake.generation and not fake.returned} - story.stuck
        return sorted(there - waiting)
