"""Fake agents and workers carry out the commands of the core; their answers wait until a test sends them."""

from __future__ import annotations

from dataclasses import dataclass

from nbelastic.core import commands as cmd
from nbelastic.core.state import ClusterState
from nbelastic.protocol import events as ev
from nbelastic.protocol.exit_codes import HUNG
from nbelastic.protocol.ids import Gpu, Interface, WorkerId

SIGKILL = -9


@dataclass
class FakeWorker:
    """What a fake worker knows of itself."""

    job: str = ""
    generation: int = 0  # the generation it is in, or 0
    left: int = 0  # the newest generation it has left or seen aborted
    commit: int = 0  # of its state, since the job's beginning
    steps: int = 0  # commits in this generation
    clean: bool = True
    returned: bool = False  # from its elastic function
    offered: bool = False  # a store, in this generation
    begun: int = 0  # collectives, in this generation
    cpu: float = 0.0  # seconds of processor time
    place: str = "train.py:9 in step"
    rank: int = 0  # in its generation or, between generations, in the last
    size: int = 0  # of its generation
    was: tuple[int, int] = (0, 0)  # rank and size in the generation before
    formed: bool = False  # the group of its generation is formed
    holds: bool = False  # it has had the job's state
    since: int = 0  # the generation in which it has had it last
    numbered: int = 0  # the highest generation that it has received
    bound: bool = False  # it has acknowledged a question, and waits for the leave point
    word: ev.WorkerReady | ev.WorkerRaised | ev.WorkerSucceeded | None = (
        None  # its last report, if it waits for an answer
    )
    ended: tuple[str, str] = ("", "")  # the job of a program that has ended, and its error
    stands: int = 0  # the generation whose group it has kept when its program ended
    stopped: str = ""  # why it was asked to stop
    asks: bool = False  # it hangs and asks how to end
    debugs: bool = False  # its program waits in the debugger
    program: int = 0  # of its job
    old: tuple[int, int] | None = None  # while it tries a new program: the old one, and the commit at which it was left


def wid(text: str) -> WorkerId:
    return WorkerId.parse(text)


