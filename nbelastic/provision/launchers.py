"""Start and stop an agent: on this machine as a process, on another one over ssh, as a batch job or in a pod."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from nbelastic.protocol.ids import HostSpec
from nbelastic.protocol.settings import KUBERNETES, Settings
from nbelastic.provision import pod_exec, ssh
from nbelastic.provision.pod_tunnel import PodTunnel
from nbelastic.provision.pods import PodAgent
from nbelastic.provision.process_agent import ProcessAgent
from nbelastic.provision.tunnelled_agent import TunnelledAgent
from nbelastic.system.folder_paths import batch_folder


class Agent(Protocol):
    """How the driver starts and kills one agent. `on_stop(why)` is called once, in the loop's thread.

    `process`: the agent's process on this machine, or its tunnel's (`pid@start`); empty if there is none. `job`: the
    number of its batch job or the name of its pod; empty if there is none.
    """

    @property
    def process(self) -> str: ...

    @property
    def job(self) -> str: ...

    def start(self, config: Mapping[str, Any]) -> None:
        """Return at once."""

    def kill(self) -> None:
        """Kill the agent, and with it its workers. Return at once."""


class BatchJobAgent:
    """An agent that runs as a batch job. `number`: unique among the cluster's agents."""

    process = ""

    def __init__(self, host: str, settings: Settings, on_stop: Callable[[str], None], number: int) -> None:
        from nbelastic.provision.batch import BatchAgent  # importing ipyparallel is slow

        self._python, self._on_stop = settings.python, on_stop
        folder = batch_folder(settings.name, settings.number)
        self._batch = BatchAgent(
            settings.launcher, host, folder, settings.launcher_options, self._stopped, number=number
        )

    @property
    def job(self) -> str:
        return self._batch.job

    @property
    def slurm_job(self) -> str:
        """The number of its job in Slurm; empty if there is none, or if it is another batch system's."""
        return self._batch.job if self._batch.is_slurm else ""

    def start(self, config: Mapping[str, Any]) -> None:
        self._batch.start(config, {}, self._python, None)

    def adopt(self, job: str) -> None:
        """Take over a job that another driver has submitted, instead of `start`."""
        self._batch.adopt(job)

    def _stopped(self, code: int | None) -> None:
        if code is None:
            self._on_stop("its batch job was cancelled by nbelastic")
        elif self._batch.problem:
            self._on_stop(f"its batch job {_in_one_line(self._batch.problem)}")
        else:
            self._on_stop(_explain_exit("batch job", code, self._batch.output()))

    def kill(self) -> None:
        self._batch.kill()

    async def state(self) -> str:
        """The job's state for people: see `BatchAgent.state`."""
        return await self._batch.state()


def job_agent(host: str, settings: Settings, on_stop: Callable[[str], None], number: int) -> BatchJobAgent | PodAgent:
    """An agent in a batch job or in a pod. `number`: unique among the cluster's agents."""
    if settings.launcher == KUBERNETES:
        return PodAgent(host, settings, on_stop, number)
    return BatchJobAgent(host, settings, on_stop, number)


def tunnelled_agent(
    spec: HostSpec,
    settings: Settings,
    *,
    number: int,
    on_stop: Callable[[str], None],
    on_disconnect: Callable[[str], None],
) -> TunnelledAgent | PodTunnel:
    """An agent that is reached through ssh, or through `exec` in a pod: one that exists, or that is made for it."""

    def open_tunnel(name: str, on_stop: Callable[[str], None]) -> TunnelledAgent:
        return _tunnelled_agent(HostSpec(name, spec.slots, spec.user), settings, on_stop, on_disconnect)

    if settings.launcher == KUBERNETES and settings.makes_pods:
        return PodTunnel(spec.name, settings, number, on_stop, open_tunnel)
    return open_tunnel(spec.name, on_stop)


def _tunnelled_agent(
    spec: HostSpec, settings: Settings, on_stop: Callable[[str], None], on_disconnect: Callable[[str], None]
) -> TunnelledAgent:
    log, python = agent_log(settings, spec.name), settings.python
    if settings.launcher == KUBERNETES:
        command = pod_exec.command(spec.name, settings)
        explain: Callable[[int | None, str], str] = partial(pod_exec.explain_exit, spec.name, python)
    else:
        command, explain = ssh.command(spec, python), partial(_explain_ssh, spec, python)
    eof_ends_agent = settings.launcher != KUBERNETES
    return TunnelledAgent(
        command, settings, log, explain, on_stop=on_stop, on_disconnect=on_disconnect, eof_ends_agent=eof_ends_agent
    )


def _explain_ssh(spec: HostSpec, python: str | None, code: int | None, output: str) -> str:
    return ssh.explain_exit(spec, code, output, python)


def agent_for(
    spec: HostSpec,
    local: str,
    settings: Settings,
    *,
    number: int,
    on_stop: Callable[[str], None],
    on_disconnect: Callable[[str], None],
) -> Agent:
    """The launcher of a host's agent. `local`: the host's loopback address if it is this machine, else empty.

    `on_disconnect(why)` is called whenever the host cannot be reached any more and its agent may run on.
    """
    log = agent_log(settings, spec.name)
    if local:
        command = [sys.executable, "-P", "-c", ssh.AGENT]
        return ProcessAgent(command, log, lambda code, output: on_stop(_explain_exit("agent", code, output)))
    if settings.tunnels:
        return tunnelled_agent(spec, settings, number=number, on_stop=on_stop, on_disconnect=on_disconnect)
    return job_agent(spec.name, settings, on_stop, number)


def agent_log(settings: Settings, host: str) -> Path:
    """The file on this machine with the output of a host's agents."""
    stem = "".join(c if c.isalnum() or c in ".-_" else "_" for c in host)
    return settings.run_folder / f"agent-{stem}.log"


def _explain_exit(what: str, code: int | None, output: str) -> str:
    """Why the agent ended, in one line."""
    last = _in_one_line(output)
    return f"its {what} ended with exit code {code}" + (f": {last}" if code and last else "")


def _in_one_line(output: str) -> str:
    return "; ".join(output.strip().splitlines()[-5:])
