"""External nodes: `torchrun --rdzv-backend=nbelastic --rdzv-endpoint=<connection file>` joins the cluster from a terminal."""

from __future__ import annotations

import atexit
import os
import secrets
import signal
import socket
import sys
import threading
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
from nbelastic.torchrun.tracebacks import first_line, user_traceback
from nbelastic.transport import cluster_file
from nbelastic.transport.client import Client
from nbelastic.transport.keys import Keys
from nbelastic.transport.sockets import HEARTBEAT

JOIN_TIMEOUT = 600.0  # seconds that a node waits for a round: torch's own default
HANDSHAKE_TIMEOUT = 10.0  # seconds that the driver may take to answer


def create(params: RendezvousParameters) -> ExternalRendezvous:
    """The rendezvous handler of an external node, in the cluster of `params.endpoint`. RendezvousConnectionError.

    Options in `--rdzv-conf`: `join_timeout` (seconds, 600); `keys` (a connection file, if the endpoint is host:port);
    `spare=0` (leave at once if the cluster is full); `nproc` and `role` (unless torchrun itself runs the node).
    """
    try:
        cluster = cluster_file.find(params.endpoint, params.get("keys", ""))
    except UsageError as error:
        raise RendezvousConnectionError(str(error)) from None
    home = _home(params.local_addr or "", cluster.address)
    check_connection(cluster.address, cluster.keys, cluster.name)
    config = _launch_config()
    workers = params.get_as_int("nproc") or (config.nproc_per_node if config is not None else 1)
    role = params.get("role") or (config.role if config is not None else "default")
    # Containers may share both: the name of a machine, and a process number.
    name = f"torchrun-{socket.gethostname()}-{secrets.token_hex(2)}-{os.getpid()}"
    job = "" if params.run_id in ("", "none") else params.run_id
    ready = sev.NodeReady(name, 0, "", role, workers, external=True, job=job)
    return ExternalRendezvous(
        cluster,
        ready,
        home,
        timeout=float(params.get("join_timeout") or JOIN_TIMEOUT),
        leaves_if_full=not params.get_as_bool("spare", True),
    )


def _launch_config() -> LaunchConfig | None:
    """The caller's LaunchConfig, with the number of workers: torch does not pass it to a rendezvous handler."""
    config = _local_of_caller("launch_agent", "config")
    return config if isinstance(config, LaunchConfig) else None


def _failures() -> dict[int, ProcessFailure]:
    """The failures, by rank, after which torch's agent calls the handler again: torch does not pass them."""
    result = _local_of_caller("_invoke_run", "run_result")
    return dict(result.failures) if result is not None else {}


def _local_of_caller(function: str, variable: str) -> Any:
    """A local variable of the nearest caller with this name; None if there is none."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame.f_locals.get(variable) if frame is not None else None


def _home(local: str, driver: str) -> tuple[str, str]:
    """The address at which other nodes connect to this one, and its interface.

    The address is `local` if that is given, else this machine's address towards the driver.
    """
    try:
        address = local or address_towards(address_of(driver)).partition("%")[0]
        if local and ":" not in local:
            address = socket.gethostbyname(local)
        return address, interface_of(address)
    except OSError as error:
        where = f"--local-addr {local}" if local else f"towards the driver at {driver}"
        raise RendezvousConnectionError(f"this machine has no address for {where}: {error}.") from None


def check_connection(address: str, keys: Keys, name: str) -> None:
    """RendezvousConnectionError unless the driver listens at `address` and accepts these keys."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IPV6, 1)
    dealer.curve_serverkey = keys.server_public.encode()
    dealer.curve_publickey = keys.client_public.encode()
    dealer.curve_secretkey = keys.client_secret.encode()
    monitor = dealer.get_monitor_socket()
    connected, end = False, time.monotonic() + HANDSHAKE_TIMEOUT
    try:
        dealer.connect(address)
        while (left := end - time.monotonic()) > 0 and monitor.poll(int(left * 1000)):
            event = recv_monitor_message(monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            refused = event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
            if refused or (connected and event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)):
                raise RendezvousConnectionError(
                    f"the driver at {address} does not accept this key: is this the connection file of {name!r}'s present start?"
                )
            connected = connected or event == zmq.EVENT_CONNECTED
            if event == zmq.EVENT_CLOSED and not connected:
                raise RendezvousConnectionError(f"nothing listens at {address}: the cluster {name!r} is closed.")
    finally:
        dealer.disable_monitor()
        monitor.close(linger=0)
        dealer.close()
        context.term()
    raise RendezvousConnectionError(f"the driver at {address} has not answered for {HANDSHAKE_TIMEOUT:g} s.")


