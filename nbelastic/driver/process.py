"""The driver's process: a client starts it, writes its settings to its standard input, and waits until it is ready."""

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

from nbelastic.core.provisioning import too_many_text
from nbelastic.driver.driver_snapshot import DriverSnapshot
from nbelastic.driver.log_folder import LOG, prepare_log_folder
from nbelastic.errors import HostError, NbelasticError, UsageError
from nbelastic.protocol import events as ev
from nbelastic.protocol.driver_start import Start, StartReport
from nbelastic.protocol.local_clusters import claim_name
from nbelastic.protocol.run_folder import RunFolder
from nbelastic.protocol.timeouts import STOP_AT_KERNEL_END
from nbelastic.system import open_files
from nbelastic.system.private_files import redirect
from nbelastic.system.process_identity import pidfd_of

if TYPE_CHECKING:
    from nbelastic.driver.driver import Driver

log = logging.getLogger("nbelastic")


def main(path: list[str]) -> None:
    """Read the settings, run the driver, and end the process. `path`: the kernel's `sys.path`, which local agents get."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    # An interrupt in the terminal is meant for the kernel. Child processes handle it themselves.
    signal.signal(signal.SIGINT, lambda *_: None)
    start = decode(sys.stdin.buffer.read())
    tempfile.tempdir = start.temporary_folder
    with os.fdopen(start.ready_fd, "wb") as pipe:
        os.set_inheritable(start.ready_fd, False)

        def send(start_report: StartReport) -> None:
            if not pipe.closed:
                with contextlib.suppress(BrokenPipeError), pipe:
                    pipe.write(msgspec.json.encode(start_report) + b"\n")

        def fail(error: BaseException) -> None:
            """End the process at once, so that nothing keeps the cluster's port. What the next driver needs stays as it is."""
            if isinstance(error, NbelasticError):
                send(StartReport(type(error).__name__, str(error)))
            else:
                log.error("the driver of %r has failed", start.settings.name, exc_info=error)
                send(StartReport(HostError.__name__, f"the driver cannot start: {type(error).__name__}: {error}"))
            os._exit(1)

        try:
            driver = prepare(start)
            sys.path[:] = path  # after all imports: a file of the user may have the name of a standard module
            redirect(driver.settings.log_dir / LOG, 1, 2)  # the kernel's terminal may close
            asyncio.run(_serve(driver, lambda: send(StartReport()), fail))
        except BaseException as error:  # noqa: BLE001  (it is reported, and this is the end)
            fail(error)


def decode(data: bytes | bytearray) -> Start:
    return msgspec.msgpack.decode(data, type=Start, dec_hook=lambda kind, value: kind(value))


def prepare(start: Start) -> Driver:
    """A driver that holds the cluster's name and is ready to serve. NbelasticError if that is impossible."""
    from nbelastic.driver.driver import Driver
    from nbelastic.driver.metrics_server import check_port
    from nbelastic.driver.snapshot_writer import SnapshotWriter

    settings = start.settings
    room = open_files.most_workers(open_files.raise_limit())
    if not start.takes_over and settings.limits.min > room:
        raise HostError(too_many_text(settings.limits.min, room))
    if not start.takes_over:
        check_port(settings.metrics_port)
    run_folder = RunFolder(settings.name)
    if not start.takes_over:
        claim_name(run_folder, settings.number)
    try:
        if start.takes_over:
            run_folder.acquire()
        previous = DriverSnapshot.read(run_folder.path) if start.takes_over else None
        settings, submitted = replace(settings, limits=replace(settings.limits, room=room)), start.submitted
        if previous is not None:
            settings = replace(settings, log_dir=Path(previous.log_dir), number=previous.number, owner=previous.owner)
            run_folder.write_number(previous.number)
            submitted = previous.submitted
        try:
            prepare_log_folder(settings.log_dir)
        except UsageError:
            if not start.takes_over:
                raise
            # Others have changed it since the cluster's start. The training goes on; its newer events are elsewhere.
            settings = replace(settings, log_dir=run_folder.new_log_dir())
            prepare_log_folder(settings.log_dir)
        snapshot_writer = SnapshotWriter(run_folder, start.arguments, previous)
        return Driver(settings, run_folder, snapshot_writer, submitted=submitted, arguments=start.arguments)
    except BaseException:
        run_folder.release(keep_folder=start.takes_over)
        raise


async def _serve(driver: Driver, ready: Callable[[], object], fail: Callable[[BaseException], None]) -> None:
    """Run the driver until its cluster has stopped. The end of the kernel that owns it stops it."""
    loop = asyncio.get_running_loop()

    def on_kernel_end() -> None:
        loop.remove_reader(kernel)
        driver.on_kernel_ended(STOP_AT_KERNEL_END)

    if driver.settings.owner:
        try:
            kernel = pidfd_of(driver.settings.owner)
            loop.add_reader(kernel, on_kernel_end)
        except ProcessLookupError:
            driver.on_kernel_ended(STOP_AT_KERNEL_END)
        stop = ev.StopRequested("its driver received SIGTERM", STOP_AT_KERNEL_END)
        loop.add_signal_handler(signal.SIGTERM, driver.post, stop)
    try:
        await driver.serve(ready)
    except BaseException as error:  # noqa: BLE001  (it is reported, and this is the end)
        fail(error)
    os._exit(0)  # all is closed, and a host name lookup in another thread must not delay the end