class FakeCluster:
    """The agents and workers of one cluster, the network between their hosts, and their unsent messages."""

    def __init__(self, cluster: ClusterState) -> None:
        self.cluster = cluster
        self.answers: list[ev.Event] = []
        self.fakes: dict[WorkerId, FakeWorker] = {}
        self.silent: set[WorkerId] = set()  # workers that send nothing
        self.stuck: set[WorkerId] = set()  # no abort wakes them
        self.kept: dict[WorkerId, tuple[str, int]] = {}  # on disks, by these workers: a job's state, and its commit
        self.started: set[WorkerId] = set()  # every worker ever started
        self.addresses: dict[str, tuple[str, ...]] = {}  # of hosts that have any, in their order of preference
        self.gpus: dict[str, tuple[Gpu, ...]] = {}  # of hosts that have any
        self.gpu_of: dict[WorkerId, str] = {}  # as it was started
        self.homes: dict[str, str] = {}  # where their workers' stores are
        self.cut: set[tuple[str, str]] = set()  # (host, address): the host does not reach the address
        self.stores: dict[WorkerId, str] = {}  # what each has offered last
        self.prepared: set[int] = set()  # generations
        self.mute: set[str] = set()  # hosts whose agents answer no probes
        self.agents: dict[str, dict[int, int]] = {}  # living agents: the newest incarnation of each slot
        self.ran: dict[WorkerId, list[str]] = {}  # sources of the setup cells that each has run, in order
        self.broken: set[tuple[str, str]] = set()  # (host or worker, source): setup cells that fail there

    def end_agent(self, name: str) -> None:
        """An agent ends, and its workers end with it."""
        self.agents.pop(name, None)
        self.kept = {w: state for w, state in self.kept.items() if w.host != name}
        for w in [w for w in self.fakes if w.host == name]:
            self._forget(w)
        self.answers = [e for e in self.answers if getattr(e, "host", "") != name]

    def end_program(self, w: WorkerId, error: str) -> None:
        fake = self.fakes[w]
        fake.ended, fake.stands = (fake.job, error), fake.generation
        fake.job, fake.generation = "", 0

    def _obey(self, command: cmd.Command) -> None:
        match command:
            case cmd.StartAgent(host=host):
                self.end_agent(host.name)
                self.agents[host.name] = {}
                self.answers.append(self._hello(host.name))
            case cmd.Probe(host=prober, target=target, addresses=tried, number=number):
                reached = tuple(address for address in tried if (prober, address) not in self.cut)
                self.answers += [ev.Probed(prober, target, reached, number)] if prober not in self.mute else []
            case cmd.Rehome(host=name, address=address):
                self._rehome(name, address)
            case cmd.QueryPosition(generation=generation, members=members):
                for w, fake in [(w, self.fakes[w]) for w in members if w in self.fakes]:
                    joined = self._connects(w, self.cluster.members)
                    self._say(
                        w, ev.PositionReported(w, generation, fake.commit, fake.begun, fake.place, fake.cpu, joined)
                    )
            case cmd.StopAgent(host=name):
                self.end_agent(name)
                if self.cluster.stopping:
                    self.answers.append(ev.AgentLost(name, "it was asked to end"))
            case cmd.StartWorker(worker=w, gpu=gpu):
                assert w not in self.started, f"{w} was started twice"
                self.gpu_of[w] = gpu
                self.started.add(w)
                self.fakes[w] = FakeWorker()
                self.agents[w.host][w.slot] = w.incarnation
                self._say(w, ev.WorkerStarted(w, 1000 + len(self.started)), ev.WorkerRegistered(w))
            case cmd.StopWorker(worker=w, kill=kill):
                self._forget(w)
                self.answers.append(ev.WorkerExited(w, SIGKILL if kill else 0))
            case cmd.RunSetup(worker=w, version=version, source=source):
                assert not self.fakes[w].job, f"{w} runs {self.fakes[w].job}"
                fails = not self.broken.isdisjoint({(w.host, source), (str(w), source)})
                if not fails:
                    self.ran.setdefault(w, []).append(source)
                self._say(w, ev.SetupEnded(w, version, f"NameError: {source}" if fails else ""))
            case cmd.RunProgram(worker=w, job=job):
                missing = {cell.source for cell in self.cluster.setup} - set(self.ran.get(w, ()))
                assert not missing, f"{w} gets a program without {missing}"
                assert not self.fakes[w].job, f"{w} still runs {self.fakes[w].job}"
                self.fakes[w] = FakeWorker(job, numbered=self.fakes[w].numbered, program=self.cluster.job.program)
                self._say_ready(w)
            case cmd.FormWorld():
                self._form(command)
            case cmd.PrepareWorld(formation=order):
                for w in order.to or order.members:
                    self._hear_of_generation(w, order.generation)
                    if self._connects(w, order.members):
                        self._say(w, ev.WorkerPrepared(w, order.generation))
            case cmd.DropWorld(generation=generation, members=members):
                for w in members:
                    self._hear_of_generation(w, generation)
                    self._unsay(w, ev.WorkerPrepared)
                    if self.fakes[w].generation == generation:
                        self._abort(w, generation)
            case cmd.AskLeave(generation=generation, members=members, number=ask):
                for w in members:
                    if not self.fakes[w].returned:
                        self.fakes[w].bound = True
                        self._say(w, ev.LeaveAcknowledged(w, generation, self.fakes[w].steps, ask))
            case cmd.LeaveAt(members=members, commit=commit):
                for w in members:
                    self._leave(w, commit)
            case cmd.HaltAt(generation=generation, commit=commit, members=members):
                for w in members:
                    fake = self.fakes[w]
                    if not fake.returned:
                        fake.commit, fake.steps, fake.bound = fake.commit + commit - fake.steps, commit, True
                        self._say(w, ev.WorkerHalted(w, generation, commit))
            case cmd.RunCommitCell(number=number, workers=workers):
                for w in workers:
                    assert self.fakes[w].bound, f"{w} does not stand still"
                    self._say(w, ev.CommitCellEnded(w, number))
            case cmd.TryProgram(program=program, workers=workers, on_trial=on_trial):
                for w in workers:
                    self._try_program(w, program, on_trial=on_trial)
            case cmd.KeepProgram(program=program, workers=workers):
                for w in workers:
                    self._keep_program(w, program)
            case cmd.InterruptCell(number=number, workers=workers):
                for w in workers:
                    self._unsay(w, ev.CommitCellEnded)
                    self._say(w, ev.CommitCellEnded(w, number))
            case cmd.CancelLeave(generation=generation, members=members):
                for w in members:
                    self._unsay(w, ev.WorkerReady, ev.WorkerHalted)
                    self._stay(self.fakes[w], generation)
            case cmd.AbortWorld(generation=generation, members=members):
                for w in members:
                    self._abort(w, generation)
            case cmd.StopProgram(workers=workers):
                for w in workers:
                    self._quit(w, command)
            case cmd.EndHungWorker(worker=w, keep=keep):
                self._end_stuck(w, keep)
            case cmd.LoadKeptState(worker=w, by=by, commit=commit):
                self._take_kept(w, by, commit)
            case cmd.DeleteKeptState(by=by):
                self.kept.pop(by, None)
            case cmd.EndJob() | cmd.Record():
                pass

    def _hello(self, name: str) -> ev.AgentReady:
        gpus = self.gpus.get(name, ())
        if name not in self.addresses:
            return ev.AgentReady(name, 1, gpus=gpus)
        self.homes[name] = self.addresses[name][0]
        return ev.AgentReady(name, 1, self.interfaces(name), 4711, gpus=gpus)

    def interfaces(self, name: str) -> tuple[Interface, ...]:
        named = enumerate(self.addresses.get(name, ()))
        return tuple(Interface("lo" if a.startswith("127.") else f"eth{i}", a) for i, a in named)

    def store(self, w: WorkerId, generation: int) -> str:
        return f"{self.homes[w.host]}:{w.slot}{generation}" if w.host in self.homes else f"{w}@{generation}"

    def reach(self, one: WorkerId, other: WorkerId) -> bool:
        """Whether two workers reach one another at their hosts' present addresses."""
        ways = ((one.host, other.host), (other.host, one.host))
        return not any((prober, self.homes.get(target, "")) in self.cut for prober, target in ways)

    def _connects(self, w: WorkerId, members: tuple[WorkerId, ...]) -> bool:
        """Whether a worker and all living members reach one another."""
        return all(self.reach(w, other) for other in members if other in self.fakes)

    def _rehome(self, name: str, address: str) -> None:
        self.homes[name] = address
        for w, fake in self.fakes.items():
            if w.host != name or not fake.job or fake.returned:
                continue
            if not fake.generation:
                self._say_ready(w)
            elif fake.offered:
                self._say(w, ev.StoreOffered(w, fake.generation, self.store(w, fake.generation)))

    def _form(self, order: cmd.FormWorld) -> None:
        is_plan = self.cluster.next_formation is not None and order.generation == self.cluster.next_formation.generation
        whole = is_plan or all(self._connects(w, order.members) for w in order.members)  # a plan's group stands already
        for rank, w in enumerate(order.members):
            fake = self.fakes.get(w)
            if (order.to and w not in order.to) or fake is None or order.generation <= fake.left:
                continue
            if not is_plan:  # else who has left the old generation still says so
                self._unsay(w, ev.WorkerReady)
            self._hear_of_generation(w, order.generation)
            fake.was, fake.rank, fake.size = (fake.rank, fake.size), rank, len(order.members)
            fake.generation, fake.steps, fake.offered, fake.begun = order.generation, 0, False, 0
            fake.formed, fake.bound, fake.word = False, False, None
            newest = max((f.commit for f in self._holders(order)), default=0)
            assert rank != order.root or fake.commit >= newest, f"commit {newest} is lost: {w} sends {fake.commit}"
            if rank in order.receivers:
                source = self.fakes.get(order.members[order.root])
                fake.commit, fake.clean = source.commit if source else fake.commit, True
            elif is_plan:
                assert fake.commit == self.fakes[order.members[order.root]].commit, f"{w} is not up to date"
            if whole:
                self._say(w, ev.WorkerFormed(w, order.generation))

    def _holders(self, order: cmd.FormWorld) -> list[FakeWorker]:
        """Living members that hold a clean commit of this job and were in a world that trained."""
        return [fake for w, fake in self.fakes.items() if w in order.members and fake.holds and fake.clean]

    def _hear_of_generation(self, w: WorkerId, generation: int) -> None:
        if w in self.fakes:
            self.fakes[w].numbered = max(self.fakes[w].numbered, generation)

    def _stay(self, fake: FakeWorker, generation: int) -> None:
        """A worker stays in its generation, or returns to it, as it has not left."""
        if fake.generation not in (0, generation):
            fake.rank, fake.size = fake.was
        fake.generation, fake.left, fake.formed, fake.bound = generation, generation - 1, True, False
        if not fake.returned and isinstance(fake.word, ev.WorkerReady):
            fake.word = None

    def _leave(self, w: WorkerId, commit: int) -> None:
        fake = self.fakes[w]
        if fake.returned:
            return
        fake.commit += commit - fake.steps
        fake.left, fake.generation, fake.formed = fake.generation, 0, False
        self._say_ready(w)

    def _abort(self, w: WorkerId, generation: int) -> None:
        fake = self.fakes.get(w)
        self._hear_of_generation(w, generation)
        if fake is None or not fake.job or fake.returned:
            return
        if w in self.stuck:
            self._ask_how_to_end(w, generation)
            return
        self._unsay(w, ev.WorkerFormed, ev.LeaveAcknowledged, ev.WorkerReady, ev.WorkerHalted, ev.CommitCellEnded)
        fake.left, fake.generation, fake.formed, fake.bound = max(fake.left, generation), 0, False, False
        self._say_ready(w)

    def _try_program(self, w: WorkerId, program: int, *, on_trial: bool) -> None:
        fake = self.fakes.get(w)
        if fake is None or not fake.job or fake.returned or fake.program == program or w in self.stuck:
            return
        assert fake.bound or not fake.generation, f"{w} does not stand still"
        fake.program, fake.old = program, (fake.program, fake.commit) if on_trial else None
        self._leave_for_program(w)

    def _keep_program(self, w: WorkerId, program: int) -> None:
        fake = self.fakes.get(w)
        if fake is None or fake.old is None or w in self.stuck:
            return
        if fake.program != program:
            assert program == fake.old[0], f"{w} is to return to program {program}"
            fake.program, fake.commit = fake.old
            self._leave_for_program(w)
        fake.old = None

    def _leave_for_program(self, w: WorkerId) -> None:
        fake = self.fakes[w]
        self._unsay(w, ev.WorkerFormed, ev.LeaveAcknowledged, ev.WorkerReady, ev.WorkerHalted, ev.CommitCellEnded)
        fake.left, fake.generation = max(fake.left, fake.generation), 0
        fake.formed = fake.bound = False
        self._say_ready(w)

    def _quit(self, w: WorkerId, order: cmd.StopProgram) -> None:
        fake = self.fakes.get(w)
        if fake is None or fake.job != order.job:
            return
        if w in self.stuck:
            self._exit_stuck(w)
            return
        self._unsay(w, ev.WorkerFormed, ev.LeaveAcknowledged, ev.WorkerReady)
        own = w == order.culprit
        error = "" if fake.returned else "its own error" if own else "the job was stopped"
        self.end_program(w, error)
        fake.stands, fake.formed, fake.stopped = 0, False, "" if own else order.reason
        if own:
            fake.word = ev.WorkerRaised(w, fake.left, intact=True, error=error)
        self._say(w, ev.ProgramEnded(w, order.job, error))

    def _ask_how_to_end(self, w: WorkerId, generation: int) -> None:
        if self.fakes[w].holds:
            self.fakes[w].asks = True
            self.answers.append(ev.WorkerHung(w, generation, self.fakes[w].commit))
        else:
            self._exit_stuck(w)

    def _ask_again(self) -> bool:
        """Each hung worker repeats its question, or that it has kept the state."""
        open_ = [w for w in self.stuck if w in self.fakes and (self.fakes[w].asks or w in self.kept)]
        for w in sorted(open_):
            fake = self.fakes[w]
            stuck = ev.WorkerHung(w, fake.numbered, fake.commit)
            word = ev.StateKept(w, fake.job, fake.commit) if w in self.kept else stuck
            self.answers.append(word)
        return bool(open_)

    def _end_stuck(self, w: WorkerId, keep: bool) -> None:
        if w not in self.stuck or w not in self.fakes:
            return
        if keep:
            fake = self.fakes[w]
            self.kept[w] = (fake.job, fake.commit)
            self.answers.append(ev.StateKept(w, fake.job, fake.commit))
        else:
            self._exit_stuck(w)

    def _take_kept(self, w: WorkerId, by: WorkerId, commit: int) -> None:
        fake = self.fakes.get(w)
        if fake is None or not fake.job or fake.generation:
            return
        assert w.host == by.host, "a disk of another host"
        assert self.kept[by] == (fake.job, commit), f"{self.kept} is kept"
        fake.commit, fake.clean, fake.holds = commit, True, True
        self._unsay(w, ev.WorkerReady)
        self._say_ready(w)

    def _exit_stuck(self, w: WorkerId) -> None:
        self._forget(w)
        self.answers.append(ev.WorkerExited(w, HUNG))

    def _say_ready(self, w: WorkerId) -> None:
        fake = self.fakes[w]
        store = self.store(w, fake.left)
        fake.word = ev.WorkerReady(
            w, fake.job, fake.left, fake.commit, fake.clean, store, fake.holds, fake.since, fake.program
        )
        self._say(w, fake.word)

    def _say(self, w: WorkerId, *events: ev.Event) -> None:
        if w in self.fakes and w not in self.silent:
            self.answers.extend(events)

    def _unsay(self, w: WorkerId, *kinds: type[ev.Event]) -> None:
        self.answers = [e for e in self.answers if not (isinstance(e, kinds) and e.worker == w)]

    def _forget(self, w: WorkerId) -> None:
        self.answers = [e for e in self.answers if getattr(e, "worker", None) != w]
        self.fakes.pop(w, None)
