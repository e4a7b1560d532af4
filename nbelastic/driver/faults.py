"""Injects the faults that a client requests, if the cluster was started with chaos allowed."""

from __future__ import annotations

from collections.abc import Callable

from nbelastic.core import commands as cmd
from nbelastic.core.chaos import Fault, Withheld, choose
from nbelastic.core.state import ClusterState
from nbelastic.driver.agents import Agents
from nbelastic.errors import UsageError
from nbelastic.protocol.agent_messages import InjectFault
from nbelastic.protocol.ids import WorkerId
from nbelastic.protocol.requests import RequestFault

_TEXTS = {
    "kill": "chaos kills the process of {}",
    "stop": "chaos stops the process of {} (SIGSTOP)",
    "host": "chaos kills the agent of {}, with its workers",
}


class Faults:
    """Lives in the driver's thread. `record` adds to the event log. `is_allowed`: the cluster was started with chaos."""

    def __init__(
        self,
        agents: Agents,
        cluster: Callable[[], ClusterState],
        record: Callable[[cmd.Record], None],
        *,
        is_allowed: bool,
    ) -> None:
        self._agents, self._cluster, self._record, self._is_allowed = agents, cluster, record, is_allowed
        self._hit: set[WorkerId] = set()  # workers that are not known to be lost yet

    def inject(self, request: RequestFault) -> str:
        """Inject a fault, and return why none was possible; empty: one was injected. UsageError if it is not allowed."""
        cluster = self._cluster()
        if not self._is_allowed:
            raise UsageError(
                "this cluster was started without chaos, so no faults are injected: start it with --chaos, or "
                "Cluster(..., chaos=True)."
            )
        if not cluster.present_job:
            raise UsageError("no job is running that could survive a fault: run a program first.")
        if cluster.active is None and "host" not in request.kinds:
            raise UsageError("the workers of a script are not nbelastic's own: use the kind host.")
        if request.is_check:
            return ""
        self._hit &= cluster.workers.keys()
        number, below_min = request.number, request.below_min
        match choose(cluster, request.kinds, request.seed, number, self._hit, below_min=below_min):
            case Withheld(why=why):
                return why
            case Fault(kind=kind, host=host, worker=w) as fault:
                text = _TEXTS[kind].format(w or host) + f" (fault {number} of {request.by})"
                worker = str(w) if w is not None else ""
                # A prepared generation breaks with the present one: the training recovers in a later one than both.
                self._record(cmd.Record(f"fault-{kind}", text, host, worker, cluster.highest_generation))
                self._hit.update(x for x in cluster.workers if x == fault.worker or (w is None and x.host == host))
                self._agents.send(host, InjectFault(kind, w))
        return ""
