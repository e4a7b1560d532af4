"""The driver's process: started by a client, told on its standard input what it is to be, it says when it is there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from nbelastic.core.provisioning import too_many
from nbelastic.driver.snapshot import Saved
from nbelastic.errors import HostError, NbelasticError
from nbelastic.protocol import events as ev
from nbelastic.protocol.run_directory import RunDir
from nbelastic.protocol.saved_cluster import begin
from nbelastic.protocol.start import AT_THE_END, Refusal, Start
from nbelastic.system import open_files
from nbelastic.system.files import make_private, redirect
from nbelastic.system.presence import end_of

if TYPE_CHECKING:
    from nbelastic.driver.driver import Driver

log = logging.getLogger("nbelastic")
LOG = "driver.log"  # in the cluster's folder of logs: what the driver's process writes to its standard output and error


# ---- in the client ----


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
    from nbelastic.driver.snapshot_writer import SnapshotWriter

    settings = start.settings
    room = open_files.room(open_files.raise_limit())
    if not start.found and settings.limits.min > room:
        raise HostError(too_many(settings.limits.min, room))
    run_dir = RunDir(settings.name)
    if not start.found:
        begin(run_dir, settings.number)
    try:
        if start.found:
            run_dir.hold()
        found = Saved.read(run_dir.path) if start.found else None
        settings, submitted = replace(settings, limits=replace(settings.limits, room=room)), start.submitted
        if found is not None:
            settings = replace(settings, log_dir=Path(found.log_dir), number=found.number, owner=found.owner)
            run_dir.sign(found.number)
            submitted = found.submitted
        make_private(settings.log_dir)
        notes = SnapshotWriter(run_dir, start.arguments, found)
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
        told = ev.StopRequested("its driver was told to end (SIGTERM)", AT_THE_END)
        loop.add_signal_handler(signal.SIGTERM, driver.take_in, told)
    try:
        await driver.serve(ready)
    except BaseException as error:  # noqa: BLE001  (it is reported, and this is the end)
        fail(error)
    os._exit(0)  # nothing is open any more, and a name that is still being looked up must not hold up the end
