"""A Kubernetes API server for tests: objects in memory, over real HTTP on loopback. It runs no pod: see fake_kubelet.

As in Kubernetes are: resource versions, label selectors, and watches that begin at a version (410 for one that is too old).
So are deletion with a grace period, eviction, removal of what an object owns, and access by the rules of a Role. Each object
that is created is checked against the published schemas.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import threading
import uuid
from contextlib import contextmanager
from datetime import UTC, datetime

import kubernetes_validate
import yaml
from aiohttp import web

SCHEMAS = "1.34"  # the version of Kubernetes whose schemas are used
KEPT = 200  # changes that a watch can begin before
VERBS = {"GET": "get", "POST": "create", "DELETE": "delete"}


class FakeApi:
    """The server, in a thread of its own. `pods`, `secrets`, `nodes`: objects by name, in one namespace."""

    namespace = "ml"

    def __init__(self):
        self.objects = {"pods": {}, "secrets": {}, "nodes": {}}
        self.rules = None  # [(verbs, resources)]; None: all is allowed
        self.requests = []  # "POST pods"
        self.failures = {}  # answers to the next requests, as {"POST pods": [(429, "too many requests"), …]}
        self.port = 0
        self._changes = []  # (version, resource, type, object)
        self._version = 100
        self._waiting = set()
        self._executions = set()
        self.run = None  # starts a command in a pod: see FakeNodes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-api", daemon=True)
        self._thread.start()

    # ---- for tests ----

    def call(self, function, *args):
        """Run this in the server's thread, and return what it returns."""

        async def run():
            answer = function(*args)
            return await answer if asyncio.iscoroutine(answer) else answer

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    def up(self):
        self.call(self._up)

    def down(self):
        """The server ends, and closes all connections; its objects are kept."""
        self.call(self._down)

    def close(self):
        self.down()
        self.call(self._end_tasks)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def names(self, resource="pods"):
        return sorted(self.objects[resource])

    def kubeconfig(self, path):
        """Write one that leads here."""
        user = {"name": "me", "user": {"token": "test"}}
        cluster = {"name": "fake", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
        context = {"name": "fake", "context": {"cluster": "fake", "user": "me", "namespace": self.namespace}}
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "fake"}
        config |= {"clusters": [cluster], "users": [user], "contexts": [context]}
        path.write_text(yaml.safe_dump(config))
        return path

    def allow_only(self, text):
        """Allow what the Roles in these manifests allow, and nothing else."""
        roles = [each for each in yaml.safe_load_all(text) if each and each["kind"] in ("Role", "ClusterRole")]
        self.rules = [rule for role in roles for rule in role["rules"]]

    # ---- state: in the server's thread ----

    def put(self, resource, found):
        """Create or replace an object."""
        name = found["metadata"]["name"]
        kind = "MODIFIED" if name in self.objects[resource] else "ADDED"
        self._version += 1
        found = copy.deepcopy(found)
        found["metadata"] |= {"resourceVersion": str(self._version)}
        found["metadata"].setdefault("uid", str(uuid.uuid4()))
        found["metadata"].setdefault("namespace", self.namespace)
        self.objects[resource][name] = found
        self._notify(resource, kind, found)
        return found

    def change(self, resource, name, function):
        """Let `function` change a copy of the object, if there is one."""
        if name in self.objects[resource]:
            found = copy.deepcopy(self.objects[resource][name])
            function(found)
            self.put(resource, found)

    def remove(self, resource, name):
        """Remove an object at once, and later what it owns."""
        found = self.objects[resource].pop(name, None)
        if found is None:
            return
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        self._notify(resource, "DELETED", found)
        for kind, objects in self.objects.items():
            for each in list(objects.values()):
                owners = [owner["uid"] for owner in each["metadata"].get("ownerReferences", ())]
                if owners == [found["metadata"]["uid"]]:
                    self.delete(kind, each["metadata"]["name"])

    def delete(self, resource, name, grace=None, reason=""):
        """Delete an object as the API does. A pod that runs ends in its grace period: a kubelet removes it."""
        found = self.objects[resource][name]
        if resource != "pods" or not found["spec"].get("nodeName") or grace == 0:
            self.remove(resource, name)
            return
        if grace is None:
            grace = found["spec"].get("terminationGracePeriodSeconds", 30)

        def mark(pod):
            old = pod["metadata"].get("deletionGracePeriodSeconds", grace)
            pod["metadata"]["deletionGracePeriodSeconds"] = min(grace, old)
            pod["metadata"].setdefault("deletionTimestamp", datetime.now(UTC).isoformat())
            if reason:
                condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
                pod["status"].setdefault("conditions", []).append(condition)

        self.change(resource, name, mark)

    def forget_changes(self):
        """Watches of older versions get 410."""
        self._changes.clear()

    def _notify(self, resource, kind, found):
        self._changes = [*self._changes[-KEPT:], (self._version, resource, kind, copy.deepcopy(found))]
        for event in self._waiting:
            event.set()

    # ---- HTTP ----

    async def _up(self):
        app = web.Application()
        app.router.add_get("/version/", self._answer_version)
        for prefix in ("/api/v1/namespaces/{namespace}/{resource}", "/api/v1/{resource}"):
            app.router.add_route("*", prefix, self._answer)
            app.router.add_route("*", prefix + "/{name}", self._answer)
            app.router.add_route("*", prefix + "/{name}/{sub}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def _down(self):
        for socket in list(self._executions):
            await socket.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _end_tasks(self):
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _answer_version(self, _):
        return web.json_response({"major": "1", "minor": "34", "gitVersion": "v1.34.0"})

    async def _answer(self, request):
        resource, name, sub = (request.match_info.get(key, "") for key in ("resource", "name", "sub"))
        asked = f"{request.method} {resource}{'/' + sub if sub else ''}"
        self.requests.append(asked)
        if self.failures.get(asked):
            status, text, *done = self.failures[asked].pop(0)
            if done:  # the request is carried out, and only its answer is lost
                await self._create(request, resource)
            return failure(status, text)
        verb = VERBS.get(request.method, "")
        if request.method == "GET" and not name:
            verb = "watch" if request.query.get("watch") == "true" else "list"
        if not self._is_allowed(verb, f"{resource}/{sub}" if sub else resource):
            text = (
                f'{resource} is forbidden: User "system:serviceaccount:ml:notebook" cannot {verb} resource "{resource}"'
            )
            return failure(403, f'{text} in API group "" in the namespace "ml"')
        match verb:
            case "watch":
                return await self._watch(request, resource)
            case "list":
                items = [each for each in self.objects[resource].values() if chosen(each, request.query)]
                return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})
            case "create" if not name:
                return await self._create(request, resource)
        if sub == "exec" and name in self.objects[resource]:
            return await self._exec(request, name)
        if name not in self.objects[resource]:
            return failure(404, f'{resource} "{name}" not found')
        if verb == "delete":
            grace = request.query.get("gracePeriodSeconds")
            self.delete(resource, name, None if grace is None else int(grace))
        return web.json_response(self.objects[resource].get(name, {}))

    def _is_allowed(self, verb, resource):
        return self.rules is None or any(verb in rule["verbs"] and resource in rule["resources"] for rule in self.rules)

    async def _create(self, request, resource):
        found = await request.json()
        try:
            kubernetes_validate.validate(found, SCHEMAS, strict=True)
        except kubernetes_validate.ValidationError as error:
            return failure(422, f"{'.'.join(map(str, error.path))}: {error.message}")
        if found["metadata"]["name"] in self.objects[resource]:
            return failure(409, f"{resource} {found['metadata']['name']!r} already exists")
        if resource == "pods":
            found["status"] = {"phase": "Pending"}
        return web.json_response(self.put(resource, found), status=201)

    async def _exec(self, request, name):
        """The websocket of a command in a pod: `run(pod, words)` starts it and returns its process."""
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        words = request.query.getall("command")
        try:
            process = await asyncio.get_running_loop().run_in_executor(None, self.run, name, words)
        except FileNotFoundError:
            text = f'exec: "{words[0]}": executable file not found in $PATH'
            await socket.send_bytes(b"\3" + json.dumps({"status": "Failure", "message": text}).encode())
            return socket
        self._executions.add(socket)
        answers = asyncio.Queue()
        threading.Thread(target=read_output, args=(process, self._loop, answers), daemon=True).start()

        async def send():
            while (answer := await answers.get()) is not None:
                await socket.send_bytes(answer)
            await socket.close()

        sending = asyncio.create_task(send())
        try:
            async for message in socket:
                process.stdin.write(message.data[1:])
                process.stdin.flush()
        except OSError:  # the process has ended
            await asyncio.wait({sending})
        finally:
            self._executions.discard(socket)
            sending.cancel()
            with contextlib.suppress(OSError):
                process.stdin.close()
        return socket

    async def _watch(self, request, resource):
        since = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)

        async def send(kind, found):
            await response.write(json.dumps({"type": kind, "object": found}).encode() + b"\n")

        oldest = self._changes[0][0] if self._changes else self._version + 1
        if since + 1 < oldest and since < self._version:
            await send("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})
            return response
        wake = asyncio.Event()
        self._waiting.add(wake)
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while True:
                    wake.clear()
                    for version, kind_of, kind, found in list(self._changes):
                        if version > since and kind_of == resource:
                            since = version
                            if chosen(found, request.query):
                                await send(kind, found)
                    await wake.wait()
        except (TimeoutError, ConnectionError):
            return response
        finally:
            self._waiting.discard(wake)


def read_output(process, loop, answers):
    """Pass on a process's output and exit code. As a container runtime, read on when the connection has ended."""
    with process.stdout:
        while data := process.stdout.read1(1 << 14):
            post(loop, answers, b"\1" + data)
    code = process.wait()
    causes = [{"reason": "ExitCode", "message": str(code)}]
    status = {"status": "Failure", "details": {"causes": causes}} if code else {"status": "Success"}
    post(loop, answers, b"\3" + json.dumps(status).encode())
    post(loop, answers, None)


def post(loop, answers, answer):
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(answers.put_nowait, answer)


def chosen(found, query):
    """Whether the object has the labels and fields that the query names."""
    labels = found["metadata"].get("labels", {})
    wanted = dict(part.split("=") for part in query.get("labelSelector", "").split(",") if part)
    if query.get("fieldSelector") == "spec.unschedulable=true" and not found["spec"].get("unschedulable"):
        return False
    return all(labels.get(key) == value for key, value in wanted.items())


def failure(code, message):
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
    return web.json_response(status, status=code)


@contextmanager
def running_api():
    api = FakeApi()
    api.up()
    try:
        yield api
    finally:
        api.close()
