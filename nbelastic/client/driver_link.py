"""Starts the driver of one cluster, connects this process to it, sends it requests, and leaves it."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any

from msgspec.structs import replace

from nbelastic.client.code_sync import CodeSync
from nbelastic.client.configuration import Configuration
from nbelastic.client.connection import Connection
from nbelastic.client.discovery_poller import DiscoveryPoller
from nbelastic.client.driver_process import start_driver_process
from nbelastic.client.notebook_line import show_in_one_line
from nbelastic.client.progress import ProgressLine, describe_progress, terminal
from nbelastic.client.replacement import DriverReplacement
from nbelastic.client.saved_arguments import BY_CLIENTS
from nbelastic.client.waiting import ANSWER_TIMEOUT, wait_for_result
from nbelastic.errors import ClusterStoppedError, DriverLostError
from nbelastic.protocol import requests
from nbelastic.protocol.driver_start import Start
from nbelastic.protocol.host_sources import ClientDiscovery, HostDiscovery
from nbelastic.protocol.local_clusters import remove_dead_cluster
from nbelastic.protocol.run_folder import RunFolder
from nbelastic.protocol.status import Status
from nbelastic.system.process_identity import identity
from nbelastic.system.processes import disown

NOT_ATTACHED = "it was not attached to"
START_UNDONE = "the start is undone: no cluster runs."  # after Ctrl-C
STILL_PAUSES = "no longer waiting; the training pauses at a commit, until %elastic_resume lets it go on."


class DriverLink:
    """What connects this process to the driver of its cluster, and replaces a driver that has died.

    `connection` is None before a start, and after a stop or a detach. `newest` is the last connection there was.
    `is_owner`: the cluster was started here, not attached to. `on_release` is called when this process leaves the cluster.
    """

    def __init__(
        self, configuration: Configuration, on_change: Callable[[], object], on_release: Callable[[], object]
    ) -> None:
        self.configuration = configuration
        self.run_folder = RunFolder(configuration.settings.name)
        self.connection: Connection | None = None
        self.newest: Connection | None = None
        self.is_owner = True
        self.process: subprocess.Popen[bytes] | None = None  # the driver's, if it is a child of this process
        self.poller: DiscoveryPoller | None = None
        self._on_change, self._on_release = on_change, on_release
        settings, folders = configuration.settings, [os.getcwd(), *configuration.settings.code_folders]
        self._code = CodeSync(self.ask, self.run_folder.path, folders) if settings.code_sync else None
        self._replacement = DriverReplacement(
            self.run_folder.path, self._start_driver, lambda: self.configuration, self._is_current
        )

    @property
    def name(self) -> str:
        return self.run_folder.name

    @property
    def is_connected(self) -> bool:
        return self.connection is not None and not self.connection.finished.is_set()

    @property
    def is_lost(self) -> bool:
        """Whether the driver has died and was not replaced. The cluster lives on until its lease has expired."""
        newest = self.newest
        return newest is not None and newest.finished.is_set() and newest.died and newest.successor is None

    @property
    def ends_with_kernel(self) -> bool:
        return self.is_owner and not self.configuration.is_kept

    @property
    def latest(self) -> Connection | None:
        """The connection in use or, after a stop or a detach, the last one there was."""
        return self.connection or self.newest

    def last_connection(self) -> Connection:
        """The newest connection of a cluster that has been started."""
        assert self.newest is not None
        return self.newest

    def status(self) -> Status:
        """The newest status, also of a cluster that has not been started."""
        driver = self.latest
        if driver is None:
            limits = self.configuration.settings.limits
            return Status(self.name, "finished", "not started", 0, 0, limits.min, limits.max, (), (), None, "")
        return driver.status

    def running(self) -> Connection:
        """The connection to the driver. ClusterStoppedError if the cluster does not run."""
        driver = self.connection
        # A driver that has stopped its cluster is still closing what it opened, and takes no more requests.
        if driver is None or driver.finished.is_set() or driver.status.phase == "finished":
            why = self.newest.end_reason if self.newest is not None else ""
            advice = "attach to it" if self.is_lost and not self.ends_with_kernel else "start it"
            raise ClusterStoppedError(
                f"the cluster {self.name!r} is not running{f' ({why})' if why else ''}: {advice}."
            )
        return driver

    def ask(
        self,
        request: requests.AnyRequest,
        timeout: float | None = ANSWER_TIMEOUT,
        what: str = "the driver",
        *,
        cancel: bool = False,
        on_pieces: Callable[[list[requests.Piece]], object] | None = None,
    ) -> Any:
        """Return the driver's answer, or raise its error. `cancel`: cancel the request if this call ends without an answer.

        `on_pieces` is called in this thread, ten times per second, with new output that comes before the answer. Ctrl-C cancels
        setup cells too. WaitTimeoutError names `what` it waited for. A repeatable request is sent again if the driver dies.
        """
        driver, begun = self.running(), time.monotonic()
        pieces: SimpleQueue[requests.Piece] = SimpleQueue()
        future = driver.request(request, pieces.put if on_pieces is not None else requests.ignore_piece)

        def pass_pieces() -> None:
            if on_pieces is not None:
                on_pieces([pieces.get() for _ in range(pieces.qsize())])

        try:
            answer = wait_for_result(future, timeout, lambda: f"{what}: {driver.status.reason}", pass_pieces)
        except KeyboardInterrupt as error:
            if isinstance(request, requests.ExecuteSetup):
                future.cancel()
            if isinstance(request, requests.Pause | requests.Step):
                show_in_one_line(error, STILL_PAUSES)
            raise
        except DriverLostError:
            if not isinstance(request, requests.REPEATABLE):
                raise
        else:
            return answer
        finally:
            if cancel:
                future.cancel()
            pass_pieces()  # also what came just before an error or Ctrl-C
        remaining = None if timeout is None else max(0.0, timeout - (time.monotonic() - begun))
        return self.ask(request, remaining, what, cancel=cancel, on_pieces=on_pieces)

    def send_code(self, imports: Iterable[str] = ()) -> str:
        """Have the hosts get the user's modules: those imported here, and these. Returns their version; empty if there is none."""
        self.running()  # else its run folder must not be made
        return self._code.send(imports) if self._code is not None else ""

    # ---- start and attach ----

    def start(self) -> None:
        """Start the cluster anew with a driver of its own."""
        configuration = self.configuration
        log_dir = (configuration.log_dir or self.run_folder.new_log_dir()).absolute()
        submitted = self.newest.submitted_jobs if self.newest is not None else 0
        owner = "" if configuration.is_kept else identity(os.getpid())
        settings = replace(configuration.settings, log_dir=log_dir, number=secrets.token_hex(4), owner=owner)
        self.is_owner = True
        try:
            driver = self._start_driver(Start(settings, configuration.arguments, submitted=submitted))
        except KeyboardInterrupt as error:
            show_in_one_line(error, START_UNDONE)
            raise
        self._begin(driver)

    def wait_for_start(self, timeout: float | None) -> None:
        """Wait until `min` workers are ready, for `timeout` seconds (default: elastic_timeout). A terminal shows the reason."""
        limits = self.configuration.settings.limits
        time_limit = limits.elastic_timeout if timeout is None else timeout
        request, what = requests.WaitForStart(limits.min), f"{limits.min} ready workers"
        with ProgressLine(lambda: describe_progress(self.newest.status) if self.newest else "", terminal()) as progress:
            self.ask(request, time_limit, what, cancel=True, on_pieces=lambda _: progress.show())

    def attach(
        self,
        driver: Connection | None,
        arguments: Mapping[str, Any],
        discovery: str | HostDiscovery | None,
        timeout: float,
    ) -> None:
        """Use this connection or, if the driver is dead, start another one that takes the cluster over.

        `arguments` were saved with the cluster. `discovery`, if given, replaces the cluster's own. `timeout`: seconds that
        the next driver may take to start.
        """
        if discovery is None:
            self.configuration = self.configuration.with_discovery_of(arguments)
        self.is_owner = False
        if driver is None:
            settings = self.configuration.settings
            self._begin(
                self._start_driver(Start(settings, self.configuration.arguments, takes_over=True, timeout=timeout))
            )
            return
        self._begin(driver)
        try:
            if discovery is not None:
                self.ask(requests.SetDiscovery(self.configuration.settings.discovery, self.configuration.arguments))
                present = self.running()  # another driver, if the first one has died
                present.arguments = self.configuration.arguments
                self._poll_discovery(present)
        except BaseException:
            self.detach(NOT_ATTACHED)
            raise

    def _start_driver(self, start: Start, predecessor: Connection | None = None) -> Connection:
        connection, child = start_driver_process(start, self.run_folder.path, self._on_change, predecessor)
        disown(child)  # the driver may outlive this process
        self.process = child
        return connection

    def _begin(self, driver: Connection) -> None:
        self.release()
        self._use(driver)

    def _use(self, driver: Connection) -> None:
        self.connection = self.newest = driver
        # Before `use`: if the driver dies, another thread then uses and polls for the next one.
        self._poll_discovery(driver)
        driver.use(self.handle_change, partial(self._replace, driver))
        self.handle_change()

    def _is_current(self, driver: Connection) -> bool:
        return self.connection is driver

    def _replace(self, lost: Connection) -> Connection | None:
        """Run in the reader's thread of a connection whose driver has died: connect to the next driver, if there is one."""
        successor = self._replacement.replace(lost)
        if successor is not None and self.connection is lost:
            self._use(successor)
        return successor

    def find_successor(self, lost: Connection) -> Connection | None:
        """Connect to a driver that can stop what a dead driver has left running; None if there is none."""
        return self._replacement.find_or_give_up(lost)

    def _poll_discovery(self, driver: Connection) -> None:
        """Poll the discovery object of this process, unless a client has since chosen another discovery."""
        source, key_in_use = self.configuration.settings.discovery, driver.arguments.get(BY_CLIENTS)
        if self.poller is not None:
            self.poller.stop()
        discovery = self.configuration.discovery
        if discovery is not None and isinstance(source, ClientDiscovery) and source.key == key_in_use:
            self.poller = DiscoveryPoller(discovery, source.key, driver)

    def handle_change(self) -> None:
        """Run in the reader's thread after each update."""
        if self.newest is not None and self.newest.finished.is_set() and self.poller is not None:
            self.poller.stop()
        self._on_change()

    # ---- leave ----

    def detach(self, why: str) -> None:
        """Close the connection; the cluster lives on. Jobs and calls that still wait raise an error with the text `why`."""
        driver, self.connection = self.connection, None
        while driver is not None:
            driver.leave(why)
            driver.abandon_jobs()
            driver = driver.successor  # if the driver has died just before
        self.connection = None
        self.release()

    def release(self) -> None:
        """Let go of the cluster: the end of this process no longer affects it."""
        if self.newest is not None and self.newest.forked:
            return  # this is a forked child, and all of it belongs to the parent
        if self.poller is not None:
            self.poller.stop()
            self.poller = None
        self._on_release()

    def kill_leftovers(self) -> None:
        """End what a dead driver has left running on this machine, unless another driver has taken it over."""
        if self.newest is not None:
            remove_dead_cluster(self.name, self.newest.number, kill=True)
