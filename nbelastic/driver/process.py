"""The driver's process: started by a client, told on its standard input what it is to be, it says when it is there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from nbelastic import descriptors
from nbelastic.core import messages as m
from nbelastic.core.errors import HostError, NbelasticError
from nbelastic.core.staffing import too_many
from nbelastic.driver.connection import Connection, error_of
from nbelastic.driver.places import START, RunDir
from nbelastic.driver.requests import Stop
from nbelastic.driver.saved import begin, read, sweep
from nbelastic.driver.settings import Settings
from nbelastic.driver.updates import encoded
from nbelastic.files import make_private, redirect
from nbelastic.presence import end_of

if TYPE_CHECKING:
    from nbelastic.driver.driver import Driver

CODE = """import json, sys
ours, *path = json.loads(sys.stdin.buffer.readline())
sys.path[:0] = [ours]
import nbelastic
sys.path[:1] = []
sys.path += [each for each in path if each and each not in sys.path]
from nbelastic.driver.process import main
main(path)"""
log = logging.getLogger("nbelastic")
LOG = "driver.log"  # in the cluster's folder of logs: what the driver's process writes to its standard output and error
TAKEN_BACK = 5.0  # seconds to stop what has begun, when somebody interrupts a start
LAST_WORDS = 2000  # characters of what it wrote
AT_THE_END = 0.5  # seconds that programs have when the kernel has ended


class Start(msgspec.Struct, frozen=True):
    """What the process is told. `found`: it takes over what another driver has left. `submitted`: jobs so far. `patience`: seconds
    that it may take to start. `temporary`: the kernel's temporary folder.

    `arguments`: those of `Cluster`, as they are kept. `ready`: the descriptor of a pipe.
    """

    settings: Settings
    arguments: dict[str, Any]
    found: bool = False
    submitted: int = 0
    patience: float = START
    temporary: str = ""
    ready: int = -1


class Refusal(msgspec.Struct, frozen=True):
    """Why there is no driver: the name of an error's class in `core.errors`, and its text. Both are empty: there is one."""

    error: str = ""
    text: str = ""


# ---- in the client ----


def launch(
    start: Start, folder: Path, on_change: Callable[[], object], before: Connection | None = None
) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Start the driver's process for this run folder; returns when it can be asked. `before`: see `Connection`.

    It outlives this thread, this session and, if the cluster is kept, this process. Raises what is wrong: UsageError if there is
    such a cluster already, HostError if the driver cannot start.
    """
    ours, theirs = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, ours)
        words = stack.enter_context(tempfile.TemporaryFile())
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", CODE, f"nbelastic-driver {start.settings.name}"],  # for `ps`
                stdin=subprocess.PIPE,
                stdout=words,
                stderr=words,
                start_new_session=True,  # what interrupts or ends the kernel's process group is not for it
                pass_fds=[theirs],
            )
        finally:
            os.close(theirs)
        try:
            start = replace(start, ready=theirs, temporary=tempfile.gettempdir())
            home = str(Path(__file__).parents[2])  # where the driver finds the same nbelastic as this process
            path = [home, *(each for each in sys.path if isinstance(each, str))]
            data = json.dumps(path).encode() + b"\n" + bytes(encoded(start))
            with contextlib.suppress(BrokenPipeError):  # it has ended, and has said why
                _tell(child, data)
            _wait_for(ours, child, words, start.patience)
        except BaseException:
            _end(child, start)
            raise
        try:
            return Connection(folder, on_change, before), child
        except (OSError, TimeoutError):
            _take_back(child, start, folder)
            raise HostError("the driver's process does not answer at its start: try again.") from None
        except BaseException:
            _take_back(child, start, folder)
            raise


def _take_back(child: subprocess.Popen[bytes], start: Start, folder: Path) -> None:
    """End a driver that is there, and what it may have started by now; but not what it has taken over."""
    if child.poll() is None and not start.found:
        with contextlib.suppress(OSError, NbelasticError, subprocess.TimeoutExpired):
            Connection(folder).request(Stop("an interrupt", 0.0))
            child.wait(TAKEN_BACK)
    _end(child, start)


def _end(child: subprocess.Popen[bytes], start: Start) -> None:
    """At once, with what it may just have started; but not with what it has taken over."""
    child.kill()
    child.wait()
    if not start.found:
        sweep(start.settings.name, start.settings.number, kill=True)


def _tell(child: subprocess.Popen[bytes], data: bytes) -> None:
    assert child.stdin is not None
    with child.stdin:
        child.stdin.write(data)


def _wait_for(ready: int, child: subprocess.Popen[bytes], words: IO[bytes], patience: float) -> None:
    """Return when the driver says that it is there. NbelasticError if it is not."""
    end, said = time.monotonic() + patience, b""
    news = select.poll()
    news.register(ready, select.POLLIN)
    while not said.endswith(b"\n"):
        if not news.poll(max(0.0, end - time.monotonic()) * 1000):
            raise HostError(f"the driver's process did not start within {patience:g} s.")
        data = os.read(ready, 1 << 16)
        if not data:
            words.seek(0)
            last = words.read()[-LAST_WORDS:].decode(errors="replace").strip()
            raise HostError(f"the driver's process has ended at its start (exit code {child.wait()}): {last}")
        said += data
    refusal = msgspec.json.decode(said, type=Refusal)
    if refusal.error:
        raise error_of(refusal.error, refusal.text)


# ---- in the driver's process ----


def main(path: list[str]) -> None:
    """Read what to be, be it, and end. `path`: the kernel's `sys.path`, which agents of this machine get."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    # An interrupt is for what runs in the kernel; children have their own way.
    signal.signal(signal.SIGINT, lambda *_: None)
    start = decoded(sys.stdin.buffer.read())
    tempfile.tempdir = start.temporary
    with os.fdopen(start.ready, "wb") as pipe:
        os.set_inheritable(start.ready, False)

        def say(refusal: Refusal) -> None:
            if not pipe.closed:
                with contextlib.suppress(BrokenPipeError), pipe:
                    pipe.write(msgspec.json.encode(refusal) + b"\n")

        def fail(error: BaseException) -> None:
            """At once: nothing that is still going on may keep the cluster's port; what the next driver needs is left as it is."""
            if isinstance(error, NbelasticError):
                say(Refusal(type(error).__name__, str(error)))
            else:
                log.error("the driver of %r has failed", start.settings.name, exc_info=error)
                say(Refusal(HostError.__name__, f"the driver cannot start: {type(error).__name__}: {error}"))
            os._exit(1)

        try:
            driver = prepare(start)
            sys.path[:] = path  # not before all is imported: a file of the user's may be named as a module of Python's
            redirect(driver.settings.log_dir / LOG, 1, 2)  # the kernel's terminal may go away
            asyncio.run(_serve(driver, lambda: say(Refusal()), fail))
        except BaseException as error:  # noqa: BLE001  (it is reported, and this is the end)
            fail(error)


