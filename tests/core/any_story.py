"""The first half of the random story: hosts, clients, processes, the training and drivers."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from nbelastic.core.state import Stage
from nbelastic.protocol import events as ev
from nbelastic.protocol.connection_events import HostDisconnected, HostReconnected
from nbelastic.protocol.exit_codes import HUNG
from nbelastic.protocol.host_parsing import parse_host
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.program_events import BreakpointReached, SwapCancelled, SwapSubmitted
from nbelastic.protocol.timeouts import Timeouts
from tests.core.away import Away
from tests.core.story import Story

HOSTS = ("n", "b", "g")  # in the order in which they are added, not by name
NETWORKS = (  # of these hosts: their addresses
    {},
    {"n": ("127.0.0.1", "10.0.0.1"), "b": ("127.0.0.2", "10.0.0.1"), "g": ("127.0.0.3", "10.0.0.1")},
    {"n": ("127.0.0.1", "10.0.0.1"), "b": ("127.0.0.2", "10.0.0.1", "10.1.0.1"), "g": ("10.0.0.3", "10.1.0.3")},
    {"n": ("10.0.0.1", "10.1.0.1"), "b": ("10.0.0.2", "10.1.0.2"), "g": ("10.0.0.3", "10.1.0.3")},
)
CODES = (-9, -11, 0, 1, 3, HUNG)


class AnyStory(RuleBasedStateMachine):
    """Hosts, workers, clients and time act at random; the workers that live follow the protocol."""

    @initialize(
        low=st.integers(1, 3),
        room=st.none() | st.integers(0, 3),
        spares=st.integers(0, 1),
        reset_limit=st.sampled_from([None, None, None, 3]),
        cooldown=st.sampled_from([(0.0, 0.0), (5.0, 300.0), (1.0, 2.0)]),
        stall=st.sampled_from([None, None, 2.0]),
        network=st.sampled_from(NETWORKS),
    )
    def begin(self, low, room, spares, reset_limit, cooldown, stall, network):
        high = None if room is None else low + room
        self.story = Story(
            min=low,
            max=high,
            spares=spares,
            reset_limit=reset_limit,
            cooldown=cooldown,
            elastic_timeout=1000.0,
            stall=stall,
            exclude_differing=True,
            timeouts=Timeouts(step=300.0, program=300.0, recover_working=120.0, sync=300.0),
        )
        self.story.addresses = dict(network)
        self.jobs = self.cells = self.programs = 0
        self.story.add("n:2").add("b:1")  # not in alphabetical order: seniority is not the name
        self.let_all_answer()

    # ---- hosts and people ----

    @rule(host=st.sampled_from(HOSTS), slots=st.integers(1, 3))
    def add_host(self, host, slots):
        self.story.add(f"{host}:{slots}")
        slots = self.story.cluster.hosts[host].slots if host in self.story.cluster.hosts else ()
        assert not any(slot.backoff_until > self.story.now for slot in slots), "adding a host clears its failures"

    @rule(
        host=st.sampled_from(HOSTS),
        now=st.booleans(),
        within=st.sampled_from([None, None, 0.0, 3.0, 30.0, 3600.0]),
        replaced=st.booleans(),
    )
    def remove_host(self, host, now, within, replaced):
        self.story.remove(host, now=now, within=within, replaced=replaced and not now)
        if self.story.addresses:  # a successor is of the same network
            new = [name for name in self.story.cluster.hosts if name not in self.story.addresses]
            self.story.addresses |= {name: self.story.addresses[name.partition(".")[0]] for name in new}

    @rule(hosts=st.dictionaries(st.sampled_from(HOSTS), st.integers(1, 3)))
    def discover(self, hosts):
        self.story.discover(*(f"{name}:{slots}" for name, slots in hosts.items()))

    @precondition(lambda self: self.story.cluster.hosts)
    @rule()
    def discovery_fails(self):
        workers = self.story.wait(0.0).cluster.workers
        self.story.send(ev.DiscoveryFailed("no answer"))
        assert self.story.cluster.workers == workers, "a failing discovery changes no worker"

    @rule(low=st.integers(1, 3), room=st.none() | st.integers(0, 3))
    def scale(self, low, room):
        self.story.scale(low, None if room is None else low + room)

    @rule()
    def submit(self):
        if self.story.cluster.active is None:
            self.jobs += 1
        self.story.submit(f"job-{self.jobs}")

    @precondition(lambda self: self.story.cluster.active)
    @rule(really=st.integers(0, 3))
    def stop_job(self, really):
        if not really:
            self.story.send(ev.JobStopRequested(self.story.job.name))

    @rule(ranks=st.sampled_from([(), (), (0,), (1, 2)]), limit=st.sampled_from([1.0, 30.0]))
    def submit_cell(self, ranks, limit):
        self.cells += 1
        self.story.send(ev.CommitCellSubmitted(self.cells, ranks, limit))

    @precondition(lambda self: self.story.cluster.halt.cells)
    @rule(data=st.data())
    def cancel_cell(self, data):
        cell = data.draw(st.sampled_from(self.story.cluster.halt.cells))
        self.story.send(ev.CommitCellCancelled(cell.number))

    @precondition(lambda self: self.story.cluster.halt.running)
    @rule(data=st.data(), begun=st.sampled_from([0, 0, 1]), changed=st.booleans())
    def end_cell(self, data, begun, changed):
        """A cell that has begun collectives, or changed the state, on some ranks."""
        halt = self.story.cluster.halt
        w = data.draw(st.sampled_from(sorted(halt.running)))
        self.story._unsay(w, ev.CommitCellEnded)
        self.story.send(ev.CommitCellEnded(w, halt.cells[0].number, begun, "x" * changed))

    @precondition(lambda self: any(fake.generation for fake in self.story.fakes.values()))
    @rule(data=st.data(), leaves=st.booleans())
    def come_to_breakpoint(self, data, leaves):
        fakes = self.story.fakes
        w = data.draw(st.sampled_from(sorted(w for w, fake in fakes.items() if fake.generation)))
        if leaves:
            self.story.leave_debugger(w)
        else:
            self.story.send(BreakpointReached(w, 1, "train.py:9 in step", ""))

    @rule()
    def submit_program(self):
        self.programs += 1
        self.story.send(SwapSubmitted(self.programs))

    @precondition(lambda self: self.programs)
    @rule()
    def cancel_program(self):
        self.story.send(SwapCancelled(self.programs))

    @precondition(lambda self: any(fake.old for fake in self.story.fakes.values()))
    @rule(data=st.data())
    def fail_program(self, data):
        """A new program raises on one worker, which returns to the old one."""
        w = data.draw(st.sampled_from(sorted(w for w, fake in self.story.fakes.items() if fake.old)))
        self.story.fail_program(w)

    @precondition(lambda self: self.story.cluster.active)
    @rule(steps=st.integers(0, 2))
    def pause(self, steps):
        self.story.send(ev.StepsRequested(steps, "a test") if steps else ev.PauseRequested("a test"))

    @precondition(lambda self: self.story.cluster.halt.paused_by)
    @rule()
    def resume(self):
        self.story.send(ev.ResumeRequested("a test"))

    # ---- processes ----

    @rule(data=st.data(), code=st.sampled_from(CODES))
    def kill(self, data, code):
        self.story.kill(str(self._worker(data)), code=code)

    @rule(data=st.data())
    def freeze(self, data):
        w = self._worker(data)
        self.story._forget(w)
        self.story.send(ev.WorkerFrozen(w, "stopped"))

    @rule(data=st.data(), seconds=st.sampled_from([11.0, 100.0, 1000.0]), idle=st.booleans())
    def is_silent(self, data, seconds, idle):
        w = self._worker(data)
        self.story.send_about(w, ev.WorkerSilent(w, seconds, idle))

    @precondition(lambda self: any(isinstance(e, ev.WorkerExited) for e in self.story.answers))
    @rule(data=st.data())
    def end_unreported(self, data):
        """A worker was asked to end, and its end is not reported."""
        stopped = self.story.cluster.stopped
        exits = [e for e in self.story.answers if isinstance(e, ev.WorkerExited) and e.worker in stopped]
        assume(exits)
        self.story.answers.remove(data.draw(st.sampled_from(exits)))

    @rule(data=st.data())
    def is_heard_again(self, data):
        self.story.send(ev.WorkerResponded(self._worker(data)))

    @rule(data=st.data())
    def restart(self, data):
        w = self._worker(data)
        self.story.send_about(w, ev.RestartRequested(w, "a test"))

    @precondition(lambda self: self.story.cluster.stage is Stage.FORMING and self.story.cluster.formation.receivers)
    @rule(data=st.data())
    def die_while_sending(self, data):
        """The root of a transfer is lost, and some receivers hold parts of two commits."""
        order = self.story.cluster.formation
        root, receiving = order.members[order.root], [order.members[rank] for rank in order.receivers]
        torn = sorted(self.story.cluster.awaiting & receiving & self.story.fakes.keys())
        if root in self.story.fakes:
            self.story.kill(str(root))
        for w in torn:
            if w in self.story.fakes and data.draw(st.booleans()):
                self.story.tear(str(w))

    @rule(data=st.data())
    def lose_host(self, data):
        names = sorted(self.story.cluster.hosts)
        assume(names)
        self.story.lose_host(data.draw(st.sampled_from(names)))

    @rule(data=st.data())
    def disconnect(self, data):
        names = sorted(self.story.cluster.hosts)
        assume(names)
        self.story.send(HostDisconnected(data.draw(st.sampled_from(names)), "ssh has ended"))

    @precondition(lambda self: self.story.cluster.disconnected)
    @rule(data=st.data())
    def reconnect(self, data):
        self.story.send(HostReconnected(data.draw(st.sampled_from(sorted(self.story.cluster.disconnected)))))

    @rule(data=st.data())
    def fail_to_set_up(self, data):
        w = self._answering(data, ev.SetupEnded)
        version = next(e.version for e in self.story.answers if isinstance(e, ev.SetupEnded) and e.worker == w)
        self.story._unsay(w, ev.SetupEnded)
        self.story.ran[w].pop()
        self.story.send(ev.SetupEnded(w, version, "NameError: x"))

    @rule(key=st.sampled_from("xyz"), source=st.sampled_from("123"))
    def set_up(self, key, source):
        self.story.set_up(key, source)

    @rule(key=st.sampled_from(["", "x", "y", "z"]))
    def clear_setup(self, key):
        self.story.send(ev.SetupCleared(key))

    # ---- the training ----

    @rule(count=st.integers(1, 5))
    def commit(self, count):
        if self.story.cluster.stage in (Stage.RUNNING, Stage.PREPARING):
            self.story.commit(count)

    @rule(data=st.data(), intact=st.sampled_from([False, False, False, True]))
    def raise_error(self, data, intact):
        w = self._inside(data)
        self.story.hold_back(w)
        fake = self.story.fakes[w]
        self.story.send(ev.WorkerRaised(w, fake.generation, intact, "RuntimeError: lost"))

    @rule(data=st.data())
    def end_by_error(self, data):
        w = self._inside(data)
        self.story.ended(str(w), error="ValueError: bad")

    @rule(data=st.data(), ends=st.booleans())
    def return_(self, data, ends):
        w = self._inside(data)
        self.story.returned(str(w))
        if ends:
            self.story.ended(str(w))

    @rule(data=st.data())
    def end(self, data):
        returned = sorted(w for w, fake in self.story.fakes.items() if fake.returned and fake.job)
        assume(returned)
        self.story.ended(str(data.draw(st.sampled_from(returned))))

    @precondition(lambda self: self.story.cluster.stage is Stage.RUNNING)
    @rule(
        host=st.sampled_from(HOSTS),
        slots=st.integers(1, 3),
        missing=st.sampled_from([ev.WorkerPrepared, ev.LeaveAcknowledged, ev.WorkerReady, ev.WorkerFormed]),
    )
    def begin_a_change(self, host, slots, missing):
        """A reconfiguration proceeds until the members' next message, of this kind, is missing."""
        story = self.story
        story.commit(3).answer()
        members = story.cluster.member_set
        if host in story.cluster.hosts and slots == 3:
            story.remove(host)
        else:
            story.add(f"{host}:{slots}")
        story.answer(lambda e: not (isinstance(e, missing) and e.worker in members))

    @rule()
    def let_all_answer(self):
        """All answer for some seconds."""
        if self.story.cluster.active is None:
            self.jobs += 1
            self.story.submit(f"job-{self.jobs}")
        self.story.quiet(3.0)

    # ---- drivers ----

    @precondition(lambda self: not self.story.cluster.stopping)
    @rule(data=st.data(), reached=st.integers(0, 12), written=st.booleans(), things=st.integers(0, 3))
    def the_driver_dies(self, data, reached, written, things):
        """The driver ends at any moment; things may happen until a new one takes over."""
        story = self.story
        last = self._last_event(data)
        leaving = {e.worker for e in story.answers if isinstance(e, ev.WorkerReady)} & story.cluster.member_set
        leaving = sorted(leaving) if story.cluster.stage is Stage.LEAVING and last is None else []
        held = data.draw(st.sets(st.sampled_from(leaving))) if leaving else ()
        away = Away(story, last, reached=reached, written=written, held=held)
        for _ in range(things):
            self._happens(away, data)
        frozen = sorted(map(str, story.fakes)) if data.draw(st.integers(0, 5)) == 5 else []
        late = sorted(story.agents) if data.draw(st.integers(0, 5)) == 5 else []
        away.new_driver(frozen=frozen and [data.draw(st.sampled_from(frozen))], late=late[:1])

    def _last_event(self, data) -> ev.Event | None:
        """The event that the driver handles when it ends."""
        story = self.story
        events = [
            None,
            None,
            ev.Scaled(1, 2),
            ev.Scaled(2, None),
            ev.HostAdded(parse_host("g:2", 1)),
            ev.HostRemoved("n"),
            ev.HostRemoved("n", within=5.0),
        ]
        events += story.answers[:3]
        if story.cluster.active is not None:
            events += [ev.JobStopRequested(story.job.name)]
        else:
            events += [ev.JobSubmitted(f"job-{self.jobs + 1}")]
        if story.fakes:
            events += [ev.WorkerExited(data.draw(st.sampled_from(sorted(story.fakes))), -9)]
        last = data.draw(st.sampled_from(events))
        match last:
            case ev.JobSubmitted():
                self.jobs += 1
            case ev.WorkerExited(worker=w):
                story._forget(w)
        if last in story.answers:
            story.answers.remove(last)
        return last

    def _happens(self, away, data):
        """One thing that happens while no driver runs."""
        fakes = self.story.fakes
        inside = {w for w, fake in fakes.items() if fake.formed and fake.generation and not fake.returned}
        inside = sorted(map(str, inside - self.story.stuck))
        every, hosts = sorted(map(str, fakes)), sorted(self.story.agents)
        noticed = data.draw(st.booleans())
        match data.draw(st.sampled_from(["form", "form", "commit", "kill", "host", "error", "return", "end"])):
            case "form":
                away.form()
            case "commit":
                away.form().commit(3)
            case "kill" if every:
                away.kill(data.draw(st.sampled_from(every)), noticed=noticed)
            case "host" if hosts:
                away.lose_host(data.draw(st.sampled_from(hosts)), noticed=noticed)
            case "error" if inside:
                away.raised(data.draw(st.sampled_from(inside)))
            case "return" if inside:
                away.returned(*(inside if noticed else inside[:1]))
            case "end" if inside:
                away.returned(*inside).ended(
                    *inside[: 1 + noticed], error=data.draw(st.sampled_from(["", "", "KeyError: x"]))
                )

    def _worker(self, data) -> WorkerId:
        assume(self.story.fakes)
        return data.draw(st.sampled_from(sorted(self.story.fakes)))

    def _inside(self, data) -> WorkerId:
        """A worker in the elastic function, in a generation that it has formed."""
        story = self.story
        forming = {e.worker for e in story.answers if isinstance(e, ev.WorkerFormed)}
        leaving = {e.worker for e in story.answers if isinstance(e, ev.WorkerReady)}
        leaving = leaving & story.cluster.member_set if story.cluster.stage is Stage.LEAVING else set()
        there = ({w for w, fake in story.fakes.items() if fake.generation} | leaving) - story.stuck
        inside = sorted(w for w in there - (forming - leaving) if not story.fakes[w].returned)
        assume(inside)
        return data.draw(st.sampled_from(inside))

    def _answering(self, data, kind) -> WorkerId:
        found = [e.worker for e in self.story.answers if isinstance(e, kind)]
        assume(found)
        return data.draw(st.sampled_from(found))
