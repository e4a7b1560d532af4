"""The prober of an agent: it answers other hosts' probers, and tests at which addresses it reaches them.

It listens on each of its host's addresses, at one common port, and answers with the host's name. Both ends use CURVE with the
cluster's client keys: without the client's secret there is no answer. Probers send no other data.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from hmac import compare_digest

import zmq
from zmq.utils import z85

from nbelastic.system.addresses import address_of, bracketed
from nbelastic.transport.keys import Keys

log = logging.getLogger("nbelastic.prober")

TIMEOUT = 2.5  # seconds; enough for a network with round trips of 200 ms that loses 5 % of its packets
RETRY_INTERVAL = 0.2  # seconds until another connection to an address that has not answered
ATTEMPTS = 6  # the most connections to an address
PORTS = 20  # free ports of the first address that are tried until one is free on all addresses
CLOSE_TIMEOUT = 0.5  # seconds in which the thread ends
CHECK_INTERVAL = 0.1  # seconds between two counts of open descriptors
MOST_OPEN = 8192  # descriptors of this process, or half of its limit: with more it accepts no connections for a while
PER_SOCKET = 3  # descriptors of a socket that connects, at most
_QUESTION = b"who"
_ZAP = "inproc://zeromq.zap.01"
_SOCKET_OPTIONS = {
    zmq.LINGER: 0,
    zmq.MAXMSGSIZE: 1024,
    zmq.HANDSHAKE_IVL: 2000,
    zmq.HEARTBEAT_IVL: 1000,
    zmq.HEARTBEAT_TIMEOUT: 3000,
    zmq.SNDHWM: 100,
    zmq.RCVHWM: 100,
    zmq.IPV6: 1,
}

Done = Callable[[tuple[str, ...]], None]


def endpoint(address: str, port: int) -> str:
    """The endpoint of a prober at this address and port."""
    return f"tcp://{bracketed(address)}:{port}"


class _Probe:
    """A test whether the host `target` answers at these endpoints."""

    def __init__(self, target: str, endpoints: Sequence[str], until: float, done: Done) -> None:
        self.target, self.endpoints, self.until, self.done = target.encode(), tuple(endpoints), until, done
        self.reached: set[str] = set()
        self.sockets: dict[zmq.Socket[bytes], str] = {}
        self.attempts = 0
        self.retry_at = 0.0

    @property
    def all_reached(self) -> bool:
        return len(self.reached) == len(set(self.endpoints))

    def is_due(self, now: float) -> bool:
        """Whether another connection to each address is to be made."""
        return now >= self.retry_at and self.attempts < ATTEMPTS


class Prober:
    """Answers other probers, and probes them, in its own thread, from `start()` to `close()`.

    Addresses that this machine does not have (any more) are left out. `port`: the common port of all addresses; 0: a free one.
    """

    def __init__(self, host: str, keys: Keys, addresses: Sequence[str], port: int = 0) -> None:
        self._host, self._keys, self._given_port = host, keys, port
        self._given_addresses = tuple(dict.fromkeys(addresses))
        self._inbox: deque[_Probe] = deque()
        self._probes: list[_Probe] = []
        self._closing = False
        self._most_open = min(MOST_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._bound: tuple[str, ...] = ()  # as ZeroMQ names the endpoints
        self._closed_endpoints: tuple[str, ...] = ()  # at which it does not listen now
        self._wake = -1
        self._thread = threading.Thread(target=self._run, name="nbelastic-prober", daemon=True)
        self.addresses: tuple[str, ...] = ()
        self.port = 0

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints at which it listens, in the order of `addresses`."""
        return tuple(endpoint(address, self.port) for address in self.addresses)

    def start(self) -> None:
        """Return when it listens. OSError if it can listen at no address."""
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MOST_OPEN)  # ZeroMQ's own limit is 1023
        try:
            self._zap = self._context.socket(zmq.REP)
            self._zap.linger = 0
            self._zap.bind(_ZAP)
            self._server = self._listen()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread.start()

    def probe(self, target: str, endpoints: Sequence[str], timeout: float, done: Done) -> None:
        """Test in parallel at which endpoints the prober of the host `target` answers. Any thread may call it.

        After at most `timeout` seconds the prober's thread calls `done(addresses)` with the addresses that answered, in the
        order of `endpoints`. An answer with another host's name does not count. After `close()` it calls nothing.
        """
        self._inbox.append(_Probe(target, endpoints, time.monotonic() + timeout, done))
        self._wake_thread()

    def close(self) -> None:
        """End the thread and all connections. Probes that have not ended get no result."""
        if self._wake < 0:
            return
        self._closing = True
        self._wake_thread()
        self._thread.join(CLOSE_TIMEOUT)
        wake, self._wake = self._wake, -1
        if not self._thread.is_alive():
            os.close(wake)

    def _wake_thread(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _listen(self) -> zmq.Socket[bytes]:
        """Listen on all addresses at one port."""
        errors: dict[str, str] = {}
        for _ in range(PORTS):
            server = self._socket(zmq.ROUTER)
            server.curve_server = True
            server.zap_domain = b"nbelastic"
            port, bound = self._given_port, []
            for address in self._given_addresses:
                try:
                    server.bind(endpoint(address, port))
                except zmq.ZMQError as error:
                    errors[address] = str(error)
                    if error.errno == zmq.EADDRINUSE:
                        break
                    continue
                bound.append(address)
                self._bound = (*self._bound[: len(bound) - 1], server.get_string(zmq.LAST_ENDPOINT))
                port = port or int(self._bound[0].rpartition(":")[2])
            else:
                if bound:
                    self.addresses, self.port = tuple(bound), port
                    return server
            server.close()
        reasons = "; ".join(f"{address}: {error}" for address, error in errors.items())
        raise OSError(f"the prober of {self._host} can listen on none of its addresses ({reasons or 'it has none'})")

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        for option, value in _SOCKET_OPTIONS.items():
            socket.setsockopt(option, value)
        socket.curve_publickey = self._keys.client_public.encode()
        socket.curve_secretkey = self._keys.client_secret.encode()
        return socket

    # ---- the thread ----

    def _run(self) -> None:
        self._poller = zmq.Poller()
        for source in (self._server, self._zap, self._wake):
            self._poller.register(source, zmq.POLLIN)
        try:
            while not self._closing:
                self._turn()
        except Exception:
            log.exception("the prober of %s has failed", self._host)
        finally:
            self._context.destroy(linger=0)

    def _turn(self) -> None:
        now = time.monotonic()
        while self._inbox:
            self._probes.append(self._inbox.popleft())
        self._connect_due(now)
        for probe in [probe for probe in self._probes if probe.all_reached or now >= probe.until]:
            self._finish(probe)
        times = [p.until if p.attempts >= ATTEMPTS else min(p.until, p.retry_at) for p in self._probes]
        self._limit_connections()
        delay = int(min(CHECK_INTERVAL, max(0.0, min(times, default=math.inf) - now)) * 1000) + 1
        for source in dict(self._poller.poll(delay)):
            if source == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            elif source is self._zap:
                self._authenticate()
            elif source is self._server:
                self._answer()
            else:
                self._receive_answer(source)

    def _limit_connections(self) -> None:
        """Listen only while this process has descriptors left, which the agent needs. Else end all connections."""
        try:
            used = len(os.listdir("/proc/self/fd"))
        except OSError:  # none is left
            used = self._most_open + 1
        if self._closed_endpoints:
            if used < self._most_open * 3 // 4:
                self._closed_endpoints = tuple(
                    each for each in self._closed_endpoints if not self._change(each, zmq.Socket.bind)
                )
        elif used > self._most_open:
            self._closed_endpoints = tuple(each for each in self._bound if self._change(each, zmq.Socket.unbind))

    def _change(self, endpoint: str, change: Callable[[zmq.Socket[bytes], str], object]) -> bool:
        """Bind or unbind. Returns False if that is impossible now: the address has gone, or its port is in use."""
        try:
            change(self._server, endpoint)
        except zmq.ZMQError:
            return False
        return True

    def _authenticate(self) -> None:
        """ZAP (ZeroMQ's RFC 27): accept only peers with the client's key."""
        version, request, *_, mechanism, key = self._zap.recv_multipart()[:7]
        ours = mechanism == b"CURVE" and compare_digest(z85.encode(key), self._keys.client_public.encode())
        verdict = (b"200", b"OK") if ours else (b"400", b"not of this cluster")
        self._zap.send_multipart([version, request, *verdict, b"", b""])

    def _answer(self) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the other end may have closed
            peer, *frames = self._server.recv_multipart(zmq.NOBLOCK)
            if frames == [_QUESTION]:
                self._server.send_multipart([peer, self._host.encode()], zmq.NOBLOCK)

    def _connect_due(self, now: float) -> None:
        """Make the connections that are due, as far as there are descriptors: to hosts that were tried least first."""
        free = self._most_open // PER_SOCKET - sum(len(probe.sockets) for probe in self._probes)
        for probe in sorted((probe for probe in self._probes if probe.is_due(now)), key=lambda probe: probe.attempts):
            free -= len(probe.endpoints)
            if free >= 0:
                self._connect(probe, now)
            else:
                probe.retry_at = now + RETRY_INTERVAL

    def _connect(self, probe: _Probe, now: float) -> None:
        """Make another connection to each address that has not answered: lost packets do not delay it."""
        probe.attempts += 1
        probe.retry_at = now + RETRY_INTERVAL
        for each in probe.endpoints:
            if each in probe.reached:
                continue
            try:
                socket = self._socket(zmq.DEALER)
            except zmq.ZMQError:  # no descriptor is left
                return
            socket.curve_serverkey = self._keys.client_public.encode()
            try:
                socket.connect(each)
                socket.send(_QUESTION, zmq.NOBLOCK)
            except zmq.ZMQError:
                socket.close()
                continue
            probe.sockets[socket] = each
            self._poller.register(socket, zmq.POLLIN)

    def _receive_answer(self, socket: zmq.Socket[bytes]) -> None:
        for probe in self._probes:
            if socket in probe.sockets:
                with contextlib.suppress(zmq.ZMQError):
                    if socket.recv_multipart(zmq.NOBLOCK) == [probe.target]:
                        probe.reached.add(probe.sockets[socket])
                self._close_connections(probe, probe.sockets[socket])

    def _close_connections(self, probe: _Probe, endpoint: str) -> None:
        for socket in [s for s, other in probe.sockets.items() if other == endpoint]:
            del probe.sockets[socket]
            self._poller.unregister(socket)
            socket.close()

    def _finish(self, probe: _Probe) -> None:
        self._probes.remove(probe)
        for each in set(probe.endpoints):
            self._close_connections(probe, each)
        reached = dict.fromkeys(each for each in probe.endpoints if each in probe.reached)
        try:
            probe.done(tuple(address_of(each) for each in reached))
        except Exception:
            log.exception("the result of a probe could not be handled")
