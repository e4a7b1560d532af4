"""Whatever happens, in whatever order: what must always hold does, and ready workers get to train.

The invariants themselves are `invariants.faults`, checked after every step of every story; here hypothesis tells the story.
"""

from __future__ import annotations

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nbelastic.core import commands as cmd
from nbelastic.core.state import HostPhase, Stage
from nbelastic.core.step import deadline
from nbelastic.protocol import events as ev
from nbelastic.protocol.exit_codes import HUNG
from nbelastic.protocol.host_parsing import parse_host
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.timeouts import Timeouts
from tests.core.away import Away
from tests.core.invariants import WORDS
from tests.core.story import IN_TIME, Story
from tests.support.soak import examples

HOSTS = ("n", "b", "g")  # in the order of their coming, which is not that of their names
NETWORKS = (  # of these hosts: their addresses
    {},
    {"n": ("127.0.0.1", "10.0.0.1"), "b": ("127.0.0.2", "10.0.0.1"), "g": ("127.0.0.3", "10.0.0.1")},
    {"n": ("127.0.0.1", "10.0.0.1"), "b": ("127.0.0.2", "10.0.0.1", "10.1.0.1"), "g": ("10.0.0.3", "10.1.0.3")},
    {"n": ("10.0.0.1", "10.1.0.1"), "b": ("10.0.0.2", "10.1.0.2"), "g": ("10.0.0.3", "10.1.0.3")},
)
LONG_ENOUGH = 4  # times ten minutes: every deadline has come by then
CODES = (-9, -11, 0, 1, 3, HUNG)


