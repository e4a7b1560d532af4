"""`torchrun --rdzv-backend=nbelastic --rdzv-endpoint=<cluster file>`: a terminal's torchrun becomes a host of the cluster."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import psutil
import zmq
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.launcher.api import LaunchConfig
from zmq.utils.monitor import recv_monitor_message

from nbelastic.errors import UsageError
from nbelastic.protocol import messages, node_messages
from nbelastic.protocol import script_events as sev
from nbelastic.system import versions
from nbelastic.system.addresses import address_of
from nbelastic.system.interfaces import address_towards, interface_of
from nbelastic.system.processes import pid_namespace
from nbelastic.torchrun.rendezvous import DriverRendezvous
from nbelastic.torchrun.warm import own_part
from nbelastic.transport import cluster_file
from nbelastic.transport.client import Client
from nbelastic.transport.keys import Keys
from nbelastic.transport.sockets import HEARTBEAT

JOIN = 600.0  # seconds until a waiting node gives up: torch's own default
HANDSHAKE = 10.0  # seconds that the driver may take to answer


def create(params: RendezvousParameters) -> ExternalRendezvous:
    """A node of the cluster that `params.endpoint` leads to.

    `--rdzv-conf`: `join_timeout` (seconds, 600), `keys` (a cluster file, if the endpoint is host:port), `spare=0` (leave at
    once if the cluster is full), `nproc` and `role` (where no torchrun tells). RendezvousConnectionError says why not.
    """
    try:
        found = cluster_file.find(params.endpoint, params.get("keys", ""))
    except UsageError as error:
        raise RendezvousConnectionError(str(error)) from None
    home = _home(params.local_addr or "", found.address)
    reach(found.address, found.keys, found.name)
    config = _launch_config()
    workers = params.get_as_int("nproc") or (config.nproc_per_node if config is not None else 1)
    role = params.get("role") or (config.role if config is not None else "default")
    name = f"torchrun-{socket.gethostname()}-{os.getpid()}"
    job = "" if params.run_id in ("", "none") else params.run_id
    ready = sev.NodeReady(name, 0, "", role, workers, external=True, job=job)
    return ExternalRendezvous(
        found,
        ready,
        home,
        timeout=float(params.get("join_timeout") or JOIN),
        leaves=not params.get_as_bool("spare", True),
    )


def _launch_config() -> LaunchConfig | None:
    """What torchrun, or whoever calls `launch_agent`, was asked for: a handler is not told how many workers there are."""
    frame: Any = sys._getframe()
    while frame is not None:
        config = frame.f_locals.get("config") if frame.f_code.co_name == "launch_agent" else None
        if isinstance(config, LaunchConfig):
            return config
        frame = frame.f_back
    return None


def _failures() -> dict[int, ProcessFailure]:
    """Why torch's agent comes back, by rank: it does not say so."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_invoke_run":
        frame = frame.f_back
    result = frame.f_locals.get("run_result") if frame is not None else None
    return dict(result.failures) if result is not None else {}


def _home(local: str, driver: str) -> tuple[str, str]:
    """Where the others reach this machine: at `local`, or else at its address towards the driver's; and the interface."""
    try:
        address = (
            socket.gethostbyname(local)
            if local and ":" not in local
            else local or address_towards(address_of(driver)).partition("%")[0]
        )
        return address, interface_of(address)
    except OSError as error:
        where = f"--local-addr {local}" if local else f"towards the driver at {driver}"
        raise RendezvousConnectionError(f"there is no address of this machine {where}: {error}.") from None


