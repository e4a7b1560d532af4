"""The Kubernetes API, through kr8s: requests and watches in one namespace, and each failure in one line."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from nbelastic.errors import HostError, UsageError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # in each pod that has one
TIMEOUT = 15.0  # seconds for an answer
WATCH_TIME = 60  # seconds after which the server ends a watch, and a new one begins: a dead connection shows by then


class ApiError(HostError):
    """The Kubernetes API cannot be reached or refuses. `status`: the HTTP status; 0: there was no answer."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status

    @property
    def is_overloaded(self) -> bool:
        """Whether the API, or a webhook that it calls, has failed as it may in passing."""
        return self.status == 429 or self.status >= 500 or (self.status == 409 and not self.exists)

    @property
    def exists(self) -> bool:
        """Whether an object of this name exists. Other conflicts pass: two requests change a quota at the same moment."""
        return self.status == 409 and "already exists" in str(self)


class KubernetesApi:
    """One namespace of one Kubernetes cluster. All calls are made in one event loop; each may raise ApiError.

    `context`: of the kubeconfig; empty: its current one, or the service account of the pod in which this process runs.
    `namespace`: empty: that of the context or of the pod.
    """

    def __init__(self, context: str = "", namespace: str = "") -> None:
        self._context, self.namespace = context, namespace
        self._api: Any = None
        self._connecting = asyncio.Lock()

    async def connect(self) -> None:
        """Find the credentials, once. UsageError without kr8s."""
        async with self._connecting:
            if self._api is not None:
                return
            check_installed()
            kr8s = await asyncio.to_thread(importlib.import_module, "kr8s")  # it takes 0.4 s
            async with _errors_in_words("find the credentials"):
                api = await kr8s.asyncio.api(context=self._context or None, namespace=self.namespace or None)
            api.timeout = TIMEOUT
            # kr8s does not read the namespace of a pod's service account
            own = own_namespace() if not api.auth.active_context else ""
            self.namespace = self.namespace or own or api.namespace
            self._api = api

    async def close(self) -> None:
        """Close the connections."""
        session = self._api._session if self._api is not None else None  # kr8s closes none
        if session is not None:
            await session.aclose()

    async def request(
        self,
        method: str,
        kind: str,
        name: str = "",
        body: Mapping[str, Any] | None = None,
        *,
        everywhere: bool = False,
        **parameters: str,
    ) -> dict[str, Any]:
        """The answer to a request for objects of the namespace: `request("GET", "pods", labelSelector="a=b")`.

        `everywhere`: the objects are in no namespace, such as nodes.
        """
        await self.connect()
        namespace = None if everywhere else self.namespace
        content = None if body is None else json.dumps(body)
        path = f"{kind}/{name}" if name else kind
        async with (
            _errors_in_words(f"{method} {path}"),
            asyncio.timeout(TIMEOUT),
            self._api.call_api(method, url=path, namespace=namespace, content=content, params=parameters) as response,
        ):
            answer: dict[str, Any] = response.json()
        return answer

    async def watch(self, kind: str, since: str, **parameters: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Changes since a resource version, for up to a minute: `ADDED`, `MODIFIED` or `DELETED`, and the object."""
        await self.connect()
        parameters |= {"watch": "true", "resourceVersion": since, "timeoutSeconds": str(WATCH_TIME)}
        arguments = {"url": kind, "namespace": self.namespace, "params": parameters, "timeout": WATCH_TIME + TIMEOUT}
        async with (
            _errors_in_words(f"watch {kind}"),
            self._api.call_api("GET", stream=True, **arguments) as response,
        ):
            async for line in response.aiter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise ApiError(f"Kubernetes ended a watch: {status.get('message', status)}", status.get("code", 0))
                yield event["type"], event["object"]

    async def cordoned_nodes(self) -> set[str]:
        """The names of the nodes that take no more pods."""
        listed = await self.request("GET", "nodes", everywhere=True, fieldSelector="spec.unschedulable=true")
        return {each["metadata"]["name"] for each in listed["items"]}

    @asynccontextmanager
    async def exec(self, pod: str, parameters: Mapping[str, Any]) -> AsyncIterator[Any]:
        """Run a command in a pod: the websocket with its streams, in the protocol v4.channel.k8s.io."""
        await self.connect()
        arguments = {"url": f"pods/{pod}/exec", "namespace": self.namespace, "params": parameters}
        async with (
            _errors_in_words(f"exec in the pod {pod}"),
            self._api.open_websocket(subprotocols=("v4.channel.k8s.io",), **arguments) as socket,
        ):
            yield socket


def check_installed() -> None:
    """UsageError without kr8s."""
    if importlib.util.find_spec("kr8s") is None:
        raise UsageError("Kubernetes needs kr8s: pip install 'nbelastic[kubernetes]'.")


def own_namespace() -> str:
    """The namespace of the pod in which this process runs; empty if it runs in none."""
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text().strip()
    except OSError:
        return ""


@asynccontextmanager
async def _errors_in_words(what: str) -> AsyncIterator[None]:
    """Raise each failure as an ApiError in one line. `what`: the request that fails."""
    try:
        yield
    except (ApiError, UsageError, asyncio.CancelledError, GeneratorExit):
        raise
    except TimeoutError:
        raise ApiError(f"the Kubernetes API has not answered within {TIMEOUT:g} s ({what})") from None
    except Exception as problem:  # noqa: BLE001  (of kr8s, httpx, ssl, and of programs that make credentials)
        error = problem
        while isinstance(error, ExceptionGroup):  # of anyio's
            error = error.exceptions[0]
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", 0)
        text = str(error).partition("For more information check")[0]
        if response is not None and status >= 500:  # kr8s leaves out what the server says then
            with suppress(Exception):
                text = response.json()["message"]
        text = " ".join(text.split()) or type(error).__name__
        if status == 403:
            # "pods is forbidden: User … cannot create", or no reason; else a quota, a security standard or a webhook forbids it
            is_role = " cannot " in text or " is forbidden: " not in text
            advice = ": apply the Role in docs/kubernetes.md" if is_role else ""
            raise ApiError(f"Kubernetes forbids it ({text}){advice}", status) from None
        if status == 401:
            raise ApiError(f"Kubernetes does not accept your credentials ({text}): renew them", status) from None
        if status:
            raise ApiError(f"Kubernetes refuses it ({text})", status) from None
        raise ApiError(f"the Kubernetes API cannot be used ({what}: {text})") from None
