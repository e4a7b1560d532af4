"""Engines as the driver needs them. What it takes of ipyparallel is here, in `client`, and in `controller` (a process)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipyparallel as ipp

from nbelastic.driver.calls import Call
from nbelastic.driver.caretaker import Caretaker
from nbelastic.driver.client import Client, Context, ControllerLostError
from nbelastic.driver.run import Cell
from nbelastic.supervision import Report, report_to_log, supervise

PROGRAM = "__import__('nbelastic.worker.program', fromlist=['call'])"
HEARTBEAT = 100  # milliseconds between two heartbeats of an engine, up to so many engines; of more, as many as engines
LONGER = 10.0  # seconds that ipyparallel waits longer for a silent engine than we do: it would throw its results away
REACH, PATIENCE = 5.0, 30.0  # seconds after which a controller is asked again, and that it may take to answer
FIRST_PAUSE, PAUSE = 0.1, 10.0  # seconds between two starts of a controller that ends soon: at first, and at most
SOON = 10.0  # seconds after its start
HISTORY = 1000  # calls that ipyparallel's client remembers
LOOK = 1.0  # seconds between two looks at what is not answered
STILL = 5  # looks at a stopped controller after which it is ended
IDLE = (2, 4, 8, 16)  # looks without an answer of who runs nothing, after which it is asked; then every 16th
Outcome = tuple[str, Any, str]


def heartbeat(most: float) -> int:
    """Milliseconds between two heartbeats for `most` engines.

    An engine counts only after a heartbeat, so a short period makes starts quick. Each heartbeat costs the controller
    about 1.1 ms of CPU. So the period grows with the engines, and all of them together take about a tenth of a core.
    """
    return max(HEARTBEAT, int(min(most, 10 * HEARTBEAT)))


class _Program:
    """A program whose outcome is waited for."""

    def __init__(self, job: str, done: Callable[[Outcome], None], request: tuple[Any, ...] | None) -> None:
        self.job, self.done = job, done
        self.request = request  # None: an earlier driver has sent it
        self.sent = request is None
        self.asked = False  # an answer is on its way


class Engines:
    """The controller and a client. `on_engine(uuid)` is called in the loop's thread when an engine can be spoken to.

    A controller that ends unasked is started again in its place, the engines come back to it, and `on_again()` is called.
    What was asked for meanwhile waits. Answers that were lost with it are asked for again if they were programs' outcomes;
    cells fail with ControllerLostError then. So it is with what a broken connection has lost: engines are asked that have
    not answered and, as `busy` tells, run no program. With `keep`, a file and a lease for `presence.outlast`, it outlives this
    process.
    """

    def __init__(
        self,
        profile_dir: str,
        name: str,
        silence: float,
        on_engine: Callable[[str], None],
        *,
        keep: tuple[Path, float] | None = None,
        on_again: Callable[[], None] = lambda: None,
        on_trouble: Callable[[str], None] = lambda why: None,  # noqa: ARG005
        most: float = 0,
        report: Report = report_to_log,
    ) -> None:
        self._profile_dir = profile_dir
        self._name = name
        period = heartbeat(most)
        misses = int((silence + LONGER) * 1000 / period)
        arguments = [
            "--nodb",  # the hub's record of every message would grow for ever
            "--usethreads",
            f"--HeartMonitor.period={period}",  # an engine counts only after a heartbeat
            f"--HeartMonitor.max_heartmonitor_misses={misses}",
            "--log-level=40",
        ]
        self._caretaker = Caretaker(Path(profile_dir), name, arguments, keep)
        self._on_engine, self._on_again, self._on_trouble = on_engine, on_again, on_trouble
        self._report = report
        self._ids: dict[str, int] = {}  # engine uuid -> ipyparallel's number, of those that can be spoken to
        self._programs: dict[str, list[_Program]] = {}  # engine uuid -> those without an outcome
        self._held: dict[str, list[Callable[[], None]]] = {}  # what waits for an engine
        self._gone: set[str] = set()  # engines that have died, of which the controller has not said so
        self._busy: dict[str, str] = {}  # engine uuid -> the job whose program it says that it runs
        self._idle: dict[str, int] = {}  # engine uuid -> for how many looks it has not answered, without running any
        self._tasks: list[asyncio.Task[None]] = []
        self._term = 0  # how many controllers have ended
        self._met = -1  # the term of the one whose engines we know of
        self._all_connected = asyncio.Event()
        self.client: Any = None
        self.connection = ""

    @property
    def process(self) -> str:
        """The controller's, as pid@start."""
        return self._caretaker.process

    # ---- beginning and end ----

    async def start(self) -> None:
        """Start the controller and connect to it."""
        await self._caretaker.begin()
        await self._reach()

    async def attach(self, process: str = "") -> None:
        """Connect to the controller that an earlier kernel has started; one that has ended is started again in its place.

        `on_engine` is called for every engine that is there. `process`: as that kernel knew it; it may be another by now.
        """
        if not self._caretaker.adopt(process):
            await self._caretaker.again()
        await self._reach()

    async def detach(self) -> None:
        """Leave the controller, and all that runs, to a later kernel."""
        await self._close()
        self._caretaker.leave()
        self._caretaker.close()

    async def stop(self) -> None:
        """End client and controller. It has nothing to tidy up, and asking it takes longer than the kernel has at its end."""
        await self._close()
        await self._caretaker.end()
        self._caretaker.close()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.client is not None:
            self.client.close()  # here: at the kernel's end no other thread can be had

    async def _reach(self) -> None:
        self._loop = asyncio.get_running_loop()
        watches = (("the look at ipyparallel's controller", self._watch), ("the look for lost answers", self._look))
        self._tasks = [self._loop.create_task(supervise(what, watch, self._report)) for what, watch in watches]
        late = self._loop.time() + PATIENCE
        while self.client is None:
            connecting = self._loop.run_in_executor(None, self._connect, self._caretaker.information("client"))
            try:
                self.client = await asyncio.shield(connecting)
            except TimeoutError:  # it may have ended meanwhile, and the next one has not heard the question
                if self._loop.time() > late:
                    raise
            except asyncio.CancelledError:
                connecting.add_done_callback(lambda made: made.exception() or made.result().close())
                raise
        self.connection = json.dumps(self._caretaker.information("engine"))
        await self._meet()

    def _connect(self, info: dict[str, Any]) -> Any:
        client = Client(
            connection_info=info,
            timeout=REACH,
            cluster_id=self._name,
            profile_dir=self._profile_dir,
            context=Context(),
        )
        client._registration_callbacks.append(self._noticed)
        client.watch(lambda connected: self._loop.call_soon_threadsafe(self._note, connected))
        return client

    # ---- the client's thread ----

    def _noticed(self, event: dict[str, Any]) -> None:
        heard = self._came if event["event"] == "register" else self._unregistered
        self._loop.call_soon_threadsafe(heard, event["uuid"], int(event["id"]))

    # ---- the loop's thread ----

    def _note(self, connected: bool) -> None:
        (self._all_connected.set if connected else self._all_connected.clear)()

    async def _watch(self) -> None:
        """For ever: have a controller. One that ends at once is started again after pauses that grow."""
        pause = 0.0
        while True:
            began = self._loop.time()
            await self._caretaker.ended()
            lived = self._loop.time() - began
            self._term += 1
            self._all_connected.clear()  # the client will say so too, but later
            self._ids.clear()
            if self.client is not None:
                self.client._io_loop.add_callback(self.client.fail_unbound)
            for uuid in self._gone:
                self._drop(uuid)
            pause = min(2 * pause or FIRST_PAUSE, PAUSE) if lived < SOON else 0.0
            if pause:
                self._on_trouble(f"it ended after {lived:.1f} s: {self._caretaker.last_line()}")
                await asyncio.sleep(pause)
            await self._start_again()
            if self.client is not None:
                meeting = self._loop.create_task(self._meet())
                ending = self._loop.create_task(self._caretaker.ended())
                await asyncio.wait((meeting, ending), return_when=asyncio.FIRST_COMPLETED)
                ending.cancel()
                if meeting.done():
                    meeting.result()
                    self._on_again()
                else:
                    meeting.cancel()
                await asyncio.gather(meeting, ending, return_exceptions=True)

    async def _look(self) -> None:
        """For ever: a stopped controller is as good as none, and a connection that breaks takes along what is on its way."""
        still = 0
        while True:
            await asyncio.sleep(LOOK)
            still = still + 1 if self._caretaker.stopped else 0
            if still >= STILL:
                await self._caretaker.end()
            for uuid in self._ids:
                waits = bool(self.client._outstanding_dict.get(uuid)) and not self._busy.get(uuid)
                self._idle[uuid] = looks = self._idle.get(uuid, 0) + 1 if waits else 0
                if looks in IDLE or (looks and looks % IDLE[-1] == 0):
                    self._sort_out(uuid)

    def busy(self, uuid: str, job: str) -> None:
        """The engine runs a program of this job; empty: none."""
        self._busy[uuid] = job

    async def _start_again(self) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                await self._caretaker.again()
            except (OSError, RuntimeError) as error:  # one of its ports may be taken for a moment
                self._on_trouble(f"the last start failed: {error}")
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSE)
            else:
                return

    async def _meet(self) -> None:
        """Wait until all of the client is connected, then get to know the engines that are there already."""
        await self._all_connected.wait()
        term = self._met = self._term
        answered: asyncio.Future[dict[str, str]] = self._loop.create_future()

        def settle(engines: dict[str, str]) -> None:
            if not answered.done():
                answered.set_result(engines)

        def answer(future: Any) -> None:
            engines = {} if future.exception() else dict(future.result()["content"]["engines"])
            self.client._update_engines(engines)
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(settle, engines)

        self.client._send(self.client._query_socket, "connection_request").add_done_callback(answer)
        for number, uuid in (await answered).items():
            if self._term == term:
                self._registered(uuid, int(number))

    def _came(self, uuid: str, number: int) -> None:
        if self._met == self._term:  # else the last controller said so, or this one before we asked it for all
            self._registered(uuid, number)

    def _registered(self, uuid: str, number: int) -> None:
        if self._ids.get(uuid) == number:
            return
        self._ids[uuid] = number
        self._sort_out(uuid)
        for program in self._programs.get(uuid, ()):
            if not program.asked:
                self._ask(uuid, program)
        for call in self._held.pop(uuid, ()):
            call()
        self._on_engine(uuid)

    def _sort_out(self, uuid: str) -> None:
        """Which answers were lost, with the last controller or a connection? Those that have not come when a later call is
        answered.
        """
        calls = set(self.client._outstanding_dict.get(uuid, ()))
        view = self._view(uuid) if calls else None
        if view is None:
            return
        last = view.apply_async(ipp.Reference(f"{PROGRAM}.outcome"), "")
        add = self.client._io_loop.add_callback
        last.add_done_callback(lambda _: add(self.client.fail, calls))
        printed = self.client._output_futures.get(last.msg_ids[0]) or last

        def sorted_out(_: object) -> None:
            add(self.client.end_output, calls)
            self._loop.call_soon_threadsafe(self._purge, last)

        printed.add_done_callback(sorted_out)

    def _unregistered(self, uuid: str, number: int) -> None:
        if self._ids.get(uuid) == number:
            del self._ids[uuid]
        self._programs.pop(uuid, None)
        self._gone.discard(uuid)

    def knows(self, uuid: str) -> bool:
        return uuid in self._ids

    def forget(self, uuid: str) -> None:
        """It is gone. Its controller will notice; the next one will never have heard of it."""
        for known in (self._held, self._busy, self._idle):
            known.pop(uuid, None)
        if self._ids.pop(uuid, None) is None:
            self._programs.pop(uuid, None)
            self._drop(uuid)
        else:
            self._gone.add(uuid)

    def _drop(self, uuid: str) -> None:
        def drop() -> None:
            for number in [number for number in self.client._ids if self.client._engines.get(number) == uuid]:
                self.client._unregister_engine({"content": {"id": number, "uuid": uuid}})

        if self.client is not None:
            self.client._io_loop.add_callback(drop)

    def execute(self, uuid: str, source: str, done: Callable[[Any], None]) -> None:
        """Run a cell on one engine; `done(AsyncResult)` is called in the loop's thread."""

        def send() -> None:
            view = self._view(uuid)
            if view is None:
                return
            result = view.execute(source, silent=False)
            result.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._with_output, result, done))

        if uuid in self._ids:
            send()
        else:
            self._held.setdefault(uuid, []).append(send)

    def _with_output(self, result: Any, done: Callable[[Any], None]) -> None:
        """What was printed comes by another socket than the answer, and may come later."""
        waiting = self._loop.run_in_executor(None, result.wait_for_output, 2.0)

        def printed(_: object) -> None:
            done(result)
            self._purge(result)

        waiting.add_done_callback(printed)

    def _purge(self, result: Any) -> None:
        """ipyparallel's client keeps every result and all output, for whoever may ask again: nobody does."""
        self.client.purge(result)
        del self.client.history[:-HISTORY]

    def run_cell(self, uuid: str, job: str, log_dir: str, cell: Cell, done: Callable[[Outcome], None]) -> None:
        """Run a cell as a job's program."""
        source, checkpoints = cell
        self._begin(uuid, _Program(job, done, ("run_cell", job, log_dir, checkpoints, source)))

    def run_function(self, uuid: str, job: str, log_dir: str, call: Call, done: Callable[[Outcome], None]) -> None:
        """Run a function as a job's program. Its parts are sent as they are: nothing is pickled or copied here."""
        parts = [memoryview(part) for part in call.parts]
        self._begin(uuid, _Program(job, done, ("call", job, log_dir, call.checkpoints, *parts)))

    def await_outcome(self, uuid: str, job: str, done: Callable[[Outcome], None]) -> None:
        """Have the outcome of a program that runs or has run; an error if the engine's newest was that of another job."""
        self._begin(uuid, _Program(job, done, None))

    def _begin(self, uuid: str, program: _Program) -> None:
        self._programs.setdefault(uuid, []).append(program)
        if uuid in self._ids:
            self._ask(uuid, program)

    def _ask(self, uuid: str, program: _Program) -> None:
        """Send a program, or ask what became of it."""
        view = self._view(uuid)
        if view is None:
            return
        request = ("outcome", program.job) if program.sent else program.request
        assert request is not None
        program.sent = program.asked = True
        name, *rest = request
        result = view.apply_async(ipp.Reference(f"{PROGRAM}.{name}"), *rest)
        result.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._settle, uuid, program, result))

    def _settle(self, uuid: str, program: _Program, result: Any) -> None:
        program.asked = False
        try:
            outcome: Outcome = result.get(timeout=0)
        except ipp.error.EngineError:
            return  # the engine died: its agent tells of that
        except ipp.RemoteError as error:  # outside the program: its value or the program itself cannot be sent
            if error.ename == "EngineError":  # the same death, as the hub tells it
                return
            lost = error.ename == ControllerLostError.__name__
            outcome = ("none" if lost else "error", f"{error.ename}: {error.evalue}", str(error.traceback))
        except Exception as error:  # noqa: BLE001  (a value that cannot be unpickled here is the program's error)
            lost = False
            outcome = ("error", f"the result cannot be read here: {type(error).__name__}: {error}", "")
        else:
            lost = False
        self._purge(result)
        waiting = self._programs.get(uuid, [])
        if program not in waiting:
            return
        if outcome[0] != "none" or (program.request is None and not lost):
            waiting.remove(program)
            program.done(outcome if outcome[0] != "none" else ("error", f"this worker has not run {program.job}", ""))
            return
        program.sent = lost  # else it was lost on the way there
        if uuid in self._ids:
            self._ask(uuid, program)

    def _view(self, uuid: str) -> Any:
        """None if the client's thread has just dropped the engine: it is dead, which its agent reports."""
        try:
            view = self.client.direct_view(self._ids[uuid])
        except (KeyError, IndexError, ipp.error.NoEnginesRegistered):
            return None
        view.block = False
        view.track = False
        return view
