"""A cluster's pods: one agent in each. Pods are created, watched and deleted in the driver's event loop."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import psutil
from msgspec import Struct

from nbelastic.errors import NbelasticError, UsageError
from nbelastic.protocol.settings import Settings
from nbelastic.provision import pod_manifest
from nbelastic.provision.kubernetes_api import ApiError, KubernetesApi, own_namespace
from nbelastic.provision.pod_manifest import PodOptions
from nbelastic.provision.pod_states import CLEAN_END, PodView, view
from nbelastic.provision.ssh import TUNNELLED_AGENT
from nbelastic.system.backoff import Backoff

WAITING = "from nbelastic.agent.pod import main; main()"
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0  # seconds between two tries while the API does not answer
CORDON_POLL = 5.0  # seconds between two looks at which nodes are cordoned
ADOPTED_START = 600.0  # seconds for the start of a pod whose driver was killed perhaps before it made the pod's Secret
UNCONNECTED = 5.0  # seconds since the driver has asked for the state: its agent has not connected then
KILL_GRACE = 1  # seconds between SIGTERM and SIGKILL of a pod that is killed; 0 would not wait for the kubelet
CREATE_TIMEOUT, CREATE_PAUSE = (
    30.0,
    2.0,
)  # seconds in which an overloaded API is asked again, and between two tries at most
CLOSE_TIMEOUT = 8.0  # seconds for the deletions when the cluster stops
FORBIDDEN, GONE, EXPIRED = 403, 404, 410  # HTTP


class Notice(Struct, frozen=True):
    """A pod will end: `why`. `at`: when, on the monotonic clock; None: the time is not known."""

    why: str
    at: float | None


class Pods:
    """The pods of one cluster in one namespace. It lives in one event loop."""

    def __init__(self, options: PodOptions, cluster: str, start: str) -> None:
        """`start`: random, of the cluster's start. The labels of both name its pods."""
        self.options, self.cluster, self.start = options, cluster, start
        self.labels = pod_manifest.labels_of(cluster, start)
        self.api = KubernetesApi(options.context, options.namespace)
        self.problem = ""  # why the pods cannot be watched now
        self._agents: dict[str, PodAgent] = {}  # by pod
        self._watches: list[asyncio.Task[None]] = []
        self._deletions: set[asyncio.Task[None]] = set()
        self._owner: dict[str, Any] | None = None
        self._owner_is_known, self._finding_owner = False, asyncio.Lock()

    def follow(self, agent: PodAgent) -> None:
        """Report the changes of the agent's pod to it, until `forget`."""
        self._agents[agent.job] = agent
        if not self._watches:
            loop = asyncio.get_running_loop()
            self._watches = [loop.create_task(self._watch_pods()), loop.create_task(self._watch_nodes())]

    def forget(self, agent: PodAgent) -> None:
        self._agents.pop(agent.job, None)

    def delete(self, name: str, after: asyncio.Task[None] | None) -> None:
        """Delete the pod, and with it its Secret, after the task `after`. Return at once; keep trying."""
        task = asyncio.get_running_loop().create_task(self._delete(name, after))
        self._deletions.add(task)
        task.add_done_callback(self._deletions.discard)

    async def close(self) -> None:
        """Wait for the deletions that have begun, but not for an API that does not answer."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        if self._deletions:
            await asyncio.wait(self._deletions, timeout=CLOSE_TIMEOUT)
        late = list(self._deletions)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await self.api.close()

    async def owner(self) -> dict[str, Any] | None:
        """The reference to the pod in which this process runs, if its pods are in the same namespace.

        Kubernetes deletes the cluster's pods when that pod has ended.
        """
        async with self._finding_owner:
            if not self._owner_is_known:
                self._owner, self._owner_is_known = await self._find_owner(), True
        return self._owner

    async def _find_owner(self) -> dict[str, Any] | None:
        await self.api.connect()
        if own_namespace() != self.api.namespace:
            return None
        try:
            found = await self.api.request("GET", "pods", socket.gethostname())
        except ApiError as error:
            if error.status in (GONE, FORBIDDEN):  # it has another host name, or may not be read
                return None
            raise
        own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
        is_own = own.intersection(each["ip"] for each in found.get("status", {}).get("podIPs") or ())
        return pod_manifest.owner_reference(found) if is_own else None

    async def _delete(self, name: str, after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await asyncio.wait({after})
        pause = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            try:
                await self.api.request("DELETE", "pods", name, gracePeriodSeconds=str(KILL_GRACE))
            except UsageError:
                return
            except ApiError as error:
                if error.status in (GONE, FORBIDDEN):
                    return
                await asyncio.sleep(pause.next())
            else:
                return

    async def _watch_pods(self) -> None:
        """List the pods, then follow their changes; begin again when the server ends the watch, or after a failure."""
        selector = ",".join(f"{name}={value}" for name, value in self.labels.items())
        pause = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            created = [agent for agent in self._agents.values() if agent.is_created]
            try:
                listed = await self.api.request("GET", "pods", labelSelector=selector)
                self._compare(listed["items"], created)
                self.problem = ""
                pause.reset()
                since = listed["metadata"]["resourceVersion"]
                async for kind, found in self.api.watch("pods", since, labelSelector=selector):
                    agent = self._agents.get(found["metadata"]["name"])
                    if agent is not None:
                        agent.update(None if kind == "DELETED" else found)
            except ApiError as error:
                self.problem = "" if error.status == EXPIRED else str(error)
            except Exception as error:  # noqa: BLE001  (an answer that is none of Kubernetes' must not end the watch)
                self.problem = f"the Kubernetes API has sent something else: {error!r}"
            await asyncio.sleep(pause.next() if self.problem else FIRST_PAUSE)

    def _compare(self, listed: list[dict[str, Any]], created: list[PodAgent]) -> None:
        """`created`: agents whose pods existed before the API was asked."""
        found = {each["metadata"]["name"]: each for each in listed}
        for name, one in found.items():
            if name in self._agents:
                self._agents[name].update(one)
        for agent in created:
            if agent.job not in found:
                agent.update(None)

    async def _watch_nodes(self) -> None:
        """Announce the end of pods on nodes that are cordoned, if this account may list nodes."""
        while True:
            await asyncio.sleep(CORDON_POLL)
            try:
                cordoned = await self.api.cordoned_nodes()
            except UsageError:
                return
            except Exception as error:  # noqa: BLE001  (as above)
                if isinstance(error, ApiError) and error.status == FORBIDDEN:
                    return
            else:
                for agent in list(self._agents.values()):
                    if agent.view.node in cordoned:
                        agent.announce(Notice("the cordon of its node", None))


class PodAgent:
    """An agent in a pod of its own. `on_stop(why)` is called once, in the loop's thread.

    `job`: the pod's name. `number`: unique among the cluster's agents. With `on_running`, the pod has no Secret and only
    waits for an agent: `on_running()` is called once, when it runs.
    """

    process = ""

    def __init__(
        self,
        host: str,
        settings: Settings,
        on_stop: Callable[[str], None],
        number: int,
        *,
        on_running: Callable[[], None] | None = None,
    ) -> None:
        self.job = pod_manifest.pod_name(settings.name, host, settings.number, number)
        self.view = PodView(state="queued")
        self.is_created = False
        self._host, self._settings, self._on_stop = host, settings, on_stop
        self._pods = pods_of(settings)
        self._creation: asyncio.Task[None] | None = None
        self._announced: Notice | None = None  # the announcement that counts
        self._untaken: Notice | None = None  # the same, until it was taken
        self._must_run_by, self._asked_at = math.inf, -math.inf
        self._ended = self._gone = False
        self._waits, self._on_running = on_running is not None, on_running

    def start(self, config: Mapping[str, Any]) -> None:
        """Create the pod, and its Secret with the agent's configuration. Return at once."""
        self._pods.follow(self)
        self._creation = asyncio.get_running_loop().create_task(self._create(config))

    def adopt(self, job: str) -> None:
        """Take over a pod that an earlier driver has created, instead of `start`."""
        self.job, self.is_created = job, True
        self._must_run_by = time.monotonic() + ADOPTED_START
        self._pods.follow(self)

    def kill(self) -> None:
        """Delete the pod. Return at once."""
        self._end("its pod was deleted")

    async def state(self) -> str:
        """The pod's state for people, as `queued (0/3 nodes are available …)` or `running on node7`.

        The driver asks for it while the agent has not connected.
        """
        self._asked_at = time.monotonic()
        return "; ".join(filter(None, (self.view.state, self._pods.problem)))

    @property
    def returns(self) -> bool:
        """Whether Kubernetes has ended the pod, and not the user: the host gets another pod, elsewhere."""
        return self._announced is not None or self._gone

    def take_notice(self) -> Notice | None:
        """The announcement of the pod's end, the first time."""
        notice, self._untaken = self._untaken, None
        return notice

    def announce(self, notice: Notice) -> None:
        """The pod will end. The first announcement counts; after one without a time, also the first one with a time."""
        if self._announced is None or (self._announced.at is None and notice.at is not None):
            self._announced = self._untaken = notice

    def update(self, found: Mapping[str, Any] | None) -> None:
        """The API reports this of the pod; None: there is no such pod any more."""
        if found is None:
            self._gone = True
            self._end(self._announced.why if self._announced else "its pod is gone")
            return
        self.view = view(found)
        if self.view.leaves_within is not None:
            self.announce(Notice(self.view.why, time.monotonic() + self.view.leaves_within))
        if self.view.ended == CLEAN_END and time.monotonic() < self._asked_at + UNCONNECTED:
            self._end(f"{self.view.ended}, and its agent had not connected: a NetworkPolicy may forbid that")
        elif self.view.ended:
            self._end(self.view.ended)
        elif self.view.is_starting and time.monotonic() > self._must_run_by:
            self._end(f"its pod has not started within {ADOPTED_START:g} s: {self.view.state}")
        if self.view.is_running and self._on_running is not None and not self._ended:
            on_running, self._on_running = self._on_running, None
            on_running()

    async def _create(self, config: Mapping[str, Any]) -> None:
        pods, settings = self._pods, self._settings
        try:
            owner = await pods.owner()
            manifest = pod_manifest.pod(
                pods.options,
                name=self.job,
                host=self._host,
                slots=int(config["settings"]["slots"]),
                labels=pods.labels,
                command=[settings.python or "python3", "-P", "-c", WAITING if self._waits else TUNNELLED_AGENT],
                with_keys=not self._waits,
                grace=settings.limits.timeouts.notice,
                owner=owner,
            )
            created = await self._post("pods", manifest)
            self.is_created = True
            if self._waits:
                return
            # After the pod, which owns it: so it never outlives the pod. The pod starts when it is there
            keys = pod_manifest.secret(self.job, pods.labels, config, pod_manifest.owner_reference(created))
            await self._post("secrets", keys)
        except NbelasticError as error:
            self._end(f"its pod cannot be created: {error}")
        except Exception as error:  # noqa: BLE001  (an answer that is none of Kubernetes' must not leave the host waiting)
            self._end(f"its pod cannot be created: the Kubernetes API has sent something else: {error!r}")

    async def _post(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create the object, and return the pod. An overloaded API is asked again; it may have made the object nonetheless."""
        pause, until = Backoff(FIRST_PAUSE, CREATE_PAUSE), time.monotonic() + CREATE_TIMEOUT
        while True:
            try:
                return await self._pods.api.request("POST", kind, body=body)
            except ApiError as error:
                if error.exists:
                    return await self._pods.api.request("GET", "pods", self.job)
                if not error.is_overloaded or self._ended or time.monotonic() > until:
                    raise
            await asyncio.sleep(pause.next())

    def _end(self, why: str) -> None:
        if self._ended:
            return
        self._ended = True
        self._pods.forget(self)
        self._pods.delete(self.job, self._creation)
        asyncio.get_running_loop().call_soon(self._on_stop, why)


_open: WeakKeyDictionary[asyncio.AbstractEventLoop, Pods] = WeakKeyDictionary()


def pods_of(settings: Settings) -> Pods:
    """The pods of the driver that runs in this event loop: launchers are made one by one, and share one watch."""
    loop = asyncio.get_running_loop()
    if loop not in _open:
        options = pod_manifest.parse_options(settings.launcher_options)
        _open[loop] = Pods(options, settings.name, settings.number)
    return _open[loop]


async def close_pods() -> None:
    """Wait until the pods of this event loop's driver have been deleted."""
    pods = _open.pop(asyncio.get_running_loop(), None)
    if pods is not None:
        with suppress(asyncio.CancelledError):
            await pods.close()