class ExternalRendezvous(DriverRendezvous):
    """An external node. It runs torch's own agent, so this handler reports what happens to its workers."""

    def __init__(
        self, cluster: cluster_file.ClusterFile, ready: sev.NodeReady, home: tuple[str, str], **options: Any
    ) -> None:
        self._cluster, self._name = cluster, ready.host
        super().__init__(self._connect, ready, home, on_wait=_print_reason, **options)
        self._reported_round = 0  # the newest round whose NodeStarted was sent
        self._has_left = False
        self.link.send(self._hello())
        atexit.register(self._leave, "its process has ended")

    def _hello(self) -> node_messages.NodeHello:
        return node_messages.NodeHello(self._name, os.getpid(), pid_namespace(), versions.installed())

    def _on_new_driver(self) -> None:
        """Start the script again: a new driver does not know its round."""
        self.link.reset_session(self._hello)
        if self.round is not None:
            self.receive(node_messages.LeaveRound(self.round.round, "a new driver has connected"))

    def _connect(self, receive: Callable[[messages.Message], None]) -> Client:
        peer = f"node/{self._name}~{os.getpid()}"
        cluster = self._cluster
        return Client(cluster.address, cluster.keys, peer, node_messages.ToNode, receive, heartbeat=HEARTBEAT)

    def next_rendezvous(self) -> RendezvousInfo:
        failures = tuple(_failure(rank, failure) for rank, failure in _failures().items())
        if failures and self.round is not None:
            self.link.send(sev.NodeFailed(self._name, self.round.round, failures))
        return super().next_rendezvous()

    def _check_driver(self) -> None:
        """RendezvousClosedError if the driver is unresponsive for longer than the lease: nothing else ends this node."""
        silent_for = time.monotonic() - self.link.heard_at
        if silent_for > self._cluster.lease:
            raise RendezvousClosedError(
                f"the driver of the cluster {self._cluster.name!r} is unresponsive for {silent_for:.0f} s: "
                "it has ended, or the network failed."
            )

    def num_nodes_waiting(self) -> int:
        self._check_driver()
        current = self.round
        if current is not None and current.round > self._reported_round:
            pids = _worker_pids()
            if len(pids) == current.assignments[current.rank].workers:
                self._reported_round = current.round
                self._wrap_signal_handlers()  # before the report: a reader of the pids may send a signal at once
                self.link.send(sev.NodeStarted(self._name, current.round, pids))
        return super().num_nodes_waiting()

    def _wrap_signal_handlers(self) -> None:
        """Send NodeLeft before torch ends the workers for a signal, or the driver takes their end for a failure."""
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers: torch's agent sets none here either
        for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(","):
            number = getattr(signal, name.strip(), signal.SIGTERM)
            torch_handler = signal.getsignal(number)
            if callable(torch_handler) and not getattr(torch_handler, "is_wrapper", False):

                def leave(signum: int, frame: FrameType | None, torch_handler: Any = torch_handler) -> None:
                    self._leave(f"it was ended by {signal.Signals(signum).name}")
                    torch_handler(signum, frame)

                leave.is_wrapper = True  # type: ignore[attr-defined]
                signal.signal(number, leave)

    def shutdown(self) -> bool:
        """Report that torchrun has ended, by itself or with the exception that is being raised."""
        current, error = self.round, sys.exc_info()[1]
        if current is not None and isinstance(error, ChildFailedError):
            failures = tuple(_failure(rank, failure) for rank, failure in error.failures.items())
            self.link.send(sev.NodeFailed(self._name, current.round, failures))
        elif current is not None and error is None and not self.is_closed():
            self.link.send(sev.NodeSucceeded(self._name, current.round))
            self.keep_store()
        was_asked = isinstance(error, SystemExit) and not error.code
        reason = "it has ended" if error is None or was_asked else f"it has ended with {type(error).__name__}"
        self._leave(reason, broken=error is not None and not was_asked)
        return super().shutdown()

    def _leave(self, reason: str, *, broken: bool = False) -> None:
        """Send NodeLeft and disconnect, at the first call."""
        if not self._has_left:
            self._has_left = True
            self.link.send(sev.NodeLeft(self._name, reason, broken))
            self.link.close()


def _print_reason(reason: str) -> None:
    print(f"nbelastic: waiting: {reason}", file=sys.stderr, flush=True)


def _worker_pids() -> tuple[int, ...]:
    """The pids of torchrun's workers, by local rank."""
    pids = {}
    for child in psutil.Process().children():
        try:
            environment = child.environ()
        except psutil.Error:
            continue
        if "TORCHELASTIC_RUN_ID" in environment and "LOCAL_RANK" in environment:
            pids[int(environment["LOCAL_RANK"])] = child.pid
    return tuple(pids[rank] for rank in sorted(pids))


def _failure(rank: int, failure: ProcessFailure) -> sev.Failure:
    message, text = failure.message, ""
    if isinstance(message, dict):
        message, text = message.get("message", ""), message.get("extraInfo", {}).get("py_callstack", "")
    if not text and failure.exitcode > 0:
        message = f"exit code {failure.exitcode}"
    elif failure.exitcode < 0:
        message = failure.signal_name()
    ago = max(0.0, time.time() - failure.timestamp)
    error, traceback = first_line(str(message)), user_traceback(text)
    return sev.Failure(rank, failure.local_rank, failure.exitcode, error, traceback, ago)