def reach(address: str, keys: Keys, name: str) -> None:
    """RendezvousConnectionError if nobody listens at `address`, or not with these keys."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = context.socket(zmq.DEALER)
    link.setsockopt(zmq.LINGER, 0)
    link.setsockopt(zmq.IPV6, 1)
    link.curve_serverkey = keys.server_public.encode()
    link.curve_publickey = keys.client_public.encode()
    link.curve_secretkey = keys.client_secret.encode()
    monitor = link.get_monitor_socket()
    connected, end = False, time.monotonic() + HANDSHAKE
    try:
        link.connect(address)
        while (left := end - time.monotonic()) > 0 and monitor.poll(int(left * 1000)):
            event = recv_monitor_message(monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            refused = event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
            if refused or (connected and event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)):
                raise RendezvousConnectionError(
                    f"the driver at {address} does not accept this key: is the file of {name!r}'s present start?"
                )
            connected = connected or event == zmq.EVENT_CONNECTED
            if event == zmq.EVENT_CLOSED and not connected:
                raise RendezvousConnectionError(f"nobody listens at {address}: the cluster {name!r} is closed.")
    finally:
        link.disable_monitor()
        monitor.close(linger=0)
        link.close()
        context.term()
    raise RendezvousConnectionError(f"the driver at {address} has not answered for {HANDSHAKE:g} s.")


class ExternalRendezvous(DriverRendezvous):
    """A terminal's node. torch's agent is its own: what becomes of the workers is seen from here."""

    def __init__(
        self, found: cluster_file.ClusterFile, ready: sev.NodeReady, home: tuple[str, str], **options: Any
    ) -> None:
        self._found, self._name = found, ready.host
        super().__init__(self._connect, ready, home, told=_tell, **options)
        self._started = 0  # the newest round whose workers the driver was told of
        self._here = True
        self.link.send(self._hello())
        atexit.register(self._leave, "its process has ended")

    def _hello(self) -> node_messages.NodeHello:
        return node_messages.NodeHello(self._name, os.getpid(), pid_namespace(), versions.installed())

    def _introduce(self) -> None:
        """The script begins again for a new driver."""
        self.link.reset_session(self._hello)
        if self.round is not None:
            self.hear(node_messages.LeaveRound(self.round.round, "a new driver has come"))

    def _connect(self, hear: Callable[[messages.Message], None]) -> Client:
        peer = f"node/{self._name}~{os.getpid()}"
        return Client(self._found.address, self._found.keys, peer, node_messages.ToNode, hear, heartbeat=HEARTBEAT)

    def next_rendezvous(self) -> RendezvousInfo:
        failures = tuple(_failure(rank, failure) for rank, failure in _failures().items())
        if failures and self.round is not None:
            self.link.send(sev.NodeFailed(self._name, self.round.round, failures))
        return super().next_rendezvous()

    def _mind_driver(self) -> None:
        """Nobody else would end this node. RendezvousClosedError if the driver is gone, or cut off from here."""
        quiet = time.monotonic() - self.link.heard_at
        if quiet > self._found.lease:
            raise RendezvousClosedError(
                f"the driver of the cluster {self._found.name!r} has not been heard for {quiet:.0f} s: "
                "it is gone, or cut off from here."
            )

    def num_nodes_waiting(self) -> int:
        self._mind_driver()
        order = self.round
        if order is not None and order.round > self._started:
            pids = _workers()
            if len(pids) == order.assignments[order.rank].workers:
                self._started = order.round
                self._mind_signals()  # first: whoever sees the workers may send one
                self.link.send(sev.NodeStarted(self._name, order.round, pids))
        return super().num_nodes_waiting()

    def _mind_signals(self) -> None:
        """Say that this node leaves before torch ends its workers: else the others take that for a failure."""
        for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(","):
            number = getattr(signal, name.strip(), signal.SIGTERM)
            torchs = signal.getsignal(number)
            if callable(torchs) and not getattr(torchs, "of_guest", False):

                def leave(signum: int, frame: FrameType | None, torchs: Any = torchs) -> None:
                    self._leave(f"it was ended by {signal.Signals(signum).name}")
                    torchs(signum, frame)

                leave.of_guest = True  # type: ignore[attr-defined]
                signal.signal(number, leave)

    def shutdown(self) -> bool:
        """torchrun has ended, well or by the error that is being raised."""
        order, error = self.round, sys.exc_info()[1]
        if order is not None and isinstance(error, ChildFailedError):
            failures = tuple(_failure(rank, failure) for rank, failure in error.failures.items())
            self.link.send(sev.NodeFailed(self._name, order.round, failures))
        elif order is not None and error is None and not self.is_closed():
            self.link.send(sev.NodeSucceeded(self._name, order.round))
            self.linger()
        dismissed = isinstance(error, SystemExit) and not error.code
        reason = "it has ended" if error is None or dismissed else f"it has ended with {type(error).__name__}"
        self._leave(reason, broken=error is not None and not dismissed)
        return super().shutdown()

    def _leave(self, reason: str, *, broken: bool = False) -> None:
        """Once: by torchrun's end, or by its process's."""
        if self._here:
            self._here = False
            self.link.send(sev.NodeLeft(self._name, reason, broken))
            self.link.close()


def _tell(reason: str) -> None:
    print(f"nbelastic: waiting: {reason}", file=sys.stderr, flush=True)


def _workers() -> tuple[int, ...]:
    """The pids of torchrun's workers, by local rank."""
    found = {}
    for child in psutil.Process().children():
        try:
            environment = child.environ()
        except psutil.Error:
            continue
        if "TORCHELASTIC_RUN_ID" in environment and "LOCAL_RANK" in environment:
            found[int(environment["LOCAL_RANK"])] = child.pid
    return tuple(found[rank] for rank in sorted(found))


def _failure(rank: int, failure: ProcessFailure) -> sev.Failure:
    message, text = failure.message, ""
    if isinstance(message, dict):
        message, text = message.get("message", ""), message.get("extraInfo", {}).get("py_callstack", "")
    if not text and failure.exitcode > 0:
        message = f"exit code {failure.exitcode}"
    elif failure.exitcode < 0:
        message = failure.signal_name()
    line = (str(message).strip().splitlines() or ["an error without a message"])[0]
    ago = max(0.0, time.time() - failure.timestamp)
    return sev.Failure(rank, failure.local_rank, failure.exitcode, line[:500], own_part(text), ago)
