"""Run a command in a pod that exists, as `kubectl exec -i` does: tunnels to such hosts go through this program, as others through ssh.

Its standard input goes to the command, first the agent's configuration with the keys, and the command's output comes back. It
exits with the command's exit code.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from functools import partial
from typing import Any, NoReturn

from nbelastic.errors import NbelasticError
from nbelastic.protocol.exit_codes import AGENT_GONE, CONNECTION_LOST
from nbelastic.protocol.settings import Settings
from nbelastic.provision.kubernetes_api import KubernetesApi
from nbelastic.provision.pod_manifest import PodOptions, parse_options
from nbelastic.provision.ssh import TUNNELLED_AGENT

PROGRAM = "from nbelastic.provision.pod_exec import main; main()"
API_FAILED = 255  # exit code if the API refuses, or the connection breaks
NOT_STARTED = 126  # exit code if the command cannot be started
STDIN, STDOUT, STDERR, RESULT = range(4)  # channels of the protocol v4.channel.k8s.io
BLOCK = 1 << 15  # bytes that are passed on at once


def command(pod: str, settings: Settings) -> list[str]:
    """The command that runs an agent and its end of the tunnel in the pod. `launcher_options` name its namespace and container."""
    options = parse_options(settings.launcher_options)
    words = json.dumps([settings.python or "python3", "-P", "-c", TUNNELLED_AGENT])
    return [sys.executable, "-P", "-c", PROGRAM, pod, options.context, options.namespace, options.container, words]


def explain_exit(pod: str, python: str | None, code: int | None, output: str) -> str:
    """Why the agent in a pod ended, in one line. `output`: the last lines of this program and the agent."""
    lines = output.strip().splitlines()
    if code == AGENT_GONE:
        return f"the connection to the pod {pod} had ended, and its agent has ended since"
    if "No module named 'nbelastic'" in output:
        return f"nbelastic is not installed for {python or 'python3'} in the pod {pod}: install it in its image"
    if code in (API_FAILED, CONNECTION_LOST):
        why = lines[-1] if lines else "no message"
        return why if code == API_FAILED else f"the connection to the pod {pod} has ended ({why})"
    if code == NOT_STARTED:
        return f"{python or 'python3'} cannot be started in the pod {pod}: {lines[-1] if lines else 'no message'}"
    return f"its agent ended with exit code {code}" + (f": {'; '.join(lines[-5:])}" if code and lines else "")


def main() -> NoReturn:
    """Four arguments, of which the last three may be empty, and the command as JSON."""
    pod, context, namespace, container, words = sys.argv[1:]
    options = PodOptions(context=context, namespace=namespace, container=container)
    try:
        code = asyncio.run(_run(pod, options, json.loads(words)))
    except NbelasticError as error:
        print(error, file=sys.stderr)
        code = API_FAILED
    os._exit(code)  # a thread may wait for the standard input


async def _run(pod: str, options: PodOptions, words: list[str]) -> int:
    """The command's exit code."""
    api = KubernetesApi(options.context, options.namespace)
    parameters: dict[str, Any] = {"command": words, "stdin": "true", "stdout": "true", "stderr": "true"}
    if options.container:
        parameters["container"] = options.container
    async with api.exec(pod, parameters) as socket:
        sending = asyncio.create_task(_send_input(socket))
        try:
            while True:
                message = await socket.receive_bytes()
                channel, data = message[0], message[1:]
                if channel == RESULT:
                    return _exit_code(json.loads(data))
                if data and channel in (STDOUT, STDERR):  # in a thread: while output waits, input is passed on
                    await asyncio.to_thread(_write, channel, data)
        finally:
            sending.cancel()


async def _send_input(socket: Any) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), sys.stdin)
    while data := await reader.read(BLOCK):
        await socket.send_bytes(bytes([STDIN]) + data)
    os._exit(API_FAILED)  # the driver's end is closed; the end of the connection ends the agent


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _exit_code(status: dict[str, Any]) -> int:
    if status.get("status") == "Success":
        return 0
    for cause in status.get("details", {}).get("causes", ()):
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    print(status.get("message", status), file=sys.stderr)
    return NOT_STARTED
