"""A worker of a simulation: the real `worker.protocol`, and a main thread that does what `Session` and the elastic loop do.

The main thread is a generator: it yields what it waits for. The training state is the number of its newest commit, and of the
generation in which each commit was made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from nbelastic.protocol import events as ev
from nbelastic.protocol import messages, worker_messages
from nbelastic.protocol.ids import WorkerId
from nbelastic.worker import protocol
from nbelastic.worker.formation import Formation
from nbelastic.worker.hang_detector import REPEAT
from nbelastic.worker.link_thread import OFFER_AT
from tests.simulation.groups import Group
from tests.simulation.network import HEARTBEAT

if TYPE_CHECKING:
    from tests.simulation.world import World

LEASE = 900.0
STOP_TIMEOUT = 0.25
STEPS = (0.4, 1.6)  # seconds that a step takes
SYNC = (0.01, 0.3)  # seconds in which the state goes to newcomers


class WorldAbortedError(Exception):
    pass


class WorldLeftError(Exception):
    pass


class JobStoppedError(Exception):
    pass


class GroupError(Exception):
    """A collective has failed."""


Main = Generator[tuple[Any, ...], Any, Any]  # yields ("receive", seconds), ("sleep", seconds) or ("group", method, …)


class Worker:
    """`send(worker, message)` sends to the driver. `renew(id)` drops what has not arrived there."""

    def __init__(
        self, world: World, w: WorkerId, send: Callable[[Worker, Any], None], renew: Callable[[WorkerId], None]
    ) -> None:
        self.id, self._world, self._clock, self._rng = w, world, world.clock, world.rng
        self._send, self._renew = partial(send, self), renew
        self.term = 0  # of the newest driver
        self._offer = ""  # its store for the next generation
        self._result: ev.ProgramEnded | None = None
        self.protocol = protocol.Protocol(w, LEASE)
        self._inbox: deque[Any] = deque()
        self._attention = False
        self._main: Main | None = None
        self._waits_for_news = False
        self._timer: Any = None
        self._waiting_number = 0  # of the present wait: calls for an earlier one are late
        self._group: Group | None = None
        self._left: tuple[Group, int] | None = None  # the last group, whose connections are open
        self._group_rank = 0
        self._prepared: dict[int, tuple[Group, int]] = {}
        self._read: Formation | None = None
        self.is_alive, self.is_stopped = True, False
        self._while_stopped: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.commits: list[int] = []  # the generation in which each commit was made
        self.job = ""
        self.raised_at = 0.0  # when it last asked the driver about an error
        self._collectives = 0
        self._offers = 0

    # ---- the process ----

    def start(self) -> None:
        """It is ready for a program. It introduces itself to the driver first, if there is one."""
        self._guarded(self._start)

    def _start(self) -> None:
        drivers = self._world.drivers
        if not drivers.is_dead and self.term < drivers.term:
            self._receive(messages.NewDriver(drivers.term))
        self.protocol.facts.is_ready = True
        self._send(worker_messages.WorkerHello(self.id, 1000))

    def die(self) -> None:
        self.is_alive = False
        self._main = None
        if self._group is not None:
            self._group.close(self._group_rank, "its process has ended")
        self._close_left("its process has ended")
        for group, rank in self._prepared.values():
            group.close(rank, "its process has ended")
        self._prepared.clear()

    def stop(self) -> None:
        self.is_stopped = True

    def go_on(self) -> None:
        self.is_stopped = False
        late, self._while_stopped = self._while_stopped, []
        for call, arguments in late:
            self._guarded(call, *arguments)

    def _guarded(self, call: Callable[..., None], *arguments: Any) -> None:
        if self.is_stopped:
            self._while_stopped.append((call, arguments))
        elif self.is_alive:
            call(*arguments)

    # ---- the link thread ----

    def receive(self, message: messages.Message) -> None:
        self._guarded(self._receive, message)

    def _receive(self, message: messages.Message) -> None:
        if isinstance(message, messages.NewDriver):
            self.term = max(self.term, message.term)
        for action in self.protocol.receive(message):
            match action:
                case protocol.Post(news=news):
                    self._inbox.append(news)
                    self._attention = True
                case protocol.Send(message=answer):
                    self._send(answer)
                case protocol.Introduce():
                    self._renew(self.id)
                    self._send(self.protocol.report(1000, self._offer))
                    if self._result is not None:
                        self._send(self._result)
                case protocol.PrepareGroup(formation=formation):
                    self._prepare(formation)
                case protocol.Perform(message=order):
                    self._perform(order)
        self._abort_what_is_over()
        if self._waits_for_news and self._inbox:
            self._waits_for_news = False
            self._resume(self._inbox.popleft())

    def _perform(self, message: messages.Message) -> None:
        match message:
            case worker_messages.Program(job=job):
                self.protocol.facts.begin(job)
                self._result = None
                self._main = self._program(job)
                self._resume(None)
            case worker_messages.QueryPosition(generation=generation):
                machine = self.protocol
                if self._group is not None and machine.generation <= generation:
                    connected = machine.formation is not None and machine.formation.generation == generation
                    position = (machine.total, self._collectives, "train.py:9 in step", self._clock.now)
                    self._send(ev.PositionReported(self.id, generation, *position, connected))

    def _tick(self, generation: int) -> None:
        """As `LinkThread.tick`, while the worker waits for the driver, in this generation or before the next one."""
        machine, now = self.protocol, self._world.now_on(self.id.host)
        if machine.generation != generation:
            return
        self._clock.after(HEARTBEAT, self._guarded, self._tick, generation)
        link = protocol.LinkState(self._world.is_disconnected(self.id.host), congested=False, received_at=now)
        for action in machine.tick(now, link):
            if isinstance(action, protocol.AbortGroup):
                if self._group is not None:
                    self._group.close(self._group_rank)
                self._close_left()

    def _prepare(self, formation: Formation) -> None:
        group = self._world.groups.of(formation.generation, formation.world_size)
        self._prepared[formation.generation] = group, formation.rank

        def done(error: str) -> None:
            if self.is_alive and not self.protocol.is_over(formation.generation):
                self._send(ev.WorkerPrepared(self.id, formation.generation, error))

        group.connect(self, formation.rank, done)

    def _abort_what_is_over(self) -> None:
        for generation in [number for number in self._prepared if self.protocol.is_over(number)]:
            group, rank = self._prepared.pop(generation)
            group.close(rank)
        if self._group is not None and self.protocol.is_over(self.protocol.generation):
            self._group.leave(self._group_rank)

    def _leave_group(self) -> None:
        if self._group is not None:
            self._close_left()
            self._group.leave(self._group_rank)
            self._left, self._group = (self._group, self._group_rank), None

    def _close_left(self, why: str = "a peer has closed its connections") -> None:
        if self._left is not None:
            group, rank = self._left
            group.close(rank, why)
            self._left = None

    @property
    def blocks(self) -> bool:
        """Whether it waits in a collective for other ranks."""
        return self._group is not None and self._group.awaits(self._group_rank)

    # ---- the main thread ----

    def _resume(self, value: Any, error: BaseException | None = None) -> None:
        """Run the main thread until it waits again."""
        main = self._main
        if main is None or not self.is_alive:
            return
        self._waiting_number += 1
        number = self._waiting_number
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            match main.throw(error) if error is not None else main.send(value):
                case ("sleep", seconds):
                    self._timer = self._clock.after(seconds, self._wake, number, None)
                case ("group", call, *arguments):
                    call(*arguments, partial(self._wake, number))
                case ("receive", seconds):
                    self._waits_for_news = not self._inbox
                    self._timer = self._clock.after(0.0 if self._inbox else seconds, self._wake, number, None)
        except StopIteration:
            self._main = None

    def _wake(self, number: int, error: str | None) -> None:
        if self.is_stopped:
            self._while_stopped.append((self._wake, (number, error)))
        elif number == self._waiting_number and self.is_alive:
            self._waits_for_news = False
            if error:
                self._resume(None, GroupError(error))
            else:
                self._resume(self._inbox.popleft() if error is None and self._inbox else None)

    def _program(self, job: str) -> Main:
        machine = self.protocol
        self._leave_group()
        self._close_left()
        self._inbox.clear()
        self._read = None
        machine.begin(job, 0)
        self.job, self.commits = job, []
        error = ""
        try:
            if machine.quit is not None:
                raise JobStoppedError
            yield ("sleep", self._rng.uniform(0.01, 0.5))  # it builds its model
            while not (yield from self._generation()):
                pass
        except JobStoppedError:
            error = "the job was stopped"
        if machine.quit is not None:
            machine.leave()
            self._leave_group()
        machine.facts.busy = False
        self._result = ev.ProgramEnded(self.id, job, error)
        self._send(self._result)

    def _generation(self) -> Main:
        """Returns whether the function has returned."""
        formation = yield from self._gather()
        try:
            yield from self._join(formation)
            while True:
                yield ("sleep", self._rng.uniform(*STEPS))
                self._collectives += 1
                yield ("group", self._group.collective, self._group_rank)
                if self.protocol.is_over(self.protocol.generation):
                    raise WorldAbortedError
                self._commit()
                if self._attention:
                    yield from self._read_messages()
        except (WorldLeftError, WorldAbortedError):
            return False
        except GroupError as error:
            yield from self._ask_about(str(error))
            return False

    def _gather(self) -> Main:
        machine = self.protocol
        machine.leave()
        self._make_offer()
        if machine.left > 0 and machine.is_over(machine.left):
            self._clock.after(HEARTBEAT, self._guarded, self._tick, 0)
        news, sent = None, None
        while True:
            if machine.quit is not None:
                raise JobStoppedError
            ready = machine.ready(len(self.commits), clean=True, store=self._offer)
            if ready != sent or not isinstance(news, worker_messages.Abort):
                self._send(ready)
                sent = ready
            self._leave_group()
            read, self._read = self._read, None
            news = read or (yield from self._next(REPEAT))
            formation = machine.enter(news)
            if formation is not None:
                return formation
            if isinstance(news, messages.Rehome):
                self._make_offer()

    def _make_offer(self) -> None:
        self._offers += 1
        self._offer = self._world.store_of(self.id, self._offers)

    def _next(self, seconds: float) -> Main:
        news = yield ("receive", seconds)
        if isinstance(news, worker_messages.StopProgram) and not news.own:
            raise JobStoppedError
        return news

    def _join(self, formation: Formation) -> Main:
        machine = self.protocol
        self._prepared.pop(formation.generation, None)
        self._group = self._world.groups.of(formation.generation, formation.world_size)
        self._group_rank = formation.rank
        machine.generation = formation.generation
        self._collectives, self._offer = 0, ""
        if machine.is_over(formation.generation):
            raise WorldAbortedError
        yield ("group", self._group.connect, self, formation.rank)
        if machine.is_over(formation.generation):
            raise WorldAbortedError
        machine.joined(formation)
        shared = self._world.transfers.setdefault(formation.generation, {})
        if formation.rank == formation.root:
            shared["commits"] = list(self.commits)
        if formation.receivers:
            yield ("sleep", self._rng.uniform(*SYNC))
            yield ("group", self._group.collective, formation.rank)
            if machine.is_over(formation.generation):
                raise WorldAbortedError
            if formation.rank in formation.receivers:
                assert len(self.commits) <= len(shared["commits"]), (
                    f"{self.id} loses commits to generation {machine.generation}"
                )
                self.commits = list(shared["commits"])
                machine.total = len(self.commits)
        self._world.check_synced(self, formation, shared)
        self._send(machine.formed({}))

    def _commit(self) -> None:
        machine = self.protocol
        self.commits.append(machine.generation)
        self._world.check_commit(self)
        machine.commits += 1
        machine.total = len(self.commits)
        self._world.progress(self.id, machine.generation, machine.total)
        if machine.commits == OFFER_AT:
            self._close_left()
            self._make_offer()
            self._send(ev.StoreOffered(self.id, machine.generation, self._offer))

    def _read_messages(self) -> Main:
        machine, announced = self.protocol, False
        while True:
            waiting = machine.pause_at is not None and machine.commits >= machine.pause_at
            if waiting and machine.stands_still and not announced:
                announced = True
                self._send(ev.WorkerHalted(self.id, machine.generation, machine.commits))
            if waiting:
                news = yield from self._next(REPEAT)
            elif self._inbox:
                news = self._inbox.popleft()
                if isinstance(news, worker_messages.StopProgram) and not news.own:
                    raise JobStoppedError
            else:
                break
            if isinstance(news, Formation):
                self._read = news
            elif isinstance(news, worker_messages.Abort | worker_messages.DropGroup) and machine.is_over(
                machine.generation
            ):
                raise WorldAbortedError
            announced = announced and not isinstance(news, worker_messages.Halt)
        if machine.leave_at is not None and machine.commits >= machine.leave_at:
            raise WorldLeftError
        self._attention = machine.has_promised or bool(self._inbox)

    def _ask_about(self, error: str) -> Main:
        """As `Session.is_own_error` for an error of the group."""
        machine, generation = self.protocol, self.protocol.generation
        raised, self.raised_at = machine.raised(error, intact=False), self._clock.now
        self._clock.after(HEARTBEAT, self._guarded, self._tick, generation)
        while not machine.is_over(generation):
            self._send(raised)
            news = yield from self._next(REPEAT)
            if isinstance(news, worker_messages.Abort | worker_messages.DropGroup) and machine.is_over(generation):
                yield from self._next(STOP_TIMEOUT)
                return
