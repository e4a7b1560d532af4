"""Whatever happens, in any order: the invariants hold, and ready workers train.

The invariants themselves are `invariants.faults`, checked after every step; here hypothesis draws the steps.
"""

from __future__ import annotations

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from nbelastic.core.state import HostPhase, Stage
from nbelastic.core.step import deadline
from nbelastic.protocol import events as ev
from nbelastic.protocol.program_events import ReplicaDiffered
from tests.core.any_story import HOSTS, AnyStory
from tests.core.invariants import check_saved
from tests.core.repeats import WORDS
from tests.core.settled import check_settled, settle
from tests.core.story import IN_TIME
from tests.support.soak import examples


class EveryStory(AnyStory):
    """The second half: networks, stalls, groups that fail to form, messages and time."""

    # ---- networks and stalls ----

    @precondition(lambda self: self.story.addresses)
    @rule(one=st.sampled_from(HOSTS), other=st.sampled_from(HOSTS), back=st.booleans(), data=st.data())
    def sever(self, one, other, back, data):
        """One host no longer reaches another, or some of its addresses; perhaps in both directions."""
        assume(one != other)
        known = self.story.addresses
        gone = data.draw(st.sets(st.sampled_from(sorted(known[other])), min_size=1))
        self.story.cut |= {(one, address) for address in gone}
        if back:
            self.story.cut |= {(other, address) for address in known[one]}

    @precondition(lambda self: self.story.addresses)
    @rule(host=st.sampled_from(HOSTS))
    def toggle_probe_answers(self, host):
        """A host's agent answers no probes, or answers again."""
        self.story.mute ^= {host}

    @precondition(lambda self: self.story.cut or self.story.mute)
    @rule()
    def mend(self):
        self.story.mend()

    @precondition(lambda self: any(isinstance(e, ev.Probed) for e in self.story.answers))
    @rule(data=st.data())
    def lose_an_answer(self, data):
        probed = [e for e in self.story.answers if isinstance(e, ev.Probed)]
        self.story.answers.remove(data.draw(st.sampled_from(probed)))

    @rule(host=st.sampled_from(HOSTS), slots=st.integers(1, 3))
    def lose_and_find_again(self, host, slots):
        """A host is lost and added: its agent is ready and has not answered probes yet."""
        if host in self.story.cluster.hosts:
            self.story.lose_host(host)
        self.story.add(f"{host}:{slots}").hear(ev.AgentReady)

    @precondition(lambda self: self.story.cluster.stage is Stage.RUNNING and self.story.addresses)
    @rule(back=st.booleans(), heard=st.integers(0, 12), data=st.data())
    def come_apart(self, back, heard, data):
        """Two hosts of the world no longer reach one another, so that the world stalls; some answers arrive."""
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
        """All members but one wait in a collective, and two rounds of positions show it."""
        story = self.story
        slow = data.draw(st.sampled_from(sorted(story.cluster.members)))
        for w in (story.cluster.member_set - {slow}) & story.fakes:
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

    @rule(late=st.sampled_from([0, 0, 1]), were_equal=st.booleans(), data=st.data())
    def differ(self, late, were_equal, data):
        w = self._worker(data)
        self.story.send_about(w, ReplicaDiffered(w, self.story.cluster.generation - late, 3, were_equal))

    @rule(late=st.sampled_from([0, 0, 1]))
    def go_on(self, late):
        self.story.send(ev.StallResolved(self.story.cluster.generation - late))

    # ---- groups that cannot be built ----

    @precondition(lambda self: any(isinstance(e, ev.WorkerPrepared) for e in self.story.answers))
    @rule(data=st.data(), how=st.sampled_from(["silent", "raised"]))
    def fail_to_prepare(self, data, how):
        w = self._answering(data, ev.WorkerPrepared)
        generation = next(
            e.generation for e in self.story.answers if isinstance(e, ev.WorkerPrepared) and e.worker == w
        )
        self.story._unsay(w, ev.WorkerPrepared)
        if how != "silent":
            self.story.send(ev.WorkerPrepared(w, generation, "RuntimeError: refused"))

    @rule(data=st.data(), stage=st.sampled_from(list(Stage)))
    def hang(self, data, stage):
        """A member's process lives and no longer sends what is awaited."""
        assume(self.story.cluster.stage is stage and self.story.fakes)
        members = sorted(
            w for w in self.story.cluster.awaiting or self.story.cluster.member_set if w in self.story.fakes
        )
        assume(members)
        self.story.hang(str(data.draw(st.sampled_from(members))))

    @rule(data=st.data())
    def stick(self, data):
        """A member hangs in a collective of its generation, and no abort wakes it."""
        inside = sorted(w for w, fake in self.story.fakes.items() if fake.generation and fake.job and not fake.returned)
        assume(inside)
        self.story.stick(str(data.draw(st.sampled_from(inside))))

    # ---- messages and time ----

    @precondition(lambda self: self.story.answers)
    @rule(data=st.data())
    def deliver_one(self, data):
        """One sender's next message arrives; the messages of one sender stay in order."""
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
    def deliver_again(self, data):
        """An earlier message arrives again: repeated, late, or of an ended generation, worker or job."""
        old = [e for e in self.story.heard if isinstance(e, DOUBLED) and self._may_be_repeated(e)]
        assume(old)
        self.story.send(data.draw(st.sampled_from(old)))

    @rule()
    def calm_again(self):
        self.let_all_answer()

    @rule()
    def deliver_all_but_one(self):
        """All messages but the last arrive."""
        while len(self.story.answers) > 1:
            self.story.send(self.story.answers.pop(0))

    @rule(seconds=st.sampled_from([IN_TIME, 0.1, 0.5, 1.0, 1.0, 5.0, 70.0]))
    def wait(self, seconds):
        self.story.wait(seconds)

    # ---- invariants ----

    @invariant()
    def what_is_saved_is_up_to_date(self):
        """Parts that have not changed since the earlier save are used again: the whole is as if it were made anew."""
        self.earlier = check_saved(self.story.cluster, getattr(self, "earlier", None))

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
        """All answer and time passes; then every worker that can train does."""
        if not hasattr(self, "story"):
            return
        settle(self.story)
        if self.story.cluster.active is None:
            self.jobs += 1
            self.story.submit(f"job-{self.jobs}").quiet(20.0)
            check_settled(self.story)

    def _may_be_repeated(self, event) -> bool:
        """Whether a repeated message may arrive: transports repeat and delay messages, they do not invent them."""
        fake = self.story.fakes.get(getattr(event, "worker", None))
        if isinstance(event, ev.WorkerReady) and fake is not None:
            return fake.job != event.job or event.generation <= fake.left
        return True


DOUBLED = (*WORDS, ev.StallDetected, ev.StallResolved, ev.RestartRequested)

TestAnyStory = EveryStory.TestCase
TestAnyStory.settings = settings(
    max_examples=examples(100),
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
