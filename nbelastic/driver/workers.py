"""The workers as peers of the driver: sends them messages, registers them and measures their silence."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from nbelastic.core.state import ClusterState
from nbelastic.driver.agents import Agents
from nbelastic.driver.clock import Clock
from nbelastic.driver.dependencies import MessageServer
from nbelastic.driver.telemetry import Telemetry
from nbelastic.protocol import events as ev
from nbelastic.protocol import messages, worker_messages
from nbelastic.protocol.ids import WorkerId


class Workers:
    """Lives in the driver's thread; `post` puts events into its inbox."""

    def __init__(
        self,
        server: MessageServer,
        agents: Agents,
        clock: Clock,
        telemetry: Telemetry,
        post: Callable[[ev.Event], None],
    ) -> None:
        self._server, self._agents, self._clock, self._telemetry, self._post = server, agents, clock, telemetry, post
        self._expected_since: dict[str, float] = {}  # when this driver began to wait for workers of the previous one

    def send(self, workers: Iterable[WorkerId], message: messages.Message) -> None:
        self._server.send_to_all((f"worker/{w}" for w in workers), message)

    def announce(self, hosts: Iterable[str], cluster: ClusterState) -> None:
        """Workers start on these hosts: tell the members from which addresses they may connect to an offered store.

        A host on which a member runs needs no announcement if it has only one address: the members know each other's.
        """
        known = {w.host for w in cluster.members}
        found = [cluster.hosts[name] for name in sorted(hosts) if name in cluster.hosts]
        new = [host for host in found if host.spec.name not in known or len(host.addresses) > 1]
        addresses = tuple(at.address for host in new for at in host.addresses)
        if addresses:
            self.send(cluster.members, worker_messages.AllowPeers(addresses))

    def register(self, w: WorkerId) -> None:
        """A worker can run programs and cells."""
        rehome = self._agents.rehome_of(w.host)
        if rehome is not None:  # the address may have changed between the worker's fork and its first message
            self._server.send(f"worker/{w}", rehome)
        self._post(ev.WorkerRegistered(w))

    def expect(self, w: WorkerId) -> None:
        """Measure the silence of a worker of the previous driver from now on, although it has not connected yet."""
        self._expected_since[f"worker/{w}"] = time.monotonic()

    def silence_of(self, w: WorkerId) -> float:
        """Seconds since the last message of this worker; 0 if it has not connected yet and is not expected."""
        peer = f"worker/{w}"
        heard_at = self._server.heard_at.get(peer, self._expected_since.get(peer))
        return self._clock.silence(heard_at, self._server.backlog.messages) if heard_at is not None else 0.0

    def are_heard(self, seconds: float) -> bool:
        """Whether the last message of each peer is at most so old. If so, no worker needs to be looked at."""
        heard_at = self._server.heard_at
        missing = (at for peer, at in self._expected_since.items() if peer not in heard_at)
        oldest = min((*heard_at.values(), *missing), default=math.inf)
        return self._clock.silence(oldest, self._server.backlog.messages) <= seconds

    def forget(self, workers: Iterable[WorkerId]) -> None:
        """Forget all that is known of lost workers."""
        for w in workers:
            self._server.forget(f"worker/{w}")
            self._expected_since.pop(f"worker/{w}", None)
            self._telemetry.forget_worker(w)
