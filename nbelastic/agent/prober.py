"""Which other hosts this one reaches, and being reached by them: an echo among the agents of one cluster.

An agent listens on each of its host's addresses, on one common port, and answers with the host's name. It is CURVE with the
cluster's client keys at both ends: who has not the client's secret gets no answer. Nothing else is ever said here.
"""

from __future__ import annotations

import contextlib
import logging
import os
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

TIMEOUT = 2.5  # seconds that are enough on a network with a round trip of 200 ms that loses every twentieth packet
AGAIN = 0.2  # seconds after which an address that has not answered is tried by one more connection
ATTEMPTS = 6  # connections to an address at most
PORTS = 20  # free ports of the first address that are tried, until one is free on all
CLOSING = 0.5  # seconds
_ASKED = b"who"
_ZAP = "inproc://zeromq.zap.01"
_SETTINGS = {
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
    """Where the prober of a host with this address and port listens."""
    return f"tcp://{bracketed(address)}:{port}"


class _Probe:
    """One question: does `target` answer at these endpoints?"""

    def __init__(self, target: str, endpoints: Sequence[str], until: float, done: Done) -> None:
        self.target, self.endpoints, self.until, self.done = target.encode(), tuple(endpoints), until, done
        self.reached: set[str] = set()
        self.sockets: dict[zmq.Socket[bytes], str] = {}
        self.attempts = 0
        self.again_at = 0.0

    @property
    def over(self) -> bool:
        return len(self.reached) == len(set(self.endpoints))


class Prober:
    """Answers from `start()` to `close()`, in one thread of its own, and asks what `probe` is told to.

    `addresses` of which one is not this machine's (any more) are left out; `port`, given or a free one, is the same on all
    that are left.
    """

    def __init__(self, host: str, keys: Keys, addresses: Sequence[str], port: int = 0) -> None:
        self._host, self._keys, self._given = host, keys, port
        self._wanted = tuple(dict.fromkeys(addresses))
        self._inbox: deque[_Probe] = deque()
        self._probes: list[_Probe] = []
        self._closing = False
        self._wake = -1
        self._thread = threading.Thread(target=self._run, name="nbelastic-prober", daemon=True)
        self.addresses: tuple[str, ...] = ()
        self.port = 0

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where it listens, in the order of `addresses`."""
        return tuple(endpoint(address, self.port) for address in self.addresses)

    def start(self) -> None:
        """Returns when it listens. OSError if it can listen nowhere."""
        self._context = zmq.Context()
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
        """Try to reach the prober of the host `target` at all of these side by side; from any thread.

        Then, after `timeout` seconds at the latest, `done(addresses)` is called in the prober's thread with those that
        answered, in the order of `endpoints`. Who answers with another name is somebody else. Not called after `close()`.
        """
        self._inbox.append(_Probe(target, endpoints, time.monotonic() + timeout, done))
        self._tell()

    def close(self) -> None:
        """End the thread and every connection; who still waits for an answer gets none."""
        if self._wake < 0:
            return
        self._closing = True
        self._tell()
        self._thread.join(CLOSING)
        wake, self._wake = self._wake, -1
        if not self._thread.is_alive():
            os.close(wake)

    def _tell(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _listen(self) -> zmq.Socket[bytes]:
        """One port on all addresses."""
        errors: dict[str, str] = {}
        for _ in range(PORTS):
            server = self._socket(zmq.ROUTER)
            server.curve_server = True
            server.zap_domain = b"nbelastic"
            port, bound = self._given, []
            for address in self._wanted:
                try:
                    server.bind(endpoint(address, port))
                except zmq.ZMQError as error:
                    errors[address] = str(error)
                    if error.errno == zmq.EADDRINUSE:
                        break
                    continue
                bound.append(address)
                port = port or int(server.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
            else:
                if bound:
                    self.addresses, self.port = tuple(bound), port
                    return server
            server.close()
        told = "; ".join(f"{address}: {error}" for address, error in errors.items())
        raise OSError(f"the prober of {self._host} can listen on none of its addresses ({told or 'it has none'})")

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        for option, value in _SETTINGS.items():
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
        for probe in self._probes:
            if now >= probe.again_at and probe.attempts < ATTEMPTS:
                self._try(probe, now)
        for probe in [probe for probe in self._probes if probe.over or now >= probe.until]:
            self._finish(probe)
        times = [p.until if p.attempts >= ATTEMPTS else min(p.until, p.again_at) for p in self._probes]
        delay = int(max(0.0, min(times) - now) * 1000) + 1 if times else None
        for source in dict(self._poller.poll(delay)):
            if source == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            elif source is self._zap:
                self._admit()
            elif source is self._server:
                self._answer()
            else:
                self._hear(source)

    def _admit(self) -> None:
        """ZAP (ZeroMQ's RFC 27): holders of the client's key come in, and nobody else."""
        version, request, *_, mechanism, key = self._zap.recv_multipart()[:7]
        ours = mechanism == b"CURVE" and compare_digest(z85.encode(key), self._keys.client_public.encode())
        verdict = (b"200", b"OK") if ours else (b"400", b"not of this cluster")
        self._zap.send_multipart([version, request, *verdict, b"", b""])

    def _answer(self) -> None:
        with contextlib.suppress(zmq.ZMQError):  # who has gone gets no answer
            peer, *frames = self._server.recv_multipart(zmq.NOBLOCK)
            if frames == [_ASKED]:
                self._server.send_multipart([peer, self._host.encode()], zmq.NOBLOCK)

    def _try(self, probe: _Probe, now: float) -> None:
        """One connection more to each address that has not answered: lost packets delay the others, not this one."""
        probe.attempts += 1
        probe.again_at = now + AGAIN
        for where in probe.endpoints:
            if where in probe.reached:
                continue
            socket = self._socket(zmq.DEALER)
            socket.curve_serverkey = self._keys.client_public.encode()
            try:
                socket.connect(where)
                socket.send(_ASKED, zmq.NOBLOCK)
            except zmq.ZMQError:
                socket.close()
                continue
            probe.sockets[socket] = where
            self._poller.register(socket, zmq.POLLIN)

    def _hear(self, socket: zmq.Socket[bytes]) -> None:
        for probe in self._probes:
            if socket in probe.sockets:
                with contextlib.suppress(zmq.ZMQError):
                    if socket.recv_multipart(zmq.NOBLOCK) == [probe.target]:
                        probe.reached.add(probe.sockets[socket])
                self._drop(probe, probe.sockets[socket])

    def _drop(self, probe: _Probe, where: str) -> None:
        """No more connections to that address: it has answered."""
        for socket in [s for s, other in probe.sockets.items() if other == where]:
            del probe.sockets[socket]
            self._poller.unregister(socket)
            socket.close()

    def _finish(self, probe: _Probe) -> None:
        self._probes.remove(probe)
        for where in set(probe.endpoints):
            self._drop(probe, where)
        reached = dict.fromkeys(where for where in probe.endpoints if where in probe.reached)
        try:
            probe.done(tuple(address_of(where) for where in reached))
        except Exception:
            log.exception("what was to be done with a probe's answer failed")