def decoded(told: bytes | bytearray) -> Start:
    return msgspec.msgpack.decode(told, type=Start, dec_hook=lambda kind, value: kind(value))


def prepare(start: Start) -> Driver:
    """A driver that holds the cluster's name, and has all that it needs to serve. NbelasticError if it cannot be."""
    from nbelastic.driver.driver import Driver
    from nbelastic.driver.notes import Notes

    settings = start.settings
    room = descriptors.room(descriptors.raise_limit())
    if not start.found and settings.limits.min > room:
        raise HostError(too_many(settings.limits.min, room))
    run_dir = RunDir(settings.name)
    if not start.found:
        begin(run_dir, settings.number)
    try:
        if start.found:
            run_dir.hold()
        found = read(run_dir.path) if start.found else None
        settings, submitted = replace(settings, limits=replace(settings.limits, room=room)), start.submitted
        if found is not None:
            settings = replace(settings, log_dir=Path(found.log_dir), number=found.number, owner=found.owner)
            run_dir.sign(found.number)
            submitted = found.submitted
        make_private(settings.log_dir)
        notes = Notes(run_dir, start.arguments, found)
        return Driver(settings, run_dir, notes, submitted=submitted, arguments=start.arguments)
    except BaseException:
        run_dir.let_go() if start.found else run_dir.release()
        raise


async def _serve(driver: Driver, ready: Callable[[], object], fail: Callable[[BaseException], None]) -> None:
    """Run the driver until its cluster has stopped. The end of the kernel that owns it stops it."""
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(kernel)
        driver.kernel_ended(AT_THE_END)

    if driver.settings.owner:
        try:
            kernel = end_of(driver.settings.owner)
            loop.add_reader(kernel, ended)
        except ProcessLookupError:
            driver.kernel_ended(AT_THE_END)
        told = m.StopRequested("its driver was told to end (SIGTERM)", AT_THE_END)
        loop.add_signal_handler(signal.SIGTERM, driver.take_in, told)
    try:
        await driver.serve(ready)
    except BaseException as error:  # noqa: BLE001  (it is reported, and this is the end)
        fail(error)
    os._exit(0)  # nothing is open any more, and a name that is still being looked up must not hold up the end
