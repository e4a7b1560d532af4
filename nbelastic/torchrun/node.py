"""A host's node: torch's elastic agent in a separate process, which the host's agent has forked from the template.

The main thread runs torch's agent. The client's thread talks to the driver, reads the workers' output and samples them.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing import SignalException

from nbelastic.protocol import agent_messages, node_messages
from nbelastic.protocol import script_events as sev
from nbelastic.torchrun.elastic_agent import ElasticAgent, worker_spec
from nbelastic.torchrun.output import OutputReader, WorkerLogs
from nbelastic.torchrun.rendezvous import DriverRendezvous
from nbelastic.transport.client import Client

READ_OUTPUT = 0.1  # seconds between two reads of the workers' output
SAMPLE = 1.0  # seconds between two samples of their CPU and memory


class Node:
    """Call `run()` in the main thread."""

    def __init__(self, settings: dict[str, Any], script: agent_messages.Script, folder: Path) -> None:
        self._host, self._settings = settings["host"], settings
        self._logs = WorkerLogs(folder, self._host, script.redirects, script.tee)
        self._output_reader = OutputReader(self._logs)
        self._sampled_at = 0.0
        self._processes: dict[int, psutil.Process] = {}
        if not script.cold:
            _use_template(settings["template"])
        self._agent: ElasticAgent | None = None
        self._end: sev.NodeLeft | None = None  # set when the workers have ended: the last message
        ready = sev.NodeReady(self._host, 0, "", script.role)
        self._rendezvous = DriverRendezvous(self._connect, ready, settings["home"], before_round=self._begin_round)
        self._agent = ElasticAgent(
            worker_spec(script, self._rendezvous, tuple(os.environ)), script, self._logs, self._rendezvous.link.send
        )

    def _connect(self, receive: Any) -> Client:
        settings = self._settings
        peer = f"node/{self._host}~{settings['number']}"
        return Client(
            Path(settings["relay"]),
            None,
            peer,
            node_messages.ToNode,
            receive,
            tick=self._tick,
            heartbeat=settings["heartbeat"],
        )

    def _begin_round(self, new_round: node_messages.Round) -> None:
        if self._agent is not None:
            self._agent.begin_round(new_round)

    def run(self) -> bool:
        """Run until the script, or this node's part in it, has ended. Return whether all workers have succeeded."""
        agent = self._agent
        assert agent is not None
        reason, broken, result = "it has ended", False, None
        try:
            result = agent.run()
            if result is not None:
                self._rendezvous.keep_store()
        except SignalException as end:
            reason = f"it received {end.sigval.name}"
        except Exception as error:
            reason, broken = f"its elastic agent raised {type(error).__name__}: {error}", True
            raise
        finally:
            agent.kill_groups()
            self._end = sev.NodeLeft(self._host, reason, broken)
            self._rendezvous.link.close()  # its thread sends the rest of the output first: only that thread reads it
            self._rendezvous.shutdown()
            sys.stdout.flush()
        return result is not None and result.state is WorkerState.SUCCEEDED  # for torch, UNHEALTHY is not failed

    def _tick(self) -> float:
        """Called in the client's thread; return the seconds until the next call."""
        agent = self._agent
        if agent is None:
            return READ_OUTPUT
        link, end = self._rendezvous.link, self._end
        if end is not None or not link.congested:  # else the output stays in the files meanwhile
            self._send_output()
        if end is not None:
            self._end = None
            link.send(end)
            return READ_OUTPUT
        now = time.monotonic()
        if now >= self._sampled_at + SAMPLE:
            self._sampled_at = now
            self._send_sample(link, *agent.workers)
        return READ_OUTPUT

    def _send_output(self) -> None:
        for output in self._output_reader.read():
            self._rendezvous.link.send(output)

    def _send_sample(self, link: Client, pids: tuple[int, ...], number: int) -> None:
        self._processes = {pid: process for pid, process in self._processes.items() if pid in pids}
        samples = []
        try:
            for pid in pids:
                process = self._processes.setdefault(pid, psutil.Process(pid))
                with process.oneshot():
                    samples.append((process.cpu_percent(), process.memory_info().rss))
        except psutil.Error:
            return  # a worker has just ended
        if samples:
            link.report(node_messages.NodeSample(self._host, number, tuple(samples)))


class _Template(forkserver.ForkServer):
    """The agent's template as this process's fork server: torch's start method `forkserver` then only costs a fork."""

    def __init__(self, server: dict[str, Any]) -> None:
        super().__init__()
        vars(self).update(server, _forkserver_alive_fd=vars(forkserver._forkserver)["_forkserver_alive_fd"])

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()


def _use_template(server: dict[str, Any]) -> None:
    template = _Template(server)
    forkserver.connect_to_new_process = template.connect_to_new_process
    forkserver.ensure_running = template.ensure_running
