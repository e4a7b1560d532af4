"""A scheduler and the kubelets of a few nodes, for tests: pods of the fake API run as processes of this machine.

A pod's container is one process without namespaces of its own. Its folder has what its volumes have, and paths in its
environment lead there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from nbelastic.provision import ssh
from nbelastic.system.interfaces import address_towards
from tests.support import warm_request
from tests.support.warm_agents import WarmPopen, tunnelled

IMAGE = "registry.lab/nbelastic:1"  # the only one that there is
RESCHEDULE = 0.05  # seconds between two looks


class FakeNodes:
    """`nodes`: the number of GPUs of each."""

    def __init__(self, api, nodes):
        self.api = api
        self._folder = Path(tempfile.mkdtemp(prefix="kubelet-"))
        self._address = address_towards("198.51.100.1")
        self._processes = {}  # by pod
        self._killed_at = {}
        self._lost = set()
        self._end = threading.Event()
        self._executed = {}  # processes of commands in pods, by pod
        api.run = self._execute
        for name, gpus in nodes.items():
            capacity = {"nvidia.com/gpu": str(gpus)}
            api.call(api.put, "nodes", {"metadata": {"name": name}, "spec": {}, "status": {"allocatable": capacity}})
        self._thread = threading.Thread(target=self._run, name="fake-kubelet")
        self._thread.start()

    # ---- for tests ----

    def cordon(self, node):
        self.api.call(self.api.change, "nodes", node, lambda found: found["spec"].update(unschedulable=True))

    def evict(self, pod, grace=None):
        """As `kubectl drain` does."""
        self.api.call(self.api.delete, "pods", pod, grace, "EvictionByEvictionAPI")

    def lose(self, node):
        """The node's power fails: its processes end, and no kubelet reports that."""
        self._lost.add(node)
        for pod in self._pods():
            if pod["spec"].get("nodeName") == node:
                self._kill_all(pod["metadata"]["name"])

    def node_of(self, pod):
        return self.api.objects["pods"][pod]["spec"].get("nodeName")

    def process(self, pod):
        return self._processes[pod]

    def running(self):
        return [name for name, process in self._processes.items() if process.poll() is None]

    def close(self):
        self._end.set()
        self._thread.join(20)
        for name in list(self._processes):
            self._kill_all(name)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- in its thread ----

    def _pods(self):
        return list(self.api.objects["pods"].values())

    def _run(self):
        while not self._end.wait(RESCHEDULE):
            for pod in self._pods():
                self._sync(pod)
            for name in list(self._processes):
                if name not in self.api.objects["pods"]:
                    self._kill_all(name)

    def _sync(self, pod):
        name, node = pod["metadata"]["name"], pod["spec"].get("nodeName")
        if node in self._lost:
            return
        if pod["status"].get("phase") in ("Succeeded", "Failed"):
            if "deletionTimestamp" in pod["metadata"]:
                self.api.call(self.api.remove, "pods", name)
        elif not node:
            self._schedule(pod)
        elif name not in self._processes:
            self._start(pod)
        else:
            self._watch(pod)

    def _schedule(self, pod):
        """Bind the pod to the node with most room, or say why that is impossible."""
        free = {name: self._free(node) for name, node in self.api.objects["nodes"].items() if name not in self._lost}
        best = max(free, key=free.get, default="")
        if best and free[best] >= max(gpus_of(pod), 1):
            self._change(pod, {"spec": {"nodeName": best}}, {"PodScheduled": ("True", "", "")})
            return
        count = len(self.api.objects["nodes"])
        message = f"0/{count} nodes are available: {count} Insufficient nvidia.com/gpu."
        self._change(pod, {}, {"PodScheduled": ("False", "Unschedulable", message)})

    def _free(self, node):
        """Its GPUs that no pod has; each pod counts for one at least."""
        name = node["metadata"]["name"]
        used = [max(gpus_of(pod), 1) for pod in self._pods() if pod["spec"].get("nodeName") == name]
        return (
            0 if node["spec"].get("unschedulable") else int(node["status"]["allocatable"]["nvidia.com/gpu"]) - sum(used)
        )

    def _start(self, pod):
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        if "deletionTimestamp" in pod["metadata"]:
            self.api.call(self.api.remove, "pods", name)
            return
        if container["image"] != IMAGE:
            text = f'Back-off pulling image "{container["image"]}": not found'
            self._change(
                pod, {"status": {"containerStatuses": [status(container, waiting=("ImagePullBackOff", text))]}}
            )
            return
        secrets = {
            each["name"]: each["secret"]["secretName"] for each in pod["spec"].get("volumes", ()) if "secret" in each
        }
        if not all(each in self.api.objects["secrets"] for each in secrets.values()):
            self._change(pod, {"status": {"containerStatuses": [status(container, waiting=("ContainerCreating", ""))]}})
            return
        folder = self._folder / name
        environment = {**os.environ, "HOSTNAME": name}
        environment |= {each["name"]: each["value"] for each in container.get("env", ())}
        folder.mkdir()
        for mount in container.get("volumeMounts", ()):
            place = folder / mount["name"]
            place.mkdir(parents=True)
            for key, text in (
                self.api.objects["secrets"].get(secrets.get(mount["name"]), {}).get("stringData", {}).items()
            ):
                (place / key).write_text(text)
            environment = {key: value.replace(mount["mountPath"], str(place)) for key, value in environment.items()}
        command = here(container["command"])
        self.api.commands = [*getattr(self.api, "commands", ()), command]
        with open(folder / "log", "ab") as log:
            self._processes[name] = WarmPopen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        running = {"phase": "Running", "podIP": self._address, "podIPs": [{"ip": self._address}]}
        running["containerStatuses"] = [status(container, running={})]
        self._change(pod, {"status": running}, {"Ready": ("True", "", "")})

    def _execute(self, name, words):
        """Run a command in the pod, with pipes."""
        pipe = subprocess.PIPE
        process = WarmPopen(here(words), stdin=pipe, stdout=pipe, start_new_session=True)
        self._executed.setdefault(name, []).append(process)
        return process

    def _watch(self, pod):
        name, process = pod["metadata"]["name"], self._processes[pod["metadata"]["name"]]
        code = process.poll()
        if code is not None:
            self._kill_all(name)
            message = (self._folder / name / "log").read_text()[-2048:] if code else ""
            ended = {"exitCode": code if code >= 0 else 128 - code, "reason": "Error" if code else "Completed"}
            container = pod["spec"]["containers"][0]
            phase = "Failed" if code else "Succeeded"
            statuses = [status(container, terminated={**ended, "message": message})]
            self._change(pod, {"status": {"phase": phase, "containerStatuses": statuses}}, {"Ready": ("False", "", "")})
        elif "deletionTimestamp" in pod["metadata"]:
            grace = pod["metadata"]["deletionGracePeriodSeconds"]
            if name not in self._killed_at:
                process.send_signal(signal.SIGTERM)
            self._killed_at[name] = min(self._killed_at.get(name, float("inf")), time.monotonic() + grace)
            if time.monotonic() >= self._killed_at[name]:
                self._kill_all(name)

    def _kill_all(self, name):
        """Kill the container's processes, as the end of its first process does."""
        for process in (self._processes[name], *self._executed.get(name, ())):
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                for each in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
            process.wait(10)

    def _change(self, pod, fields, conditions=None):
        """Change fields of the pod, if it has other values there."""

        def change(found):
            for part, values in fields.items():
                found[part] |= values
            known = {each["type"]: each for each in found["status"].get("conditions", ())}
            for kind, (state, reason, message) in (conditions or {}).items():
                known[kind] = {"type": kind, "status": state, "reason": reason, "message": message}
            found["status"]["conditions"] = list(known.values())

        wanted = {"spec": dict(pod["spec"]), "status": dict(pod["status"])}
        change(wanted)
        if (wanted["spec"], wanted["status"]) != (pod["spec"], pod["status"]):
            self.api.call(self.api.change, "pods", pod["metadata"]["name"], change)


def here(words):
    """The command on this machine. An agent is a fork of the tests' warm process, if there is one."""
    names = {"python3": sys.executable, warm_request.AGENT: ssh.AGENT, ssh.TUNNELLED_AGENT: tunnelled()}
    return [names.get(word, word) for word in words]


def gpus_of(pod):
    return sum(
        int(each.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0)) for each in pod["spec"]["containers"]
    )


def status(container, *, waiting=None, running=None, terminated=None):
    if waiting is not None:
        state = {"waiting": {"reason": waiting[0], "message": waiting[1]}}
    else:
        state = {"running": running} if running is not None else {"terminated": terminated}
    return {"name": container["name"], "image": container["image"], "state": state}