class AnyStory(RuleBasedStateMachine):
    """Hosts, workers, people and time do what they like; the workers that live are faithful."""

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
            timeouts=Timeouts(step=300.0, recover_working=120.0, sync=300.0),
        )
        self.story.addresses = dict(network)
        self.jobs = 0
        self.story.add("n:2").add("b:1")  # not in alphabetical order: seniority is not the name
        self.calm()

    # ---- hosts and people ----

    @rule(host=st.sampled_from(HOSTS), slots=st.integers(1, 3))
    def add_host(self, host, slots):
        self.story.add(f"{host}:{slots}")
        slots = self.story.cluster.hosts[host].slots if host in self.story.cluster.hosts else ()
        assert not any(slot.backoff_until > self.story.now for slot in slots), "adding a host pardons it"

    @rule(host=st.sampled_from(HOSTS), now=st.booleans())
    def remove_host(self, host, now):
        self.story.remove(host, now=now)

    @rule(hosts=st.dictionaries(st.sampled_from(HOSTS), st.integers(1, 3)))
    def discover(self, hosts):
        self.story.discover(*(f"{name}:{slots}" for name, slots in hosts.items()))

    @precondition(lambda self: self.story.cluster.hosts)
    @rule()
    def discovery_fails(self):
        workers = self.story.cluster.workers
        self.story.send(ev.DiscoveryFailed("no answer"))
        assert self.story.cluster.workers == workers, "a failing discovery disturbs nobody"

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
        mark = self.story.mark()
        self.story.send(ev.WorkerSilent(w, seconds, idle))
        if cmd.StopWorker(w, kill=True) in self.story.commands(cmd.StopWorker, mark):
            self.story._forget(w)

    @precondition(lambda self: any(isinstance(e, ev.WorkerExited) for e in self.story.answers))
    @rule(data=st.data())
    def end_unreported(self, data):
        """A worker was told to end, and nobody says that it has."""
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
        mark = self.story.mark()
        self.story.send(ev.RestartRequested(w, "a test"))
        if cmd.StopWorker(w, kill=True) in self.story.commands(cmd.StopWorker, mark):
            self.story._forget(w)

    @precondition(lambda self: self.story.cluster.stage is Stage.FORMING and self.story.cluster.formation.receivers)
    @rule(data=st.data())
    def die_while_sending(self, data):
        """The root of a transfer dies, and some who were receiving hold parts of two commits."""
        order = self.story.cluster.formation
        root, receiving = order.members[order.root], [order.members[rank] for rank in order.receivers]
        torn = sorted(self.story.cluster.awaiting.intersection(receiving) & self.story.fakes.keys())
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
        """Up to the moment where the members' next word, of this kind, is missing."""
        story = self.story
        story.commit(3).answer()
        members = story.cluster.member_set
        if host in story.cluster.hosts and slots == 3:
            story.remove(host)
        else:
            story.add(f"{host}:{slots}")
        story.answer(lambda e: not (isinstance(e, missing) and e.worker in members))

    # ---- drivers ----

    @precondition(lambda self: not self.story.cluster.stopping)
    @rule(data=st.data(), reached=st.integers(0, 12), written=st.booleans(), things=st.integers(0, 3))
    def the_driver_dies(self, data, reached, written, things):
        """At any moment, most likely in the middle of something; something may happen until a new one comes."""
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
        """With which the driver is busy when it dies."""
        story = self.story
        events = [
            None,
            None,
            ev.Scaled(1, 2),
            ev.Scaled(2, None),
            ev.HostAdded(parse_host("g:2", 1)),
            ev.HostRemoved("n"),
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
        """While no driver is there."""
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

    # ---- networks, and standing still ----

    @precondition(lambda self: self.story.addresses)
    @rule(one=st.sampled_from(HOSTS), other=st.sampled_from(HOSTS), back=st.booleans(), data=st.data())
    def sever(self, one, other, back, data):
        """One host reaches another no longer, or at some addresses only; perhaps the other way too."""
        assume(one != other)
        known = self.story.addresses
        gone = data.draw(st.sets(st.sampled_from(sorted(known[other])), min_size=1))
        self.story.cut |= {(one, address) for address in gone}
        if back:
            self.story.cut |= {(other, address) for address in known[one]}

    @precondition(lambda self: self.story.addresses)
    @rule(host=st.sampled_from(HOSTS))
    def fall_silent(self, host):
        """Its agent answers no probes; when there are some, it does again."""
        self.story.mute ^= {host}

    @precondition(lambda self: self.story.cut or self.story.mute)
    @rule()
    def mend(self):
        self.story.cut.clear()
        self.story.mute.clear()

    @precondition(lambda self: any(isinstance(e, ev.Probed) for e in self.story.answers))
    @rule(data=st.data())
    def lose_an_answer(self, data):
        probed = [e for e in self.story.answers if isinstance(e, ev.Probed)]
        self.story.answers.remove(data.draw(st.sampled_from(probed)))

    @rule(host=st.sampled_from(HOSTS), slots=st.integers(1, 3))
    def lose_and_find_again(self, host, slots):
        """A host is lost and added: it is a newcomer, and its agent is heard, but not yet what it was asked."""
        if host in self.story.cluster.hosts:
            self.story.lose_host(host)
        self.story.add(f"{host}:{slots}").hear(ev.AgentReady)

    @precondition(lambda self: self.story.cluster.stage is Stage.RUNNING and self.story.addresses)
    @rule(back=st.booleans(), heard=st.integers(0, 12), data=st.data())
    def come_apart(self, back, heard, data):
        """Two hosts of the world reach one another no longer, and so it stands still; some of the answers are heard."""
        story, hosts = self.story, sorted({w.host for w in self.story.cluster.members})
        assume(len(hosts) > 1)
        one, other = data.draw(st.permutations(hosts))[:2]
        story.cut |= {(one, address) for address in story.addresses[other]}
        if back:
            story.cut |= {(other, address) for address in story.addresses[one]}
        story.send(ev.StallDetected(story.cluster.generation, 3.0))
        for answer in [e for e in story.answers if isinstance(e, ev.PositionReported | ev.Probed)][:heard]:
            story.answers = [e for e in story.answers if e is not answer]
            story.send(answer)

    @precondition(lambda self: self.story.cluster.stage in (Stage.RUNNING, Stage.ASKED, Stage.LEAVING))
    @rule(seconds=st.sampled_from([0.0, 1.0, 3.0]), data=st.data())
    def fall_behind(self, seconds, data):
        """All but one wait in a collective, and say so twice."""
        story = self.story
        slow = data.draw(st.sampled_from(sorted(story.cluster.members)))
        for w in story.cluster.member_set - {slow}:
            story.fakes[w].begun += 1
        for past in (0.0, seconds):
            story.wait(past)
            story.stand_still(3.0 + past)

    @precondition(lambda self: any(isinstance(e, ev.AgentReady) for e in self.story.answers))
    @rule()
    def refuse_an_agent(self):
        hello = [e for e in self.story.answers if isinstance(e, ev.AgentReady)]
        self.story.answers.remove(hello[0])
        self.story.send(ev.AgentReady(hello[0].host, 1, problem="another version"))

    @rule(late=st.sampled_from([0, 0, 0, 1]), seconds=st.sampled_from([3.0, 30.0]))
    def stand_still(self, late, seconds):
        self.story.send(ev.StallDetected(self.story.cluster.generation - late, seconds))

    @rule(late=st.sampled_from([0, 0, 1]))
    def go_on(self, late):
        self.story.send(ev.StallResolved(self.story.cluster.generation - late))

    # ---- groups that cannot be built ----

    @precondition(lambda self: any(isinstance(e, ev.WorkerPrepared) for e in self.story.answers))
    @rule(data=st.data(), how=st.sampled_from(["silent", "raised", "raised", "unsupported"]))
    def fail_to_prepare(self, data, how):
        w = self._answering(data, ev.WorkerPrepared)
        generation = next(
            e.generation for e in self.story.answers if isinstance(e, ev.WorkerPrepared) and e.worker == w
        )
        self.story._unsay(w, ev.WorkerPrepared)
        if how != "silent":
            self.story.send(ev.WorkerPrepared(w, generation, "RuntimeError: refused", supported=how == "raised"))

    @rule(data=st.data(), stage=st.sampled_from(list(Stage)))
    def hang(self, data, stage):
        """A member's process lives, and says nothing of what is waited for any more: that it has left, come in, or prepared."""
        assume(self.story.cluster.stage is stage and self.story.fakes)
        members = sorted(
            w for w in self.story.cluster.awaiting or self.story.cluster.member_set if w in self.story.fakes
        )
        assume(members)
        self.story.hang(str(data.draw(st.sampled_from(members))))

    @rule(data=st.data())
    def stick(self, data):
        """A member sleeps in a collective of its generation, and no abort will wake it."""
        inside = sorted(w for w, fake in self.story.fakes.items() if fake.generation and fake.job and not fake.returned)
        assume(inside)
        self.story.stick(str(data.draw(st.sampled_from(inside))))

    # ---- words and time ----

    @precondition(lambda self: self.story.answers)
    @rule(data=st.data())
    def hear_one(self, data):
        """Somebody's next word arrives: each one's own words in their order, but whose is first is chance."""
        firsts = {}
        for answer in self.story.answers:
            firsts.setdefault(getattr(answer, "worker", getattr(answer, "host", "")), answer)
        answer = data.draw(st.sampled_from(list(firsts.values())))
        self.story.answers.remove(answer)
        self.story.send(answer)

    @rule()
    def hear_all(self):
        self.story.answer()

    @precondition(lambda self: self.story.heard)
    @rule(data=st.data())
    def hear_again(self, data):
        """What was heard before is heard again: doubled, late, from dead generations, dead workers and dead jobs."""
        old = [e for e in self.story.heard if isinstance(e, DOUBLED) and self._is_news_of_the_past(e)]
        assume(old)
        self.story.send(data.draw(st.sampled_from(old)))

    @rule()
    def calm(self):
        """For once everything goes well for some seconds."""
        if self.story.cluster.active is None:
            self.jobs += 1
            self.story.submit(f"job-{self.jobs}")
        self.story.quiet(3.0)

    @rule()
    def calm_again(self):
        self.calm()

    @rule()
    def all_but_the_last_word(self):
        """Where the interesting moments are: one word is missing."""
        while len(self.story.answers) > 1:
            self.story.send(self.story.answers.pop(0))

    @rule(seconds=st.sampled_from([IN_TIME, 0.1, 0.5, 1.0, 1.0, 5.0, 70.0]))
    def wait(self, seconds):
        self.story.wait(seconds)

    # ---- what must hold ----

    @invariant()
    def cooling_is_visible(self):
        for host in self.story.cluster.hosts.values():
            for slot in host.slots[: host.spec.slots]:
                if slot.backoff_until > self.story.now:
                    assert slot.reason
                    assert not slot.busy
                    assert slot.backoff_until - self.story.now <= 300.0
            if host.phase is HostPhase.LOST:
                assert host.reason
                assert host.retry_at > self.story.now or deadline(self.story.cluster, self.story.now) <= self.story.now

    def teardown(self):
        """Peace: everybody answers and time passes. Then everything that can train does."""
        if not hasattr(self, "story"):
            return
        story = self.story
        self.mend()
        for name in [name for name in story.cluster.hosts if story.cluster.hosts[name].phase is not HostPhase.DRAINING]:
            story.add(f"{name}:{story.cluster.hosts[name].spec.slots}")  # pardoned
        for _ in range(LONG_ENOUGH):
            story.quiet(600.0)
            if (
                story.cluster.stage is Stage.RUNNING
            ):  # those who could not be joined before are tried beside the training
                story.commit(3)
        story.quiet(40.0)
        cluster = story.cluster
        assert deadline(cluster, story.now) > story.now
        self._at_peace()
        if cluster.active is None:
            self.jobs += 1
            story.submit(f"job-{self.jobs}").quiet(20.0)
            self._at_peace()

    def _at_peace(self):
        cluster, story = self.story.cluster, self.story
        job, limits = cluster.active, cluster.limits
        assert not cluster.suspects
        assert not cluster.stopped, "who was told to end has ended"
        assert not cluster.probing
        assert all(host.phase in (HostPhase.UP, HostPhase.DRAINING) for host in cluster.hosts.values())
        if job is None:
            assert all(not fake.job for fake in story.fakes.values()), "a program of no job runs on"
            return
        if job.succeeded:
            assert any(fake.job for fake in story.fakes.values()), "the job waits for nobody"
            return
        able = {w for w in cluster.workers if w not in cluster.failed and story.fakes[w].job == job.name}
        able -= {w for w in able if story.fakes[w].returned}
        # One that hung in the last job as well does not come to its elastic function: that may take as long as it likes.
        able -= {w for w in able if w in story.silent and not story.fakes[w].generation}
        if cluster.held_back:  # a member hangs, so that nobody can be joined with it
            assert "is left out" in story.reason, story.reason
            return
        if (
            cluster.stage is Stage.PREPARING and story.silent & cluster.awaiting & cluster.member_set
        ):  # the same, tried again
            return
        asked = cluster.stage in (Stage.RUNNING, Stage.PREPARING, Stage.ASKED)
        if (
            asked and cluster.postponements and story.silent & cluster.member_set
        ):  # it alone holds the state, and never answers
            return
        size = len(cluster.members)
        if cluster.stage is Stage.RUNNING:
            best = int(min(limits.most, len(able)))
            assert size == best or best < limits.min, f"{size} of {best} train: {story.reason}"
            assert all(story.fakes[w].generation == cluster.generation for w in cluster.members)
            return
        assert cluster.stage is Stage.GATHERING, f"stuck in {cluster.stage}: {story.reason}"
        assert len(able) < limits.min, f"{len(able)} could train: {story.reason}"
        assert "of min" in story.reason

    def _worker(self, data) -> WorkerId:
        assume(self.story.fakes)
        return data.draw(st.sampled_from(sorted(self.story.fakes)))

    def _inside(self, data) -> WorkerId:
        """One that is in the function, in a generation that it has formed."""
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

    def _is_news_of_the_past(self, event) -> bool:
        """Not a word that would be a lie if it were said now: links double and delay words, they do not invent them."""
        fake = self.story.fakes.get(getattr(event, "worker", None))
        if isinstance(event, ev.WorkerReady) and fake is not None:
            return fake.job != event.job or event.generation <= fake.left
        return True


DOUBLED = (*WORDS, ev.StallDetected, ev.StallResolved, ev.RestartRequested)

TestAnyStory = AnyStory.TestCase
TestAnyStory.settings = settings(
    max_examples=examples(100),
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
